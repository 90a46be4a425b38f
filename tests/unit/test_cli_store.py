"""``minice models``, ``verify`` and ``quantize`` on a small model that a lock of its own pins."""

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
    monkeypatch.delenv("MINICE_MODEL_DIR", raising=False)
    return tmp_path


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


def test_models_as_a_table_shows_the_start_of_each_digest(folder, capsysbinary):
    assert main(["models", "--format", "table", "--model-dir", str(folder)]) == 0
    out = capsysbinary.readouterr().out.decode()
    digest = hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest()
    assert f"  {digest[:12]}  present  {folder / 'model.onnx'}" in out
    assert digest[:13] not in out


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
    assert err.startswith("minice: error: tiny/tokenizer.json: not on disk. ")


def test_without_an_id_only_what_is_on_disk_is_verified(run, folder):
    home = folder / "home" / "other"
    home.mkdir(parents=True)
    assert run("verify") == (0, [], "")
    shutil.copy(folder / "model.onnx", home)
    code, rows, _ = run("verify")
    assert code == 4
    assert statuses(rows) == [("other", "model.onnx", "ok"), ("other", "tokenizer.json", "missing")]


def test_an_unknown_id_names_the_nearest(run, folder):
    code, rows, err = run("verify", "tinny")
    assert (code, rows) == (4, [])
    assert "'tiny'" in err


def test_quantize_then_verify_deep(run, folder):
    pytest.importorskip("onnx")
    code, rows, _ = run("verify", "tiny", "--deep", "--model-dir", folder)
    assert code == 4  # asked for by name, and there is no int8 file yet
    assert run("verify", "--deep", "--model-dir", folder)[0] == 0
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
    assert "needs the fp32 file 'model.onnx', which is not on disk" in err
    empty = folder / "empty"
    empty.mkdir()
    code, _, err = run("quantize", empty)
    assert code == 2
    assert "expected onnx/model.onnx or model.onnx in it" in err
