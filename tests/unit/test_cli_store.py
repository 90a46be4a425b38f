"""``minice models``, ``verify`` and ``quantize`` on a small model that a lock of its own pins."""

import dataclasses
import hashlib
import json
import shutil
import sys

import pytest

import minice.artifacts.lock
from minice.cli import main


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A copy of the small model; the shipped lock pins it, and another one that is not on disk."""
    for path in (tiny.model_path, tiny.tokenizer_path):
        shutil.copy(path, tmp_path)
    second = tiny.lock_text.split("\n", 2)[2].replace('id = "tiny"', 'id = "other"')
    lock = minice.artifacts.lock.parse_lock(f"{tiny.lock_text}\n{second}")
    monkeypatch.setattr(minice.artifacts.lock, "shipped_lock", lambda: lock)
    monkeypatch.setenv("MINICE_HOME", str(tmp_path / "home"))
    for name in ("MINICE_MODEL_DIR", "MINICE_LOCK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def cached(folder, monkeypatch):
    """The same two models; the first is published, and lies in the hub's cache in place of minice's own folder."""
    first, second = minice.artifacts.lock.shipped_lock().models
    first = dataclasses.replace(first, repository="owner/tiny", revision="ab" * 20, aliases=("owner/old",))
    lock = minice.artifacts.lock.Lock(models=(first, second))
    monkeypatch.setattr(minice.artifacts.lock, "shipped_lock", lambda: lock)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    snapshot = folder / "hub" / "models--owner--tiny" / "snapshots" / ("ab" * 20)
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("model.onnx", "tokenizer.json"):
        shutil.copy(folder / name, blobs)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


@pytest.fixture
def run(capsysbinary):
    def run(*argv):
        code = main([str(argument) for argument in argv])
        out, err = capsysbinary.readouterr()
        return code, [json.loads(line) for line in out.decode().splitlines()], err.decode()

    return run


def statuses(rows):
    return [(row["model"], row["file"], row["status"]) for row in rows]


def test_models_lists_every_pin_and_where_its_files_are(run, folder):
    home = folder / "home" / "tiny"
    home.mkdir(parents=True)
    shutil.copy(folder / "model.onnx", home)
    code, (tiny, other), err = run("models")
    assert (code, err) == (0, "")
    assert (tiny["id"], tiny["license"], tiny["on_disk"]) == ("tiny", "Apache-2.0", False)
    assert [(file["name"], file["status"], file["path"]) for file in tiny["files"]] == [
        ("model.onnx", "present", str(home / "model.onnx")),
        ("tokenizer.json", "missing", None),
    ]
    data = (folder / "model.onnx").read_bytes()
    assert tiny["files"][0]["size"] == len(data)
    assert tiny["files"][0]["sha256"] == hashlib.sha256(data).hexdigest()
    assert other["on_disk"] is False
    assert [model["on_disk"] for model in run("models", "--model-dir", folder)[1]] == [True, True]


def test_models_as_a_table_shows_the_start_of_each_digest(folder, capsysbinary, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["models", "--format", "table", "--model-dir", str(folder)]) == 0
    out = capsysbinary.readouterr().out.decode()
    digest = hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest()
    assert f"  {digest[:12]}  present  {folder / 'model.onnx'}" in out
    assert digest[:13] not in out


def test_models_shows_where_it_looked(run, folder, cached, capsysbinary, monkeypatch):
    code, (tiny, other), err = run("models")
    assert (code, err, tiny["on_disk"]) == (0, "", True)
    assert [(file["path"], file["place"]) for file in tiny["files"]] == [
        (str(cached / "model.onnx"), "hub-cache"),
        (str(cached / "tokenizer.json"), "hub-cache"),
    ]
    assert tiny["searched"] == [
        {"path": str(folder / "home" / "tiny"), "origin": "MINICE_HOME"},
        {"path": str(folder / "hub" / "models--owner--tiny"), "origin": "HF_HUB_CACHE"},
        {"path": str(folder / "hub" / "models--owner--old"), "origin": "HF_HUB_CACHE"},
    ]
    assert other["searched"] == [{"path": str(folder / "home" / "other"), "origin": "MINICE_HOME"}]
    assert other["files"][0]["place"] is None
    given = run("models", "--model-dir", folder)[1][0]
    assert given["searched"] == [{"path": str(folder), "origin": "model_dir or --model-dir"}]
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["models", "--format", "table"]) == 0
    tiny, other = capsysbinary.readouterr().out.decode().split("\n\n")
    assert f"  present  {cached / 'model.onnx'}" in tiny
    assert "looked in" not in tiny  # where everything is there, nothing was sought in vain
    assert f"looked in {folder / 'home' / 'other'} (MINICE_HOME)\n" in other
    (cached / "model.onnx").unlink()
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["models", "--format", "table"]) == 0
    tiny, _ = capsysbinary.readouterr().out.decode().split("\n\n")
    for name in ("tiny", "old"):
        assert f"\nlooked in {folder / 'hub' / f'models--owner--{name}'} (HF_HUB_CACHE)\n" in tiny


def test_verify_of_a_model_in_the_hubs_cache(run, folder, cached):  # FR 135, FR 139
    assert run("verify")[:2] == run("verify", "tiny")[:2]
    code, rows, err = run("verify", "tiny")
    assert (code, err) == (0, "")
    assert [(row["path"], row["status"]) for row in rows] == [
        (str(cached / "model.onnx"), "ok"),
        (str(cached / "tokenizer.json"), "ok"),
    ]
    blob = cached.parents[1] / "blobs" / "model.onnx"
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    code, rows, err = run("verify", "tiny")
    assert code == 4
    assert statuses(rows) == [("tiny", "model.onnx", "missing"), ("tiny", "tokenizer.json", "ok")]
    place = f"{str(folder / 'home' / 'tiny')!r} (MINICE_HOME) or the hub's cache {str(folder / 'hub')!r} (HF_HUB_CACHE)"
    assert f"not on disk: no 'model.onnx' in {place}. Not taken from that cache: sha256 mismatch in " in err
    assert err.endswith("; else minice gets them. Run: minice fetch tiny\n")


def test_small_files_in_the_hubs_cache_are_no_model(run, folder, cached):
    """Who runs the model with other libraries has its tokenizer in the cache, and no graph."""
    (cached / "model.onnx").unlink()
    assert run("verify") == (0, [], "")
    code, rows, _ = run("verify", "tiny")  # only who asks for it misses it
    assert code == 4
    assert statuses(rows) == [("tiny", "model.onnx", "missing"), ("tiny", "tokenizer.json", "ok")]
    home = folder / "home" / "tiny"
    home.mkdir(parents=True)
    shutil.copy(folder / "tokenizer.json", home)
    assert run("verify")[0] == 4  # minice's own folder is for nothing else


def test_quantizing_a_model_in_the_hubs_cache(run, folder, cached):  # FR 142
    pytest.importorskip("onnx")
    before = sorted((folder / "hub").rglob("*"))
    code, (report,), err = run("quantize", "tiny")
    home = folder / "home" / "tiny"
    assert (code, err) == (0, "")
    assert (report["source"]["path"], report["result"]["path"], report["receipt"]) == (
        str(cached / "model.onnx"),
        str(home / "model.int8.onnx"),
        str(home / "model.int8.onnx.json"),
    )
    assert sorted((folder / "hub").rglob("*")) == before
    code, rows, err = run("verify", "tiny", "--deep")
    assert (code, err) == (0, "")
    assert statuses(rows)[-2:] == [("tiny", "model.int8.onnx", "ok"), ("tiny", "fp32 -> int8", "ok")]
    code, _, err = run("quantize", cached)
    assert code == 2
    assert err.startswith(f"minice: error: {cached / 'model.onnx'}: it lies in the hub's cache")


def test_models_of_the_users_own_lock(run, folder, tiny, monkeypatch):
    lock = folder / "my.lock"
    lock.write_text(tiny.lock_text.replace('id = "tiny"', 'id = "mine"'), encoding="utf-8")
    monkeypatch.setenv("MINICE_LOCK", str(lock))
    assert [model["id"] for model in run("models")[1]] == ["tiny", "other", "mine"]
    code, rows, err = run("verify", "mine", "--model-dir", folder)
    assert (code, err, statuses(rows)[0]) == (0, "", ("mine", "model.onnx", "ok"))
    lock.write_text(tiny.lock_text, encoding="utf-8")
    for verb in (["models"], ["verify", "tiny"]):
        code, rows, err = run(*verb)
        assert (code, rows) == (3, [])
        assert err.startswith(f"minice: error: MINICE_LOCK: {str(lock)!r}: model[0]: the name 'tiny' belongs to 'tiny'")


def test_verify_hashes_every_file(run, folder):
    code, rows, err = run("verify", "tiny", "--model-dir", folder)
    assert (code, err) == (0, "")
    assert statuses(rows) == [("tiny", "model.onnx", "ok"), ("tiny", "tokenizer.json", "ok")]


def test_verify_finds_one_changed_byte(run, folder):  # FR 139
    data = bytearray((folder / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.onnx").write_bytes(data)
    code, rows, err = run("verify", "tiny", "--model-dir", folder)
    assert code == 5
    assert statuses(rows) == [("tiny", "model.onnx", "mismatch"), ("tiny", "tokenizer.json", "ok")]
    assert err.startswith("minice: error: tiny/model.onnx: ")


def test_verify_of_a_missing_file_says_how_to_get_it(run, folder):
    (folder / "tokenizer.json").unlink()
    code, rows, err = run("verify", "tiny", "--model-dir", folder)
    assert code == 4
    assert statuses(rows)[1] == ("tiny", "tokenizer.json", "missing")
    assert err.startswith(f"minice: error: tiny/tokenizer.json: not on disk: no 'tokenizer.json' in '{folder}' (")
    command = f"Run: mkdir -p {folder} && cp tokenizer.json {folder}/ && minice verify tiny --model-dir {folder}\n"
    assert err.endswith(command)
    assert rows[1]["message"] in err


def test_without_an_id_only_what_is_on_disk_is_verified(run, folder):
    home = folder / "home" / "other"
    home.mkdir(parents=True)
    assert run("verify") == (0, [], "")
    shutil.copy(folder / "model.onnx", home)
    code, rows, _ = run("verify")
    assert code == 4
    assert statuses(rows) == [("other", "model.onnx", "ok"), ("other", "tokenizer.json", "missing")]


@pytest.mark.parametrize("given", ["option", "variable"])
def test_a_folder_that_is_given_and_holds_no_model_is_an_error(run, folder, monkeypatch, given):
    nowhere = folder / "nowhere"
    if given == "variable":
        monkeypatch.setenv("MINICE_MODEL_DIR", str(nowhere))
    argv = ["--model-dir", nowhere] if given == "option" else []
    for state in ("does not exist", "no 'model.onnx' and no 'tokenizer.json' in"):
        code, rows, err = run("verify", *argv)
        assert (code, rows) == (4, [])
        assert state in err
        assert "minice: error: tiny: not on disk: " in err
        assert f"cp model.onnx tokenizer.json {nowhere}/ && minice verify other --model-dir {nowhere}" in err
        nowhere.mkdir(exist_ok=True)
    monkeypatch.setenv("MINICE_MODEL_DIR", " ")
    assert run("verify") == (0, [], "")


def lock_of_two(folder, monkeypatch):
    """A second model, whose graph has the first one's name and other bytes."""
    first = minice.artifacts.lock.shipped_lock().models[0]
    graph = folder / "second.onnx"
    graph.write_bytes(b"short")
    pin = dataclasses.replace(first.files[0], size=5, sha256=hashlib.sha256(b"short").hexdigest())
    second = dataclasses.replace(first, id="second", files=(pin, *first.files[1:]))
    lock = minice.artifacts.lock.Lock(models=(first, second))
    monkeypatch.setattr(minice.artifacts.lock, "shipped_lock", lambda: lock)
    graph.replace(folder / "model.onnx")


def test_another_model_in_the_folder_is_named(run, folder, monkeypatch):
    size = (folder / "model.onnx").stat().st_size
    lock_of_two(folder, monkeypatch)
    code, rows, err = run("verify", "tiny", "--model-dir", folder)
    assert (code, statuses(rows)[0]) == (5, ("tiny", "model.onnx", "truncated"))
    assert f"is truncated or another file: expected {size:,} bytes, got 5. " in err
    assert "That folder holds another model, 'second' in fp32: name that one to use it" in err
    code, rows, err = run("verify", "--model-dir", folder)  # without an id that is no mistake
    assert (code, err, {row["model"] for row in rows}) == (0, "", {"second"})


def test_tables_fit_the_terminal(folder, capsysbinary, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("MINICE_MODEL", "other")
    deep = folder.joinpath(*["a-folder-with-a-long-name"] * 6)
    deep.mkdir(parents=True)
    for name in ("model.onnx", "tokenizer.json"):
        shutil.copy(folder / name, deep)
    for argv in (["models"], ["verify"], ["verify", "--deep"]):
        assert main([*argv, "--format", "table", "--model-dir", str(deep)]) == 0
        out = capsysbinary.readouterr().out.decode()
        assert max(map(len, out.splitlines())) <= 80
        assert "…" in out
        if argv == ["models"]:
            assert "tiny (Apache-2.0, max_length 64)\n" in out
            assert "other (default, Apache-2.0, max_length 64)\n" in out
    assert "skipped  needs the fp32 file and the int8 file\n" in out


def test_models_marks_the_default_and_shows_aliases(capsysbinary, monkeypatch):
    for name in ("MINICE_MODEL", "MINICE_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINICE_HOME", "nowhere")
    monkeypatch.setenv("HF_HUB_CACHE", "nowhere")
    assert main(["models", "--format", "table"]) == 0
    out = capsysbinary.readouterr().out.decode()
    assert "minice-l6 (default, " in out
    assert "also named cross-encoder/ms-marco-MiniLM-L-6-v2\n" in out
    assert "minice verify ms-marco-MiniLM-L6-v2 says what is wrong" in out
    assert "minice verify minice-l6" not in out
    monkeypatch.setenv("MINICE_MODEL", "cross-encoder/ms-marco-MiniLM-L-6-v2")
    assert main(["models"]) == 0
    found = [json.loads(line) for line in capsysbinary.readouterr().out.decode().splitlines()]
    assert [(row["id"], row["default"]) for row in found] == [("minice-l6", False), ("ms-marco-MiniLM-L6-v2", True)]


def test_an_unknown_id_names_the_nearest(run, folder):
    code, rows, err = run("verify", "tinny")
    assert (code, rows) == (4, [])
    assert "'tiny'" in err


def test_quantize_then_verify_deep(run, folder):
    pytest.importorskip("onnx")
    code, rows, _ = run("verify", "tiny", "--deep", "--model-dir", folder)
    assert code == 4  # asked for by name, and there is no int8 file yet
    assert run("verify", "--deep", "--model-dir", folder)[0] == 0
    assert rows[-1]["message"].startswith("not on disk: no 'model.int8.onnx' in ")
    assert "use precision fp32 (--precision fp32), or run: minice quantize" in rows[-1]["message"]
    code, (report,), err = run("quantize", "tiny", "--model-dir", folder)
    assert (code, err) == (0, "")
    assert report["pinned_as"] == "tiny"
    for end in ("source", "result"):
        with open(report[end]["path"], "rb") as file:  # noqa: PTH123
            data = file.read()
        assert (report[end]["size"], report[end]["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert report["result"]["path"] == str(folder / "model.int8.onnx")
    assert report["tensors"]
    assert report["largest_error"] == max(tensor["largest_error"] for tensor in report["tensors"])
    assert 0 < report["mean_error"] <= report["largest_error"]
    assert report["comparison"]["largest_logit_difference"] > 0
    assert -1 <= report["comparison"]["kendall_tau"] <= 1
    code, rows, err = run("verify", "tiny", "--deep", "--model-dir", folder)
    assert (code, err) == (0, "")
    assert statuses(rows)[-2:] == [("tiny", "model.int8.onnx", "ok"), ("tiny", "fp32 -> int8", "ok")]


def test_quantizing_a_folder_that_no_lock_pins_says_so(run, folder, monkeypatch):
    pytest.importorskip("onnx")
    empty = minice.artifacts.lock.Lock(models=())
    monkeypatch.setattr(minice.artifacts.lock, "shipped_lock", lambda: empty)
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model.onnx")
    code, (report,), err = run("quantize", folder)
    assert code == 0
    assert report["pinned_as"] is None
    assert (folder / "onnx" / "model.int8.onnx").is_file()
    assert report["comparison"]["texts"] == "built-in texts"  # the tokenizer above onnx/ was found
    assert "no pinned model has the fp32 file" in err


def test_a_file_may_be_named_instead_of_its_folder(run, folder):
    pytest.importorskip("onnx")
    code, (report,), _ = run("quantize", folder / "model.onnx")
    assert (code, report["pinned_as"]) == (0, "tiny")


def test_without_onnx_the_install_command_is_named(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    code, rows, err = run("quantize", folder)
    assert (code, rows) == (7, [])
    assert "pip install 'minice[quantize]'" in err
    assert "pip install '.[quantize]'" in err


def test_quantize_as_a_table(folder, capsysbinary):
    pytest.importorskip("onnx")
    assert main(["quantize", str(folder), "--format", "table"]) == 0
    out = capsysbinary.readouterr().out.decode()
    for part in ("bytes before", "largest error", "mean error", "pinned as  tiny", "differ by at most", "Kendall tau"):
        assert part in out


def test_what_cannot_be_quantized(run, folder):
    pytest.importorskip("onnx")
    code, _, err = run("quantize", "nonsense")
    assert code == 4
    assert "nor is there a file or folder of that name" in err
    code, _, err = run("quantize", folder / "home")
    assert code == 4
    code, _, err = run("quantize", "tiny")
    assert code == 4
    home = folder / "home" / "tiny"
    assert f"quantizing needs the fp32 file, which is not on disk: no 'model.onnx' in '{home}' (MINICE_HOME). " in err
    assert err.endswith(f"Run: mkdir -p {home} && cp model.onnx {home}/ && minice quantize tiny\n")
    empty = folder / "empty"
    empty.mkdir()
    code, _, err = run("quantize", empty)
    assert code == 2
    assert "expected onnx/model.onnx or model.onnx in it" in err
    code, _, err = run("quantize", folder, "--model-dir", empty)
    assert (code, err.partition(" and ")[0]) == (2, "minice: error: --model-dir: goes with the id of a model only,")
    (empty / "model.onnx").write_bytes(b"no model")
    for target in (empty, empty / "model.onnx"):
        code, _, err = run("quantize", target)
        assert code == 6
        assert err.startswith(f"minice: error: {empty / 'model.onnx'}: ")


def test_quantizing_the_embedded_model_says_what_it_needs(capsysbinary, monkeypatch, tmp_path):
    monkeypatch.setenv("MINICE_HOME", str(tmp_path))
    monkeypatch.delenv("MINICE_MODEL_DIR", raising=False)
    place = tmp_path / "minice-l6"
    assert main(["quantize", "minice-l6"]) == 4
    err = capsysbinary.readouterr().err.decode()
    assert (
        "the int8 file of this model is pinned and need not be made; quantizing needs the fp32 file, which is " in err
    )
    assert f"no 'model.onnx' in the package or '{place}' (MINICE_HOME). Put model.onnx (90,982,500 bytes" in err
    assert err.endswith(f"Run: mkdir -p {place} && cp model.onnx {place}/ && minice quantize minice-l6\n")
    pytest.importorskip("onnx")
    assert main(["verify", "minice-l6", "--deep"]) == 4
    err = capsysbinary.readouterr().err.decode()
    assert err.startswith(
        "minice: error: minice-l6/fp32 -> int8: quantizing needs the fp32 file, which is not on disk: "
    )
    assert err.endswith("&& minice verify minice-l6 --deep\n")
