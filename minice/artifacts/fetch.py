"""Fetching: a pinned model from the hub, through the hub's own client, into the folder where the store looks.

The only place in minice that opens a connection. Files arrive in a temporary folder beside the model's, are
compared with the pin there, and move into place when all of them are right. Whatever goes wrong before that,
the temporary folder is removed: by this process, or by the next fetch if it was killed. The store never
looks into it.
"""

import errno
import inspect as inspection
import logging
import os
import re
import shlex
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from minice import __version__
from minice.artifacts.environment import setting
from minice.artifacts.lock import FilePin, Lock, ModelPin, known_lock
from minice.artifacts.receipt import Digest
from minice.artifacts.store import FileReport, inspect, install_folder, read_unpinned
from minice.errors import (
    ConfigError,
    EngineUnavailableError,
    InputError,
    IntegrityError,
    MiniceError,
    ModelNotFoundError,
)

_TRUE: Final = ("1", "ON", "YES", "TRUE")  # as the hub's client reads its switches
# A full disk, a used-up quota, a limit on the size of one file.
_NO_ROOM: Final = tuple(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name))

_ANSWER_S: Final = 10  # seconds that an endpoint has for its first answer
_SLACK: Final = 1 << 20  # bytes
_LARGEST_POINTER: Final = 1024  # bytes

Say = Callable[[str], None]


class _TooLong(Exception):
    """A body goes on beyond the size that is pinned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedFile:
    """One file of a model that is there and was hashed.

    Attributes:
        name: Path in the pin.
        path: Where it lies.
        size: Bytes.
        sha256: 64 lowercase hex digits.
        fetched: Whether it was downloaded just now; False if it was there already.
    """

    name: str
    path: str
    size: int
    sha256: str
    fetched: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchReport:
    """What a fetch came to: every file that the model needs, verified.

    Attributes:
        model: Id of the pin.
        files: In the order of the lock; optional ones where they are there.
    """

    model: str
    files: tuple[FetchedFile, ...]

    @property
    def fetched(self) -> bool:
        """Whether anything was downloaded."""
        return any(file.fetched for file in self.files)


def fetch_model(
    pin: ModelPin,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    progress: bool = False,
    say: Say = lambda text: None,
    lock: Lock | None = None,
) -> FetchReport:
    """Download the files of a model that are not on disk, verify them, and move them into place.

    A file that is good wherever the store looks is not fetched again; a bad one in the model's folder is
    replaced when a good one is verified, not before. Optional files are not fetched, but a bad one is replaced.
    A model that is complete needs neither a connection nor the hub's client.

    Two fetches into one folder go one after the other. Of a fetch that fails nothing stays, except that the
    folder around the model's may be new.

    Args:
        pin: Which model.
        model_dir: As for ``open_model``; the files go there.
        environ: Where minice's own variables are taken from, and ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and
            ``TRANSFORMERS_OFFLINE``. The rest of the client's settings (``HF_TOKEN``, timeouts, proxies) the
            client reads from the process.
        progress: Whether the client may draw its bar on stderr.
        say: Is told what goes on, a sentence at a time.
        lock: As for ``open_model``.

    Raises:
        ConfigError: A variable forbids connecting or is malformed, or the folder's name is none.
        EngineUnavailableError: The hub's client is not installed.
        ModelNotFoundError: The files could not be had, and why: the pin names no repository, the endpoint
            refused or was not reached, the disk is full, the folder cannot be written.
        IntegrityError: What arrived is not what is pinned, or a bad file stands where fetching cannot help.
    """
    lock = known_lock(environ) if lock is None else lock
    reports = _check(pin, model_dir, environ, lock)
    files = _lacking(pin, reports)
    if files:
        folder = install_folder(pin, model_dir=model_dir, environ=environ)
        _refuse_unpublished(pin, reports)
        again = f"minice fetch {pin.id}" + (f" --model-dir {shlex.quote(str(folder))}" if model_dir is not None else "")
        client = _Client(pin=pin, folder=folder, again=again, environ=environ, progress=progress, say=say)
        with client.explaining(files), _alone(folder, say) as temporary:
            # The fetch that this one waited for may have brought them.
            files = _lacking(pin, _check(pin, model_dir, environ, lock))
            if files:
                client.download(files, temporary)
                _install(temporary, folder, files)
        reports = _check(pin, model_dir, environ, lock)
        for report in reports:
            if not report.good:  # the store found another file first, or something replaced ours since
                raise IntegrityError(f"{report.name!r} was fetched, but {report.message}", where=pin.id)
    else:
        _clear_up(pin, model_dir, environ)
    return FetchReport(model=pin.id, files=_described(pin, reports, files))


def _described(pin: ModelPin, reports: Sequence[FileReport], fetched: Sequence[FilePin]) -> tuple[FetchedFile, ...]:
    return tuple(
        FetchedFile(name=file.path, path=report.path, size=file.size, sha256=file.sha256, fetched=file in fetched)
        for file, report in zip(pin.files, reports, strict=True)
        if report.path is not None
    )


def _check(
    pin: ModelPin, model_dir: str | os.PathLike[str] | None, environ: Mapping[str, str], lock: Lock
) -> tuple[FileReport, ...]:
    """Hash what is there, one report for each file of the pin; one that `minice quantize` wrote is not in the pin."""
    return inspect(pin, model_dir=model_dir, environ=environ, lock=lock)[: len(pin.files)]


def _lacking(pin: ModelPin, reports: Sequence[FileReport]) -> list[FilePin]:
    return [file for file, report in zip(pin.files, reports, strict=True) if not report.good]


def _refuse_unpublished(pin: ModelPin, reports: Sequence[FileReport]) -> None:
    """Refuse a pin that does not say where its files come from."""
    if pin.repository and pin.revision:
        return
    wrong = "; ".join(f"{report.name}: {report.message}" for report in reports if not report.good)
    how = "its files come with the package: install minice again" if pin.embedded else "its files get there by copying"
    raise ModelNotFoundError(
        f"the pin names no repository and revision to fetch from; {how}. What is wrong: {wrong}", where=pin.id
    )


# --- the folder ----------------------------------------------------------------------------------------


@contextmanager
def _alone(folder: Path, say: Say | None) -> Iterator[Path]:
    """Hold the lock of a model's folder; yield the empty temporary folder, and remove both afterwards.

    The name of the temporary folder is always the same, so the next fetch clears what a killed one left.
    Without anybody to tell, nothing is waited for: a lock that another holds is a TimeoutError.
    """
    from filelock import FileLock, Timeout

    temporary = _beside(folder)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    path = _lock_path(temporary)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if say is None:
            raise
        say(f"another fetch into {str(folder)!r} is running; waiting until it ends")
        lock.acquire()
    try:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.mkdir()
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if sys.platform != "win32":  # there the lock removes its file itself, and nobody can while it is open
            # While it is held: who waits for it notices that its name is gone, and makes it anew.
            with suppress(OSError):
                path.unlink()
        lock.release()


def _clear_up(pin: ModelPin, model_dir: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> None:
    """Remove what a fetch that was killed left beside a model that is complete; nobody needs to know if that fails."""
    with suppress(ConfigError, OSError, ImportError):
        folder = install_folder(pin, model_dir=model_dir, environ=environ)
        temporary = _beside(folder)
        if temporary.exists() or _lock_path(temporary).exists():
            with _alone(folder, None):
                pass


def _beside(folder: Path) -> Path:
    """Name the temporary folder: beside the model's folder, so that moving is renaming.

    If the folder is a mount point, or its parent may not be written, then inside it. The dot keeps it from being
    a model: no id starts with one.
    """
    parent = folder.parent
    inside = folder.is_dir() and (folder.stat().st_dev != parent.stat().st_dev or not os.access(parent, os.W_OK))
    return folder / ".minice-fetch" if inside else parent / f".{folder.name}.minice-fetch"


def _lock_path(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def _install(temporary: Path, folder: Path, files: Sequence[FilePin]) -> None:
    """Move verified files into place: the whole folder where there was none, else one by one, the model last."""
    staged = temporary / "model"
    if not os.path.lexists(folder):
        for place in {staged, *((staged / file.path).parent for file in files)}:
            _sync(place)
        staged.rename(folder)
        _sync(folder.parent)
        return
    for file in files:  # before anything is moved
        _check_target(folder, file)
    for file in sorted(files, key=lambda file: file.role == "model"):
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        (staged / file.path).replace(target)
        _sync(target.parent)


def _check_target(folder: Path, file: FilePin) -> None:
    """Refuse a place that the file cannot take: a folder of its name, or a way there that leaves the model's folder."""
    target = folder / file.path
    if target.is_dir() and not target.is_symlink():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    around = Path(os.path.realpath(target.parent))
    if not around.is_relative_to(os.path.realpath(folder)):
        raise OSError(errno.EXDEV, f"a link leads out of the model's folder, to {str(around)!r}", str(target.parent))
    if os.path.lexists(around) and not around.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target.parent))


def _sync(path: Path) -> None:
    """Make a file's bytes or a folder's names durable, where the system can."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR
    with suppress(OSError):
        handle = os.open(path, flags)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- the hub's client ----------------------------------------------------------------------------------


class _Client:
    """The hub's own client, kept quiet, and its errors told in our words."""

    def __init__(
        self, *, pin: ModelPin, folder: Path, again: str, environ: Mapping[str, str], progress: bool, say: Say
    ) -> None:
        self._pin = pin
        self._folder = folder
        self._again = again
        self._progress = progress
        self._say = say
        _refuse_offline(environ)  # first: offline, the client must not even be imported
        self._hub = _import_hub()
        self._endpoint = _endpoint(environ, self._hub)
        self._source = f"{pin.repository} at revision {pin.revision}"

    def download(self, files: Sequence[FilePin], temporary: Path) -> None:
        """Download and verify files; in the end they, and nothing else, are in ``temporary / "model"``."""
        needed, free = sum(file.size for file in files), shutil.disk_usage(temporary).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{free:,} bytes are free", str(temporary))
        self._say(f"fetching {self._source} from {self._shown_endpoint} into {str(self._folder)!r}")
        self._greet(max(files, key=lambda file: file.size))
        for file in sorted(files, key=lambda file: file.size):  # what may be refused is, before the long one
            self._say(f"{file.path}: {file.size:,} bytes")
            path = self._download(file, temporary)
            self._verify(file, path)
            _sync(path)
            verified = temporary / "model" / file.path
            verified.parent.mkdir(parents=True, exist_ok=True)
            path.rename(verified)  # away from what the client notes about its downloads

    def _greet(self, file: FilePin) -> None:
        """Ask for a file's head once: of an endpoint that says nothing, the client itself asks for minutes."""
        with self._asking(file):
            url = self._hub.hf_hub_url(
                self._pin.repository, file.path, revision=self._pin.revision, endpoint=self._endpoint
            )
            size = self._hub.get_hf_file_metadata(
                url, timeout=_ANSWER_S, library_name="minice", library_version=__version__
            ).size
        # What is as small as a Git LFS pointer costs nothing, and is worth a look.
        if size is not None and size != file.size and size > _LARGEST_POINTER:
            raise IntegrityError(
                f"what {self._shown_endpoint} has as {file.path!r} of {self._source} is not what is pinned: expected "
                f"{file.size:,} bytes, got {size:,}. Nothing was downloaded; {self._by_hand}",
                where=self._pin.id,
            )

    def _download(self, file: FilePin, temporary: Path) -> Path:
        with self._asking(file):
            path: str = self._hub.hf_hub_download(
                repo_id=self._pin.repository,
                filename=file.path,
                revision=self._pin.revision,
                endpoint=self._endpoint,
                local_dir=temporary / "download",
                # The store has looked into the real one; a bad file there must not be copied again and again.
                cache_dir=temporary / "cache",
                library_name="minice",
                library_version=__version__,
                **self._bounded(file),
            )
        return Path(path)

    def _bounded(self, file: FilePin) -> dict[str, Any]:
        """Make the client stop at a body that does not end, where it lets us watch."""
        if "tqdm_class" not in inspection.signature(self._hub.hf_hub_download).parameters:
            return {}
        most = 2 * file.size + _SLACK  # what is resumed is counted again

        class Bounded(self._hub.utils.tqdm):  # type: ignore[misc, name-defined]  # it has no types
            seen = 0

            def update(self, n: float | None = 1) -> bool | None:
                Bounded.seen += int(n or 0)
                if Bounded.seen > most:
                    raise _TooLong(f"it sends more than the {file.size:,} bytes that are pinned")
                drawn: bool | None = super().update(n)
                return drawn

        return {"tqdm_class": Bounded}

    @contextmanager
    def _asking(self, file: FilePin) -> Iterator[None]:
        """Keep the client quiet, and tell what it raises in our words."""
        try:
            with _quiet(self._hub, progress=self._progress, retrying=lambda: self._say(f"{file.path}: trying again")):
                yield
        except (MiniceError, KeyboardInterrupt):
            raise
        # Whatever the client and the libraries that it connects by raise, and they differ from version to version.
        except Exception as error:
            if _is_full(error):
                raise
            raise self._failure(file, error) from error

    def _verify(self, file: FilePin, path: Path) -> None:
        try:
            read_unpinned(path, Digest(sha256=file.sha256, size=file.size))
        except (IntegrityError, InputError) as error:
            reason = error.message.replace(repr(str(path)), repr(file.path))
            raise IntegrityError(
                f"what arrived is not what is pinned, and was deleted: {reason}. From {self._source}, "
                f"{self._shown_endpoint}. If it comes like this again, that place serves other bytes: {self._by_hand}",
                where=self._pin.id,
            ) from None

    @contextmanager
    def explaining(self, files: Sequence[FilePin]) -> Iterator[None]:
        """Turn what the system refuses while files are written into our own error."""
        try:
            yield
        except OSError as error:
            folder = repr(str(self._folder))
            if _is_full(error):
                needed = sum(file.size for file in files)
                reason = f"no room for them: {needed:,} bytes are needed beside {folder} ({error.strerror})"
            else:
                where = error.filename or self._folder
                reason = f"cannot write {str(where)!r}: {error.strerror or type(error).__name__}"
            raise ModelNotFoundError(
                f"could not be fetched: {reason}. Nothing was kept; change that, or name another folder by "
                f"--model-dir or MINICE_HOME. Run: {self._again}",
                where=self._pin.id,
            ) from error

    @property
    def _shown_endpoint(self) -> str:
        return _shown(self._endpoint)

    @property
    def _by_hand(self) -> str:
        return f"copy the files into {str(self._folder)!r} from a machine that has them"

    def _failure(self, file: FilePin, error: BaseException) -> ModelNotFoundError | ConfigError:
        """Say why the client gave up on a file, and what to do."""
        if any(isinstance(cause, self._hub.utils.OfflineModeIsEnabled) for cause in _causes(error)):
            return _offline("HF_HUB_OFFLINE", "it was set when the hub's client was imported")
        answer = next((got for cause in _causes(error) if (got := getattr(cause, "response", None)) is not None), None)
        reason = _refusal(answer) if answer is not None else _breakdown(error)
        return ModelNotFoundError(
            f"could not fetch {file.path!r} of {self._source} from {self._shown_endpoint}: {reason}. Nothing was "
            f"kept. Run: {self._again} (once that is mended), or {self._by_hand}",
            where=self._pin.id,
        )


def _refuse_offline(environ: Mapping[str, str]) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(name):  # as the client has it: the second counts where the first is empty
            if environ[name].upper() in _TRUE:
                raise _offline(name, f"it is {environ[name]!r}")
            return


def _offline(name: str, state: str) -> ConfigError:
    return ConfigError(
        f"fetching has to connect, and this forbids it ({state}); unset it for this command, or copy the model's "
        "files from another machine",
        where=name,
    )


def _import_hub() -> Any:
    """Import the client and what locks folders, quietly."""
    with _settings_of_the_process, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import filelock  # noqa: F401
            import huggingface_hub
            import huggingface_hub.constants
            import huggingface_hub.file_download  # now, so that its logger is set up before anybody looks at it
            import huggingface_hub.utils
        except ImportError as error:
            raise EngineUnavailableError(
                f"fetching needs the hub's client, which cannot be imported ({error}). Run: pip install 'minice[fetch]'"
            ) from error
        except ValueError as error:  # it reads its numbers from the environment as it is imported
            raise ConfigError(
                f"the hub's client refuses a variable of its own ({error}); look at those that start with HF_HUB_"
            ) from error
    return huggingface_hub


def _endpoint(environ: Mapping[str, str], hub: Any) -> str:
    """Return the address to connect to; the client's own idea of it dates from its import, and takes blank as given."""
    given = setting("HF_ENDPOINT", environ)
    if given is None:
        default: str = getattr(hub.constants, "_HF_DEFAULT_ENDPOINT", hub.constants.ENDPOINT)
        return default
    endpoint = given.strip().rstrip("/")
    try:
        parts = urlsplit(endpoint)
        _ = parts.port  # a bad one is noticed when it is asked for
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            "expected an address such as https://hub.example, without a query; got something else, which is not "
            "shown because it may hold a password",
            where="HF_ENDPOINT",
        )
    return endpoint


def _shown(endpoint: str) -> str:
    """An endpoint without user name and password."""
    parts = urlsplit(endpoint)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port is not None else ''}{parts.path}"


@contextmanager
def _quiet(hub: Any, *, progress: bool, retrying: Callable[[], None]) -> Iterator[None]:
    """Keep the client's warnings, log lines and, unless wanted, bars off stderr; leave all as it was.

    These are settings of the process: one download at a time changes them, and puts back what it found.
    """
    with _settings_of_the_process:
        yield from _quietly(hub, progress=progress, retrying=retrying)


_settings_of_the_process = threading.Lock()


def _quietly(hub: Any, *, progress: bool, retrying: Callable[[], None]) -> Iterator[None]:
    logger = logging.getLogger("huggingface_hub")
    handlers = logger.handlers
    bars = not progress and not hub.utils.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.handlers = [_Retries(retrying)]
        if bars:
            hub.utils.disable_progress_bars()
        try:
            yield
        finally:
            logger.handlers = handlers
            if bars:
                hub.utils.enable_progress_bars()


class _Retries(logging.Handler):
    """Notices that the client tries again; its own words have addresses in them that may be signed."""

    def __init__(self, retrying: Callable[[], None]) -> None:
        super().__init__()
        self._retrying = retrying

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(r"before retry|retrying in|resume download", record.getMessage(), re.IGNORECASE):
            self._retrying()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, then what caused it, to the first cause."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_full(error: BaseException) -> bool:
    return any(isinstance(cause, OSError) and cause.errno in _NO_ROOM for cause in _causes(error))


def _refusal(answer: Any) -> str:
    """What an answer of the endpoint means; the codes are those of the hub."""
    code, status = answer.headers.get("X-Error-Code"), answer.status_code
    if code == "GatedRepo" or status == 403:
        return "access to it is gated or forbidden; accept its conditions there, and set HF_TOKEN to a token of yours"
    if code == "RepoNotFound" or status == 401:
        return "there is no such repository, or it is private; HF_TOKEN may hold no token, or one without access"
    if code == "RevisionNotFound":
        return "the repository has no such revision"
    if code == "EntryNotFound" or status == 404:
        return "there is no such file"
    if status == 429:
        wait = answer.headers.get("Retry-After", "")
        return f"too many requests (429); try again {f'in {wait} s' if wait.isdecimal() else 'later'}"
    return f"it answered with status {status}"


def _breakdown(error: BaseException) -> str:
    """What broke without an answer."""
    causes = list(_causes(error))
    names = [type(cause).__name__ for cause in causes]
    if "FileMetadataError" in names:
        return "it does not answer as a hub does; a proxy or login page may stand in between"
    if any("Timeout" in name for name in names):
        return "no answer in time"
    for cause in reversed(causes):
        if isinstance(cause, OSError) and cause.strerror:
            return f"the connection failed ({cause.strerror})"
    return f"the transfer broke off ({_public(str(causes[-1]).partition(chr(10))[0])})"


def _public(text: str) -> str:
    """Take out of addresses what may be secret: user names, passwords, signatures.

    >>> _public("GET https://me:pass@host/file?signature=1 failed")
    'GET https://host/file failed'
    """
    return re.sub(r"\?\S+", "", re.sub(r"//[^/@\s]*@", "//", text))
