"""What ``minice fetch`` decides without a connection; tests/integration/test_fetch_hub.py has the rest."""

import hashlib
import os
import shutil
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest

from minice.artifacts import fetch
from minice.artifacts.fetch import fetch_model
from minice.artifacts.lock import FilePin, Lock, ModelPin, shipped_lock
from minice.cli import main
from minice.errors import ConfigError, EngineUnavailableError, ModelNotFoundError
from minice.scores import ScoreScale

FILES = {"model.onnx": b"model", "tokenizer.json": b"tokenizer"}
PIN = ModelPin(
    id="tiny",
    license="Apache-2.0",
    max_length=64,
    scale=ScoreScale.LOGIT,
    files=tuple(
        FilePin(
            role=path.partition(".")[0],
            path=path,
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            precision="fp32" if path == "model.onnx" else None,
        )
        for path, data in FILES.items()
    ),
    repository="acme/tiny",
    revision="0" * 40,
)
LOCK = Lock(models=(PIN,))


@pytest.fixture
def environ(tmp_path):
    return {"MINICE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def no_client(monkeypatch):
    """The hub's client is not installed; what asks for it gets an ImportError."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


def install(environ, **changed):
    folder = fetch.install_folder(PIN, environ=environ)
    folder.mkdir(parents=True)
    for path, data in FILES.items():
        (folder / path).write_bytes(data)
    return folder


# --- offline -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        *(("HF_HUB_OFFLINE", {"HF_HUB_OFFLINE": value}) for value in ("1", "on", "Yes", "TRUE")),
        ("TRANSFORMERS_OFFLINE", {"TRANSFORMERS_OFFLINE": "1"}),
        ("TRANSFORMERS_OFFLINE", {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "true"}),
    ],
)
def test_offline_is_refused_before_the_client_is_looked_for(environ, no_client, name, environment):
    with pytest.raises(ConfigError, match="has to connect, and this forbids it") as caught:
        fetch_model(PIN, environ=environ | environment, lock=LOCK)
    assert caught.value.where == name


@pytest.mark.parametrize(
    "environment",
    [{}, {"HF_HUB_OFFLINE": "0"}, {"HF_HUB_OFFLINE": "2"}, {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}],
)
def test_what_the_client_does_not_read_as_offline_is_none(environ, no_client, environment):
    with pytest.raises(EngineUnavailableError, match=r"pip install 'minice\[fetch\]'"):
        fetch_model(PIN, environ=environ | environment, lock=LOCK)


def test_a_refused_fetch_creates_nothing(environ, no_client, tmp_path):
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        with pytest.raises((ConfigError, EngineUnavailableError)):
            fetch_model(PIN, environ=environ | environment, lock=LOCK)
    assert list(tmp_path.iterdir()) == []


def test_the_client_agrees_on_what_offline_means():
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub")
    assert set(fetch._TRUE) == constants.ENV_VARS_TRUE_VALUES


# --- nothing to do, nothing to be had ------------------------------------------------------------------


def test_a_complete_model_is_only_verified(environ, no_client):
    folder = install(environ)
    said = []
    report = fetch_model(PIN, environ=environ | {"HF_HUB_OFFLINE": "1"}, lock=LOCK, say=said.append)
    assert not report.fetched
    assert [(file.name, file.path, file.fetched) for file in report.files] == [
        (path, str(folder / path), False) for path in FILES
    ]
    assert [file.sha256 for file in report.files] == [file.sha256 for file in PIN.files]
    assert said == []
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny"]


def test_the_embedded_model_is_there_without_a_folder_of_the_users(environ, no_client, tmp_path):
    report = fetch_model(shipped_lock().find("minice-l6"), environ=environ)
    assert not report.fetched
    assert "model.onnx" not in {file.name for file in report.files}  # optional, and not there
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_fetch_left_beside_a_complete_model_is_removed(environ):
    pytest.importorskip("filelock", reason="needs filelock")
    folder = install(environ)
    (folder.parent / ".tiny.minice-fetch" / "model").mkdir(parents=True)
    (folder.parent / ".tiny.minice-fetch.lock").touch()
    assert not fetch_model(PIN, environ=environ, lock=LOCK).fetched
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("embedded", "words"), [(False, "its files get there by copying"), (True, "come with the package")]
)
def test_a_pin_without_a_repository_says_how_its_files_get_there(environ, no_client, embedded, words):
    import dataclasses

    pin = dataclasses.replace(PIN, repository=None, revision=None, embedded=embedded)
    with pytest.raises(ModelNotFoundError, match=words) as caught:
        fetch_model(pin, environ=environ, lock=LOCK)
    assert caught.value.where == "tiny"
    assert all(path in caught.value.message for path in FILES)


# --- the folder ----------------------------------------------------------------------------------------


def test_the_temporary_folder_lies_beside_the_models(tmp_path):
    assert fetch._beside(tmp_path / "a" / "tiny") == tmp_path / "a" / ".tiny.minice-fetch"
    (tmp_path / "tiny").mkdir()
    assert fetch._beside(tmp_path / "tiny") == tmp_path / ".tiny.minice-fetch"


def test_in_a_parent_that_may_not_be_written_it_lies_inside(tmp_path, monkeypatch):
    folder = tmp_path / "tiny"
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert fetch._beside(folder) == folder / ".minice-fetch"


def test_of_a_mount_point_it_lies_inside(tmp_path):
    shared_memory = fetch.Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == shared_memory.parent.stat().st_dev:
        pytest.skip("needs /dev/shm to be a file system of its own")
    assert fetch._beside(shared_memory) == shared_memory / ".minice-fetch"


def test_files_go_one_by_one_into_a_folder_that_is_there_the_model_last(tmp_path, monkeypatch):
    folder, temporary = tmp_path / "tiny", tmp_path / "temporary"
    folder.mkdir()
    (folder / "mine.txt").touch()
    (temporary / "model").mkdir(parents=True)
    for path, data in FILES.items():
        (temporary / "model" / path).write_bytes(data)
    moved = []
    replace = fetch.Path.replace
    monkeypatch.setattr(fetch.Path, "replace", lambda path, to: (moved.append(path.name), replace(path, to)))
    fetch._install(temporary, folder, PIN.files)
    assert moved == ["tokenizer.json", "model.onnx"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES | {"mine.txt": b""}


def test_too_little_room_is_known_beforehand(environ, monkeypatch, tmp_path):
    client = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(13))
    monkeypatch.setattr(client, "hf_hub_download", lambda **options: pytest.fail("nothing is to be downloaded"))
    with pytest.raises(ModelNotFoundError, match="no room for them: 14 bytes are needed") as caught:
        fetch_model(PIN, environ=environ, lock=LOCK)
    assert str(tmp_path / "home" / "tiny") in caught.value.message
    assert "13 bytes are free" in caught.value.message
    assert list((tmp_path / "home").iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_is_told_from_a_broken_connection(environ, monkeypatch, tmp_path):
    import errno

    client = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

    def fill(**options):
        (options["local_dir"] / "part").parent.mkdir(parents=True)
        (options["local_dir"] / "part").write_bytes(b"part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(client, "get_hf_file_metadata", lambda *_, **__: SimpleNamespace(size=None))
    monkeypatch.setattr(client, "hf_hub_download", fill)
    with pytest.raises(ModelNotFoundError, match=r"no room for them: 14 bytes .*No space left on device"):
        fetch_model(PIN, environ=environ, lock=LOCK)
    assert list((tmp_path / "home").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(environ, tmp_path):
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelNotFoundError, match="could not be fetched: cannot write"):
        fetch_model(PIN, environ=environ, lock=LOCK)


# --- the endpoint --------------------------------------------------------------------------------------

HUB = SimpleNamespace(constants=SimpleNamespace(_HF_DEFAULT_ENDPOINT="https://default.example", ENDPOINT=""))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "https://default.example"),
        ("", "https://default.example"),  # FR 145
        ("  ", "https://default.example"),
        ("https://mirror.example/", "https://mirror.example"),
        (" http://127.0.0.1:80/hub ", "http://127.0.0.1:80/hub"),
    ],
)
def test_the_endpoint_is_the_variables_or_the_clients_default(given, expected):
    assert fetch._endpoint({} if given is None else {"HF_ENDPOINT": given}, HUB) == expected


@pytest.mark.parametrize(
    "given",
    [
        "mirror.example", "ftp://mirror.example", "http://", "http://[", "//mirror.example", "http://mirror.example:x",
        "me:secret@mirror.example", "https://mirror.example/?token=secret", "https://mirror.example/#secret",
        "https://me:secret/word@mirror.example:port",
    ],
)  # fmt: skip
def test_an_endpoint_that_is_no_address_is_refused(given):
    with pytest.raises(ConfigError, match="expected an address") as caught:
        fetch._endpoint({"HF_ENDPOINT": given}, HUB)
    assert caught.value.where == "HF_ENDPOINT"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://me:secret@mirror.example:8080/hub", "https://mirror.example:8080/hub"),
        ("https://me:se@cret@mirror.example", "https://mirror.example"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_endpoint_is_shown_without_its_password(endpoint, shown):
    assert fetch._shown(fetch._endpoint({"HF_ENDPOINT": endpoint}, HUB)) == shown


def test_no_message_shows_what_is_secret_in_an_address():
    text = "GET https://me:secret@host:1/a/b?X-Signature=secret&x=1 failed; see http://host/?token=secret"
    assert fetch._public(text) == "GET https://host:1/a/b failed; see http://host/"


# --- the command ---------------------------------------------------------------------------------------


def test_the_command_lists_all_mistakes_at_once(capsysbinary):
    assert main(["fetch", "--modeldir", "x", "--format", "xml"]) == 2
    err = capsysbinary.readouterr().err.decode()
    for part in ("ID is missing", "did you mean --model-dir?", "jsonl or table", "minice fetch --help"):
        assert part in err


def test_an_unknown_model_is_named(capsysbinary):
    assert main(["fetch", "ms-marco-minilm-l6"]) == ModelNotFoundError.exit_code
    assert "did you mean 'ms-marco-MiniLM-L6-v2'?" in capsysbinary.readouterr().err.decode()


def test_help_says_what_connects_and_what_is_needed(capsysbinary):
    assert main(["fetch", "--help"]) == 0
    out = capsysbinary.readouterr().out.decode()
    for part in ("minice fetch ID [options]", "HF_ENDPOINT", "HF_HUB_OFFLINE", "minice[fetch]", "example:"):
        assert part in out


def test_a_table_shows_each_file_with_the_start_of_its_digest(capsysbinary, no_client, monkeypatch, tmp_path):
    monkeypatch.setenv("MINICE_HOME", str(tmp_path))
    monkeypatch.delenv("MINICE_MODEL_DIR", raising=False)
    assert main(["fetch", "minice-l6", "--format", "table"]) == 0
    out, err = (text.decode() for text in capsysbinary.readouterr())
    header, model, *_ = out.splitlines()
    assert header.split() == ["file", "bytes", "sha256", "status", "where"]
    pinned = shipped_lock().find("minice-l6").file("model")
    assert model.split()[:5] == [pinned.path, f"{pinned.size:,}", pinned.sha256[:12], "already", "there"]
    assert err == "minice: minice-l6: already there, verified\n"
