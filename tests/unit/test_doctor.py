"""``minice doctor``: what it tells, that it survives what it diagnoses, and what it keeps to itself."""

import json
import os
import re
import shutil
import sys

import numpy as np
import pytest
from conftest import lock_entry, run_python

from minice.artifacts.store import DEFAULT_MODEL
from minice.cli import doctor
from minice.cli.arguments import parse, usage
from minice.cross_encoder import CrossEncoder
from minice.engines import threads
from minice.engines.threads import blas_limit
from minice.errors import ModelNotFoundError

KEYS = {
    "": "format usable exit_code minice python packages platform blas threads engines environment models model sample"
    " problems",
    "minice": "version location",
    "python": "version implementation",
    "packages": "name version required purpose install",
    "platform": "system release machine libc processor",
    "blas": "libraries built_with steerable core_type",
    "blas.libraries": "name version kernel threading",
    "threads": "workers decided_by cpu_count affinity cgroup_quota",
    "engines": "used decided_by available",
    "engines.available": "name installed version install",
    "environment": "name value known nearest note",
    "models": "id used status revision searched files",
    "models.searched": "path decided_by",
    "models.files": "role precision name size sha256 status path message",
    "model": "asked decided_by precision_decided_by info open_ms load_ms",
    "sample": "pairs repeats median_ms pairs_per_s logits peak_mib",
    "sample.logits": "query passage logit",
    "problems": "where message exit_code",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No variable that doctor would tell of, and a home folder of nobody."""
    for name in list(os.environ):
        if name.upper().startswith("MINICE_") or name in doctor.OTHER_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A copy of the small model in MINICE_HOME, pinned by a user's lock, and what is used by default."""
    copy = tmp_path / "models" / "tiny"
    shutil.copytree(tiny.folder, copy)
    monkeypatch.setenv("MINICE_LOCK", str(copy / "models.lock"))
    monkeypatch.setenv("MINICE_HOME", str(copy.parent))
    monkeypatch.setenv("MINICE_MODEL", "tiny")
    return copy


@pytest.fixture
def run(capsysbinary):
    def run(*argv):
        """Exit code, and the report or the screen."""
        code = doctor.run(parse(doctor.COMMAND, [str(argument) for argument in argv]))
        out, err = capsysbinary.readouterr()
        assert err == b""
        if "--json" not in argv:
            return code, out.decode()
        assert out.count(b"\n") == 1
        report = json.loads(out, parse_constant=pytest.fail)  # NaN is not JSON
        assert report["exit_code"] == code
        assert report["usable"] == (code == 0)
        return code, report

    return run


def section(screen, name):
    """The lines of one section of a screen, without the column of names."""
    lines = screen.splitlines()
    column = len(lines[0]) - len(lines[0].removeprefix("minice").lstrip())
    starts = [i for i, line in enumerate(lines) if line[:column].strip()]
    begin = next(i for i in starts if lines[i][:column].strip() == name)
    end = next((i for i in starts if i > begin), len(lines))
    return [line[column:] for line in lines[begin:end]]


def one(items, **wanted):
    (found,) = [item for item in items if all(item[key] == value for key, value in wanted.items())]
    return found


def test_a_fresh_install_from_the_shell(tmp_path):
    """The embedded model in a process of its own: both formats, nothing on stderr, nothing written."""
    code = "import sys; from minice.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_python(code, "doctor", "--json", HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path / "data"))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["model"]["info"]["model"] == report["model"]["asked"] == DEFAULT_MODEL
    assert report["model"]["info"]["engine_info"]["gemm"] in ("merged", "per pair")
    first, second = (entry["logit"] for entry in report["sample"]["logits"])
    assert first > second  # of a built-in query: the passage that answers it, and one that does not
    assert report["sample"]["peak_mib"] > 20
    assert list(tmp_path.iterdir()) == []


def test_the_screen_of_the_embedded_model(run):
    code, screen = run()
    assert code == 0
    lines = screen.splitlines()
    assert 25 <= len(lines) <= 40
    assert max(map(len, lines)) <= doctor.WIDTH == 100
    names = [line.split()[0] for line in lines if line[0] != " "]
    assert " ".join(names) == "minice platform BLAS threads engine variables model files sample problems"
    assert section(screen, "problems") == section(screen, "variables") == ["none"]
    model = " ".join(" ".join(section(screen, "model")).split())
    assert "minice-l6 by default" in model
    assert "special_tokens=reference;engine=numpy" in model
    assert re.search("gemm (merged|per pair), exact_across_batches yes, exact_across_threads (yes|no)", model)
    files = section(screen, "files")
    assert files[0] == "minice-l6: ok, the one in use"
    assert any(re.fullmatch(r" +model\.int8\.onnx  [0-9a-f]{12}  ok", line) for line in files)
    assert re.match(
        r"20 pairs in [\d.]+ ms \(median of 3 after a warm-up\), [\d.]+ pairs/s", section(screen, "sample")[0]
    )


def test_json_holds_every_promised_key(run, folder):
    code, report = run("--json")
    assert code == 0
    for place, keys in KEYS.items():
        values = [report]
        for name in filter(None, place.split(".")):
            values = [item for value in values for item in listed(value[name])]
        if place != "problems":  # there are none
            assert values, place
        for value in values:
            assert list(value) == keys.split(), place
        for key in keys.split():
            assert f"``{key}``" in doctor.__doc__
    assert report["format"] == 1


def listed(value):
    return value if isinstance(value, list) else [value]


def test_two_runs_differ_in_times_only(run, folder):
    reports = []
    for _ in range(2):
        report = run("--json")[1]
        for key in ("open_ms", "load_ms"):
            assert report["model"].pop(key) >= 0
        for key in ("median_ms", "pairs_per_s", "peak_mib"):
            assert report["sample"].pop(key) > 0
        reports.append(json.dumps(report))
    assert reports[0] == reports[1]


def test_the_logits_are_those_of_the_scoring_verbs(run, folder, tiny, open_tiny):
    report = run("--json", "--max-length", "16")[1]
    with open_tiny(max_length=16) as encoder:
        for entry in report["sample"]["logits"]:
            (logit,) = encoder.score(entry["query"], [entry["passage"]])
            assert entry["logit"] == float(str(logit))
    assert report["sample"]["pairs"] == 20
    assert report["model"]["info"]["max_length"] == 16


def test_files_of_the_model_in_use_are_hashed_and_others_are_located(run, folder):
    report = run("--json")[1]
    tiny, embedded, published = (one(report["models"], id=name) for name in ("tiny", DEFAULT_MODEL, PUBLISHED))
    assert (tiny["used"], tiny["status"]) == (True, "ok")
    assert (embedded["used"], embedded["status"]) == (False, "present")
    assert (published["used"], published["status"]) == (False, "missing")
    assert tiny["searched"] == [{"path": str(folder), "decided_by": "MINICE_HOME"}]
    assert [place["decided_by"] for place in embedded["searched"]] == ["the package", "MINICE_HOME"]
    assert [place["decided_by"] for place in published["searched"]] == [
        "MINICE_HOME",
        "the default of HF_HUB_CACHE",
        "the default of HF_HUB_CACHE",
    ]
    file = one(tiny["files"], role="model")
    assert file["sha256"] == report["model"]["info"]["sha256"]
    assert file["path"] == report["model"]["info"]["paths"]["model"] == str(folder / "model.onnx")
    assert report["problems"] == []


PUBLISHED = "ms-marco-MiniLM-L6-v2"


def test_what_decided_is_named(run, folder):
    report = run("--json")[1]
    assert (report["model"]["asked"], report["model"]["decided_by"]) == ("tiny", "MINICE_MODEL")
    assert report["model"]["precision_decided_by"] == "default"
    report = run("--json", "--model", "tiny", "--model-dir", folder, "--precision", "fp32")[1]
    assert report["model"]["decided_by"] == "--model"
    assert report["model"]["precision_decided_by"] == "--precision"
    notes = {variable["name"]: variable["note"] for variable in report["environment"]}
    assert notes == {"MINICE_HOME": "--model-dir wins", "MINICE_LOCK": "", "MINICE_MODEL": "--model wins"}
    assert one(report["models"], id="tiny")["searched"] == [{"path": str(folder), "decided_by": "--model-dir"}]


def test_a_folder_by_variable_wins_over_home(run, folder, monkeypatch):
    monkeypatch.setenv("MINICE_MODEL_DIR", str(folder))
    report = run("--json")[1]
    assert one(report["environment"], name="MINICE_HOME")["note"] == "MINICE_MODEL_DIR wins"
    assert one(report["models"], id="tiny")["searched"] == [{"path": str(folder), "decided_by": "MINICE_MODEL_DIR"}]
    # Another model has a model.onnx and a tokenizer.json too; it is not damaged for that.
    assert one(report["models"], id=DEFAULT_MODEL)["status"] not in ("ok", "present", "missing")
    assert report["problems"] == []


def test_the_default_is_the_store_s():
    assert doctor.DEFAULT_MODEL == DEFAULT_MODEL


# --- what is wrong -------------------------------------------------------------------------------------


def test_a_model_that_is_not_there(run):
    code, report = run("--json", "--model", PUBLISHED)
    assert code == 4
    (problem,) = report["problems"]
    assert (problem["where"], problem["exit_code"]) == (PUBLISHED, 4)
    with pytest.raises(ModelNotFoundError) as raised:
        CrossEncoder.open(PUBLISHED)
    assert problem["message"] == raised.value.message
    assert "Run: " in problem["message"]
    assert report["model"]["info"] is report["sample"] is None
    assert one(report["packages"], name="numpy")["version"]
    assert report["blas"]["libraries"] or not report["blas"]["steerable"]
    code, screen = run("--model", PUBLISHED)
    assert code == 4
    assert max(map(len, screen.splitlines())) <= 100
    assert section(screen, "model")[-1] == "cannot be opened: see problems"
    assert "(exit code 4)" in " ".join(section(screen, "problems"))
    assert "numpy " in " ".join(section(screen, "minice"))


@pytest.mark.parametrize("given", ["--model", "MINICE_MODEL"])
def test_a_model_that_nobody_pinned(run, monkeypatch, given):
    monkeypatch.setenv("MINICE_MODEL", "minice-l7")
    code, report = run("--json", *(["--model", "minice-l7"] if given == "--model" else []))
    assert code == 4
    (problem,) = report["problems"]
    assert problem["where"] == given
    assert "did you mean 'minice-l6'?" in problem["message"]
    assert not any(pin["used"] for pin in report["models"])


def test_a_damaged_file(run, folder):
    data = bytearray((folder / "model.onnx").read_bytes())
    data[-1] ^= 1
    (folder / "model.onnx").write_bytes(data)
    code, report = run("--json")
    assert code == 5
    (problem,) = report["problems"]  # told once, though looking at the files finds it too
    assert (problem["where"], problem["exit_code"]) == ("tiny/model.onnx", 5)
    assert problem["message"].startswith("sha256 mismatch")
    assert one(report["models"], id="tiny")["status"] == "mismatch"


def test_a_damaged_file_of_another_model_is_told_and_harms_nothing(run, folder):
    other = folder.parent / PUBLISHED
    other.mkdir()
    (other / "model.onnx").write_bytes(b"cut off")
    code, report = run("--json")
    assert code == 0
    assert one(report["models"], id=PUBLISHED)["status"] == "truncated"
    assert {problem["where"] for problem in report["problems"]} == {
        f"{PUBLISHED}/{name}" for name in ("onnx/model.onnx", "tokenizer.json", "config.json")
    }
    for problem in report["problems"]:
        assert problem["exit_code"] is None
        assert problem["message"].count("Run: ") == 1


def test_what_the_model_in_use_lacks_and_does_not_need(run, folder):
    """Scoring in fp32 needs neither the int8 file that is pinned first nor the config file; the latter is told."""
    text = (folder / "models.lock").read_text()
    files = text.replace('precision = "fp32"', 'precision = "int8"').partition("[[model.file]]")[2]
    int8 = "[[model.file]]" + files.partition("[[model.file]]")[0].replace("model.onnx", "model.int8.onnx")
    config = int8.replace("model.int8.onnx", "config.json").replace('"model"', '"config"')
    head, mark, tail = text.partition("[[model.file]]")
    config = config.replace('precision = "int8"\n', "")
    (folder / "models.lock").write_text(f"{head}{int8}{mark}{tail}\n{config}")
    code, report = run("--json", "--precision", "fp32")
    assert code == 0
    assert [problem["where"] for problem in report["problems"]] == ["tiny/config.json"]
    assert one(report["models"], id="tiny")["status"] == "incomplete"
    assert "    missing: model.int8.onnx, config.json" in section(run("--precision", "fp32")[1], "files")
    code, report = run("--json")
    assert code == 4
    assert "--precision fp32" in report["problems"][0]["message"]


def test_only_what_was_hashed_is_shown_with_its_digest(run, folder):
    files = section(run()[1], "files")
    hashed = [line for line in files if re.fullmatch(r"    \S+  [0-9a-f]{12}  ok", line)]
    located = [line for line in files if re.fullmatch(r"    \S+  pinned as [0-9a-f]{12}  present", line)]
    assert len(hashed) == 2
    assert {line.split()[0] for line in located} == {"model.int8.onnx", "tokenizer.json", "config.json"}


def test_a_graph_that_no_engine_can_run(run, folder):
    data = b"\x08\x08"
    (folder / "model.onnx").write_bytes(data)
    files = {"model.onnx": data, "tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    (folder / "models.lock").write_text(lock_entry("tiny", files))
    code, report = run("--json")
    assert code == 6
    assert report["model"]["info"]["engine_info"] is report["model"]["load_ms"] is None
    assert report["problems"][0]["where"].startswith("model 'tiny'")
    assert section(run()[1], "model")[-1] == "cannot be loaded: see problems"


def test_a_malformed_lock(run, folder):
    (folder / "models.lock").write_text("lock-version = 'one'")
    code, report = run("--json")
    assert code == 3
    (problem,) = report["problems"]
    assert problem["where"].startswith("MINICE_LOCK: ")
    assert problem["where"].endswith(": lock-version")
    assert {pin["id"] for pin in report["models"]} == {DEFAULT_MODEL, PUBLISHED}  # those that minice pins itself


def test_a_folder_that_no_file_system_can_name(run, monkeypatch):
    code, report = run("--json", "--model-dir", "  ")
    assert code == 2
    assert report["problems"][0]["where"] == "--model-dir"
    assert {pin["status"] for pin in report["models"]} == {"unknown"}


def test_onnxruntime_that_is_not_installed(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # neither import nor find_spec finds it now
    code, report = run("--json", "--engine", "onnxruntime")
    assert code == 7
    assert "pip install 'minice[onnxruntime]'" in report["problems"][0]["message"]
    assert (report["engines"]["used"], report["engines"]["decided_by"]) == ("onnxruntime", "--engine")
    assert one(report["engines"]["available"], name="onnxruntime") == {
        "name": "onnxruntime",
        "installed": False,
        "version": None,
        "install": "pip install 'minice[onnxruntime]'",
    }
    code, screen = run()
    assert code == 0  # nobody asked for it
    assert "onnxruntime: not installed: pip install 'minice[onnxruntime]'" in section(screen, "engine")
    assert section(screen, "problems") == ["none"]
    assert "onnxruntime is not installed (--engine onnxruntime): pip install 'minice[onnxruntime]'" in section(
        screen, "minice"
    )


def test_a_package_is_found_under_another_distribution(monkeypatch):
    from importlib import metadata

    known = {"onnxruntime-gpu": "1.2.3"}

    def version(name):
        if name not in known:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(metadata, "version", version)
    assert doctor._version("onnxruntime") == "1.2.3"
    assert doctor._version("numpy") == "unknown"  # it can be imported, whoever put it there
    assert doctor._version("no_such_package_at_all") is None


def test_numpy_that_cannot_be_imported():
    code = "import sys; sys.modules['numpy'] = None; from minice.cli.arguments import parse\n"
    code += "from minice.cli import doctor; sys.exit(doctor.run(parse(doctor.COMMAND, sys.argv[1:])))"
    done = run_python(code, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert one(report["packages"], name="numpy")["version"] is None
    assert one(report["packages"], name="tokenizers")["version"]
    assert report["blas"] is report["threads"] is None
    assert report["models"] == []
    assert report["problems"][0]["exit_code"] == 1
    assert "install minice again" in report["problems"][0]["message"]
    done = run_python(code)
    assert (done.returncode, done.stderr) == (1, "")
    assert section(done.stdout, "BLAS") == section(done.stdout, "threads") == ["unknown"]


def test_memory_that_does_not_suffice(run, folder, monkeypatch):
    def fail(arguments):
        raise MemoryError

    monkeypatch.setattr(doctor, "open_encoder", fail)
    code, report = run("--json")
    assert code == 1
    assert report["problems"][0]["message"].startswith("MemoryError")


def test_a_blas_that_cannot_be_steered(run, folder, monkeypatch):
    monkeypatch.setattr(blas_limit, "_libraries", [])
    code, report = run("--json")
    assert code == 0
    assert (report["blas"]["libraries"], report["blas"]["steerable"]) == ([], False)
    (problem,) = report["problems"]
    assert (problem["where"], problem["exit_code"]) == ("blas", None)
    assert "OMP_NUM_THREADS=1" in problem["message"]
    found, steerable = section(run()[1], "BLAS")
    assert found == f"none was found; NumPy says it was built with {report['blas']['built_with']}"
    assert steerable == "minice cannot set its threads"


@pytest.mark.parametrize(
    ("config", "built_with"),
    [
        ({"Build Dependencies": {"blas": {"name": "accelerate", "version": "unknown"}}}, "accelerate unknown"),
        ({"Build Dependencies": {}}, None),
        (None, None),  # before 1.25 it printed, and returned nothing
    ],
)
def test_what_numpy_says_of_its_blas(monkeypatch, config, built_with):
    monkeypatch.setattr(np, "show_config", lambda mode: config)
    assert doctor._built_with() == built_with


def test_logits_that_are_not_finite(run, folder, monkeypatch):
    monkeypatch.setattr(CrossEncoder, "score_pairs", lambda self, pairs: np.full(len(pairs), np.nan, np.float32))
    code, report = run("--json")
    assert code == 0
    assert [entry["logit"] for entry in report["sample"]["logits"]] == [None, None]
    assert "not finite" in report["problems"][0]["message"]


# --- threads -------------------------------------------------------------------------------------------


def test_threads_by_option(run, folder):
    report = run("--json", "--threads", "3")[1]
    assert (report["threads"]["workers"], report["threads"]["decided_by"]) == (3, "--threads")
    assert report["model"]["info"]["engine_info"]["threads"] == 3


@pytest.mark.parametrize(
    ("affinity", "quota", "workers", "decided_by"),
    [
        (4, None, 4, "affinity"),
        (4, 1.5, 2, "cgroup quota"),
        (4, 64.0, 4, "affinity"),
        (None, None, 8, "cpu count"),
        (None, 2.0, 2, "cgroup quota"),
    ],
)
def test_threads_by_what_limits_them(run, folder, monkeypatch, affinity, quota, workers, decided_by):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "_affinity", lambda: affinity)
    monkeypatch.setattr(threads, "_cgroup_quota", lambda: quota)
    report = run("--json")[1]
    assert report["threads"] == {
        "workers": workers,
        "decided_by": decided_by,
        "cpu_count": 8,
        "affinity": affinity,
        "cgroup_quota": quota,
    }
    assert report["model"]["info"]["engine_info"]["threads"] == workers
    assert section(run()[1], "threads")[0].startswith(f"{workers} by {decided_by} (8 CPUs")


# --- variables -----------------------------------------------------------------------------------------


def test_a_misspelt_variable(run, folder, monkeypatch):  # FR 72
    monkeypatch.setenv("MINICE_MODLE", "whatever it holds")
    code, report = run("--json")
    assert code == 0
    assert one(report["environment"], known=False) == {
        "name": "MINICE_MODLE",
        "value": "set",
        "known": False,
        "nearest": "MINICE_MODEL",
        "note": "",
    }
    (problem,) = report["problems"]
    assert (problem["where"], problem["exit_code"]) == ("MINICE_MODLE", None)
    assert problem["message"].endswith("did you mean MINICE_MODEL?")
    screen = run()[1]
    assert "MINICE_MODLE=set (unknown; did you mean MINICE_MODEL?)" in section(screen, "variables")
    assert "whatever" not in screen + json.dumps(report)


def test_an_unknown_variable_that_is_near_to_none(run, folder, monkeypatch):
    monkeypatch.setenv("MINICE_ZZZZZZZZZZZZZZZ", "1")
    assert run("--json")[1]["problems"][0]["message"].endswith(
        "known: MINICE_HOME, MINICE_LOCK, MINICE_MODEL, MINICE_MODEL_DIR"
    )


def test_blank_variables_are_said_to_be_unset(run, folder, monkeypatch):
    monkeypatch.setenv("MINICE_MODEL", " ")
    report = run("--json")[1]
    assert report["model"]["decided_by"] == "default"
    assert one(report["environment"], name="MINICE_MODEL")["note"] == "blank, which counts as unset"


def test_secrets_stay_where_they_are(run, folder, monkeypatch):
    secret = "s3cr3t"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", secret)
    monkeypatch.setenv("MINICE_API_KEY", secret)
    monkeypatch.setenv("UNRELATED", secret)
    monkeypatch.setenv("MINICE_MODEL", f"https://me:{secret}@models.example/x")  # in an error message too
    for endpoint in (
        f"https://me:{secret}@mirror.example/hf",
        f"https://me:{secret}/{secret}@mirror.example/hf",
        f"me:{secret}@mirror.example/hf",
        f"//me:{secret}@mirror.example/hf",
        f"https://me:it's {secret}@mirror.example/hf",
        f"https://mirror.example/hf#{secret}",
        f"https://mirror.example/hf?token={secret}",
    ):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        code, report = run("--json")
        assert code == 4
        screen = run()[1]
        for text in (json.dumps(report), screen):
            assert secret not in text
            assert "mirror.example/hf" in text
            assert "models.example" in text
            assert "UNRELATED" not in text
        assert one(report["environment"], name="HF_TOKEN")["value"] == "set"


def test_variables_come_in_order(run, folder, monkeypatch):
    for name in ("XDG_CACHE_HOME", "HF_HOME", "OPENBLAS_CORETYPE", "MINICE_AAA"):
        monkeypatch.setenv(name, "x")
    report = run("--json")[1]
    assert [variable["name"] for variable in report["environment"]] == [
        *("MINICE_AAA", "MINICE_HOME", "MINICE_LOCK", "MINICE_MODEL"),
        *("HF_HOME", "OPENBLAS_CORETYPE", "XDG_CACHE_HOME"),
    ]
    assert report["blas"]["core_type"] == "x"


# --- the screen ----------------------------------------------------------------------------------------


def test_no_line_is_too_long_and_nothing_is_cut(run, folder, monkeypatch):
    deep = folder.parent.parent / ("long" * 20) / ("name" * 20)
    deep.mkdir(parents=True)
    shutil.copytree(folder, deep / "tiny")
    monkeypatch.setenv("MINICE_HOME", str(deep))
    code, screen = run()
    assert code == 0
    assert max(map(len, screen.splitlines())) <= 100
    assert str(deep / "tiny") in "".join(line.strip() for line in section(screen, "files"))


def test_a_terminal_survives_it(run, folder, monkeypatch):
    monkeypatch.setenv("HF_HOME", "\x1b[31mred\n\u202e")
    screen = run()[1]
    assert r"HF_HOME=\x1b[31mred \u202e" in "".join(section(screen, "variables"))
    assert "\x1b" not in screen


def test_what_an_engine_tells_is_shown_whatever_it_is(run, folder, monkeypatch):
    from minice.engines.numpy_engine import NumpyEngine

    told = {"engine": "numpy", "threads": 5, "arrangement": "2 workers", "batched": False, "sizes": [1, 2]}
    monkeypatch.setattr(NumpyEngine, "info", lambda self: told)
    code, screen = run()
    assert code == 0
    assert "arrangement 2 workers, batched no, sizes [1, 2]" in section(screen, "model")
    assert section(screen, "threads")[0].startswith("5 by ")


def test_scores_that_depend_on_the_batch_are_a_problem(run, folder, monkeypatch):  # FR 76
    from minice.engines.numpy_engine import NumpyEngine

    monkeypatch.setattr(NumpyEngine, "info", lambda self: {"threads": 1, "scores_depend_on_batch": True})
    code, report = run("--json")
    assert code == 0
    (problem,) = report["problems"]
    assert (problem["where"], problem["exit_code"]) == ("tiny", None)
    assert "depends on the passages" in problem["message"]


def test_help():
    text = usage(doctor.COMMAND)
    assert text.startswith("usage: minice doctor [options]\n")
    for option in ("--model ID", "--model-dir DIR", "--precision", "--engine", "--threads N", "--json"):
        assert f"  {option}" in text
    assert "paths" in text
