"""``minice models``: every pinned model, and what of it is on disk."""

from typing import TYPE_CHECKING

from minice.cli.arguments import Arguments, Command
from minice.cli.encoder import FORMAT, MODEL_DIR, model_dir
from minice.cli.writing import choose_format, table, to_json, write

if TYPE_CHECKING:
    from minice.artifacts.lock import ModelPin
    from minice.artifacts.store import FileReport

SHOWN_DIGITS = 12  # of a digest in a table, as in a model_id; JSONL has all 64


def run(arguments: Arguments) -> int:
    """List the pins of the lock and where their files lie; no model file is read."""
    # Imported here, as in every verb: help and argument mistakes need neither lock nor NumPy.
    from minice.artifacts.lock import shipped_lock
    from minice.artifacts.store import locate

    found = [(pin, locate(pin, model_dir=model_dir(arguments))) for pin in shipped_lock().models]
    if choose_format(arguments["format"]) == "jsonl":
        for pin, reports in found:
            write(to_json(_as_json(pin, reports)) + "\n")
        return 0
    rows = [_row(pin, report) for pin, reports in found for report in reports]
    write(table(["model", "licence", "file", "bytes", "sha256", "status", "where"], rows))
    return 0


def _row(pin: "ModelPin", report: "FileReport") -> list[str]:
    size = "" if report.size is None else f"{report.size:,}"
    digest = _digest(pin, report)[:SHOWN_DIGITS]
    return [pin.id, pin.license, report.name, size, digest, report.status, report.path or ""]


def _digest(pin: "ModelPin", report: "FileReport") -> str:
    """The pinned digest; a file that `minice quantize` wrote has its own in its receipt, and none here."""
    return next((file.sha256 for file in pin.files if file.path == report.name), "")


def _as_json(pin: "ModelPin", reports: "tuple[FileReport, ...]") -> dict[str, object]:
    return {
        "id": pin.id,
        "repository": pin.repository,
        "aliases": list(pin.aliases),
        "revision": pin.revision,
        "license": pin.license,
        "max_length": pin.max_length,
        "scale": str(pin.scale),
        "on_disk": all(report.good for report in reports),
        "files": [
            {
                "role": report.role,
                "precision": report.precision,
                "name": report.name,
                "size": report.size,
                "sha256": _digest(pin, report) or None,
                "status": report.status,
                "path": report.path,
                "message": report.message,
            }
            for report in reports
        ],
    }


COMMAND = Command(
    name="models",
    summary="every pinned model, and what of it is on disk",
    description="""\
Lists the files of every pinned model: licence, size, digest, where the file lies. Only names and sizes
are looked at ("present"); `minice verify` reads and hashes. "absent" is an optional file that is not there.""",
    example="minice models",
    run=run,
    options=(FORMAT, MODEL_DIR),
)
