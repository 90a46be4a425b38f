"""The hub's own cache, as its client leaves it: links into blobs, shared blobs, and plain files."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from test_store import (
    CONFIG,
    INT8,
    MODEL,
    OTHER,
    PIN,
    POINTER,
    TOKENIZER,
    opened,
    receipt,
    refused,
    sha256,
    statuses,
    write,
)

from minice.artifacts import store
from minice.artifacts.hub_cache import cache_folder, hub_cache
from minice.artifacts.store import inspect, locate, places
from minice.errors import IntegrityError, ModelNotFoundError

ALIASED = dataclasses.replace(PIN, aliases=("owner/older-name", "nickname"))
REVISION = "ab" * 20
OTHER_REVISION = "cd" * 20
WHOLE = {"onnx/model.onnx": MODEL, "tokenizer.json": TOKENIZER}


class Cache:
    """A cache below a temporary folder, and the environment that names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "hub"
        self.environ = {"HF_HUB_CACHE": str(self.folder), "MINICE_HOME": str(folder / "home")}
        self.home = folder / "home" / "published"

    def repository(self, name: str = "owner/published") -> Path:
        return self.folder / ("models--" + name.replace("/", "--"))

    def snapshot(self, revision: str = REVISION, name: str = "owner/published") -> Path:
        return self.repository(name) / "snapshots" / revision

    def add(
        self,
        files: dict[str, bytes],
        revision: str = REVISION,
        name: str = "owner/published",
        *,
        layout: str = "blobs",
    ) -> Path:
        """Put files into a snapshot: as "blobs", as "shared" blobs, or "plain" where links do not work."""
        snapshot = self.snapshot(revision, name)
        for path, data in files.items():
            target = snapshot / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if layout == "plain":
                target.write_bytes(data)
                continue
            digest = sha256(data)
            blob = self.repository(name) / "blobs" / digest
            target.symlink_to(os.path.relpath(blob, target.parent))
            if layout == "shared":
                shared = write(self.folder / "blobs" / digest[:2], {digest: data}) / digest
                blob.parent.mkdir(exist_ok=True)
                blob.symlink_to(os.path.relpath(shared, blob.parent))
            else:
                write(blob.parent, {digest: data})
        return snapshot


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


# --- where it is ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX paths")
@pytest.mark.parametrize(
    ("environ", "expected", "origin"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/c", "HF_HUB_CACHE"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub", "HF_HOME"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub", "XDG_CACHE_HOME"),
        ({}, "/u/.cache/huggingface/hub", ""),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"}, "/old", "HUGGINGFACE_HUB_CACHE"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "/c"}, "/c", "HF_HUB_CACHE"),
        ({"HF_HUB_CACHE": "~/c"}, "/u/c", "HF_HUB_CACHE"),
        ({"HF_HOME": "~"}, "/u/hub", "HF_HOME"),
        ({"HF_HOME": "~other/c"}, None, "HF_HOME"),
        ({"HF_HUB_CACHE": "$DISK/${PART}/$none", "DISK": "/d", "PART": "p"}, "/d/p/$none", "HF_HUB_CACHE"),
        # FR 145: blank is unset
        ({"HF_HUB_CACHE": "", "HF_HOME": " ", "XDG_CACHE_HOME": "\t"}, "/u/.cache/huggingface/hub", ""),
    ],
)
def test_folder(environ: dict, expected: str | None, origin: str) -> None:
    folder, named = cache_folder({"HOME": "/u"} | environ)
    if expected is None:  # somebody else's home is not looked up: the text stays, below the working directory
        expected = str(Path("~other/c/hub").absolute())
    assert (str(folder), named) == (expected, origin)


def test_folder_as_the_installed_client_has_it(tmp_path: Path) -> None:
    """What the client itself makes of the variables, in a process of its own: it reads them at import."""
    pytest.importorskip("huggingface_hub")
    from conftest import run_python

    code = (
        "import os\n"
        "for environ in ({'HF_HUB_CACHE': '~/c'}, {'HF_HOME': '$HOME/h'}, {'XDG_CACHE_HOME': '/x'}, {},\n"
        "                {'HUGGINGFACE_HUB_CACHE': '/old'}):\n"
        "    import importlib, huggingface_hub.constants as constants\n"
        "    for name in ('HF_HUB_CACHE', 'HUGGINGFACE_HUB_CACHE', 'HF_HOME', 'XDG_CACHE_HOME'):\n"
        "        os.environ.pop(name, None)\n"
        "    os.environ.update(environ)\n"
        "    theirs = importlib.reload(constants).HF_HUB_CACHE\n"
        "    from minice.artifacts.hub_cache import cache_folder\n"
        "    print(theirs, cache_folder(os.environ)[0])\n"
    )
    done = run_python(code, HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 5
    assert [theirs for theirs, _ in rows] == [ours for _, ours in rows]


def test_only_models_with_a_repository_have_a_cache() -> None:
    assert hub_cache(("minice-l6", "nickname"), None, {"HOME": "/u"}) is None
    found = hub_cache(ALIASED.names, REVISION, {"HF_HUB_CACHE": "/c"})
    assert found is not None
    assert [path.name for path in found.repositories] == ["models--owner--published", "models--owner--older-name"]


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_a_folder_that_no_system_can_name(tmp_path: Path, value: str) -> None:
    environ = {"HF_HUB_CACHE": value, "MINICE_HOME": str(tmp_path)}
    refused(ModelNotFoundError, None, environ=environ)
    assert [place.origin for place in places(PIN, environ=environ)] == ["MINICE_HOME"]


# --- what is taken -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["blobs", "shared", "plain"])
def test_every_layout_of_the_client(cache: Cache, layout: str) -> None:
    # FR 135: what an online run of the hub's client left is found offline
    snapshot = cache.add(WHOLE, layout=layout)
    files = opened(None, environ=cache.environ)
    assert (files.model, files.tokenizer) == (MODEL, TOKENIZER)
    assert files.paths == {
        "model": str(snapshot / "onnx" / "model.onnx"),
        "tokenizer": str(snapshot / "tokenizer.json"),
    }
    for report in (inspect(PIN, environ=cache.environ), locate(PIN, environ=cache.environ)):
        assert [(item.good, item.place) for item in report] == [(True, "hub-cache")] * 2 + [(True, None)]
        assert report[0].path == files.paths["model"]


def test_what_the_installed_client_writes(cache: Cache) -> None:
    """The client's own function makes the link, so that its layout is not only what we say it is."""
    download = pytest.importorskip("huggingface_hub.file_download")
    name = download.repo_folder_name(repo_id="owner/published", repo_type="model")
    assert name == cache.repository().name
    for path, data in WHOLE.items():
        blob = write(cache.folder / name / "blobs", {sha256(data): data}) / sha256(data)
        pointer = cache.snapshot() / path
        pointer.parent.mkdir(parents=True, exist_ok=True)
        download._create_symlink(str(blob), str(pointer), new_blob=True)
    assert opened(None, environ=cache.environ).model == MODEL


@pytest.mark.parametrize("links", [True, False], ids=["links", "files"])
def test_what_the_installed_client_downloads(cache: Cache, monkeypatch, links: bool) -> None:
    """The client itself, against a local server: large files by way of another host, and a system without links."""
    client = pytest.importorskip("huggingface_hub")
    from hub import REVISION as PUBLISHED
    from hub import Hub

    if not links:
        monkeypatch.setattr(client.file_download, "are_symlinks_supported", lambda folder: False)
    with Hub({"owner/older-name": {**WHOLE, "config.json": CONFIG}}) as server:
        for name in (*WHOLE, "config.json"):
            client.hf_hub_download(
                "owner/older-name", name, cache_dir=cache.folder, endpoint=server.url, token=False, revision=PUBLISHED
            )
    # The server's revision is not the pinned one, and the repository is the pin's under its older name.
    snapshot = cache.snapshot(PUBLISHED, "owner/older-name")
    assert (snapshot / "tokenizer.json").is_symlink() is links
    reports = inspect(ALIASED, environ=cache.environ)
    assert [(report.path, report.status) for report in reports] == [
        (str(snapshot / name), "ok") for name in (*WHOLE, "config.json")
    ]


def test_blobs_that_the_installed_client_shares(cache: Cache) -> None:
    """The client moves a blob to where all repositories find it, and leaves a link; minice follows both."""
    shared = pytest.importorskip("huggingface_hub.utils._shared_blobs")
    snapshot = cache.add(WHOLE)
    blob = cache.repository() / "blobs" / sha256(MODEL)
    assert shared.publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash="ef" * 32, cache_dir=cache.folder, expected_size=len(MODEL)
    )
    assert blob.is_symlink()
    assert Path(os.path.realpath(blob)).is_relative_to(os.path.realpath(cache.folder / "blobs"))
    assert opened(None, environ=cache.environ).paths["model"] == str(snapshot / "onnx" / "model.onnx")


def test_any_revision_and_any_name_whose_bytes_match(cache: Cache) -> None:
    # Each file from another snapshot: the graph under an older name, the tokenizer at another revision.
    cache.add({"onnx/model.onnx": OTHER, "tokenizer.json": b"x"})
    model = cache.add({"onnx/model.onnx": MODEL}, "0" * 40, "owner/older-name")
    tokenizer = cache.add({"tokenizer.json": TOKENIZER, "onnx/model.onnx": MODEL[::-1]}, OTHER_REVISION)
    files = opened(None, ALIASED, environ=cache.environ)
    assert files.paths == {"model": str(model / "onnx" / "model.onnx"), "tokenizer": str(tokenizer / "tokenizer.json")}
    assert files.model == MODEL
    refused(ModelNotFoundError, None, environ=cache.environ)  # a pin without that alias does not look there


def test_the_pinned_revision_goes_first_and_is_hashed_once(cache: Cache, monkeypatch) -> None:
    for revision in ("0" * 40, REVISION, "f" * 40):
        cache.add({**WHOLE, "config.json": revision.encode()}, revision)
    opened_paths, hashed = [], []
    real_open, real_hash = os.open, store.hashlib.sha256
    listed = []
    monkeypatch.setattr(os, "listdir", listed.append)
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened_paths.append(path) or real_open(path, *rest))
    monkeypatch.setattr(store.hashlib, "sha256", lambda data: hashed.append(len(data)) or real_hash(data))
    files = opened(None, environ=cache.environ)
    monkeypatch.undo()
    assert Path(files.paths["model"]).is_relative_to(cache.snapshot(REVISION))
    assert hashed == [len(MODEL), len(TOKENIZER)]
    assert {Path(path).name for path in opened_paths} == {sha256(MODEL), sha256(TOKENIZER)}
    assert not listed


def test_one_blob_of_many_snapshots_is_read_once(cache: Cache, monkeypatch) -> None:
    wrong = MODEL[::-1]
    for number in range(1000):
        cache.add({"onnx/model.onnx": wrong}, f"{number:040x}")
    cache.add({"tokenizer.json": TOKENIZER})
    hashed, real = [], store.hashlib.sha256
    monkeypatch.setattr(store.hashlib, "sha256", lambda data: hashed.append(data) or real(data))
    message = refused(ModelNotFoundError, None, environ=cache.environ).message
    assert hashed.count(wrong) == 1
    assert message.count("sha256 mismatch in") == 1


@pytest.mark.parametrize("place", ["argument", "variable"])
def test_a_folder_that_was_named_is_the_only_place(cache: Cache, tmp_path: Path, place: str) -> None:
    # FR 136
    cache.add(WHOLE)
    folder = tmp_path / "named"
    folder.mkdir()
    environ = cache.environ | ({"MINICE_MODEL_DIR": str(folder)} if place == "variable" else {})
    given = folder if place == "argument" else None
    message = refused(ModelNotFoundError, given, environ=environ).message
    assert "the hub's cache" not in message
    assert "so no other place is searched" in message
    assert [report.path for report in inspect(PIN, model_dir=given, environ=environ)] == [None] * 3
    assert [item.path for item in places(PIN, model_dir=given, environ=environ)] == [str(folder)]


def test_minices_own_folder_goes_first(cache: Cache) -> None:
    cache.add(WHOLE)
    write(cache.home, {"model.onnx": MODEL})
    assert opened(None, environ=cache.environ).paths == {
        "model": str(cache.home / "model.onnx"),
        "tokenizer": str(cache.snapshot() / "tokenizer.json"),
    }
    write(cache.home, {"model.onnx": MODEL[::-1]})  # the first file found is the one, and a bad one is an error
    error = refused(IntegrityError, None, environ=cache.environ)
    assert error.message.endswith("Run: minice fetch published")
    assert statuses(inspect(PIN, environ=cache.environ))["onnx/model.onnx"] == "mismatch"


def test_a_base_name_is_no_file_of_the_repository(cache: Cache) -> None:
    cache.add({"model.onnx": MODEL, "tokenizer.json": TOKENIZER})
    refused(ModelNotFoundError, None, environ=cache.environ)


# --- what is not taken, and why ------------------------------------------------------------------------


def passed_over(cache: Cache) -> str:
    """The reason that is given for a graph in the cache; opening and the reports give the same."""
    message = refused(ModelNotFoundError, None, environ=cache.environ).message
    assert f"the hub's cache {str(cache.folder)!r} (HF_HUB_CACHE). Not taken from that cache: " in message
    assert message.endswith("Run: minice fetch published")
    report = inspect(PIN, environ=cache.environ)[0]
    assert (report.status, report.path) == ("missing", None)
    reason = message.partition("Not taken from that cache: ")[2].partition(". Without a network")[0]
    assert reason in report.message
    return reason


@pytest.mark.parametrize("layout", ["blobs", "plain"])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (MODEL[:-1], "is truncated or another file: expected 140 bytes, got 139"),  # FR 130
        (MODEL + b"x", "is too long: expected 140 bytes, got 141"),
        (MODEL[::-1], f"expected {sha256(MODEL)}, got {sha256(MODEL[::-1])}"),  # FR 139
        (POINTER, "is a Git LFS pointer of"),  # FR 140
    ],
    ids=["short", "long", "changed", "pointer"],
)
def test_wrong_bytes(cache: Cache, layout: str, data: bytes, reason: str) -> None:
    path = cache.add({"onnx/model.onnx": data, "tokenizer.json": TOKENIZER}, layout=layout) / "onnx" / "model.onnx"
    assert reason in passed_over(cache)
    assert repr(str(path)) in passed_over(cache)
    cache.add({"onnx/model.onnx": b"y"}, OTHER_REVISION)
    assert passed_over(cache).endswith(" (and 1 more)")
    cache.add({"onnx/model.onnx": MODEL}, "ef" * 20)
    assert opened(None, environ=cache.environ).model == MODEL


def test_wrong_bytes_of_the_right_size_are_no_surprise_to_locate(cache: Cache) -> None:
    cache.add(WHOLE | {"onnx/model.onnx": MODEL[::-1]})
    assert statuses(locate(PIN, environ=cache.environ))["onnx/model.onnx"] == "present"  # nothing is read
    assert statuses(inspect(PIN, environ=cache.environ))["onnx/model.onnx"] == "missing"


def test_a_wrong_tokenizer(cache: Cache) -> None:
    cache.add(WHOLE | {"tokenizer.json": TOKENIZER.upper()})
    error = refused(ModelNotFoundError, None, environ=cache.environ)
    assert "no 'tokenizer.json' in " in error.message
    assert "sha256 mismatch in" in error.message


@pytest.mark.parametrize(
    "target",
    [
        "outside",  # beside the cache
        "hub/models--owner--other/blobs/x",  # the blobs of another repository
        "hub/models--owner--published/snapshots/plain/x",  # another snapshot
        "hub/models--owner--published/blobs2",
        "hub/blobs-of-mine/x",
    ],
)
def test_links_to_anywhere_else(cache: Cache, tmp_path: Path, target: str) -> None:
    cache.add({"tokenizer.json": TOKENIZER})
    write(tmp_path, {target: MODEL})
    link = cache.snapshot() / "onnx" / "model.onnx"
    link.parent.mkdir()
    link.symlink_to(tmp_path / target)
    reason = passed_over(cache)
    assert f"{str(link)!r} is a link to {os.path.realpath(link)!r}, which is none of the cache's blobs" in reason


def test_a_link_that_is_refused_does_not_hide_the_file_itself(cache: Cache) -> None:
    other = cache.add(WHOLE, OTHER_REVISION, layout="plain") / "onnx" / "model.onnx"
    link = cache.snapshot() / "onnx" / "model.onnx"
    link.parent.mkdir(parents=True)
    link.symlink_to(other)
    assert opened(None, environ=cache.environ).paths["model"] == str(other)


def test_a_blob_that_leads_elsewhere(cache: Cache, tmp_path: Path) -> None:
    cache.add(WHOLE)
    blob = cache.repository() / "blobs" / sha256(MODEL)
    blob.rename(tmp_path / "outside")
    blob.symlink_to(tmp_path / "outside")
    assert "none of the cache's blobs" in passed_over(cache)


@pytest.mark.parametrize("part", ["onnx", "snapshots", "blobs", "repository"])
def test_a_folder_that_is_a_link_to_elsewhere(cache: Cache, tmp_path: Path, part: str) -> None:
    cache.add(WHOLE)
    folder = {
        "onnx": cache.snapshot() / "onnx",
        "snapshots": cache.repository() / "snapshots",
        "blobs": cache.repository() / "blobs",
        "repository": cache.repository(),
    }[part]
    if part != "blobs":  # so that the files themselves are no links
        for path in WHOLE:
            data = (cache.snapshot() / path).read_bytes()
            (cache.snapshot() / path).unlink()
            (cache.snapshot() / path).write_bytes(data)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    message = refused(ModelNotFoundError, None, environ=cache.environ).message
    assert "which is none of the cache's blobs" in message


def test_the_cache_itself_may_be_a_link(cache: Cache, tmp_path: Path) -> None:
    cache.add(WHOLE)
    cache.folder.rename(tmp_path / "disk")
    cache.folder.symlink_to(tmp_path / "disk")
    assert opened(None, environ=cache.environ).model == MODEL


def test_broken_links(cache: Cache) -> None:
    cache.add(WHOLE)
    (cache.repository() / "blobs" / sha256(MODEL)).unlink()  # what an interrupted cleaning leaves
    assert "which does not exist" in passed_over(cache)
    link = cache.snapshot() / "onnx" / "model.onnx"
    link.unlink()
    link.symlink_to("model.onnx")
    assert "is a link that leads back to itself" in passed_over(cache)


def test_folders_and_pipes_in_place_of_files(cache: Cache) -> None:
    path = cache.add(WHOLE, layout="plain") / "onnx" / "model.onnx"
    path.unlink()
    path.mkdir()
    assert "is not a regular file but a folder" in passed_over(cache)
    if hasattr(os, "mkfifo"):
        path.rmdir()
        os.mkfifo(path)
        assert "but a pipe, socket or device" in passed_over(cache)


# --- caches that are none ------------------------------------------------------------------------------


def test_files_and_loops_in_place_of_folders(cache: Cache, tmp_path: Path) -> None:
    for folder in (cache.folder, cache.repository(), cache.repository() / "snapshots"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.write_bytes(b"")
        assert f"{str(cache.repository() / 'snapshots')!r} cannot be listed: Not a directory" in passed_over(cache)
        folder.unlink()
        folder.symlink_to(folder.name)
        message = refused(ModelNotFoundError, None, environ=cache.environ).message
        assert "is a link that leads back to itself (and 1 more)" in message
        folder.unlink()
    (cache.repository() / "snapshots").mkdir()
    write(cache.repository() / "snapshots", {REVISION: b"", "x": b""})
    assert "Not taken" not in refused(ModelNotFoundError, None, environ=cache.environ).message


def test_a_folder_that_cannot_be_listed(cache: Cache, monkeypatch) -> None:
    cache.add(WHOLE, OTHER_REVISION)
    real = os.listdir

    def denied(folder):
        if Path(folder).name == "snapshots":
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(os, "listdir", denied)
    assert "cannot be listed: Permission denied" in passed_over(cache)
    cache.add(WHOLE)
    assert opened(None, environ=cache.environ).model == MODEL  # the pinned snapshot needs no list


def test_no_cache_at_all(cache: Cache) -> None:
    message = refused(ModelNotFoundError, None, environ=cache.environ).message
    assert f"in {str(cache.home)!r} (MINICE_HOME) or the hub's cache {str(cache.folder)!r} (HF_HUB_CACHE). W" in message
    assert not cache.folder.exists()


def test_a_user_without_a_home_may_have_a_cache(cache: Cache, monkeypatch) -> None:
    pwd = pytest.importorskip("pwd")

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    environ = {"HF_HUB_CACHE": str(cache.folder)}
    message = refused(ModelNotFoundError, None, environ=environ).message
    assert f"in the hub's cache {str(cache.folder)!r} (HF_HUB_CACHE), nor in any place: the user has no home" in message
    assert message.endswith("or name a folder by MINICE_HOME. Run: minice fetch published")
    cache.add(WHOLE)
    assert opened(None, environ=environ).model == MODEL


# --- places, receipts, and nothing written -------------------------------------------------------------


def test_places(cache: Cache) -> None:
    found = [(place.path, place.origin) for place in places(ALIASED, environ=cache.environ)]
    assert found == [
        (str(cache.home), "MINICE_HOME"),
        (str(cache.repository()), "HF_HUB_CACHE"),
        (str(cache.repository("owner/older-name")), "HF_HUB_CACHE"),
    ]
    default = places(PIN, environ={"HOME": "/u"})
    assert [place.origin for place in default] == ["the default of MINICE_HOME", "the default of HF_HUB_CACHE"]
    embedded = dataclasses.replace(PIN, repository=None, revision=None, embedded=True)
    assert [place.origin for place in places(embedded, environ=cache.environ)] == ["the package", "MINICE_HOME"]


def test_the_int8_file_lies_in_minices_own_folder(cache: Cache) -> None:
    cache.add({**WHOLE, "config.json": CONFIG})
    message = refused(ModelNotFoundError, None, precision="int8", environ=cache.environ).message
    assert message.endswith("use precision fp32 (--precision fp32), or run: minice quantize published")
    made = {"onnx/model.int8.onnx": INT8, "onnx/model.int8.onnx.json": receipt()}
    cache.add(made)  # whoever put it there: the cache holds what was published
    refused(ModelNotFoundError, None, precision="int8", environ=cache.environ)
    write(cache.home, made)
    files = opened(None, precision="int8", environ=cache.environ)
    assert (files.model, files.tokenizer) == (INT8, TOKENIZER)
    assert files.paths["tokenizer"] == str(cache.snapshot() / "tokenizer.json")
    places_found = {report.name: report.place for report in inspect(PIN, environ=cache.environ)}
    assert places_found["onnx/model.int8.onnx"] == "folder"
    assert places_found["onnx/model.onnx"] == "hub-cache"


def test_nothing_is_written_into_the_cache(cache: Cache) -> None:
    # FR 142
    cache.add(WHOLE)
    cache.add({"onnx/model.onnx": OTHER}, OTHER_REVISION)

    def state() -> dict[Path, tuple[int, int]]:
        everything = [cache.folder, *cache.folder.rglob("*")]
        return {path: (path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in everything}

    before = state()
    opened(None, environ=cache.environ)
    inspect(PIN, environ=cache.environ)
    refused(ModelNotFoundError, None, precision="int8", environ=cache.environ)
    assert state() == before


def test_the_hubs_client_is_not_imported(cache: Cache) -> None:
    from conftest import run_python

    cache.add(WHOLE)
    code = (
        "import sys\n"
        "from minice.artifacts.lock import shipped_lock\n"
        "from minice.artifacts.store import inspect\n"
        "inspect(shipped_lock().find('ms-marco-MiniLM-L6-v2'))\n"
        "print([name for name in sys.modules if 'huggingface' in name])\n"
    )
    done = run_python(code, **cache.environ)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
