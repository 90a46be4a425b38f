"""The hub's own cache of downloads, as its client lays it out: where it is, and which files of a model lie in it.

It is read as any folder is; the hub's client is not imported, and nothing is ever written. The layout::

    <cache>/models--<owner>--<name>/snapshots/<revision>/<path>    a link, or a file where links do not work
    <cache>/models--<owner>--<name>/blobs/<etag>                   what those links lead to: a file, or a link
    <cache>/blobs/<2 hex digits>/<hash>                            to one that repositories share (hub 2)

Source: huggingface_hub 0.36 and 2.4, ``constants``, ``file_download`` and ``utils/_shared_blobs``.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minice.artifacts.environment import setting

# Variable, and what stands below the folder it names; the first that is set wins. The second is the first's old name.
_VARIABLES: Final = (
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedFile:
    """A name in a snapshot of the cache that exists, whatever it is.

    Attributes:
        path: In the cache.
        snapshot: The snapshot's folder.
        plain: What ``path`` resolves to if it is no link.
        blobs: The folders that it may be a link into.
    """

    path: Path
    snapshot: Path
    plain: Path
    blobs: tuple[Path, Path]

    def allows(self, resolved: Path) -> bool:
        """Whether the file may be what ``path`` resolves to: the cache's own, and not one that lies elsewhere."""
        return resolved == self.plain or any(resolved.is_relative_to(folder) for folder in self.blobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubCache:
    """Where a model may lie in the cache.

    Attributes:
        folder: Of the cache.
        origin: The variable that named it; empty: the default.
        repositories: Folders of the model's repository and of its other names, which need not exist.
        revision: The snapshot that is looked in first.
    """

    folder: Path
    origin: str
    repositories: tuple[Path, ...]
    revision: str | None

    def files(self, path: str) -> Iterator[CachedFile]:
        """Yield every file of a name: the pinned revision of each repository, then all others.

        A file that several snapshots link to comes once.

        Args:
            path: POSIX path in the repository.
        """
        real = Path(os.path.realpath(self.folder))
        seen = set()
        for snapshot in self._snapshots():
            if not exists(snapshot / path):
                continue
            inside = snapshot.relative_to(self.folder)
            blobs = real / inside.parts[0] / "blobs", real / "blobs"
            file = CachedFile(path=snapshot / path, snapshot=snapshot, plain=real / inside / path, blobs=blobs)
            resolved = Path(os.path.realpath(file.path))
            # A link that is refused must not hide the file itself, which another snapshot may hold.
            if (resolved, file.allows(resolved)) not in seen:
                seen.add((resolved, file.allows(resolved)))
                yield file

    def _snapshots(self) -> Iterator[Path]:
        """The pinned ones need no listing, which is for the case that they do not hold the file."""
        if self.revision is not None:
            yield from (repository / "snapshots" / self.revision for repository in self.repositories)
        for repository in self.repositories:
            names, _ = _listed(repository / "snapshots")
            yield from (repository / "snapshots" / name for name in names if name != self.revision)

    def problems(self) -> list[str]:
        """Say which folders are there and cannot be listed; a cache that is not there is no problem."""
        listed = (_listed(folder / "snapshots")[1] for folder in self.repositories)
        return [problem for problem in listed if problem]


def hub_cache(names: tuple[str, ...], revision: str | None, environ: Mapping[str, str]) -> HubCache | None:
    """Find the cache of the user's hub client.

    Args:
        names: Of a model; those of the form ``owner/name`` are repositories.
        revision: The pinned one.
        environ: Where ``HF_HUB_CACHE`` and its like, and the home folder, are taken from; blank is unset.

    Returns:
        None if the model has no repository, or the user no home folder.
    """
    repositories = ["--".join(("models", *name.split("/"))) for name in names if "/" in name]
    folder, origin = cache_folder(environ)
    if folder is None or not repositories:
        return None
    paths = tuple(folder / name for name in repositories)
    return HubCache(folder=folder, origin=origin, repositories=paths, revision=revision)


def cache_folder(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the cache's folder and the variable that named it (empty: the default).

    Args:
        environ: As for ``hub_cache``.
    """
    for variable, below in _VARIABLES:
        value = setting(variable, environ)
        if value is not None:
            return _absolute(_expanded(value, environ), below), variable
    home = home_folder(environ)
    return (None if home is None else _absolute(str(home), ".cache/huggingface/hub")), ""


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """Put in the home folder for a leading ``~``, and variables, as the client does; unknown ones stay as they are."""
    home = home_folder(environ)
    if home is not None and re.match(r"~(?=/|\\|$)", text):
        text = f"{home}{text[1:]}"
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda name: environ.get(name[1] or name[2], name[0]), text)


def _absolute(text: str, below: str) -> Path | None:
    try:
        os.fsencode(text)
        return Path(text, below).absolute() if "\0" not in text else None
    except (OSError, UnicodeEncodeError):  # a working directory that was deleted; a name that no file system has
        return None


def home_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the user's home folder, or None for an account that has none.

    Args:
        environ: Where it is taken from; if it is not there, the system's list of users says.
    """
    home = setting("USERPROFILE" if sys.platform == "win32" else "HOME", environ)
    if home is not None:
        return Path(home)
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError):  # containers run as users that no passwd file names
        return None


def exists(path: Path) -> bool:
    """Whether something has this name. If that cannot be known, then yes: reading will say why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _listed(folder: Path) -> tuple[list[str], str]:
    """Return the sorted names in a folder, and why they are not known where that is not because it is missing."""
    try:
        return sorted(os.listdir(folder)), ""  # noqa: PTH208 - names are all that is needed
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{str(folder)!r} cannot be listed: {error.strerror or type(error).__name__}"
