"""``minice lock``: hash a folder, find out what the model in it is, and print its pin."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from minice.cli.arguments import Arguments, Command, Option, Positional, local_path, read_choice, read_count
from minice.cli.writing import complain, harmless, write
from minice.errors import ConfigError, GraphError, InputError, LockError, MiniceError

if TYPE_CHECKING:
    from minice.artifacts.lock import ModelPin
    from minice.artifacts.make_pin import ConfigFacts, Fact, GraphFacts

_Result = TypeVar("_Result")
_SCALES = ("logit", "probability")
# Role -> file beside the model's; which of them a model needs, its pin says.
_BESIDE = {"tokenizer": "tokenizer.json", "config": "config.json", "vocab": "vocab.txt"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    """A value of the pin that a file or the user says.

    Attributes:
        option: Name of the option for it.
        given: What the option says.
        fact: What was read, if anything was.
        read: Makes the value from text; a ValueError says what is wrong with it.
        missing: What to say where nobody says it.
    """

    option: str
    given: object
    fact: "Fact | None"
    read: Callable[[str], object]
    missing: str = ""


def run(arguments: Arguments) -> int:
    """Read every file once, settle the values, print the lock."""
    from minice.artifacts.lock import Lock, format_lock
    from minice.artifacts.make_pin import ConfigFacts, check_tokenizer, make_pin, read_config

    _refuse_taken(arguments)
    folder = Path(local_path(arguments["dir"]))
    files = _read_files(folder, arguments["model_file"])
    graph = _graph(folder, files, arguments["precision"])
    _within(folder, "tokenizer.json", lambda: check_tokenizer(files["tokenizer"][1], graph))
    config = ConfigFacts()
    if "config" in files:
        config = _within(folder, "config.json", lambda: read_config(files["config"][1]))
    values = _settled(_values(arguments, graph, config), arguments)
    pin = make_pin(
        arguments["id"],
        files,
        graph,
        max_length=int(str(values["max-length"])),
        scale=str(values["scale"]),
        license=str(values["license"]),
        repository=arguments["repository"],
        revision=arguments["revision"],
    )
    if arguments["add_to"] is None:
        write(format_lock(Lock(models=(pin,))))
    else:
        _add(pin, Path(local_path(arguments["add_to"])))
    _tell_how_to_use(pin, folder, arguments["add_to"])
    return 0


def _refuse_taken(arguments: Arguments) -> None:
    """A name of a model that minice pins itself stays its own; said before 90 MB are read."""
    from minice.artifacts.lock import shipped_lock

    for key in ("id", "repository"):
        owner = arguments[key] and shipped_lock().owner(arguments[key])
        if owner:
            raise ConfigError(
                f"the name {arguments[key]!r} belongs to {owner.id!r}, a model that minice pins itself; choose another",
                where=key,
            )


# --- the files -----------------------------------------------------------------------------------------


def _read_files(folder: Path, model_file: str | None) -> dict[str, tuple[str, bytes]]:
    """Role -> path in the folder and bytes, in the order of a lock."""
    from minice.artifacts.store import read_unpinned

    model = _model_path(folder, model_file)
    if not os.path.lexists(folder / _BESIDE["tokenizer"]):
        raise InputError("expected tokenizer.json in it, found none", where=str(folder))
    paths = {"model": model} | {role: name for role, name in _BESIDE.items() if os.path.lexists(folder / name)}
    files = {role: (path, read_unpinned(folder / path)) for role, path in paths.items()}
    empty = [path for path, data in files.values() if not data]
    if empty:
        raise InputError("it is empty", where=str(folder / empty[0]))
    return files


def _model_path(folder: Path, model_file: str | None) -> str:
    """The model's POSIX path in the folder: the one that was named, else the only one."""
    if model_file is not None:
        path = Path(os.path.abspath(folder / local_path(model_file)))  # noqa: PTH100 - without following links
        try:
            inside = path.relative_to(os.path.abspath(folder)).as_posix()  # noqa: PTH100
        except ValueError:
            inside = "."
        if inside == ".":
            raise ConfigError(f"expected a file in {str(folder)!r}, got {model_file!r}", where="model_file")
        if not os.path.lexists(path):
            raise ConfigError(f"there is no {inside!r} in {str(folder)!r}", where="model_file")
        return inside
    found = sorted(_model_paths(folder))
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError("expected onnx/model.onnx or model.onnx in it, found no .onnx file", where=str(folder))
    shown = ", ".join(found[:20])
    raise ConfigError(f"it holds {len(found)} .onnx files; choose by --model-file: {shown}", where=str(folder))


def _model_paths(folder: Path) -> Iterator[str]:
    """ONNX files in the folder and in onnx/ below it, but for those that `minice quantize` made of the others."""
    from minice.artifacts.receipt import receipt_path

    for place in ("", "onnx"):
        try:
            names = os.listdir(folder / place)  # noqa: PTH208 - names are all that is needed
        except (FileNotFoundError, NotADirectoryError):
            if place:
                continue
            raise InputError("expected a folder, found none", where=str(folder)) from None
        except OSError as error:
            raise InputError(f"cannot be listed: {error.strerror}", where=str(folder / place)) from None
        for name in names:
            path = folder / place / name
            if name.endswith(".onnx") and not path.is_dir() and not os.path.lexists(receipt_path(str(path))):
                yield f"{place}/{name}" if place else name


def _graph(folder: Path, files: dict[str, tuple[str, bytes]], precision: str | None) -> "GraphFacts":
    """What the model file is; people see it, because the rest follows from it."""
    from minice.artifacts.make_pin import read_graph

    path, data = files["model"]
    graph = _within(folder, path, lambda: read_graph(data))
    if precision not in (None, graph.precision):
        raise ConfigError(f"{path} is {graph.precision}: {graph.source}", where="precision")
    scheme = "" if graph.scheme is None else f", scheme {graph.scheme}"
    complain(f"model: {path}, {len(data):,} bytes, {graph.precision}{scheme} ({graph.source})")
    if graph.refusal:
        complain(f"minice: note: the numpy engine cannot run it, so it needs --engine onnxruntime: {graph.refusal}")
    return graph


def _within(folder: Path, path: str, act: Callable[[], _Result]) -> _Result:
    """Do something with a file's bytes; errors name the file."""
    try:
        return act()
    except (ConfigError, GraphError, InputError) as error:
        inside = "" if error.where in ("", path) else f":{error.where}"
        raise type(error)(error.message, where=f"{folder / path}{inside}") from None


# --- the values ----------------------------------------------------------------------------------------


def _values(arguments: Arguments, graph: "GraphFacts", config: "ConfigFacts") -> list[_Value]:
    from minice.artifacts.lock import SHORTEST_PAIR, checked_text
    from minice.artifacts.make_pin import UNKNOWN_LICENSE, Fact, length_fact, scale_fact

    def read_length(text: str) -> int:
        length: int = read_count(SHORTEST_PAIR)(text)
        if graph.positions is not None and length > graph.positions:
            raise ValueError(f"expected at most {graph.positions}, the rows of the graph's position table, got {text}")
        return length

    unknown = Fact(value=UNKNOWN_LICENSE, source="SPDX's word for a licence that nobody stated")
    return [
        _Value(
            option="max-length",
            given=arguments["max_length"],
            fact=length_fact(graph, config),
            read=read_length,
            missing="neither the graph nor config.json says how many tokens a pair may have",
        ),
        _Value(
            option="scale",
            given=arguments["scale"],
            fact=scale_fact(graph, config),
            read=read_choice(*_SCALES),
            missing="neither the graph nor config.json declares what the model's numbers mean; give "
            "--scale logit if they are raw, --scale probability if they went through a sigmoid",
        ),
        _Value(
            option="license", given=arguments["license"], fact=unknown, read=lambda text: checked_text("license", text)
        ),
    ]


def _settled(values: list[_Value], arguments: Arguments) -> dict[str, object]:
    """Option -> value: given, else confirmed on a terminal, else as it was read.

    Raises:
        ConfigError: Nobody says a value; all of them at once.
    """
    ask = not arguments["yes"] and sys.stdin is not None and sys.stdin.isatty()
    mistakes = []
    settled: dict[str, object] = {}
    for value in values:
        if value.given is not None:
            settled[value.option] = value.given
        elif ask:
            settled[value.option] = _asked(value)
        elif value.fact is not None:
            complain(f"{value.option}: {value.fact.value} ({value.fact.source})")
            settled[value.option] = value.fact.value
        else:
            mistakes.append(f"--{value.option} is missing: {value.missing}")
    if mistakes:
        raise ConfigError("\n".join([*mistakes, "Run: minice lock --help"]))
    return settled


def _asked(value: _Value) -> object:
    """Ask on the terminal until the answer can be used; an empty one takes what was read."""
    fact = value.fact
    about = value.missing if fact is None else f"{fact.source}; Enter takes {fact.value}"
    while True:
        _prompt(f"{value.option} ({about}): ")
        line = sys.stdin.readline()
        if not line:
            complain("")
            raise ConfigError("the answers ended, so nothing is pinned; --yes takes the values that were read")
        text = line.strip() or ("" if fact is None else fact.value)
        try:
            return value.read(text)
        except ValueError as error:
            complain(f"{error}")


def _prompt(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(harmless(text))
            sys.stderr.flush()


# --- the lock ------------------------------------------------------------------------------------------


def _add(pin: "ModelPin", path: Path) -> None:
    """Put the pin at the end of a lock, which is replaced as a whole or stays as it was; one process at a time."""
    with _alone_in(Path(os.path.realpath(path)).parent):
        _add_alone(pin, path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes of ours out of a folder, where the system can; it is the file in it that is replaced."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = None
    with suppress(OSError):  # writing will say what is wrong with the folder
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _add_alone(pin: "ModelPin", path: Path) -> None:
    from minice.artifacts.lock import read_lock_text
    from minice.artifacts.make_pin import add_to_lock

    there = os.path.lexists(path)
    before = read_lock_text(path, "--add-to") if there else ""
    try:
        after = add_to_lock(before, pin)
    except LockError as error:
        inside = f": {error.where}" if error.where else ""
        raise LockError(error.message, where=f"--add-to: {str(path)!r}{inside}") from None
    if after == before:
        complain(f"minice: note: {str(path)!r} holds this pin already; nothing was changed")
        return
    target = Path(os.path.realpath(path))  # what a link leads to is replaced, and not the link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(after.encode())
            file.flush()
            os.fsync(file.fileno())
        if there:
            temporary.chmod(target.stat().st_mode & 0o777)
        if read_lock_text(temporary, "--add-to") != after:
            raise OSError("what was read back is not what was written")
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror or error}", where="--add-to") from error
    finally:
        with suppress(OSError):  # it has moved, normally
            temporary.unlink()


def _tell_how_to_use(pin: "ModelPin", folder: Path, lock: str | None) -> None:
    from minice.artifacts.store import install_folder

    environ = {name: value for name, value in os.environ.items() if name != "MINICE_MODEL_DIR"}
    place = "MINICE_HOME"
    with suppress(MiniceError):  # an account without a home folder
        place = repr(str(install_folder(pin, environ=environ)))
    complain(
        f"minice: note: minice knows {pin.id!r} where MINICE_LOCK names the lock's file; its files are looked for in "
        f"{place}, or in the folder that --model-dir names"
    )
    name = shlex.quote(lock or "my.lock")
    complain(f"Run: MINICE_LOCK={name} minice verify {pin.id} --model-dir {shlex.quote(str(folder))}")


def _read_as(key: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        from minice.artifacts.lock import checked_text

        return checked_text(key, text)

    return read


def _check(arguments: Arguments) -> Iterator[str]:
    if arguments["id"] is None:
        yield "--id is missing: the name of the model"
    if (arguments["repository"] is None) != (arguments["revision"] is None):
        yield "--repository and --revision go together"


COMMAND = Command(
    name="lock",
    summary="print a pin for a model of your own",
    description="""\
Hashes the files of the model in DIR and prints a lock that pins them: onnx/model.onnx or model.onnx,
tokenizer.json, and config.json and vocab.txt if they are there. Longest pair and scale are read from the
graph and config.json where these declare them; on a terminal each is shown and Enter confirms it. With
--yes, and where stdin is no terminal, they are taken as they were read, and shown on stderr. minice knows
the models of the lock that the variable MINICE_LOCK names.""",
    example="minice lock ./folder --id my-model > my.lock\n"
    "MINICE_LOCK=my.lock minice verify my-model --model-dir ./folder",
    run=run,
    positionals=(Positional(name="DIR", help="the folder with the model's files"),),
    options=(
        Option(name="id", metavar="NAME", read=_read_as("id"), help="the name to use it by; required"),
        Option(name="max-length", metavar="N", read=read_count(5), help="tokens in one pair"),
        Option(
            name="scale",
            metavar="|".join(_SCALES),
            read=read_choice(*_SCALES),
            help="what the numbers in the model's output mean",
        ),
        Option(name="license", metavar="SPDX", read=_read_as("license"), help="of the weights; default: NOASSERTION"),
        Option(
            name="precision",
            metavar="fp32|int8",
            read=read_choice("fp32", "int8"),
            help="what the model file has to be; default: as the graph says",
        ),
        Option(name="model-file", metavar="PATH", help="the model in DIR, where it holds several .onnx files"),
        Option(
            name="repository",
            metavar="OWNER/NAME",
            read=_read_as("repository"),
            help="where it is published, for `minice fetch` and the hub's cache; goes with --revision",
        ),
        Option(name="revision", metavar="HEX", read=_read_as("revision"), help="40 hex digits; goes with --repository"),
        Option(name="add-to", metavar="FILE", help="add the pin to this lock instead of printing it"),
        Option(name="yes", help="ask nothing; take what was read"),
    ),
    check=_check,
)
