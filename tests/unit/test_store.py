import dataclasses
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minice.artifacts import store
from minice.artifacts.lock import FilePin, Lock, ModelPin, format_lock, shipped_lock
from minice.artifacts.receipt import Digest, Receipt, format_receipt
from minice.artifacts.store import inspect, locate, not_on_disk, open_model, read_unpinned, setting
from minice.errors import ConfigError, InputError, IntegrityError, ModelNotFoundError
from minice.scores import ScoreScale

MODEL = b"the fp32 graph" * 10
INT8 = b"the int8 graph"
TOKENIZER = b"the tokenizer"
OTHER = b"another graph of another size"
CONFIG = b"{}"

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 140\n"
)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_pin(role: str, path: str, data: bytes, precision: str | None = None, optional: bool = False) -> FilePin:
    return FilePin(role=role, path=path, size=len(data), sha256=sha256(data), precision=precision, optional=optional)


def model_pin(name: str, *files: FilePin, embedded: bool = False) -> ModelPin:
    return ModelPin(id=name, license="MIT", max_length=64, scale=ScoreScale.LOGIT, files=files, embedded=embedded)


TOKENIZER_PIN = file_pin("tokenizer", "tokenizer.json", TOKENIZER)
PIN = model_pin(
    "published",
    file_pin("model", "onnx/model.onnx", MODEL, "fp32"),
    TOKENIZER_PIN,
    file_pin("config", "config.json", CONFIG, optional=True),
)
PIN = dataclasses.replace(PIN, repository="owner/published", revision="ab" * 20)
TWO = model_pin(
    "two",
    file_pin("model", "model.int8.onnx", INT8, "int8"),
    file_pin("model", "model.onnx", MODEL, "fp32", optional=True),
    TOKENIZER_PIN,
)
ANOTHER = model_pin("another", file_pin("model", "model.onnx", OTHER, "fp32"), TOKENIZER_PIN)
LOCK = Lock(models=(PIN, TWO, ANOTHER))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def opened(folder: Path | None, pin: ModelPin = PIN, **options):
    options.setdefault("environ", {})
    return open_model(pin, model_dir=folder, lock=LOCK, **options)


def refused(kind: type, folder: Path | None, pin: ModelPin = PIN, **options):
    with pytest.raises(kind) as caught:
        opened(folder, pin, **options)
    return caught.value


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    return write(tmp_path / "flat", {"model.onnx": MODEL, "tokenizer.json": TOKENIZER})


# --- where files are looked for ------------------------------------------------------------------------


def test_pin_paths(tmp_path: Path) -> None:
    folder = write(tmp_path, {"onnx/model.onnx": MODEL, "tokenizer.json": TOKENIZER})
    files = opened(folder)
    assert (files.model, files.tokenizer) == (MODEL, TOKENIZER)
    assert (files.precision, files.scheme, files.model_sha256) == ("fp32", "fp32", sha256(MODEL))
    assert files.paths == {
        "model": str(folder / "onnx" / "model.onnx"),
        "tokenizer": str(folder / "tokenizer.json"),
    }
    assert files.pin is PIN


def test_flat_folder(flat: Path) -> None:
    # FR 135: a flat folder is one of the two layouts
    assert opened(flat).paths["model"] == str(flat / "model.onnx")
    assert opened(Path(str(flat))).model == MODEL
    assert open_model(PIN, model_dir=str(flat), environ={}).model == MODEL


def test_pin_path_goes_before_its_base_name(tmp_path: Path) -> None:
    folder = write(tmp_path, {"onnx/model.onnx": MODEL, "model.onnx": b"x", "tokenizer.json": TOKENIZER})
    assert opened(folder).model == MODEL


def test_the_first_file_found_is_the_one(tmp_path: Path) -> None:
    folder = write(tmp_path, {"onnx/model.onnx": b"x", "model.onnx": MODEL, "tokenizer.json": TOKENIZER})
    refused(IntegrityError, folder)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("place", ["argument", "environment", "home", "default"])
def test_every_precision_from_every_place(tmp_path: Path, place: str, precision: str) -> None:
    # FR 141: {fp32, int8} x {argument, environment, MINICE_HOME, default folder}
    folders = {
        "argument": tmp_path / "given",
        "environment": tmp_path / "environment",
        "home": tmp_path / "home" / "two",
        "default": tmp_path / "data" / "minice" / "two",
    }
    folder = folders[place]
    write(folder, {"model.int8.onnx": INT8, "model.onnx": MODEL, "tokenizer.json": TOKENIZER})
    environ = {
        "argument": {},
        "environment": {"MINICE_MODEL_DIR": str(folder)},
        "home": {"MINICE_HOME": str(tmp_path / "home")},
        "default": {"XDG_DATA_HOME": str(tmp_path / "data")},
    }[place]
    if place == "default" and sys.platform != "linux":
        pytest.skip("XDG_DATA_HOME is for Linux")
    files = opened(folder if place == "argument" else None, TWO, precision=precision, environ=environ)
    assert files.model == {"fp32": MODEL, "int8": INT8}[precision]
    assert files.scheme == {"fp32": "fp32", "int8": "int8-weight-only/1"}[precision]
    assert Path(files.paths["model"]).parent == folder


def test_default_precision_is_the_first_model_file(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model.int8.onnx": INT8, "model.onnx": MODEL, "tokenizer.json": TOKENIZER})
    assert opened(folder, TWO).precision == "int8"


def test_argument_wins_over_environment(flat: Path, tmp_path: Path) -> None:
    assert opened(flat, environ={"MINICE_MODEL_DIR": str(tmp_path / "nowhere")}).model == MODEL


def test_a_given_folder_is_the_only_place(flat: Path, tmp_path: Path) -> None:
    # FR 136
    home = write(tmp_path / "home", {"published/model.onnx": MODEL, "published/tokenizer.json": TOKENIZER})
    empty = tmp_path / "empty"
    empty.mkdir()
    environ = {"MINICE_HOME": str(home), "MINICE_MODEL_DIR": str(flat)}
    assert opened(None, environ={"MINICE_HOME": str(home)}).model == MODEL
    refused(ModelNotFoundError, empty, environ=environ)
    refused(ModelNotFoundError, None, environ=environ | {"MINICE_MODEL_DIR": str(empty)})


def model_folder(environ: dict) -> Path:
    """The folder that a message about a model tells people to make."""
    folder = re.search(r"into '([^']+)'", not_on_disk(PIN, TOKENIZER_PIN, environ=environ).message)
    assert folder
    return Path(folder[1])


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_blank_environment_is_unset(flat: Path, tmp_path: Path, blank: str) -> None:
    # FR 145
    environ = {"MINICE_MODEL_DIR": blank, "MINICE_HOME": blank, "XDG_DATA_HOME": blank, "HOME": str(tmp_path)}
    blanks = model_folder(environ)
    assert blanks == model_folder({"HOME": str(tmp_path)})
    assert setting("HOME", {"HOME": blank}) is None
    home = {"MINICE_MODEL_DIR": blank, "MINICE_HOME": str(tmp_path / "home")}
    write(tmp_path / "home" / "published", {"model.onnx": MODEL, "tokenizer.json": TOKENIZER})
    assert opened(None, environ=home).model == MODEL


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"HOME": "/u"}, "/u/.local/share/minice/published"),
        ("linux", {"HOME": "/u", "XDG_DATA_HOME": "/data"}, "/data/minice/published"),
        ("linux", {"HOME": "/u", "XDG_DATA_HOME": "relative"}, "/u/.local/share/minice/published"),
        ("darwin", {"HOME": "/u"}, "/u/Library/Application Support/minice/published"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/minice/published"),
        ("linux", {"HOME": "/u", "MINICE_HOME": "/models"}, "/models/published"),
        ("linux", {"HOME": "/u", "MINICE_HOME": "/models", "MINICE_MODEL_DIR": "/given"}, "/given"),
    ],
)
def test_user_folder_of_each_platform(monkeypatch, platform: str, environ: dict, expected: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert model_folder(environ).as_posix() == expected


def test_home_unset(monkeypatch) -> None:
    pwd = pytest.importorskip("pwd")
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert home in model_folder({}).parents

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    error = refused(ModelNotFoundError, None)
    assert "the user has no home folder" in error.message
    assert "MINICE_MODEL_DIR" in error.message
    # The embedded model needs no home.
    assert open_model(shipped_lock().find("minice-l6"), environ={}).precision == "int8"


@pytest.mark.parametrize(("value", "shown"), [("", "''"), (" ", "' '"), ("a\0b", "'a\\x00b'"), (7, "int")])
def test_names_that_are_no_folder(value, shown: str) -> None:
    error = refused(ConfigError, value)
    assert (error.where, error.message) == ("model_dir", f"expected a folder, got {shown}")


def test_relative_folder_is_shown_whole(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert repr(str(tmp_path / "models")) in refused(ModelNotFoundError, "models").message


# --- the embedded model --------------------------------------------------------------------------------


@pytest.fixture
def builtin(monkeypatch, tmp_path: Path) -> Path:
    folder = write(tmp_path / "builtin", {"model.int8.onnx": INT8, "tokenizer.json": TOKENIZER})
    monkeypatch.setattr(store, "BUILTIN", folder)
    return folder


EMBEDDED = dataclasses.replace(TWO, id="embedded", embedded=True)


def test_embedded_files_come_with_the_package(builtin: Path, tmp_path: Path) -> None:
    files = opened(None, EMBEDDED, environ={"MINICE_HOME": str(tmp_path / "nowhere")})
    assert files.paths == {
        "model": str(builtin / "model.int8.onnx"),
        "tokenizer": str(builtin / "tokenizer.json"),
    }


def test_embedded_files_never_stand_in_for_a_given_folder(builtin: Path, tmp_path: Path) -> None:
    # FR 136
    folder = write(tmp_path / "given", {"tokenizer.json": TOKENIZER})
    assert refused(ModelNotFoundError, folder, EMBEDDED).where == "embedded"
    (folder / "tokenizer.json").unlink()
    write(folder, {"model.int8.onnx": INT8})
    assert "no 'tokenizer.json'" in refused(ModelNotFoundError, folder, EMBEDDED).message


def test_embedded_files_never_serve_another_pin(builtin: Path, tmp_path: Path) -> None:
    refused(ModelNotFoundError, None, TWO, environ={"MINICE_HOME": str(tmp_path)})


def test_optional_precision_of_the_embedded_model_lies_in_the_users_folder(builtin: Path, tmp_path: Path) -> None:
    environ = {"MINICE_HOME": str(tmp_path)}
    error = refused(ModelNotFoundError, None, EMBEDDED, precision="fp32", environ=environ)
    assert f"no 'model.onnx' in the package or {str(tmp_path / 'embedded')!r} (MINICE_HOME)" in error.message
    write(tmp_path / "embedded", {"model.onnx": MODEL})
    files = opened(None, EMBEDDED, precision="fp32", environ=environ)
    assert files.model == MODEL
    assert files.paths["tokenizer"] == str(builtin / "tokenizer.json")


def test_a_bad_copy_in_the_users_folder_does_not_break_the_embedded_model(builtin: Path, tmp_path: Path) -> None:
    write(tmp_path / "embedded", {"model.int8.onnx": b"of an older version"})
    assert opened(None, EMBEDDED, environ={"MINICE_HOME": str(tmp_path)}).model == INT8


def test_damaged_installation(builtin: Path, tmp_path: Path) -> None:
    write(builtin, {"model.int8.onnx": INT8[::-1]})
    error = refused(IntegrityError, None, EMBEDDED, environ={"MINICE_HOME": str(tmp_path)})
    assert error.message.endswith("Install minice again: the file is part of it")


def test_installers_may_link_the_embedded_files(builtin: Path, tmp_path: Path) -> None:
    (builtin / "model.int8.onnx").rename(tmp_path / "cached")
    (builtin / "model.int8.onnx").symlink_to(tmp_path / "cached")
    assert opened(None, EMBEDDED).model == INT8


def test_the_shipped_model_is_the_pinned_one() -> None:
    pin = shipped_lock().find(store.DEFAULT_MODEL)
    files = open_model(pin, environ={})
    assert files.model_sha256 == pin.file("model", "int8").sha256 == sha256(files.model)
    assert sha256(files.tokenizer) == pin.file("tokenizer").sha256
    assert files.scheme == "int8-weight-only/1"
    statuses = [report.status for report in inspect(pin, environ={"MINICE_HOME": "/nowhere"})]
    assert statuses == ["ok", "absent", "ok", "ok"]


# --- what is wrong with a file -------------------------------------------------------------------------


def test_missing(tmp_path: Path) -> None:
    error = refused(ModelNotFoundError, tmp_path)
    assert error.where == "published"
    assert error.message == (
        "not on disk: no 'onnx/model.onnx' or 'model.onnx' and no 'tokenizer.json' in "
        f"{str(tmp_path)!r} (model_dir or --model-dir names it, so no other place is searched). "
        f"Without a network, put onnx/model.onnx (140 bytes, sha256 {sha256(MODEL)[:8]}...) and tokenizer.json (13 "
        f"bytes, sha256 {sha256(TOKENIZER)[:8]}...) into {str(tmp_path)!r}, as published in owner/published at "
        f"revision {'ab' * 20}; else minice gets them. Run: minice fetch published --model-dir {tmp_path}"
    )
    environ = {"MINICE_HOME": str(tmp_path), "HF_HUB_CACHE": "/cache"}
    home = refused(ModelNotFoundError, None, environ=environ)
    assert f"in {str(tmp_path / 'published')!r} (MINICE_HOME) or the hub's cache '/cache' (HF_HUB_CACHE). " in (
        home.message
    )
    assert home.message.endswith("; else minice gets them. Run: minice fetch published")


def test_missing_model_that_nothing_is_published_of(tmp_path: Path) -> None:
    error = refused(ModelNotFoundError, None, ANOTHER, environ={"MINICE_HOME": str(tmp_path)})
    place = tmp_path / "another"
    assert error.message == (
        f"not on disk: no 'model.onnx' and no 'tokenizer.json' in {str(place)!r} (MINICE_HOME). Put model.onnx (29 "
        f"bytes, sha256 {sha256(OTHER)[:8]}...) and tokenizer.json (13 bytes, sha256 {sha256(TOKENIZER)[:8]}...) into "
        f"{str(place)!r}. Run: mkdir -p {place} && cp model.onnx tokenizer.json {place}/ && minice verify another"
    )


def test_missing_folder(tmp_path: Path) -> None:
    gone = refused(ModelNotFoundError, tmp_path / "gone")
    assert f"{str(tmp_path / 'gone')!r}, named by model_dir or --model-dir, does not exist" in gone.message
    write(tmp_path, {"model.onnx": MODEL})
    environ = {"MINICE_MODEL_DIR": str(tmp_path / "model.onnx")}
    file = refused(ModelNotFoundError, None, environ=environ)
    assert f"{str(tmp_path / 'model.onnx')!r}, named by MINICE_MODEL_DIR, is not a folder" in file.message


def test_only_what_is_used_must_be_there(flat: Path) -> None:
    needed = dataclasses.replace(PIN, files=(*PIN.files[:2], dataclasses.replace(PIN.files[2], optional=False)))
    assert opened(flat, needed).model == MODEL
    (flat / "model.onnx").unlink()
    # But the command that puts the model in place ends in a check of everything.
    needed = dataclasses.replace(needed, repository=None, revision=None)
    assert f"&& cp model.onnx config.json {flat}/ &&" in refused(ModelNotFoundError, flat, needed).message


def test_a_folder_is_quoted_for_the_shell(tmp_path: Path) -> None:
    folder = f"'{tmp_path / 'my models'}'"
    message = refused(ModelNotFoundError, tmp_path / "my models", ANOTHER).message
    assert f"Run: mkdir -p {folder} && cp model.onnx tokenizer.json {folder}/ &&" in message
    message = refused(ModelNotFoundError, tmp_path / "my models").message
    assert message.endswith(f"Run: minice fetch published --model-dir {folder}")


def bad_model(flat: Path, data: bytes) -> str:
    write(flat, {"model.onnx": data})
    error = refused(IntegrityError, flat)
    assert error.where == "published/onnx/model.onnx"
    return error.message


def test_truncated(flat: Path) -> None:
    # FR 130
    assert bad_model(flat, MODEL[:-1]) == (
        f"{str(flat / 'model.onnx')!r} is truncated or another file: expected 140 bytes, got 139. Run: minice "
        f"fetch published --model-dir {flat}"
    )
    assert "is truncated or another file: expected 140 bytes, got 0. " in bad_model(flat, b"")


def test_a_bad_file_that_nothing_is_published_of(flat: Path) -> None:
    write(flat, {"model.onnx": b"x" * 29})
    message = refused(IntegrityError, flat, ANOTHER).message
    assert message.endswith(f". Replace it by model.onnx (29 bytes, sha256 {sha256(OTHER)[:8]}...)")


def test_too_long(flat: Path) -> None:
    assert "is too long: expected 140 bytes, got 141. " in bad_model(flat, MODEL + b"\0")


def test_wrong_digest(flat: Path) -> None:
    # FR 139: one byte in the middle, at the same size and time
    status = (flat / "model.onnx").stat()
    assert opened(flat).model == MODEL
    changed = MODEL[:70] + b"!" + MODEL[71:]
    (flat / "model.onnx").write_bytes(changed)
    os.utime(flat / "model.onnx", ns=(status.st_atime_ns, status.st_mtime_ns))
    error = refused(IntegrityError, flat)
    assert f"sha256 mismatch in {str(flat / 'model.onnx')!r}: expected {sha256(MODEL)}, got {sha256(changed)}. " in (
        error.message
    )


def test_bad_tokenizer(flat: Path) -> None:
    write(flat, {"tokenizer.json": TOKENIZER.upper()})
    error = refused(IntegrityError, flat)
    assert error.where == "published/tokenizer.json"
    assert "sha256 mismatch" in error.message


def test_git_lfs_pointer(flat: Path) -> None:
    # FR 140
    message = bad_model(flat, POINTER)
    assert f"is a Git LFS pointer of {len(POINTER)} bytes and not the file of 140 bytes" in message


def test_external_data(flat: Path) -> None:
    # FR 168: the graph and its weights in two files are no model
    write(flat, {"model.onnx_data": MODEL})
    assert opened(flat).model == MODEL  # a stranger in the folder is none of our business
    message = bad_model(flat, b"graph")
    assert "keeps its weights in an external data file, 'model.onnx_data', which is refused" in message
    assert "expected one file of 140 bytes, got 5" in message


def test_folder_in_place_of_a_file(flat: Path) -> None:
    (flat / "model.onnx").unlink()
    (flat / "model.onnx").mkdir()
    assert "is not a regular file but a folder" in refused(IntegrityError, flat).message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_in_place_of_a_file_does_not_hang(flat: Path) -> None:
    (flat / "model.onnx").unlink()
    os.mkfifo(flat / "model.onnx")
    started = time.monotonic()
    assert "but a pipe, socket or device" in refused(IntegrityError, flat).message
    assert time.monotonic() - started < 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_that_appears_while_opening_does_not_hang(flat: Path, monkeypatch) -> None:
    real = store._check_regular
    seen = []

    def swap(status: os.stat_result, shown: str) -> None:
        real(status, shown)
        if not seen:
            (flat / "model.onnx").unlink()
            os.mkfifo(flat / "model.onnx")
        seen.append(shown)

    monkeypatch.setattr(store, "_check_regular", swap)
    assert "but a pipe, socket or device" in refused(IntegrityError, flat).message


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no device files here")
def test_device_in_place_of_a_file(flat: Path, builtin: Path) -> None:
    # Links of the package may lead anywhere, so the device itself is what has to be refused.
    (builtin / "model.int8.onnx").unlink()
    (builtin / "model.int8.onnx").symlink_to("/dev/null")
    assert "but a pipe, socket or device" in refused(IntegrityError, None, EMBEDDED).message


def test_unreadable(flat: Path, monkeypatch) -> None:
    def denied(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    error = refused(IntegrityError, flat)
    assert f"{str(flat / 'model.onnx')!r} cannot be read: Permission denied" in error.message


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="the superuser may read everything")
def test_unreadable_folder(flat: Path) -> None:
    flat.chmod(0)
    try:
        assert "cannot be read: Permission denied" in refused(IntegrityError, flat).message
    finally:
        flat.chmod(0o755)


def test_no_allocation_for_a_huge_file(flat: Path) -> None:
    with (flat / "model.onnx").open("wb") as file:
        file.truncate(1 << 40)  # sparse; reading it would take a terabyte
    started = time.monotonic()
    assert "is too long: expected 140 bytes, got 1,099,511,627,776" in refused(IntegrityError, flat).message
    assert time.monotonic() - started < 1


class Meddling:
    """Stands in for hashing or fstat: does something to the file in between."""

    def __init__(self, monkeypatch, action) -> None:
        real, calls = os.fstat, []

        def fstat(descriptor: int) -> os.stat_result:
            result = real(descriptor)
            calls.append(descriptor)
            if len(calls) == 1:
                action()
            return result

        monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize(
    "data", [MODEL + b"more", MODEL[:-3], MODEL[:-1] + b"!"], ids=["grows", "shrinks", "same size"]
)
def test_changes_while_it_is_read(flat: Path, monkeypatch, data: bytes) -> None:
    path = flat / "model.onnx"

    def change() -> None:
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))

    Meddling(monkeypatch, change)
    assert "changed while it was being read; try again" in refused(IntegrityError, flat).message


def test_replaced_while_it_is_read(flat: Path, monkeypatch) -> None:
    # The bytes that were opened are the right ones; what has the name afterwards does not matter.
    write(flat, {"new": OTHER})
    Meddling(monkeypatch, lambda: (flat / "new").replace(flat / "model.onnx"))
    assert opened(flat).model == MODEL


def test_removed_while_opening(flat: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "_resolved", lambda found, shown: flat / "gone")
    assert "was removed while it was being opened" in refused(IntegrityError, flat).message


def test_file_is_read_once(flat: Path, monkeypatch) -> None:
    real, paths = os.open, []

    def spy(path, flags, *rest, **options) -> int:
        paths.append(os.fspath(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", spy)
    opened(flat)
    assert paths == [os.path.realpath(flat / name) for name in ("model.onnx", "tokenizer.json")]


# --- links ---------------------------------------------------------------------------------------------


def test_link_inside_the_folder(flat: Path) -> None:
    (flat / "blobs").mkdir()
    (flat / "model.onnx").rename(flat / "blobs" / "abc")
    (flat / "onnx").mkdir()
    (flat / "onnx" / "model.onnx").symlink_to("../blobs/abc")
    assert opened(flat).model == MODEL


def test_the_folder_itself_may_be_a_link(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(flat)
    assert opened(tmp_path / "link").model == MODEL


def test_link_that_leaves_the_folder(flat: Path, tmp_path: Path) -> None:
    (flat / "model.onnx").rename(tmp_path / "outside.onnx")
    (flat / "model.onnx").symlink_to(tmp_path / "outside.onnx")
    message = refused(IntegrityError, flat).message
    outside = os.path.realpath(tmp_path / "outside.onnx")
    assert f"{str(flat / 'model.onnx')!r} is a link that leaves its folder, to {outside!r}" in message
    assert "cp -L" in message


def test_parent_that_is_a_link_out_of_the_folder(flat: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"model.onnx": MODEL})
    (flat / "onnx").symlink_to(tmp_path / "elsewhere")
    assert "is a link that leaves its folder" in refused(IntegrityError, flat).message


def test_neighbour_with_the_folders_name_as_prefix_is_outside(flat: Path, tmp_path: Path) -> None:
    write(tmp_path / "flat2", {"model.onnx": MODEL})
    (flat / "model.onnx").unlink()
    (flat / "model.onnx").symlink_to("../flat2/model.onnx")
    assert "is a link that leaves its folder" in refused(IntegrityError, flat).message


def test_hub_snapshot(tmp_path: Path) -> None:
    # FR 135: files of a hub cache's snapshot are links into its blobs: refused, and the message says what to do
    cache = write(tmp_path, {"blobs/a": MODEL, "blobs/b": TOKENIZER})
    snapshot = cache / "snapshots" / ("ab" * 20)
    (snapshot / "onnx").mkdir(parents=True)
    (snapshot / "onnx" / "model.onnx").symlink_to("../../../blobs/a")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/b")
    message = refused(IntegrityError, snapshot).message
    assert "is a link that leaves its folder" in message
    assert "(cp -L copies what a link stands for)" in message


def test_dangling_link(flat: Path) -> None:
    (flat / "model.onnx").unlink()
    (flat / "model.onnx").symlink_to("nothing")
    assert "is a link to" in (message := refused(IntegrityError, flat).message)
    assert "which does not exist" in message


def test_link_loop(flat: Path) -> None:
    (flat / "model.onnx").unlink()
    (flat / "model.onnx").symlink_to("model.onnx")
    assert "is a link that leads back to itself" in refused(IntegrityError, flat).message


# --- nothing is written --------------------------------------------------------------------------------


def test_reading_writes_nothing(flat: Path) -> None:
    # FR 142
    flat.chmod(0o555)
    before = {path: path.stat().st_mtime_ns for path in (flat, *flat.rglob("*"))}
    try:
        opened(flat)
        inspect(PIN, model_dir=flat, environ={})
        assert {path: path.stat().st_mtime_ns for path in (flat, *flat.rglob("*"))} == before
    finally:
        flat.chmod(0o755)


def test_read_only_files_without_home_or_temporary_folder(flat: Path) -> None:
    # FR 142: HOME unset, TMPDIR unusable
    flat.chmod(0o555)
    code = (
        "import sys; from minice.artifacts.lock import shipped_lock; from minice.artifacts.store import open_model;"
        "files = open_model(shipped_lock().find('minice-l6')); print(files.model_sha256)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "HOME" and "MINICE" not in name}
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        env=environ | {"TMPDIR": "/nonexistent", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    flat.chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == shipped_lock().find("minice-l6").file("model").sha256


# --- precision -----------------------------------------------------------------------------------------


def receipt(**changes) -> bytes:
    made = Receipt(
        source=Digest(sha256=sha256(MODEL), size=len(MODEL)),
        result=Digest(sha256=sha256(INT8), size=len(INT8)),
        scheme="int8-weight-only/1",
        minice="0.1.0",
        onnx="1.20.0",
    )
    values = json.loads(format_receipt(made))
    for place, value in changes.items():
        *outer, last = place.replace("_", "-").split("__" if "__" in place else ".")
        target = values
        for key in outer:
            target = target[key]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return json.dumps(values).encode()


@pytest.fixture
def quantized(flat: Path) -> Path:
    return write(flat, {"model.int8.onnx": INT8, "model.int8.onnx.json": receipt()})


@pytest.mark.parametrize("precision", ["fp16", "FP32", "", "int4"])
def test_unknown_precision(flat: Path, precision: str) -> None:
    error = refused(ConfigError, flat, precision=precision)
    assert (error.where, error.message) == (
        "precision",
        f"'published' has no precision {precision!r}; known: fp32, int8",
    )


def test_precision_that_a_pin_cannot_have(flat: Path) -> None:
    only = dataclasses.replace(TWO, files=(TWO.files[0], TWO.files[2]))
    assert refused(ConfigError, flat, only, precision="fp32").message == ("'two' has no precision 'fp32'; known: int8")


def test_quantized_file_by_its_receipt(quantized: Path) -> None:
    files = opened(quantized, precision="int8")
    assert (files.model, files.model_sha256) == (INT8, sha256(INT8))
    assert (files.precision, files.scheme) == ("int8", "int8-weight-only/1")
    assert opened(quantized).model == MODEL
    (quantized / "model.onnx").unlink()
    assert opened(quantized, precision="int8").model == INT8  # the source need not be kept


def test_quantized_file_beside_the_pin_path(tmp_path: Path) -> None:
    files = {"onnx/model.int8.onnx": INT8, "onnx/model.int8.onnx.json": receipt(), "tokenizer.json": TOKENIZER}
    assert opened(write(tmp_path, files), precision="int8").model == INT8


def test_a_receipt_does_not_replace_a_pinned_digest(quantized: Path) -> None:
    # A pin that has an int8 file of its own does not ask receipts.
    other = b"made elsewhere"
    result = {"sha256": sha256(other), "size": len(other)}
    write(quantized, {"model.int8.onnx": other, "model.int8.onnx.json": receipt(result=result)})
    refused(IntegrityError, quantized, TWO)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"source.sha256": "0" * 64}, "source.sha256", "it was made from another file: expected"),
        ({"source.size": 139}, "source.size", "expected 140, got 139"),
        ({"source.size": "140"}, "source.size", "expected int, got str"),
        ({"source.size": True}, "source.size", "expected int, got bool"),
        ({"source": "model.onnx"}, "source", "expected dict, got str"),
        ({"source": None}, "source", "expected dict, got nothing"),
        ({"scheme": "int8-weight-only/2"}, "scheme", "expected int8-weight-only/1, got int8-weight-only/2"),
        ({"scheme": None}, "scheme", "expected str, got nothing"),
        ({"receipt-version": 2}, "receipt-version", "expected 1, got 2"),
        ({"result.sha256": "A" * 64}, "result.sha256", "expected 64 lowercase hex digits, got"),
        ({"result.size": 0}, "result.size", "expected a number of bytes above 0, got 0"),
        ({"result.size": 10**12}, "result.size", "expected at most 140, the size of the source"),
        ({"result.sha256": None}, "result.sha256", "expected str, got nothing"),
        ({"signed": "by me"}, "signed", "expected no such field, got one"),
    ],
)
def test_unusable_receipt_names_the_field(quantized: Path, changes: dict, field: str, message: str) -> None:
    write(quantized, {"model.int8.onnx.json": receipt(**changes)})
    error = refused(IntegrityError, quantized, precision="int8")
    assert error.where == f"published/onnx/model.int8.onnx.json:{field}"
    assert message in error.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the receipt is not JSON"),
        (b"\xff", "the receipt is not JSON"),
        (b"[" * 60_000, "the receipt is not JSON"),
        (b"[]", "expected an object, got list"),
        (b" " * 70_000, "is too long: 70,000 bytes, at most 65,536"),
    ],
)
def test_receipt_that_is_none(quantized: Path, data: bytes, message: str) -> None:
    write(quantized, {"model.int8.onnx.json": data})
    error = refused(IntegrityError, quantized, precision="int8")
    assert message in error.message
    assert error.message.endswith(f"run: minice quantize {quantized}")


def test_quantized_file_that_is_not_the_receipts(quantized: Path) -> None:
    write(quantized, {"model.int8.onnx": INT8[::-1]})
    error = refused(IntegrityError, quantized, precision="int8")
    assert "sha256 mismatch" in error.message
    assert error.where == "published/onnx/model.int8.onnx"


def test_quantized_file_without_receipt(quantized: Path) -> None:
    # A crash between writing the two leaves this.
    (quantized / "model.int8.onnx.json").unlink()
    message = refused(IntegrityError, quantized, precision="int8").message
    assert "has no receipt beside it" in message
    # FR 130: nothing partial is ever a model; the whole fp32 file beside it is named instead
    assert "use precision fp32 (--precision fp32)" in message


def test_missing_int8_says_how_it_is_made(flat: Path, tmp_path: Path) -> None:
    message = refused(ModelNotFoundError, flat, precision="int8").message
    assert "no 'onnx/model.int8.onnx' or 'model.int8.onnx'" in message
    assert "The fp32 file of this model is there: use precision fp32 (--precision fp32)" in message
    assert f"run: minice quantize {flat}" in message
    environ = {"MINICE_HOME": str(tmp_path)}
    message = refused(ModelNotFoundError, None, precision="int8", environ=environ).message
    assert message.endswith("Run: minice fetch published && minice quantize published")
    assert "put onnx/model.onnx (140 bytes" in message
    assert "and tokenizer.json (13 bytes" in message


def test_missing_fp32_points_to_the_int8_file(quantized: Path) -> None:
    (quantized / "model.onnx").unlink()
    message = refused(ModelNotFoundError, quantized).message
    assert "The int8 file of this model is there: use precision int8 (--precision int8)" in message
    write(quantized, {"model.int8.onnx": b"broken"})
    assert "use precision" not in refused(ModelNotFoundError, quantized).message


# --- hints ---------------------------------------------------------------------------------------------


def test_folder_of_another_model(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model.onnx": OTHER, "tokenizer.json": TOKENIZER})
    hint = "That folder holds another model, 'another' in fp32: name that one to use it"
    assert refused(ModelNotFoundError, folder, TWO).message.endswith(hint)  # another name is looked for
    assert refused(IntegrityError, folder, PIN).message.endswith(hint)  # the same name, other bytes
    write(tmp_path, {"model.onnx": OTHER[::-1]})
    assert "holds another model" not in refused(ModelNotFoundError, folder, TWO).message  # the size alone says nothing


# --- reports -------------------------------------------------------------------------------------------


def statuses(reports) -> dict[str, str]:
    return {report.name: report.status for report in reports}


def test_reports(quantized: Path) -> None:
    expected = {
        "onnx/model.onnx": "ok",
        "tokenizer.json": "ok",
        "config.json": "absent",
        "onnx/model.int8.onnx": "ok",
    }
    reports = inspect(PIN, model_dir=quantized, environ={})
    assert statuses(reports) == expected
    assert all(report.good for report in reports)
    model, _, config, made = reports
    assert (model.role, model.precision, model.path, model.size) == (
        "model",
        "fp32",
        str(quantized / "model.onnx"),
        140,
    )
    assert (config.path, config.size, config.message) == (None, 2, "optional")
    assert (made.precision, made.size) == ("int8", len(INT8))
    located = locate(PIN, model_dir=quantized, environ={})
    assert statuses(located) == {name: "present" if status == "ok" else status for name, status in expected.items()}


def test_locate_does_not_read_models(flat: Path) -> None:
    write(flat, {"model.onnx": MODEL[::-1]})
    assert statuses(locate(PIN, model_dir=flat, environ={}))["onnx/model.onnx"] == "present"
    assert statuses(inspect(PIN, model_dir=flat, environ={}))["onnx/model.onnx"] == "mismatch"


@pytest.mark.parametrize("report", [locate, inspect])
def test_reports_never_raise(tmp_path: Path, report) -> None:
    missing = report(PIN, model_dir=tmp_path / "nowhere", environ={})
    assert statuses(missing) == {
        "onnx/model.onnx": "missing",
        "tokenizer.json": "missing",
        "config.json": "absent",
    }
    assert not missing[0].good
    assert missing[0].message.startswith(f"{str(tmp_path / 'nowhere')!r}, named by model_dir or --model-dir, does not ")
    assert ". Without a network, put onnx/model.onnx (140 bytes" in missing[0].message
    tried = report(PIN, model_dir=tmp_path, environ={})[0].message
    assert tried.startswith(f"no 'onnx/model.onnx' or 'model.onnx' in {str(tmp_path)!r} (")
    (tmp_path / "loop").symlink_to("loop")
    assert {item.status for item in report(PIN, model_dir=tmp_path / "loop", environ={})} <= {
        "unreadable",
        "missing",
        "absent",
    }
    folder = tmp_path / "bad"
    write(folder, {"model.onnx": POINTER, "model.int8.onnx": INT8, "config.json": b"longer"})
    (folder / "tokenizer.json").mkdir()
    assert statuses(report(PIN, model_dir=folder, environ={})) == {
        "onnx/model.onnx": "pointer",
        "tokenizer.json": "not-a-file",
        "config.json": "too-long",
        "onnx/model.int8.onnx": "receipt",
    }


def test_reports_say_what_the_folder_holds_instead(flat: Path) -> None:
    missing = inspect(TWO, model_dir=flat, environ={}, lock=LOCK)[0]
    assert missing.status == "missing"
    assert missing.message == refused(ModelNotFoundError, flat, TWO).message.removeprefix("not on disk: ")
    assert missing.message.endswith("use precision fp32 (--precision fp32)")
    assert "use precision" not in locate(TWO, model_dir=flat, environ={})[0].message
    write(flat, {"model.onnx": OTHER})
    other = "That folder holds another model, 'another' in fp32: name that one to use it"
    assert inspect(PIN, model_dir=flat, environ={}, lock=LOCK)[0].message.endswith(other)
    assert not locate(PIN, model_dir=flat, environ={})[0].message.endswith(other)


# --- files named by their path -------------------------------------------------------------------------


def test_read_unpinned(tmp_path: Path) -> None:
    write(tmp_path, {"model.onnx": MODEL})
    assert read_unpinned(tmp_path / "model.onnx") == MODEL
    assert read_unpinned(tmp_path / "model.onnx", Digest(sha256=sha256(MODEL), size=140)) == MODEL
    with pytest.raises(IntegrityError, match="sha256 mismatch"):
        read_unpinned(tmp_path / "model.onnx", Digest(sha256=sha256(INT8), size=140))
    for name in ("", "nothing.onnx"):
        with pytest.raises(InputError):
            read_unpinned(tmp_path / name)


def test_a_pointer_that_is_named_by_its_path(tmp_path: Path) -> None:
    # FR 140: nothing says how long the file should be, and it is no model all the same
    write(tmp_path, {"model.onnx": POINTER, "long": POINTER.ljust(1025)})
    with pytest.raises(InputError) as caught:
        read_unpinned(tmp_path / "model.onnx")
    assert caught.value.message == (
        f"{str(tmp_path / 'model.onnx')!r} is a Git LFS pointer of {len(POINTER)} bytes and not the file that it "
        "stands for; git lfs pull gets that where it came from"
    )
    assert len(read_unpinned(tmp_path / "long")) == 1025


def test_messages_point_to_the_pins_of_the_environment(tmp_path: Path, monkeypatch) -> None:
    """Without a lock, the other models are those of MINICE_LOCK in the environment that was given."""
    monkeypatch.delenv("MINICE_LOCK", raising=False)
    lock = tmp_path / "my.lock"
    lock.write_text(format_lock(Lock(models=(ANOTHER,))), encoding="utf-8")
    folder = write(tmp_path / "folder", {"model.onnx": OTHER, "tokenizer.json": TOKENIZER})
    hint = "That folder holds another model, 'another' in fp32: name that one to use it"
    for environ, expected in (({"MINICE_LOCK": str(lock)}, True), ({}, False)):
        with pytest.raises(ModelNotFoundError) as caught:
            open_model(TWO, model_dir=folder, environ=environ)
        assert caught.value.message.endswith(hint) is expected
        report = inspect(TWO, model_dir=folder, environ=environ)[0]
        assert report.message.endswith(hint) is expected


def test_scheme_of_a_pinned_file(flat: Path) -> None:
    """What a pin says of how weights are stored is what is told; without a word it is minice's own rounding."""
    write(flat, {"model.int8.onnx": INT8})
    model, *others = TWO.files
    for scheme, told in ((None, "int8-weight-only/1"), ("int8-dynamic", "int8-dynamic")):
        pin = dataclasses.replace(TWO, files=(dataclasses.replace(model, scheme=scheme), *others))
        assert opened(flat, pin).scheme == told
        assert opened(flat, pin, precision="fp32").scheme == "fp32"


def test_files_stay_as_they_were(quantized: Path) -> None:
    before = {path: (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in quantized.iterdir()}
    opened(quantized, precision="int8")
    assert {path: (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in quantized.iterdir()} == before
