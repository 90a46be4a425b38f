"""``minice fetch`` with the hub's real client against a local server that answers as the hub does (tests/hub.py)."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hub import LARGE, REVISION, SIGNATURE, Fault, Hub, closed_address, silent_address

from minice.artifacts.lock import FilePin, Lock, ModelPin, format_lock
from minice.artifacts.store import open_model
from minice.errors import IntegrityError, ModelNotFoundError
from minice.scores import ScoreScale

pytest.importorskip("huggingface_hub", reason="minice fetch needs huggingface_hub")
pytest.importorskip("filelock", reason="minice fetch needs filelock")

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "acme/tiny"
MODEL = "onnx/model.onnx"
FILES = {  # path -> bytes; only the model is large
    MODEL: random.Random(1).randbytes(20 * LARGE),
    "tokenizer.json": random.Random(2).randbytes(LARGE // 2),
    "config.json": b"{}",
    "vocab.txt": b"a\nb\n",
}
# The client waits between its attempts, and long for an answer; here it waits as often and not as long.
DRIVER = """
import sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
import huggingface_hub.file_download
from huggingface_hub import constants
constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = 0.3
constants.DOWNLOAD_CHUNK_SIZE = 1000  # it resumes behind the last whole one, and the files are small here
huggingface_hub.file_download._ETAG_RETRY_TIMEOUT = 0.3
from minice.cli import main
sys.exit(main(sys.argv[1:]))
"""


def pin_file(path: str, data: bytes) -> FilePin:
    role = {MODEL: "model", "tokenizer.json": "tokenizer", "config.json": "config"}.get(path, "vocab")
    return FilePin(
        role=role,
        path=path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        precision="fp32" if role == "model" else None,
        optional=role == "vocab",
    )


PIN = ModelPin(
    id="tiny",
    license="Apache-2.0",
    max_length=64,
    scale=ScoreScale.LOGIT,
    files=tuple(pin_file(path, data) for path, data in FILES.items()),
    repository=REPOSITORY,
    revision=REVISION,
    aliases=("acme/small",),
)


class Place:
    """A user's machine: a folder with everything that a fetch reads or writes, and the hub it connects to."""

    def __init__(self, root: Path, hub: Hub) -> None:
        self.root = root
        self.hub = hub
        self.home = root / "home"
        self.folder = self.home / "tiny"
        lock = root / "user.lock"
        lock.write_text(format_lock(Lock(models=(PIN,))), encoding="utf-8")
        self.environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HOME": str(root),
            "HF_HOME": str(root / "hf"),
            "HF_ENDPOINT": hub.url,
            "NO_PROXY": "127.0.0.1",
            "MINICE_HOME": str(self.home),
            "MINICE_LOCK": str(lock),
        }

    def start(self, *argv: object, code: str = DRIVER, **environ: str) -> subprocess.Popen[str]:
        """Start ``minice`` with arguments, or any script, in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, argv)],
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    def run(self, *argv: object, code: str = DRIVER, **environ: str) -> tuple[int, list[dict[str, object]], str]:
        """Run to its end: exit code, rows of stdout, stderr."""
        process = self.start(*argv, code=code, **environ)
        return finish(process)

    def fetch(self, *argv: object, **environ: str) -> tuple[int, list[dict[str, object]], str]:
        return self.run("fetch", "tiny", *argv, **environ)

    def complete(self, folder: Path | None = None) -> bool:
        """Whether the store opens the model, whose bytes it verifies; False if it says that it is not there."""
        try:
            files = open_model(PIN, model_dir=folder, environ=self.environ, lock=Lock(models=(PIN,)))
        except ModelNotFoundError:
            return False
        assert (files.model, files.tokenizer) == (FILES[MODEL], FILES["tokenizer.json"])
        return True

    def there(self) -> list[str]:
        """Everything below ``MINICE_HOME``."""
        return listing(self.home)

    def fill(self, files: Sequence[str], folder: Path | None = None) -> None:
        """Put good files into the model's folder."""
        for path in files:
            target = (folder or self.folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(FILES[path])


def finish(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, object]], str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def hub():
    with Hub({REPOSITORY: FILES}) as server:
        yield server


@pytest.fixture
def place(tmp_path, hub):
    return Place(tmp_path, hub)


INSTALLED = ["tiny", "tiny/config.json", "tiny/onnx", "tiny/onnx/model.onnx", "tiny/tokenizer.json"]


# --- it works ------------------------------------------------------------------------------------------


def test_a_fetch_brings_the_files_that_are_needed_and_nothing_else(place, hub):
    code, rows, err = place.fetch()
    assert code == 0, err
    assert [(row["file"], row["status"]) for row in rows] == [
        (MODEL, "fetched"),
        ("tokenizer.json", "fetched"),
        ("config.json", "fetched"),
    ]
    pinned = PIN.file("model")
    assert rows[0] == {
        "model": "tiny",
        "file": MODEL,
        "path": str(place.folder / MODEL),
        "size": pinned.size,
        "sha256": pinned.sha256,
        "status": "fetched",
    }
    # FR 142: no lock, no metadata, no cache beside the model
    assert place.there() == INSTALLED
    assert place.complete()
    assert not (place.root / "hf" / "hub").exists()  # nor a copy in the hub's cache
    assert f"{REPOSITORY} at revision {REVISION} from {hub.url}" in err
    assert "tiny: fetched, verified" in err


def test_the_client_asks_for_the_pinned_revision_and_says_who_it_is(place, hub):
    assert place.fetch()[0] == 0
    files = [request for request in hub.requests if "/resolve/" in request.path]
    assert {request.path for request in files} == {
        f"/{REPOSITORY}/resolve/{REVISION}/{path}" for path in FILES if path != "vocab.txt"
    }
    assert all(request.headers["user-agent"].startswith("minice/") for request in files)
    assert [request.host for request in hub.asked("GET", MODEL)] == ["blobs"]  # redirected


def test_a_complete_model_is_verified_without_a_connection_or_the_client(place, hub):
    place.fill([MODEL, "tokenizer.json", "config.json"])
    without_client = """
import sys
sys.modules["huggingface_hub"] = sys.modules["filelock"] = None
from minice.cli import main
sys.exit(main(sys.argv[1:]))
"""
    code, rows, err = place.run("fetch", "acme/small", code=without_client, HF_HUB_OFFLINE="1")
    assert (code, err) == (0, "minice: tiny: already there, verified\n")
    assert [(row["path"], row["status"]) for row in rows] == [
        (str(place.folder / path), "already there") for path in (MODEL, "tokenizer.json", "config.json")
    ]
    assert hub.requests == []
    assert place.there() == INSTALLED


def test_only_what_is_missing_is_fetched(place, hub):
    place.fill([MODEL, "config.json"])
    code, rows, err = place.fetch()
    assert code == 0, err
    assert [row["status"] for row in rows] == ["already there", "fetched", "already there"]
    assert [request.path.rpartition("/")[2] for request in hub.asked("GET", "/resolve/")] == ["tokenizer.json"]
    assert place.there() == INSTALLED


def test_a_folder_that_is_named_gets_the_files(place):
    folder = place.root / "a folder"
    code, rows, err = place.fetch("--model-dir", folder)
    assert code == 0, err
    assert listing(place.root / "a folder") == [name.partition("/")[2] for name in INSTALLED[1:]]
    assert [row["path"] for row in rows] == [str(folder / str(row["file"])) for row in rows]
    assert [path.name for path in place.root.iterdir() if path.name.startswith(".")] in ([], [".cache"])


def test_the_token_goes_to_the_hub_and_into_no_message(place, hub):
    hub.faults[MODEL] = Fault(status=403, headers={"X-Error-Code": "GatedRepo"})
    code, _, err = place.fetch(HF_TOKEN="hf_" + "verysecret")
    assert code == 4
    assert {request.headers.get("authorization") for request in hub.asked("HEAD")} == {"Bearer hf_verysecret"}
    assert "verysecret" not in err


def test_a_blank_endpoint_counts_as_none_and_another_one_is_checked(place):  # FR 145
    script = """
import os
from minice.artifacts.fetch import _endpoint, _import_hub
hub = _import_hub()
assert _endpoint(os.environ, hub).startswith("https://"), _endpoint(os.environ, hub)
"""
    assert place.run(code=script, HF_ENDPOINT=" ")[0] == 0
    assert place.run(code=script, HF_ENDPOINT="")[0] == 0
    code, _, err = place.fetch(HF_ENDPOINT="me:secret@mirror.example/hub")
    assert code == 2
    assert "HF_ENDPOINT: expected an address" in err


def test_the_endpoint_is_the_one_of_the_call_and_not_that_of_the_import(place, hub):
    script = """
import os, sys
import huggingface_hub.constants
from minice.artifacts.fetch import fetch_model
from minice.artifacts.lock import known_lock
assert fetch_model(known_lock().find("tiny"), environ=os.environ | {"HF_ENDPOINT": sys.argv[1]}).fetched
"""
    process = place.start(hub.url, code=script, HF_ENDPOINT=closed_address())
    assert process.communicate(timeout=60) == ("", "")
    assert place.complete()


def test_a_client_that_was_imported_offline_is_understood(place, hub):
    script = """
import os
import huggingface_hub.constants
from minice.artifacts.fetch import fetch_model
from minice.artifacts.lock import known_lock
from minice.errors import ConfigError
online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
try:
    fetch_model(known_lock().find("tiny"), environ=online)
except ConfigError as error:
    print(repr(error.where))
"""
    process = place.start(code=script, HF_HUB_OFFLINE="1")
    assert process.communicate(timeout=60) == ("'HF_HUB_OFFLINE'\n", "")
    assert hub.requests == []
    assert place.there() == []


def test_logging_and_warnings_are_as_they_were(place, hub):  # FR 151
    hub.faults[MODEL] = Fault(body="stalled", after=LARGE, times=1)
    script = """
import logging, warnings, os
import huggingface_hub.file_download  # its own set-up is none of ours
from huggingface_hub.utils import are_progress_bars_disabled
from minice.artifacts.fetch import fetch_model
from minice.artifacts.lock import known_lock
def state():
    names = ("", "huggingface_hub")
    loggers = [logging.getLogger(name) for name in names]
    return [(x.level, list(x.handlers), x.propagate, list(x.filters)) for x in loggers], list(warnings.filters), (
        are_progress_bars_disabled(), dict(os.environ))
before = state()
assert fetch_model(known_lock().find("tiny")).fetched
assert state() == before
"""
    # The second makes the client's bars appear without a terminal, unless they are switched off.
    code, _, err = place.run(code=script, HF_HUB_DOWNLOAD_TIMEOUT="1", TQDM_POSITION="-1")
    assert (code, err) == (0, "")  # a library says nothing of its own accord


def test_fetches_in_several_threads_leave_the_process_as_it_was(place, hub):  # FR 151
    hub.chunk, hub.pause_s = 5_000, 0.002
    script = """
import logging, os, sys, threading, warnings
import huggingface_hub.file_download
from dataclasses import replace
from huggingface_hub.utils import are_progress_bars_disabled
from minice.artifacts.fetch import fetch_model
from minice.artifacts.lock import known_lock
pin = known_lock().find("tiny")
def state():
    logger = logging.getLogger("huggingface_hub")
    return list(logger.handlers), list(warnings.filters), are_progress_bars_disabled(), dict(os.environ)
before, done = state(), []
def fetch(number):
    done.append(fetch_model(replace(pin, id=f"tiny{number}")).fetched)
threads = [threading.Thread(target=fetch, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert done == [True] * 4, done
assert state() == before
"""
    code, _, err = place.run(code=script)
    assert (code, err) == (0, "")


# --- bars ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(place):
    import termios

    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (24, 100))  # a bar on a terminal without width has none either
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(leader, 4096):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    subprocess.run(
        [sys.executable, "-c", DRIVER, "fetch", "tiny"],
        env=place.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=follower,
        check=True,
        timeout=60,
    )
    os.close(follower)
    reader.join()
    os.close(leader)
    assert b"100%" in shown
    shutil.rmtree(place.home)
    code, _, err = place.fetch()
    assert code == 0
    assert "%" not in err


# --- what the endpoint may answer ----------------------------------------------------------------------

REFUSALS = {
    "no-such-repository": (404, {"X-Error-Code": "RepoNotFound"}, "no such repository"),
    "no-such-revision": (404, {"X-Error-Code": "RevisionNotFound"}, "no such revision"),
    "no-such-file": (404, {"X-Error-Code": "EntryNotFound"}, "no such file"),
    "no-code": (404, {}, "no such file"),
    "unauthorized": (401, {}, "HF_TOKEN"),
    "gated": (403, {"X-Error-Code": "GatedRepo"}, "HF_TOKEN"),
    "too-many": (429, {"Retry-After": "0"}, "(429); try again in 0 s"),
    "broken": (500, {}, "status 500"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_which_file_of_which_revision_where_and_why(place, hub, name):
    status, headers, words = REFUSALS[name]
    hub.faults[MODEL] = Fault(status=status, headers=headers)
    code, rows, err = place.fetch()
    assert (code, rows) == (ModelNotFoundError.exit_code, [])
    message = err.splitlines()[-1]
    for part in (MODEL, REPOSITORY, REVISION, hub.url, words, "minice fetch tiny", str(place.folder)):
        assert part in message
    assert place.there() == []
    assert "Traceback" not in err


def test_a_server_that_is_no_hub_is_told_apart(place, hub):
    hub.metadata = False
    code, _, err = place.fetch()
    assert code == ModelNotFoundError.exit_code
    assert "does not answer as a hub does" in err
    assert place.there() == []


# --- what may happen on the way ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, LARGE])
@pytest.mark.parametrize("body", ["truncated", "stalled", "reset", "wrong"])
def test_a_broken_transfer_leaves_nothing_and_the_next_one_succeeds(place, hub, body, after):  # FR 130
    hub.faults[MODEL] = Fault(body=body, after=after)
    code, rows, err = place.fetch()
    assert (code, rows) == (5 if body == "wrong" else 4, [])
    if body == "stalled":  # after the others some versions of the client give up at once
        assert "trying again" in err
    words = {
        "truncated": "broke off",
        "stalled": "no answer in time",
        "reset": "connection",
        "wrong": f"sha256 mismatch in '{MODEL}': expected {PIN.file('model').sha256}, got ",
    }
    assert words[body] in err
    assert SIGNATURE not in err
    assert place.there() == []
    assert not place.complete()
    hub.faults.clear()
    code, _, err = place.fetch()
    assert code == 0, err
    assert place.there() == INSTALLED
    assert place.complete()


def test_a_transfer_that_stalls_once_goes_on_where_it_was(place, hub):
    hub.faults[MODEL] = Fault(body="stalled", after=LARGE, times=1)
    code, _, err = place.fetch()
    assert code == 0, err
    assert f"{MODEL}: trying again" in err
    first, second = hub.asked("GET", MODEL)
    assert ("range" in first.headers, second.headers["range"]) == (False, f"bytes={LARGE}-")
    assert place.complete()


def test_a_pointer_in_place_of_the_file_is_named_as_such(place, hub):  # FR 140
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 200000\n"
    hub.repositories = {REPOSITORY: FILES | {MODEL: pointer}}
    code, _, err = place.fetch()
    assert code == 5
    assert f"Git LFS pointer of {len(pointer)} bytes" in err
    assert place.there() == []


@pytest.mark.parametrize("address", ["closed", "silent"])
def test_an_endpoint_that_is_not_reached_is_named(place, address):
    if address == "closed":
        url = closed_address()
        code, _, err = place.fetch(HF_ENDPOINT=url)
        assert "Connection refused" in err
    else:
        with silent_address() as url:
            code, _, err = place.fetch(HF_ENDPOINT=url)
        assert "no answer in time" in err
    assert code == ModelNotFoundError.exit_code
    assert f"from {url}" in err.splitlines()[-1]
    assert place.there() == []


def test_a_body_without_end_is_given_up(place, hub):
    import inspect

    from huggingface_hub import hf_hub_download

    if "tqdm_class" not in inspect.signature(hf_hub_download).parameters:
        pytest.skip("this client lets nobody watch a download")
    hub.faults[MODEL] = Fault(body="endless")
    code, _, err = place.fetch()
    assert code == ModelNotFoundError.exit_code
    assert f"it sends more than the {len(FILES[MODEL]):,} bytes that are pinned" in err
    assert place.there() == []


def test_a_file_of_another_size_is_not_downloaded(place, hub):
    hub.repositories = {REPOSITORY: FILES | {MODEL: FILES[MODEL] + b"more"}}
    code, _, err = place.fetch()
    assert code == IntegrityError.exit_code
    assert "is not what is pinned: expected 200,000 bytes, got 200,004. Nothing was downloaded" in err
    assert hub.asked("GET", "/resolve/") == []
    assert place.there() == []


def test_a_proxy_that_the_client_cannot_use_is_an_error_of_ours(place):
    code, _, err = place.fetch(ALL_PROXY="socks5://127.0.0.1:1", NO_PROXY="")
    assert code == ModelNotFoundError.exit_code
    assert "Traceback" not in err
    assert place.there() == []


def test_a_disk_that_fills_up_leaves_nothing(place):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n" + DRIVER
    pytest.importorskip("resource", reason="needs limits on the size of a file")
    code, rows, err = place.run("fetch", "tiny", code=limited)
    assert (code, rows) == (ModelNotFoundError.exit_code, [])
    needed = sum(file.size for file in PIN.files if not file.optional)
    assert f"no room for them: {needed:,} bytes are needed beside {str(place.folder)!r}" in err
    assert place.there() == []
    assert place.fetch()[0] == 0


def test_a_bad_file_is_replaced_by_a_good_one_and_not_before(place, hub):  # FR 139
    place.fill([MODEL, "tokenizer.json", "config.json", "vocab.txt"])
    bad = bytes(reversed(FILES[MODEL]))
    (place.folder / MODEL).write_bytes(bad)
    (place.folder / "mine.txt").write_text("not yours")
    hub.faults[MODEL] = Fault(body="wrong", times=1)
    assert place.fetch()[0] == 5
    assert (place.folder / MODEL).read_bytes() == bad
    code, rows, err = place.fetch()
    assert code == 0, err
    assert [row["status"] for row in rows] == ["fetched", "already there", "already there", "already there"]
    assert place.there() == sorted([*INSTALLED, "tiny/mine.txt", "tiny/vocab.txt"])
    assert place.complete()


def snapshot(place: Place) -> Path:
    """Where the hub's own cache has the pinned revision."""
    return place.root / "hf" / "hub" / "models--acme--tiny" / "snapshots" / REVISION


def test_a_good_file_in_the_hub_cache_is_not_fetched_again(place, hub):
    place.fill([MODEL], snapshot(place))
    code, rows, err = place.fetch()
    assert code == 0, err
    assert [row["status"] for row in rows] == ["already there", "fetched", "fetched"]
    assert rows[0]["path"] == str(snapshot(place) / MODEL)
    assert hub.asked("GET", MODEL) == []
    assert place.there() == ["tiny", "tiny/config.json", "tiny/tokenizer.json"]
    assert place.complete()


def test_a_bad_file_in_the_hub_cache_is_not_taken(place):
    for path, data in FILES.items():
        target = snapshot(place) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bytes(reversed(data)))
    code, _, err = place.fetch()
    assert code == 0, err
    assert place.there() == INSTALLED
    assert place.complete()


def test_what_a_link_stands_for_is_left_alone(place):
    outside = place.root / "elsewhere.onnx"
    outside.write_bytes(b"mine")
    place.fill(["tokenizer.json"])
    (place.folder / "onnx").mkdir()
    (place.folder / MODEL).symlink_to(outside)
    code, _, err = place.fetch()
    assert code == 0, err
    assert outside.read_bytes() == b"mine"
    assert not (place.folder / MODEL).is_symlink()
    assert place.complete()


def test_a_folder_that_is_a_link_is_not_followed(place):
    (place.root / "elsewhere").mkdir()
    place.folder.mkdir(parents=True)
    (place.folder / "onnx").symlink_to(place.root / "elsewhere")
    code, _, err = place.fetch()
    assert code == ModelNotFoundError.exit_code
    assert "a link leads out of the model's folder" in err
    assert list((place.root / "elsewhere").iterdir()) == []
    assert list(place.folder.iterdir()) == [place.folder / "onnx"]  # nor was anything else moved


def test_a_folder_in_the_way_is_an_error_of_ours(place):
    (place.folder / MODEL / "occupied").mkdir(parents=True)
    code, _, err = place.fetch()
    assert code == ModelNotFoundError.exit_code
    assert f"cannot write {str(place.folder / MODEL)!r}" in err or f"{MODEL}'" in err
    assert "Traceback" not in err
    assert [name for name in place.there() if "fetch" in name] == []
    assert not (place.folder / "config.json").exists()  # looked at before anything is moved


# --- two at once, and the end of a process -------------------------------------------------------------


def hold(place: Place, hub: Hub) -> subprocess.Popen[str]:
    """Start a fetch that stops in the middle of the model until the hub is released."""
    hub.faults[MODEL] = Fault(body="held", after=LARGE, times=1)
    process = place.start("fetch", "tiny", code=PATIENT)
    assert hub.holding.wait(60)
    return process


PATIENT = DRIVER.replace("0.3", "30")


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} was not said: {lines}")


def test_a_second_fetch_waits_and_finds_all_there(place, hub):
    first = hold(place, hub)
    second = place.start("fetch", "tiny")
    wait_for(second, "another fetch into")
    assert not place.complete()
    hub.released.set()
    code, rows, err = finish(first)
    assert (code, rows[0]["status"]) == (0, "fetched"), err
    code, rows, err = finish(second)
    assert (code, {row["status"] for row in rows}) == (0, {"already there"}), err
    assert err == "minice: tiny: already there, verified\n"
    assert len(hub.asked("GET", MODEL)) == 1
    assert place.there() == INSTALLED


def test_a_killed_fetch_makes_way_for_one_that_waits(place, hub):
    first = hold(place, hub)
    second = place.start("fetch", "tiny")
    wait_for(second, "another fetch into")
    first.kill()
    first.communicate()
    code, rows, err = finish(second)
    assert (code, rows[0]["status"]) == (0, "fetched"), err
    assert place.there() == INSTALLED


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_ends_a_fetch_and_one_that_waits_without_a_trace(place, hub):
    first = hold(place, hub)
    second = place.start("fetch", "tiny")
    wait_for(second, "another fetch into")
    second.send_signal(signal.SIGINT)
    assert finish(second)[0] == 130
    first.send_signal(signal.SIGINT)
    code, rows, err = finish(first)
    assert (code, rows) == (130, [])
    assert "Traceback" not in err
    assert place.there() == []


# Fetches in children of a process that has imported everything, so that a life is short and mostly fetching.
# First 50 moments, one out of each fiftieth of a life; then before each change that minice or the client
# makes to the file system. After each the store says "not there" or opens the right bytes, and a fetch succeeds.
KILLS = """
import collections, json, os, random, shutil, signal, ssl, statistics, sys, time
from pathlib import Path
ssl.SSLContext.load_verify_locations = lambda *arguments, **options: None  # a third of a life, and not used
os.fsync = lambda handle: None  # what is killed is the process and not the machine
import filelock, huggingface_hub.file_download
from minice.artifacts.fetch import fetch_model
from minice.artifacts.lock import known_lock
from minice.artifacts.store import open_model
from minice.errors import IntegrityError, ModelNotFoundError

moments, seed = int(sys.argv[1]), int(sys.argv[2])
pin, home = known_lock().find("tiny"), Path(os.environ["MINICE_HOME"])
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"}

def start(kill_at=None):
    child = os.fork()
    if child:
        return child
    count = 0
    def watch(event, arguments):
        nonlocal count
        # The client's own notes lie in .cache, and there are many.
        if event in CHANGES and str(home) in str(arguments[0]) and ".cache" not in str(arguments[0]):
            if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                return
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
    code = 1
    try:
        sys.addaudithook(watch)
        fetch_model(pin)
        code = 0
        if kill_at == -1:
            Path(os.environ["HOME"], "count").write_text(str(count))
    finally:
        os._exit(code)

def end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def state():
    there = sorted(path.name for path in home.iterdir()) if home.is_dir() else []
    try:
        open_model(pin)
        opened = True
    except ModelNotFoundError:
        opened = False
    return ("whole " if opened else "") + ("temporary " if any(n.endswith("fetch") for n in there) else "")

def check(code, phases, partly=False):
    phases["landed" if code == -signal.SIGKILL else f"exit {code}"] += 1
    found = state().strip()
    phases[found or "nothing"] += 1
    # A folder that was not there comes as a whole.
    assert partly or (home / "tiny").exists() == ("whole" in found)
    began = time.monotonic()
    assert end(start()) == 0, "the next fetch"
    lives.append(time.monotonic() - began)
    open_model(pin)
    assert [path.name for path in home.iterdir()] == ["tiny"], list(home.iterdir())

def prepare(partly):
    # An empty home, or one where the folder is there already and gets one file after the other.
    shutil.rmtree(home, ignore_errors=True)
    if partly:
        (home / "tiny").mkdir(parents=True)
        (home / "tiny" / "config.json").write_bytes(b"{}")

def changes(partly):
    prepare(partly)
    assert end(start(kill_at=-1)) == 0
    return int(Path(os.environ["HOME"], "count").read_text())

fetch_model(pin)  # imports the rest
lives = []
timed, stepped, chance = collections.Counter(), collections.Counter(), random.Random(seed)
for _ in range(3):
    prepare(False)
    began = time.monotonic()
    assert end(start()) == 0
    lives.append(time.monotonic() - began)
for moment in range(moments):
    prepare(False)
    child = start()
    # Of lives as they are now: other processes come and go.
    time.sleep(statistics.median(lives[-5:]) * (moment + chance.random()) / moments)
    os.kill(child, signal.SIGKILL)
    check(end(child), timed)
steps = 0
for partly in (False, True):
    for step in range(changes(partly)):
        prepare(partly)
        check(end(start(kill_at=step)), stepped, partly)
        steps += 1
print(json.dumps({"steps": steps, "life": statistics.median(lives), "timed": timed, "stepped": stepped}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_nothing_is_there_or_all_of_it(place, hub):  # FR 130
    hub.chunk, hub.pause_s = 4 * LARGE, 0.005
    process = place.start(50, 11, code=KILLS)
    code, rows, err = finish(process)
    assert code == 0, err
    (counts,) = rows
    print(counts)
    assert sum(counts["timed"][name] for name in counts["timed"] if name == "landed" or "exit" in name) == 50
    assert counts["timed"]["temporary"] >= 5  # kills that found it in the middle
    # Every step was reached, and the last ones found the model whole.
    assert counts["stepped"]["landed"] == counts["steps"] >= 20
    assert counts["stepped"]["temporary"] >= 10
    assert counts["stepped"]["whole temporary"] >= 2
