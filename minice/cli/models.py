"""``minice models``: every pinned model, and what of it is on disk."""

from typing import TYPE_CHECKING

from minice.cli.arguments import Arguments, Command
from minice.cli.encoder import FORMAT, MODEL_DIR, model_dir
from minice.cli.writing import choose_format, harmless, table, to_json, write

if TYPE_CHECKING:
    from minice.artifacts.lock import ModelPin
    from minice.artifacts.store import FileReport, Place

SHOWN_DIGITS = 12  # of a digest in a table, as in a model_id; JSONL has all 64


def run(arguments: Arguments) -> int:
    """List the pins of the lock and where their files lie; no model file is read."""
    # Imported here, as in every verb: help and argument mistakes need neither lock nor NumPy.
    from minice.artifacts.environment import setting
    from minice.artifacts.lock import known_lock
    from minice.artifacts.store import DEFAULT_MODEL, locate, places

    # What is used where no --model is given.
    default = setting("MINICE_MODEL") or DEFAULT_MODEL
    folder = model_dir(arguments)
    found = [
        (pin, locate(pin, model_dir=folder), places(pin, model_dir=folder), default in pin.names)
        for pin in known_lock().models
    ]
    if choose_format(arguments["format"]) == "jsonl":
        for pin, reports, searched, is_default in found:
            write(to_json(_as_json(pin, reports, searched, default=is_default)) + "\n")
        return 0
    blocks = [_block(pin, reports, searched, default=is_default) for pin, reports, searched, is_default in found]
    write("\n".join(blocks))
    return 0


def _block(pin: "ModelPin", reports: "tuple[FileReport, ...]", searched: "tuple[Place, ...]", *, default: bool) -> str:
    """One model: a line about it, its other names, a table of its files; and what to do if one is missing or bad."""
    marks = [*(["default"] if default else []), pin.license, f"max_length {pin.max_length}"]
    lines = [f"{pin.id} ({', '.join(marks)})", *(f"also named {name}" for name in pin.names[1:])]
    header = ["file", "bytes", "sha256", "status", "where"]
    rows = [_row(pin, report) for report in reports]
    text = "".join(f"{line}\n" for line in lines) + table(header, rows, elastic=[4])
    if any(not report.good for report in reports):
        # Whole, however narrow the terminal is: these are to be read to the end, and copied.
        text += "".join(f"looked in {harmless(place.path)} ({place.origin})\n" for place in searched)
        text += f"minice verify {pin.id} says what is wrong and what to do\n"
    return text


def _row(pin: "ModelPin", report: "FileReport") -> list[str]:
    size = "" if report.size is None else f"{report.size:,}"
    return [report.name, size, _digest(pin, report)[:SHOWN_DIGITS], report.status, report.path or ""]


def _digest(pin: "ModelPin", report: "FileReport") -> str:
    """The pinned digest; a file that `minice quantize` wrote has its own in its receipt, and none here."""
    return next((file.sha256 for file in pin.files if file.path == report.name), "")


def _as_json(
    pin: "ModelPin", reports: "tuple[FileReport, ...]", searched: "tuple[Place, ...]", *, default: bool
) -> dict[str, object]:
    return {
        "id": pin.id,
        "default": default,
        "repository": pin.repository,
        "aliases": list(pin.aliases),
        "revision": pin.revision,
        "license": pin.license,
        "max_length": pin.max_length,
        "scale": str(pin.scale),
        "on_disk": all(report.good for report in reports),
        "searched": [{"path": place.path, "origin": place.origin} for place in searched],
        "files": [
            {
                "role": report.role,
                "precision": report.precision,
                "name": report.name,
                "size": report.size,
                "sha256": _digest(pin, report) or None,
                "status": report.status,
                "path": report.path,
                "place": report.place,
                "message": report.message,
            }
            for report in reports
        ],
    }


COMMAND = Command(
    name="models",
    summary="every pinned model, and what of it is on disk",
    description="""\
Lists the files of every pinned model: licence, other names, size, digest, where the file lies. "default" is
the model that is used where no --model is given. Only names and sizes are looked at ("present"); `minice
verify` reads and hashes. "absent" is an optional file that is not there. Where a file is missing, the folders
that were searched are shown: MINICE_HOME, or the one that was named, and the hub's own cache.""",
    example="minice models",
    run=run,
    options=(FORMAT, MODEL_DIR),
)
