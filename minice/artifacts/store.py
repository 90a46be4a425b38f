"""The store: finds a model's files, verifies them, and hands out their bytes. Nothing else reads model bytes.

A file is opened once and read into memory once; that buffer is hashed, and that buffer is what engines and
tokenizers get. Nothing is ever written, so a read-only folder works.

A file that lies in the user's folder is the one, good or bad. The hub's cache comes last, and there a file that
is not the pinned one is passed over: other revisions of a repository hold other bytes, and rightly so.
"""

import errno
import hashlib
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minice.artifacts.environment import setting
from minice.artifacts.hub_cache import CachedFile, HubCache, exists, home_folder, hub_cache
from minice.artifacts.lock import PRECISIONS, FilePin, Lock, ModelPin, known_lock
from minice.artifacts.receipt import (
    LARGEST_RECEIPT,
    Digest,
    Receipt,
    parse_receipt,
    quantized_path,
    receipt_path,
)
from minice.errors import ConfigError, InputError, IntegrityError, ModelNotFoundError

DEFAULT_MODEL: Final = "minice-l6"
BUILTIN: Final = Path(__file__).resolve().parent / "builtin"

_POINTER: Final = b"version https://git-lfs"
LARGEST_FILE: Final = 2**31 - 1  # bytes; what one ONNX file can hold
_LARGEST_POINTER: Final = 1024  # bytes; the format's own limit
_DEFAULT: Final = "the default of MINICE_HOME"
_ARGUMENT: Final = "model_dir or --model-dir"  # messages are read in Python and on the command line


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VerifiedFile:
    """Bytes whose size and SHA-256 were found to be the pinned ones.

    Attributes:
        pin: What they were compared with.
        path: Where they were read, for people; opening it again would be another file.
        data: The bytes that were hashed.
        sha256: 64 lowercase hex digits.
    """

    pin: FilePin
    path: str
    data: bytes
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelFiles:
    """What a scorer needs of a model, verified.

    Attributes:
        pin: The model that was asked for.
        precision: "fp32" or "int8".
        scheme: How the weights are stored: "fp32", or one of ``SCHEMES`` of the lock.
        model: The ONNX file's bytes.
        tokenizer: The tokenizer.json file's bytes.
        model_sha256: Digest of ``model``, 64 lowercase hex digits.
        paths: Role to path, for people.
    """

    pin: ModelPin
    precision: str
    scheme: str
    model: bytes
    tokenizer: bytes
    model_sha256: str
    paths: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReport:
    """What is on disk of one file of a model.

    Attributes:
        role: As in the lock.
        precision: As in the lock; "int8" for a file that `minice quantize` wrote.
        name: Path in the pin.
        path: Where the file lies, or None.
        size: Expected bytes; None for a quantized file whose receipt is unusable.
        status: "ok" (hashed) or "present" (right size, not hashed); "missing", or "absent" for an optional
            file; else what is wrong: "truncated", "too-long", "mismatch", "pointer", "external-data",
            "not-a-file", "outside", "unreadable", "changed" or "receipt".
        message: The same as a sentence; empty if there is nothing to say.
        place: Which place the file was found in: "package", "folder" or "hub-cache"; None if in none.
    """

    role: str
    precision: str | None
    name: str
    path: str | None
    size: int | None
    status: str
    message: str
    place: str | None = None

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the file: it may be used, or need not be there."""
        return self.status in ("ok", "present", "absent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder that is searched for a model's files.

    Attributes:
        path: The folder, which need not exist.
        origin: What made it one: "the package", an option, a variable, or "the default of" a variable.
    """

    path: str
    origin: str


def open_model(
    pin: ModelPin,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    precision: str | None = None,
    environ: Mapping[str, str] = os.environ,
    lock: Lock | None = None,
) -> ModelFiles:
    """Find, read and verify a model's graph and tokenizer.

    A folder that is given, by ``model_dir`` or by ``MINICE_MODEL_DIR``, is the only place looked in.
    Otherwise the files lie in ``MINICE_HOME/<id>/``; those of the embedded model come with the package. In a
    folder the pin's path is tried first, then its base name. The first file found is the one: if it is bad,
    that is an error and no reason to look further. A file that is in none of these is taken from the hub's own
    cache, from the first snapshot whose bytes are the pinned ones.

    Args:
        pin: Which model.
        model_dir: The only folder to look in.
        precision: "fp32" or "int8"; None takes the pin's first model file. "int8" of a pin that has none is
            the file that `minice quantize` wrote beside the fp32 file, by its receipt.
        environ: Where ``MINICE_MODEL_DIR``, ``MINICE_HOME``, ``HF_HUB_CACHE`` and its like, and the user's folders
            are taken from; a blank value is unset.
        lock: Whose other models error messages may point to; ``known_lock(environ)`` by default.

    Raises:
        ConfigError: The pin cannot have that precision, or the folder's name is none.
        ModelNotFoundError: A file is missing; says where it was looked for, and by what names.
        IntegrityError: A file is not the pinned one; says in what way.
    """
    wanted = _wanted(pin, precision)
    search = _search(pin, model_dir, environ)
    tokenizer = pin.file("tokenizer")
    missing = [file for file in (wanted.pin, tokenizer) if not _is_there(search, file)]
    if missing:
        raise _not_found(search, wanted, missing, lock)
    try:
        model = _verified_model(search, wanted)
    except _Absent as absence:
        raise _not_found(search, wanted, [wanted.pin], lock, absence) from None
    except _Refused as refusal:
        raise refusal.as_error(pin, wanted.pin, _instead(search, wanted, lock)) from None
    try:
        vocabulary = _verified(search, tokenizer)
    except _Absent as absence:
        raise _not_found(search, wanted, [tokenizer], lock, absence) from None
    except _Refused as refusal:
        raise refusal.as_error(pin, tokenizer, _replace(search, tokenizer)) from None
    return ModelFiles(
        pin=pin,
        precision=str(wanted.pin.precision),
        scheme=wanted.pin.weight_scheme,
        model=model.data,
        tokenizer=vocabulary.data,
        model_sha256=model.sha256,
        paths={"model": model.path, "tokenizer": vocabulary.path},
    )


def locate(
    pin: ModelPin,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[FileReport, ...]:
    """Report where each file of a model lies and whether its size is right; reads no model byte.

    Args:
        pin: Which model.
        model_dir: As for ``open_model``.
        environ: As for ``open_model``.

    Returns:
        One report a file, in the order of the lock; then the int8 file that `minice quantize` wrote, if any.

    Raises:
        ConfigError: The folder's name is none. Never raises for a bad file.
    """
    return _report(pin, model_dir, environ)


def inspect(
    pin: ModelPin,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    lock: Lock | None = None,
) -> tuple[FileReport, ...]:
    """Read and hash each file of a model, and report what was found.

    Args:
        pin: Which model.
        model_dir: As for ``open_model``.
        environ: As for ``open_model``.
        lock: As for ``open_model``.

    Returns:
        As ``locate``.

    Raises:
        ConfigError: The folder's name is none. Never raises for a bad file.
    """
    return _report(pin, model_dir, environ, hashed_against=known_lock(environ) if lock is None else lock)


def places(
    pin: ModelPin,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Place, ...]:
    """Return the folders that are searched for a model's files, in order.

    Args:
        pin: Which model.
        model_dir: As for ``open_model``.
        environ: As for ``open_model``.

    Raises:
        ConfigError: The folder's name is none.
    """
    search = _search(pin, model_dir, environ)
    found = [Place(path=str(BUILTIN), origin="the package")] if search.builtin else []
    if search.folder is not None:
        found.append(Place(path=str(search.folder), origin=search.origin or _DEFAULT))
    if search.cache is not None:
        found += [Place(path=str(path), origin=_cache_origin(search.cache)) for path in search.cache.repositories]
    return tuple(found)


def install_folder(
    pin: ModelPin,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Return the folder that a user's copy of a model belongs in, which need not exist.

    Args:
        pin: Which model.
        model_dir: As for ``open_model``.
        environ: As for ``open_model``.

    Raises:
        ConfigError: The folder's name is none, or the user has no home folder and none was named.
    """
    folder = _search(pin, model_dir, environ).folder
    if folder is None:
        raise ConfigError(
            "the user has no home folder to keep models in; name a folder by MINICE_HOME", where="MINICE_HOME"
        )
    return folder


def read_unpinned(path: Path, expected: Digest | None = None) -> bytes:
    """Read a model file that somebody names by its path, for tools that make other files of it.

    Args:
        path: The file; links are followed wherever they lead.
        expected: What it has to hash to; None takes it as it is.

    Returns:
        The bytes that were hashed.

    Raises:
        InputError: It cannot be read.
        IntegrityError: It is not what was expected.
    """
    try:
        data = _read(_Found(path=path, root=None, place="folder"), expected, limit=LARGEST_FILE)
        if expected is None and len(data) <= _LARGEST_POINTER and data.startswith(_POINTER):
            raise _Refused("pointer", _is_pointer(repr(str(path)), len(data), "the file"))
        return data
    except _Refused as refusal:
        if expected is not None and refusal.status in ("truncated", "too-long", "mismatch", "pointer"):
            raise IntegrityError(refusal.message, where=str(path)) from None
        raise InputError(refusal.message, where="source") from None


def not_on_disk(
    pin: ModelPin,
    *files: FilePin,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    then: str = "",
) -> ModelNotFoundError:
    """Return the error for files of a model that are missing: where they were looked for, and how they get there.

    Args:
        pin: Which model.
        files: The missing files.
        model_dir: As for ``open_model``.
        environ: As for ``open_model``.
        then: The command to run when they are there; `minice verify` by default.

    Raises:
        ConfigError: The folder's name is none.
    """
    search = _search(pin, model_dir, environ)
    missing = list(files)
    return ModelNotFoundError(
        f"not on disk: {_looked_for(search, missing)}. {_how_to_get(search, missing, then)}", where=pin.id
    )


# --- where to look -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A name that exists on disk, in one of the places.

    Files of ``root`` may not leave it by a link; None trusts all links. Those of the hub's cache are links, and
    ``cached`` says where to.
    """

    path: Path
    root: Path | None
    place: str
    cached: CachedFile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """The places of one model, in order.

    ``folder`` is the user's one, ``origin`` the option that named it (empty: the default), and ``only``
    whether it is the only place. ``cache`` is the hub's.
    """

    pin: ModelPin
    folder: Path | None
    origin: str
    only: bool
    environ: Mapping[str, str]
    cache: HubCache | None = None

    @property
    def builtin(self) -> bool:
        return self.pin.embedded and not self.only

    def candidates(self, path: str) -> Iterator[_Found]:
        names = dict.fromkeys((path, path.rpartition("/")[2]))
        if self.builtin:
            # First, so that an older or damaged copy in the user's folder cannot break a fresh install. Links
            # are fine: some installers make every file of a package a link into their cache.
            yield from (_Found(path=BUILTIN / name, root=None, place="package") for name in names)
        if self.folder is not None:
            yield from (_Found(path=self.folder / name, root=self.folder, place="folder") for name in names)

    def find(self, path: str) -> _Found | None:
        """Return the file where its first name is; not in the hub's cache, where a name alone says nothing."""
        return next((found for found in self.candidates(path) if exists(found.path)), None)

    def cached(self, pin: FilePin) -> Iterator[_Found]:
        # Only what is pinned: the cache is the hub's, so what minice made does not lie there.
        if self.cache is not None and pin in self.pin.files:
            for file in self.cache.files(pin.path):
                yield _Found(path=file.path, root=file.snapshot, place="hub-cache", cached=file)


def _search(pin: ModelPin, model_dir: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> _Search:
    given = setting("MINICE_MODEL_DIR", environ)
    if model_dir is not None:
        folder, origin = _folder(model_dir, "model_dir"), _ARGUMENT
    elif given is not None:
        folder, origin = _folder(given, "MINICE_MODEL_DIR"), "MINICE_MODEL_DIR"
    else:
        return _default_search(pin, environ)
    return _Search(pin=pin, folder=folder, origin=origin, only=True, environ=environ)


def _default_search(pin: ModelPin, environ: Mapping[str, str]) -> _Search:
    """Where no folder was named."""
    home, data = setting("MINICE_HOME", environ), _user_data_folder(environ)
    folder = None if data is None else data / "minice" / pin.id
    if home is not None:
        folder = _folder(home, "MINICE_HOME") / pin.id
    return _Search(
        pin=pin,
        folder=folder,
        origin="" if home is None else "MINICE_HOME",
        only=False,
        environ=environ,
        cache=hub_cache(pin.names, pin.revision, environ),
    )


def _folder(value: str | os.PathLike[str], where: str) -> Path:
    try:
        text = os.fsdecode(value)
    except TypeError:
        raise ConfigError(f"expected a folder, got {type(value).__name__}", where=where) from None
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ConfigError(f"expected a folder, got {text!r}, which no file system can name", where=where) from None
    if not text.strip() or "\0" in text:
        raise ConfigError(f"expected a folder, got {text!r}", where=where)
    try:
        return Path(text).absolute()
    except OSError:  # the working directory was deleted; nothing will be found, and messages say where
        return Path(text)


def _user_data_folder(environ: Mapping[str, str]) -> Path | None:
    """The platform's folder for a user's data, or None for an account that has none."""
    if sys.platform == "win32":
        local = setting("LOCALAPPDATA", environ)
        return None if local is None else Path(local)
    home = home_folder(environ)
    if sys.platform == "darwin":
        return None if home is None else home / "Library" / "Application Support"
    data = setting("XDG_DATA_HOME", environ)
    if data is not None and Path(data).is_absolute():  # the specification says to ignore a relative one
        return Path(data)
    return None if home is None else home / ".local" / "share"


# --- what is wanted ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """A model file: a pinned one, or the int8 file made from the pinned ``source``.

    Size and digest of the latter are in its receipt; until that is read they are those of the source.
    """

    pin: FilePin
    source: FilePin | None = None


def _wanted(pin: ModelPin, precision: str | None) -> _Wanted:
    if precision is None or precision in pin.precisions:
        return _Wanted(pin=pin.file("model", precision))
    if precision == "int8" and "fp32" in pin.precisions:
        return _made_from(pin.file("model", "fp32"))
    known = ", ".join(name for name in PRECISIONS if name in pin.precisions or "fp32" in pin.precisions)
    raise ConfigError(f"{pin.id!r} has no precision {precision!r}; known: {known}", where="precision")


def _made_from(source: FilePin) -> _Wanted:
    made = FilePin(
        role="model",
        precision="int8",
        path=quantized_path(source.path),
        size=source.size,
        sha256=source.sha256,
        optional=True,
    )
    return _Wanted(pin=made, source=source)


# --- reading -------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A file that is there and is not used; becomes an error or a line of a report."""

    def __init__(self, status: str, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.where = where

    def as_error(self, pin: ModelPin, file: FilePin, next_step: str) -> IntegrityError:
        return IntegrityError(f"{self.message}. {next_step}", where=f"{pin.id}/{file.path}{self.where}")


class _Absent(_Refused):
    """A file that is in no place; ``message`` says why none of those in the hub's cache is the one, if any is there."""


def _is_there(search: _Search, file: FilePin) -> bool:
    """Whether a file has the name, and in the hub's cache the size too; nothing is read."""
    if search.find(file.path) is not None:
        return True
    try:
        _cached(search, file, only_size=True)
    except _Absent:
        return False
    return True


def _cached(search: _Search, pin: FilePin, *, only_size: bool = False) -> tuple[_Found, bytes]:
    """Read a file from the first snapshot of the hub's cache that holds it.

    Raises:
        _Absent: None does.
    """
    passed_over: list[str] = []
    for found in search.cached(pin):
        try:
            return found, _read(found, Digest(sha256=pin.sha256, size=pin.size), only_size=only_size)
        except _Refused as refusal:
            passed_over.append(refusal.message)
    if search.cache is not None and pin in search.pin.files:
        passed_over += search.cache.problems()
    more = f" (and {len(passed_over) - 1:,} more)" if len(passed_over) > 1 else ""
    raise _Absent("missing", f"{passed_over[0]}{more}" if passed_over else "")


def _verified_model(search: _Search, wanted: _Wanted) -> VerifiedFile:
    if wanted.source is None:
        return _verified(search, wanted.pin)
    return _verified(search, _receipted(search, wanted))


def _verified(search: _Search, pin: FilePin) -> VerifiedFile:
    found = search.find(pin.path)
    if found is None:
        found, data = _cached(search, pin)
    else:
        data = _read(found, Digest(sha256=pin.sha256, size=pin.size))
    return VerifiedFile(pin=pin, path=str(found.path), data=data, sha256=pin.sha256)


def _receipted(search: _Search, wanted: _Wanted) -> FilePin:
    """Return a pin of the int8 file that is there, as its receipt vouches for it."""
    found, source = search.find(wanted.pin.path), wanted.source
    if found is None or source is None:
        raise _Refused("changed", f"{wanted.pin.path!r} was removed while it was being opened")
    beside = _Found(path=Path(receipt_path(str(found.path))), root=found.root, place=found.place)
    if not exists(beside.path):
        raise _Refused("receipt", f"{str(found.path)!r} has no receipt beside it, which would say what it was made of")
    try:
        receipt = parse_receipt(_read(beside, None))
        _check_receipt(receipt, source)
    except IntegrityError as error:
        where = receipt_path("") + (f":{error.where}" if error.where else "")
        raise _Refused("receipt", f"{str(beside.path)!r}: {error}", where=where) from None
    return FilePin(
        role="model",
        precision="int8",
        path=wanted.pin.path,
        size=receipt.result.size,
        sha256=receipt.result.sha256,
        optional=True,
    )


def _check_receipt(receipt: Receipt, source: FilePin) -> None:
    if receipt.source.sha256 != source.sha256:
        got = f"{receipt.source.sha256[:8]}..."
        raise IntegrityError(
            f"it was made from another file: expected {source.sha256[:8]}..., got {got}",
            where="source.sha256",
        )
    if receipt.source.size != source.size:
        raise IntegrityError(f"expected {source.size:,}, got {receipt.source.size:,}", where="source.size")
    if receipt.result.size > source.size:  # so that no receipt makes us read more than the pin does
        raise IntegrityError(
            f"expected at most {source.size:,}, the size of the source, got {receipt.result.size:,}",
            where="result.size",
        )


def _read(
    found: _Found,
    expected: Digest | None,
    *,
    only_size: bool = False,
    limit: int | None = LARGEST_RECEIPT,
) -> bytes:
    """Read a file once and verify what was read; without an expectation, read one up to a limit as it is.

    With ``only_size`` nothing is read: whether it is a file, and of the right size, is all that is checked.
    """
    shown = repr(str(found.path))
    try:
        return _read_regular(found, expected, shown, only_size=only_size, limit=limit)
    except FileNotFoundError:
        if os.path.islink(found.path):  # noqa: PTH114 - Path.is_symlink may raise
            target = os.path.realpath(found.path)
            raise _Refused("unreadable", f"{shown} is a link to {target!r}, which does not exist") from None
        raise _Refused("changed", f"{shown} was removed while it was being opened") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _Refused("unreadable", f"{shown} is a link that leads back to itself") from None
        reason = error.strerror or type(error).__name__
        raise _Refused("unreadable", f"{shown} cannot be read: {reason}") from None


def _read_regular(found: _Found, expected: Digest | None, shown: str, *, only_size: bool, limit: int | None) -> bytes:
    path = _resolved(found, shown)
    # Before opening, because opening a device can do things; O_NONBLOCK is for one that appears in between.
    _check_regular(path.stat(), shown)
    with open(path, "rb", opener=_open) as file:
        before = os.fstat(file.fileno())
        _check_regular(before, shown)
        if expected is not None and before.st_size != expected.size:
            raise _wrong_size(found, before.st_size, expected.size, file.read(_LARGEST_POINTER), shown)
        if expected is None and limit is not None and before.st_size > limit:
            raise _Refused("too-long", f"{shown} is too long: {before.st_size:,} bytes, at most {limit:,}")
        if only_size:
            return b""
        data = file.read(before.st_size + 1)  # one more byte than there should be shows that it grew
        after = os.fstat(file.fileno())
    # No look at the path again: a file that replaced this one in the meantime is not what is in the buffer.
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if not same or len(data) != before.st_size:
        raise _Refused("changed", f"{shown} changed while it was being read; try again when nothing writes to it")
    if expected is not None:
        got = hashlib.sha256(data).hexdigest()
        if got != expected.sha256:
            raise _Refused("mismatch", f"sha256 mismatch in {shown}: expected {expected.sha256}, got {got}")
    return data


def _open(path: str, flags: int) -> int:
    # The path is resolved already, so a link in its last place is one that was put there since.
    extra = ("O_NONBLOCK", "O_NOCTTY", "O_NOFOLLOW")
    return os.open(path, flags | sum(getattr(os, name, 0) for name in extra))


def _resolved(found: _Found, shown: str) -> Path:
    """Follow all links; refuse those that lead out of the root (which may be a link itself)."""
    path = Path(os.path.realpath(found.path))
    if found.cached is not None:
        if not found.cached.allows(path):
            raise _Refused("outside", f"{shown} is a link to {str(path)!r}, which is none of the cache's blobs")
        return path
    if found.root is not None and not path.is_relative_to(os.path.realpath(found.root)):
        raise _Refused(
            "outside",
            f"{shown} is a link that leaves its folder, to {str(path)!r}; expected the file itself (cp -L copies "
            "what a link stands for)",
        )
    return path


def _check_regular(status: os.stat_result, shown: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise _Refused("not-a-file", f"{shown} is not a regular file but {kind}")


def _wrong_size(found: _Found, got: int, expected: int, head: bytes, shown: str) -> _Refused:
    if got <= _LARGEST_POINTER and head.startswith(_POINTER):
        return _Refused("pointer", _is_pointer(shown, got, f"the file of {expected:,} bytes"))
    outside = [found.path.name + ending for ending in ("_data", ".data")]
    for name in outside:
        if got < expected and exists(found.path.with_name(name)):
            return _Refused(
                "external-data",
                f"{shown} keeps its weights in an external data file, {name!r}, which is refused; expected one "
                f"file of {expected:,} bytes, got {got:,}",
            )
    if got < expected:
        # Whether it was cut off or is another file altogether, its size does not tell.
        return _Refused("truncated", f"{shown} is truncated or another file: expected {expected:,} bytes, got {got:,}")
    return _Refused("too-long", f"{shown} is too long: expected {expected:,} bytes, got {got:,}")


def _is_pointer(shown: str, size: int, what: str) -> str:
    return (
        f"{shown} is a Git LFS pointer of {size:,} bytes and not {what} that it stands for; git lfs pull gets that "
        "where it came from"
    )


# --- what errors say -----------------------------------------------------------------------------------


def _described(pin: FilePin) -> str:
    return f"{pin.path} ({pin.size:,} bytes, sha256 {pin.sha256[:8]}...)"


def _source(pin: ModelPin) -> str:
    """Where people get a model's files from."""
    return f", as published in {pin.repository} at revision {pin.revision}" if pin.repository else ""


def _looked_for(search: _Search, missing: list[FilePin], absence: _Absent | None = None) -> str:
    """Every name that was tried, and where; or that the folder which was named is none.

    What was passed over in the hub's cache is said too: by ``absence``, if reading found it out already.
    """
    folder = search.folder
    if search.only and folder is not None and not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir may raise
        state = "is not a folder" if exists(folder) else "does not exist"
        return f"{str(folder)!r}, named by {search.origin}, {state}"
    names = " and no ".join(" or ".join(dict.fromkeys((repr(file.path), repr(file.name)))) for file in missing)
    passed_over = [] if absence is None else [absence.message]
    if absence is None:
        for file in missing:
            try:
                _cached(search, file)
            except _Absent as reason:
                passed_over.append(reason.message)
    notes = "; ".join(dict.fromkeys(filter(None, passed_over)))
    return f"no {names} in {_places(search)}{f'. Not taken from that cache: {notes}' if notes else ''}"


def _how_to_get(search: _Search, files: list[FilePin], then: str = "") -> str:
    """The next step for somebody who lacks files; the one place that says how a model is installed."""
    wanted = " and ".join(_described(file) for file in files)
    if search.folder is None:
        step = f"Put {wanted} into a folder and name it by MINICE_MODEL_DIR{_source(search.pin)}"
        return f"{step}; or name a folder by MINICE_HOME. {_fetch(search, then)}" if search.pin.repository else step
    if search.pin.repository:
        by_hand = f"put {wanted} into {str(search.folder)!r}{_source(search.pin)}"
        return f"Without a network, {by_hand}; else minice gets them. {_fetch(search, then)}"
    folder = shlex.quote(str(search.folder))
    names = " ".join(shlex.quote(file.name) for file in files)
    then = then or f"minice verify {search.pin.id}{_folder_option(search)}"
    command = f"mkdir -p {folder} && cp {names} {folder}/ && {then}"
    return f"Put {wanted} into {str(search.folder)!r}. Run: {command}"


def _fetch(search: _Search, then: str = "") -> str:
    return f"Run: minice fetch {search.pin.id}{_folder_option(search)}{then and f' && {then}'}"


def _folder_option(search: _Search) -> str:
    return f" --model-dir {shlex.quote(str(search.folder))}" if search.only else ""


def _replace(search: _Search, file: FilePin) -> str:
    """The next step for somebody who has a bad file."""
    found = search.find(file.path)
    if found is not None and found.root is None:
        return "Install minice again: the file is part of it"
    if search.pin.repository:
        return _fetch(search)
    return f"Replace it by {_described(file)}"


def _instead(search: _Search, wanted: _Wanted, lock: Lock | None) -> str:
    """The next step for somebody who has a bad model file."""
    found = search.find(wanted.pin.path)
    if found is None or found.root is not None:
        other = _other_models(search, wanted, lock)
        if other:
            return other
    if wanted.source is not None:
        return f"Run: minice quantize {_quantize_target(search)}"
    return _replace(search, wanted.pin)


def _quantize_target(search: _Search) -> str:
    return shlex.quote(str(search.folder)) if search.only else search.pin.id


def _not_found(
    search: _Search, wanted: _Wanted, missing: list[FilePin], lock: Lock | None, absence: _Absent | None = None
) -> ModelNotFoundError:
    # Without a tokenizer no other file of the folder helps either.
    step = _other_models(search, wanted, lock) if missing == [wanted.pin] else ""
    if not step and wanted.source is not None and wanted.pin in missing:
        fp32 = [wanted.source, *(file for file in missing if file is not wanted.pin)]
        step = _how_to_get(search, fp32, then=f"minice quantize {_quantize_target(search)}")
    # Scoring does not need these, but the command that checks the model does.
    others = [
        file
        for file in search.pin.files
        if file.role not in ("model", "tokenizer") and not file.optional and not _is_there(search, file)
    ]
    problem = f"not on disk: {_looked_for(search, missing, absence)}"
    return ModelNotFoundError(f"{problem}. {step or _how_to_get(search, missing + others)}", where=search.pin.id)


def _places(search: _Search) -> str:
    cache = "" if search.cache is None else f"the hub's cache {_cache_shown(search.cache)}"
    if search.folder is None:
        nowhere = "any place: the user has no home folder, and neither MINICE_HOME nor MINICE_MODEL_DIR is set"
        return f"{cache}, nor in {nowhere}" if cache else nowhere
    shown = repr(str(search.folder))
    if search.only:
        return f"{shown} ({search.origin} names it, so no other place is searched)"
    if search.builtin:
        shown = f"the package or {shown}"
    return f"{shown} ({search.origin or _DEFAULT}){cache and f' or {cache}'}"


def _cache_shown(cache: HubCache) -> str:
    return f"{str(cache.folder)!r} ({_cache_origin(cache)})"


def _cache_origin(cache: HubCache) -> str:
    return cache.origin or "the default of HF_HUB_CACHE"


def _other_models(search: _Search, wanted: _Wanted, lock: Lock | None) -> str:
    """Say which known model or precision is there, if its bytes are one; else nothing."""
    for other in _model_files(search.pin):
        if other != wanted and _has(search, other):
            precision = other.pin.precision
            made = f", or run: minice quantize {_quantize_target(search)}" if wanted.source else ""
            use = f"use precision {precision} (--precision {precision})"
            return f"The {precision} file of this model is there: {use}{made}"
    return _other_pin(search, known_lock(search.environ) if lock is None else lock)


def _other_pin(search: _Search, lock: Lock) -> str:
    """Say which other model of the lock the folder holds, if its bytes are one; else nothing."""
    for pin in lock.models:
        for other in _model_files(pin):
            if pin.id != search.pin.id and _holds(search, pin, other):
                return f"That folder holds another model, {pin.id!r} in {other.pin.precision}: name that one to use it"
    return ""


def _holds(search: _Search, pin: ModelPin, model: _Wanted) -> bool:
    """Whether the searched folder holds this model file of a pin, to the byte."""
    place = _Search(pin=pin, folder=search.folder, origin=search.origin, only=True, environ=search.environ)
    return _has(place, model)


def _has(search: _Search, model: _Wanted) -> bool:
    """Whether a place holds this model file, to the byte."""
    if not _is_there(search, model.pin):
        return False
    try:
        _verified_model(search, model)
    except _Refused:
        return False
    return True


def _model_files(pin: ModelPin) -> list[_Wanted]:
    """Every model file a pin can have: the pinned ones, and an int8 file where it pins none."""
    files = [_Wanted(pin=file) for file in pin.files if file.role == "model"]
    if "fp32" in pin.precisions and "int8" not in pin.precisions:
        files.append(_made_from(pin.file("model", "fp32")))
    return files


# --- reports -------------------------------------------------------------------------------------------


def _report(
    pin: ModelPin,
    model_dir: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    *,
    hashed_against: Lock | None = None,
) -> tuple[FileReport, ...]:
    """Without a lock no model byte is read; with one, what is not this model is looked up among its other pins."""
    search = _search(pin, model_dir, environ)
    files = [_Wanted(pin=file) for file in pin.files]
    # A file that minice quantize may have made is worth a line only where it is there.
    files += [made for made in _model_files(pin) if made.source and search.find(made.pin.path)]
    return tuple(_report_file(search, wanted, hashed_against) for wanted in files)


def _report_file(search: _Search, wanted: _Wanted, lock: Lock | None) -> FileReport:
    pin = wanted.pin
    found = search.find(pin.path)
    size: int | None = pin.size if wanted.source is None else None
    status, message = ("present" if lock is None else "ok"), ""
    try:
        if wanted.source is not None:
            pin = _receipted(search, wanted)
            size = pin.size
        if found is None:
            found, _ = _cached(search, pin, only_size=lock is None)
        else:
            _read(found, Digest(sha256=pin.sha256, size=pin.size), only_size=lock is None)
    except _Absent as absence:
        status, message = _absent(search, pin, absence, lock)
    except _Refused as refusal:
        status, message = refusal.status, refusal.message
        if found is not None and found.root is not None and pin.role == "model" and lock is not None:
            other = _other_pin(search, lock)
            message += f". {other}" if other else ""
    return FileReport(
        role=pin.role,
        precision=pin.precision,
        name=pin.path,
        path=None if found is None else str(found.path),
        size=size,
        status=status,
        message=message,
        place=None if found is None else found.place,
    )


def _absent(search: _Search, pin: FilePin, absence: _Absent, lock: Lock | None) -> tuple[str, str]:
    """Status and message of a file that is in no place."""
    if pin.optional:
        return "absent", "optional"
    # As opening it would say; without a lock nothing is read, not even to find out what the folder holds.
    step = _other_models(search, _Wanted(pin=pin), lock) if lock is not None and pin.role == "model" else ""
    return "missing", f"{_looked_for(search, [pin], absence)}. {step or _how_to_get(search, [pin])}"
