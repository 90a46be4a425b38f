"""models.lock: which files a model consists of, and the digests that make them that model.

The lock is TOML so that people can review it as a diff; `tools/make_lock.py` writes it. Everything in it is
checked when it is parsed, so the rest of minice never meets a path with "..", a digest in capitals or a
model without a tokenizer.
"""

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from minice.artifacts.environment import setting
from minice.artifacts.receipt import SCHEME
from minice.errors import ConfigError, LockError, ModelNotFoundError
from minice.scores import ScoreScale

LOCK_VERSION: Final = 1
ROLES: Final = ("model", "tokenizer", "config", "vocab")
PRECISIONS: Final = ("fp32", "int8")
# How an int8 file's weights were rounded: as minice quantize does, without a key; by another rule that leaves
# activations alone; or by one that rounds activations too, over the batch or by constants in the file.
SCHEMES: Final = (SCHEME, "int8-weight-only", "int8-dynamic", "int8-static")
SHORTEST_PAIR: Final = 5  # [CLS] q [SEP] p [SEP]

LARGEST_LOCK: Final = 1 << 20  # bytes; a pin has about 1,000
_PACKAGE: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePin:
    """One file of a model, named by its bytes.

    Attributes:
        role: What the file is for: one of ``ROLES``.
        path: POSIX path relative to the model's folder; a flat folder may hold its base name instead.
        size: Bytes.
        sha256: 64 lowercase hex digits.
        precision: One of ``PRECISIONS`` on a model file, None on any other.
        optional: Whether the model is complete without it.
        scheme: One of ``SCHEMES`` on an int8 model file; None is the first of them. None on any other.
    """

    role: str
    path: str
    size: int
    sha256: str
    precision: str | None = None
    optional: bool = False
    scheme: str | None = None

    @property
    def weight_scheme(self) -> str:
        """How a model file stores its weights: "fp32", or one of ``SCHEMES``."""
        return self.scheme or (SCHEME if self.precision == "int8" else "fp32")

    @property
    def name(self) -> str:
        """The base name of ``path``."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPin:
    """One model: its files, and what they mean.

    Attributes:
        id: The name that people type; also the name of its folder below ``MINICE_HOME``.
        license: SPDX expression of the weights.
        max_length: Tokens in one pair, special tokens included.
        scale: What the model's numbers mean.
        files: In the order of the lock; the first model file is the default precision.
        repository: ``owner/name`` it is published under, or None.
        revision: 40 hex digits, for people and for fetching; the digests are the identity.
        aliases: Other names of the same model.
        embedded: Whether its files, the optional ones excepted, ship inside the package.
    """

    id: str
    license: str
    max_length: int
    scale: ScoreScale
    files: tuple[FilePin, ...]
    repository: str | None = None
    revision: str | None = None
    aliases: tuple[str, ...] = ()
    embedded: bool = False

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of the pinned model files, the default first."""
        return tuple(file.precision for file in self.files if file.precision is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name this model answers to."""
        return (self.id, *([self.repository] if self.repository else []), *self.aliases)

    def file(self, role: str, precision: str | None = None) -> FilePin:
        """Return the file of a role; of the model files the one of a precision.

        Args:
            role: One of ``ROLES``.
            precision: One of ``PRECISIONS``; None takes the first file of the role.

        Raises:
            ConfigError: The pin has no such file; names those it has.
        """
        of_role = [file for file in self.files if file.role == role]
        for file in of_role:
            if precision is None or file.precision == precision:
                return file
        if not of_role:
            roles = ", ".join(dict.fromkeys(file.role for file in self.files))
            raise ConfigError(f"{self.id!r} has no {role!r} file; it has: {roles}", where="role")
        known = ", ".join(self.precisions)
        raise ConfigError(
            f"{self.id!r} has no {role} file of precision {precision!r}; it has: {known}", where="precision"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """A parsed lock: every model minice knows, in file order."""

    models: tuple[ModelPin, ...]
    version: int = LOCK_VERSION

    def find(self, name: str) -> ModelPin:
        """Return the pin with this id, repository or alias; the match is exact.

        Raises:
            ModelNotFoundError: No pin has that name; names the nearest one and lists all ids.
        """
        known = {known: pin for pin in self.models for known in pin.names}
        if name in known:
            return known[name]
        folded = {known_name.casefold(): known_name for known_name in known}
        near = difflib.get_close_matches(name.casefold(), folded, n=1)
        hint = f"; did you mean {folded[near[0]]!r}?" if near else ""
        ids = ", ".join(pin.id for pin in self.models)
        raise ModelNotFoundError(f"no model is pinned as {name!r}; known: {ids}{hint}", where="model")

    def owner(self, name: str) -> ModelPin | None:
        """Return the pin that has this name in upper, lower or mixed case: the one that bars others from it."""
        folded = name.casefold()
        return next((pin for pin in self.models if folded in map(str.casefold, pin.names)), None)


@cache
def shipped_lock() -> Lock:
    """Return the lock that came with this minice.

    In an installed wheel it lies inside the package. In a checkout it lies beside the package, and is taken
    from there only when pyproject.toml is its neighbour: a file of that name in a site-packages folder
    is not ours.

    Raises:
        LockError: The file is missing, unreadable or malformed; the installation is broken.
    """
    packaged, checkout = _PACKAGE / "models.lock", _PACKAGE.parent / "models.lock"
    in_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    path = checkout if in_checkout and not packaged.is_file() else packaged
    try:
        return parse_lock(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"cannot read {str(path)!r} ({error}); install minice again", where="models.lock") from error


def known_lock(environ: Mapping[str, str] = os.environ) -> Lock:
    """Return every model that has a pin: the shipped lock, then that of the file which ``MINICE_LOCK`` names.

    A user's pin cannot take a name of a shipped one, so that no variable changes what a shipped name means.

    Args:
        environ: Where the variable is taken from; blank is unset.

    Raises:
        LockError: Either file is missing, unreadable or malformed, or a name is taken; ``where`` begins with
            ``MINICE_LOCK`` if it is the user's.
    """
    path = setting("MINICE_LOCK", environ)
    if path is None:
        return shipped_lock()
    return join_locks(shipped_lock(), read_lock(path, "MINICE_LOCK"), f"MINICE_LOCK: {path!r}")


def read_lock(path: str | os.PathLike[str], origin: str) -> Lock:
    """Read and check a user's lock file.

    Args:
        path: The file.
        origin: Who named it; goes before the place in errors.

    Raises:
        LockError: It cannot be read, or does not follow the format.
    """
    text = read_lock_text(path, origin)
    try:
        return parse_lock(text)
    except LockError as error:
        place = f"{origin}: {os.fspath(path)!r}{f': {error.where}' if error.where else ''}"
        raise LockError(error.message, where=place) from None


def read_lock_text(path: str | os.PathLike[str], origin: str) -> str:
    """Read a file that should be a lock.

    Args:
        path: The file.
        origin: Who named it; ``where`` of errors.

    Raises:
        LockError: It cannot be read, is no regular file, too long for a lock, or not text.
    """
    try:
        # utf-8-sig: editors that put a mark before the text exist, and TOML knows none.
        return _read_small(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a NUL
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise LockError(
            f"cannot read {os.fspath(path)!r}: {reason}; expected a lock as minice lock prints it", where=origin
        ) from None


def _read_small(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file of at most ``LARGEST_LOCK``; a pipe would keep us waiting, and a device never end."""
    _check_small(Path(path).stat())  # before opening, because opening a device can do things
    with open(path, "rb", opener=_open_at_once) as file:
        _check_small(os.fstat(file.fileno()))
        data = file.read(LARGEST_LOCK + 1)
    if len(data) > LARGEST_LOCK:
        raise ValueError(f"it has more than {LARGEST_LOCK:,} bytes")
    return data


def _check_small(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > LARGEST_LOCK:
        raise ValueError(f"it has {status.st_size:,} bytes, more than {LARGEST_LOCK:,}")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def join_locks(shipped: Lock, user: Lock, origin: str) -> Lock:
    """Put a user's pins behind the shipped ones.

    Raises:
        LockError: A name of a user's pin is taken, or the pin says that it is embedded; ``where`` begins with
            ``origin``.
    """
    for index, pin in enumerate(user.models):
        if pin.embedded:
            raise LockError(
                "only a model that comes with the package is embedded; leave it out",
                where=f"{origin}: model[{index}].embedded",
            )
        for name in pin.names:
            owner = shipped.owner(name)
            if owner is not None:
                raise LockError(
                    f"the name {name!r} belongs to {owner.id!r}, a model that minice pins itself; choose another",
                    where=f"{origin}: model[{index}]",
                )
    return Lock(models=shipped.models + user.models)


def parse_lock(text: str) -> Lock:
    """Parse and check the text of a lock.

    Raises:
        LockError: The text is not TOML or does not follow the format; ``where`` is the place, for
            instance ``model[0].file[2].sha256``.
    """
    try:
        top = _Table(tomllib.loads(text), "")
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, or a number of thousands of digits
        raise LockError(f"not valid TOML: {error}") from error
    # The version goes first: in another version every other key may mean something else.
    version = top.integer("lock-version", least=1)
    if version != LOCK_VERSION:
        raise LockError(
            f"unknown lock version: expected {LOCK_VERSION}, got {version}; upgrade minice to read this lock",
            where="lock-version",
        )
    models = tuple(_model(table) for table in top.tables("model"))
    top.close()
    _check_names(models)
    return Lock(version=version, models=models)


def format_lock(lock: Lock) -> str:
    """Write a lock as TOML; ``parse_lock(format_lock(lock)) == lock``. Keys at their default are left out."""
    lines = [f"lock-version = {lock.version}"]
    for pin in lock.models:
        lines += ["", "[[model]]"]
        lines += _assignments(
            {
                "id": pin.id,
                "repository": pin.repository,
                "aliases": list(pin.aliases) or None,
                "revision": pin.revision,
                "embedded": pin.embedded or None,
                "license": pin.license,
                "max-length": pin.max_length,
                "scale": str(pin.scale),
            }
        )
        for file in pin.files:
            lines += ["", "[[model.file]]"]
            lines += _assignments(
                {
                    "role": file.role,
                    "precision": file.precision,
                    "scheme": file.scheme,
                    "optional": file.optional or None,
                    "path": file.path,
                    "size": file.size,
                    "sha256": file.sha256,
                }
            )
    return "\n".join(lines) + "\n"


def _assignments(values: Mapping[str, object]) -> list[str]:
    # TOML writes these four kinds as JSON does: no text in a checked lock has a control character.
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]


# --- reading tables ------------------------------------------------------------------------------------


class _Table:
    """A TOML table that is read key by key; what nobody asked for is an error in the end."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._asked: list[str] = []

    def place(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def _take(self, key: str, kind: type, expected: str, default: object) -> Any:
        self._asked.append(key)
        if key not in self._values:
            if default is not _REQUIRED:
                return default
            raise LockError(f"missing: expected {expected}", where=self.place(key))
        value = self._values[key]
        # `type(...) is` and not isinstance: true is no whole number here, though bool is an int to Python.
        if type(value) is not kind:
            raise LockError(f"expected {expected}, got {_shown(value)}", where=self.place(key))
        return value

    def text(self, key: str, check: Callable[[str], str | None], expected: str) -> str:
        value: str = self._take(key, str, expected, _REQUIRED)
        self._refuse(value, check, self.place(key), expected)
        return value

    def optional_text(self, key: str, check: Callable[[str], str | None], expected: str) -> str | None:
        return self.text(key, check, expected) if key in self._values else self._take(key, str, expected, None)

    def texts(self, key: str, check: Callable[[str], str | None], expected: str) -> tuple[str, ...]:
        values: list[object] = self._take(key, list, f"a list, each item {expected}", [])
        for index, value in enumerate(values):
            where = f"{self.place(key)}[{index}]"
            if not isinstance(value, str):
                raise LockError(f"expected {expected}, got {_shown(value)}", where=where)
            self._refuse(value, check, where, expected)
        return tuple(str(value) for value in values)

    @staticmethod
    def _refuse(value: str, check: Callable[[str], str | None], where: str, expected: str) -> None:
        reason = check(value)
        if reason is not None:
            raise LockError(f"expected {expected}, got {_shown(value)}{reason}", where=where)

    def integer(self, key: str, *, least: int) -> int:
        expected = f"a whole number, at least {least}"
        value: int = self._take(key, int, expected, _REQUIRED)
        if value < least:
            raise LockError(f"expected {expected}, got {value}", where=self.place(key))
        return value

    def flag(self, key: str) -> bool:
        return bool(self._take(key, bool, "true or false", False))

    def tables(self, key: str) -> Iterator["_Table"]:
        header = re.sub(r"\[\d+\]", "", self.place(key))
        expected = f"one or more [[{header}]] tables"
        values = self._take(key, list, expected, _REQUIRED)
        if not values:
            raise LockError(f"expected {expected}, got []", where=self.place(key))
        for index, value in enumerate(values):
            where = f"{self.place(key)}[{index}]"
            if not isinstance(value, dict):
                raise LockError(f"expected a table, got {_shown(value)}", where=where)
            yield _Table(value, where)

    def close(self) -> None:
        for key in self._values:
            if key not in self._asked:
                near = difflib.get_close_matches(key, self._asked, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                known = ", ".join(self._asked)
                raise LockError(f"unknown key; known: {known}{hint}", where=self.place(key))


_REQUIRED: Final = object()


def _shown(value: object) -> str:
    """How an error shows a value: as TOML would, cut to a readable length."""
    if isinstance(value, dict):
        return "a table"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:76]}..."


def _model(table: _Table) -> ModelPin:
    pin = ModelPin(
        id=table.text("id", *_form("id")),
        repository=table.optional_text("repository", *_form("repository")),
        aliases=table.texts("aliases", _like(rf"[A-Za-z0-9][A-Za-z0-9._-]*|{_REPOSITORY}"), "a name or owner/name"),
        revision=table.optional_text("revision", *_form("revision")),
        embedded=table.flag("embedded"),
        license=table.text("license", *_form("license")),
        max_length=table.integer("max-length", least=SHORTEST_PAIR),
        scale=ScoreScale(table.text("scale", _one_of(ScoreScale), _choices(ScoreScale))),
        files=tuple(_file(file) for file in table.tables("file")),
    )
    table.close()
    if (pin.repository is None) != (pin.revision is None):
        lacking = "revision" if pin.revision is None else "repository"
        raise LockError("missing: repository and revision go together", where=table.place(lacking))
    _check_files(pin, table)
    return pin


def _file(table: _Table) -> FilePin:
    role = table.text("role", _one_of(ROLES), _choices(ROLES))
    precision = table.optional_text("precision", _one_of(PRECISIONS), _choices(PRECISIONS))
    if role == "model" and precision is None:
        raise LockError(
            f"missing: expected {_choices(PRECISIONS)}, because this is a model file",
            where=table.place("precision"),
        )
    if role != "model" and precision is not None:
        raise LockError(f"only model files have one, and this is a {role} file", where=table.place("precision"))
    scheme = table.optional_text("scheme", _one_of(SCHEMES), _choices(SCHEMES))
    if scheme is not None and precision != "int8":
        raise LockError("only int8 model files have one", where=table.place("scheme"))
    file = FilePin(
        role=role,
        precision=precision,
        scheme=scheme,
        optional=table.flag("optional"),
        path=table.text("path", _unportable, "a relative POSIX path"),
        size=table.integer("size", least=1),
        sha256=table.text("sha256", _like("[0-9a-f]{64}"), "64 lowercase hex digits"),
    )
    table.close()
    return file


_REPOSITORY: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
# Key of a model -> what its text must match, and that in words.
_FORMS: Final = {
    "id": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?<!\.)", "letters, digits, '.', '_' and '-', at most 100"),
    "repository": (_REPOSITORY, "a repository as owner/name"),
    "revision": ("[0-9a-f]{40}", "40 lowercase hex digits"),
    "license": (r"[A-Za-z0-9(][A-Za-z0-9.+() -]*", "an SPDX licence expression"),
}


def checked_text(key: str, text: str) -> str:
    """Return the text of a model's key in a lock, if it may stand there.

    Args:
        key: "id", "repository", "revision" or "license".
        text: The value.

    Raises:
        ValueError: It may not; says what was expected.
    """
    check, expected = _form(key)
    if check(text) is not None:
        raise ValueError(f"expected {expected}, got {_shown(text)}")
    return text


def _form(key: str) -> tuple[Callable[[str], str | None], str]:
    pattern, expected = _FORMS[key]
    return _like(pattern), expected


def _like(pattern: str) -> Callable[[str], str | None]:
    return lambda value: None if re.fullmatch(pattern, value) else ""


def _one_of(names: Iterator[str] | tuple[str, ...] | type[ScoreScale]) -> Callable[[str], str | None]:
    known = [str(name) for name in names]
    return lambda value: None if value in known else ""


def _choices(names: tuple[str, ...] | type[ScoreScale]) -> str:
    return "one of " + ", ".join(f'"{name}"' for name in names)


def _unportable(path: str) -> str | None:
    """Say why a path could name something else on some system, or lie outside of the model's folder."""
    if not path:
        return ": it is empty"
    if not path.isprintable():
        return ": it has a control character"
    if "\\" in path:
        return ": it has a backslash"
    if ":" in path:
        return ": it has a colon, which names a drive or a stream on Windows"
    if path.startswith("/"):
        return ": it is absolute"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f": {part!r} is not a name"
        if part != part.rstrip(". "):
            return f": Windows would drop the end of {part!r}"
    return None


# --- checks across tables ------------------------------------------------------------------------------


def _check_files(pin: ModelPin, table: _Table) -> None:
    paths: dict[str, int] = {}
    kinds: dict[tuple[str, str | None], int] = {}
    for index, file in enumerate(pin.files):
        where = table.place(f"file[{index}]")
        # Base names, because a flat folder holds only these; case-folded, because some file systems fold.
        first = paths.setdefault(file.name.casefold(), index)
        if first != index:
            raise LockError(f"the base name {file.name!r} is taken by file[{first}]", where=f"{where}.path")
        first = kinds.setdefault((file.role, file.precision), index)
        if first != index:
            kind = f"{file.precision} {file.role}" if file.precision else file.role
            raise LockError(f"a second {kind} file; the first is file[{first}]", where=f"{where}.role")
    for role in ("model", "tokenizer"):
        of_role = [index for index, file in enumerate(pin.files) if file.role == role]
        if not of_role:
            raise LockError(f"no file has the role {role!r}; a model needs one", where=table.place("file"))
        if pin.files[of_role[0]].optional:
            raise LockError(
                f"the first {role} file is what is used by default and cannot be optional",
                where=table.place(f"file[{of_role[0]}].optional"),
            )


def _check_names(models: tuple[ModelPin, ...]) -> None:
    taken: dict[str, str] = {}
    for index, pin in enumerate(models):
        places = {"id": pin.id, **({"repository": pin.repository} if pin.repository else {})}
        places |= {f"aliases[{number}]": alias for number, alias in enumerate(pin.aliases)}
        for key, name in places.items():
            # Case-folded, because an id is also the name of a folder.
            where = f"model[{index}].{key}"
            first = taken.setdefault(name.casefold(), where)
            if first != where:
                raise LockError(f"the name {name!r} is taken by {first}", where=where)
