"""``minice verify``: read every file of a model again, hash it, and say what was found."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minice.cli.arguments import Arguments, Command, Option, Positional, read_text
from minice.cli.encoder import FORMAT, MODEL_DIR, model_dir
from minice.cli.writing import choose_format, complain, table, to_json, write
from minice.errors import IntegrityError, MiniceError, ModelNotFoundError

if TYPE_CHECKING:
    from minice.artifacts.lock import Lock, ModelPin
    from minice.artifacts.store import FileReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check came to.

    Attributes:
        model: Id of the pin.
        file: The pin's path of the file; for the deep check what is made from what.
        status: As in a ``FileReport``; "skipped" for a deep check that lacks one of its files.
        path: Where the file lies, or None.
        message: The same as a sentence; may be empty.
        exit_code: 0, or that of the error that opening the model would raise.
    """

    model: str
    file: str
    status: str
    path: str | None
    message: str
    exit_code: int


def run(arguments: Arguments) -> int:
    """Check one model, or every model that has files on disk."""
    findings = list(_findings(arguments["id"], model_dir(arguments), deep=arguments["deep"]))
    if choose_format(arguments["format"]) == "jsonl":
        for finding in findings:
            row = {name: getattr(finding, name) for name in ("model", "file", "status", "path", "message")}
            write(to_json(row) + "\n")
    elif findings:
        rows = [[finding.model, finding.file, finding.status, _shown_place(finding)] for finding in findings]
        write(table(["model", "file", "status", "where"], rows, elastic=[3]))
    wrong = [finding for finding in findings if finding.exit_code]
    for finding in wrong:
        complain(f"minice: error: {finding.model}/{finding.file}: {finding.message}")
    return wrong[0].exit_code if wrong else 0


def _shown_place(finding: Finding) -> str:
    """Where the file lies; of a check that was skipped, why."""
    return finding.message if finding.status == "skipped" else finding.path or ""


def _findings(name: str | None, folder: str | None, *, deep: bool) -> Iterator[Finding]:
    from minice.artifacts.environment import setting
    from minice.artifacts.lock import known_lock
    from minice.artifacts.store import inspect

    lock = known_lock()
    pins = [lock.find(name)] if name is not None else list(lock.models)
    reports = {pin.id: inspect(pin, model_dir=folder, lock=lock) for pin in pins}
    if name is None:
        # A model of which nothing is there was never put in place; only who asks for it misses it.
        there = [pin for pin in pins if any(map(_put_in_place, reports[pin.id]))]
        # A folder that was named holds one model, as a rule: another one is not damaged for sharing its file names.
        given = folder or setting("MINICE_MODEL_DIR")
        whole = [pin for pin in there if any(r.role == "model" and r.status == "ok" for r in reports[pin.id])]
        if given and not there:
            raise _nothing_there(lock, folder)
        pins = (given and whole) or there
    for pin in pins:
        yield from (_finding(pin, report) for report in reports[pin.id])
        if deep:
            yield _deep(pin, reports[pin.id], folder, needed=name is not None)


def _put_in_place(report: "FileReport") -> bool:
    """Whether a file is there because somebody wanted its model here.

    Other libraries leave the small files of a repository in the hub's cache, and no graph: they run other weights.
    """
    return report.path is not None and (report.place != "hub-cache" or report.role == "model")


def _nothing_there(lock: "Lock", folder: str | None) -> ModelNotFoundError:
    """A folder was named, and holds no file of any model: for each model what opening it would say."""
    from minice.artifacts.store import not_on_disk

    lines = []
    for pin in lock.models:
        error = not_on_disk(pin, *(file for file in pin.files if not file.optional), model_dir=folder)
        lines.append(f"{pin.id}: {error.message}")
    return ModelNotFoundError("\n".join(lines))


def _finding(pin: "ModelPin", report: "FileReport") -> Finding:
    kind = ModelNotFoundError if report.status == "missing" else IntegrityError
    return Finding(
        model=pin.id,
        file=report.name,
        status=report.status,
        path=report.path,
        message=f"not on disk: {report.message}" if report.status == "missing" else report.message,
        exit_code=0 if report.good else kind.exit_code,
    )


def _deep(pin: "ModelPin", reports: "tuple[FileReport, ...]", folder: str | None, *, needed: bool) -> Finding:
    """Make the int8 file again from the fp32 file; a model that has not both is skipped unless asked for."""
    from minice.artifacts.quantize import verify_deep

    paths = {report.precision: report.path for report in reports if report.role == "model"}
    status, message, code = "skipped", "", 0
    if not (paths.get("fp32") and paths.get("int8")) and not needed:
        message = "needs the fp32 file and the int8 file"
    else:
        try:
            check = verify_deep(pin, model_dir=folder)
            status, message = ("ok" if check.matches else "mismatch"), check.message
            code = 0 if check.matches else IntegrityError.exit_code
        except MiniceError as error:
            status, message, code = "failed", error.message, error.exit_code
    return Finding(
        model=pin.id,
        file="fp32 -> int8",
        status=status,
        path=paths.get("int8"),
        message=message,
        exit_code=code,
    )


COMMAND = Command(
    name="verify",
    summary="re-hash a model's files and report each",
    description="""\
Reads every file of the model ID, compares size and SHA-256 with the pin, and reports each. Without ID:
of every model that has files on disk; with a folder that is named, of the models whose graph lies there.
Exit code: 0, or that of the first thing wrong: 4 for a missing file, 5 for one with other bytes. An
optional file that is not there ("absent") is not wrong.""",
    example="minice verify minice-l6",
    run=run,
    positionals=(Positional(name="ID", help="a model that `minice models` lists", required=False, read=read_text),),
    options=(
        Option(name="deep", help="also quantize the fp32 file again and compare with the int8 file"),
        FORMAT,
        MODEL_DIR,
    ),
)
