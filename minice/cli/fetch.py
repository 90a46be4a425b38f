"""``minice fetch``: download a pinned model, the only verb that connects."""

import sys
from typing import TYPE_CHECKING

from minice.cli.arguments import Arguments, Command, Option, Positional, read_text
from minice.cli.encoder import FORMAT, model_dir
from minice.cli.writing import choose_format, complain, table, to_json, write

if TYPE_CHECKING:
    from minice.artifacts.fetch import FetchedFile


def run(arguments: Arguments) -> int:
    """Fetch what is not there, and list every file with what happened to it."""
    from minice.artifacts.fetch import fetch_model
    from minice.artifacts.lock import known_lock

    lock = known_lock()
    pin = lock.find(arguments["id"])
    report = fetch_model(
        pin,
        model_dir=model_dir(arguments),
        progress=sys.stderr is not None and sys.stderr.isatty(),
        say=lambda text: complain(f"minice: {text}"),
        lock=lock,
    )
    complain(f"minice: {pin.id}: {'fetched, verified' if report.fetched else 'already there, verified'}")
    if choose_format(arguments["format"]) == "jsonl":
        for file in report.files:
            row = {"model": pin.id, "file": file.name, "path": file.path, "size": file.size, "sha256": file.sha256}
            write(to_json(row | {"status": _status(file)}) + "\n")
    else:
        rows = [[file.name, f"{file.size:,}", file.sha256[:12], _status(file), file.path] for file in report.files]
        write(table(["file", "bytes", "sha256", "status", "where"], rows, elastic=[4]))
    return 0


def _status(file: "FetchedFile") -> str:
    return "fetched" if file.fetched else "already there"


COMMAND = Command(
    name="fetch",
    summary="download a model's files and verify them",
    description="""\
Downloads the files of the model ID that are not on disk, at the pinned revision, and verifies size and
SHA-256 before it moves them into the model's folder: DIR, MINICE_MODEL_DIR, MINICE_HOME/ID or the default
that `minice models` shows. The only verb that connects, to HF_ENDPOINT or else the hub; refused under
HF_HUB_OFFLINE=1. A model that is there is verified, without connecting. A private or gated repository
needs HF_TOKEN. Needs: pip install 'minice[fetch]', or '.[fetch]'.""",
    example="minice fetch ms-marco-MiniLM-L6-v2",
    run=run,
    positionals=(Positional(name="ID", help="a model that `minice models` lists", read=read_text),),
    options=(FORMAT, Option(name="model-dir", metavar="DIR", help="look in this folder only, and fetch into it")),
)
