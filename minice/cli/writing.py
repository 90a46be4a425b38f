"""Everything the command line writes: UTF-8 whatever the locale, and tables that a terminal survives."""

import io
import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

_JOINERS = "\u200c\u200d"  # invisible, harmless and part of words and emoji
FALLBACK_WIDTH = 100  # columns, where no terminal tells


def write(text: str) -> None:
    """Write results to stdout as UTF-8."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """Write a message to stderr as UTF-8, each line made harmless for a terminal."""
    lines = [harmless(line) for line in text.splitlines()]
    if sys.stderr is None:
        return
    # Where stderr cannot be written, the exit code still tells.
    with suppress(OSError):
        _write(sys.stderr, "\n".join(lines) + "\n")
        sys.stderr.flush()


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Count up on stderr, in one line that stands still; say nothing where stderr is no terminal.

    Yields:
        The function to call with how many of ``total`` are done.
    """
    shown = False

    def report(done: int) -> None:
        nonlocal shown
        if sys.stderr is not None and sys.stderr.isatty():
            shown = True
            _write(sys.stderr, f"\rscored {done} of {total}")
            sys.stderr.flush()

    try:
        yield report
    finally:
        if shown:
            _write(sys.stderr, "\n")


def _write(stream: IO[str] | None, text: str) -> None:
    """Write to the bytes below a text stream, so that no locale encodes; a captured stream may have none."""
    if stream is None:
        raise OSError("stdout is closed")
    if isinstance(stream, io.TextIOWrapper):
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "backslashreplace"))
    else:
        stream.write(text)


def flush() -> None:
    """Hand everything written so far to the system: an error shows now and not at exit."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot complain of a closed pipe."""
    if sys.stdout is None:
        return
    with suppress(io.UnsupportedOperation):  # a stream in memory, put there by a caller, cannot complain
        target = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)


def choose_format(asked: str | None) -> str:
    """Return the output format: what was asked, else a table for a terminal and JSONL for a pipe."""
    if asked:
        return asked
    return "table" if sys.stdout is not None and sys.stdout.isatty() else "jsonl"


def to_json(value: object) -> str:
    """Return one line of JSON; readable, or all escapes where the text cannot be UTF-8."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return line


def harmless(text: str) -> str:
    r"""Replace what a terminal would act on: controls, escape sequences, changes of direction.

    White space becomes a space, everything else its escape.

    >>> harmless("a\tred \x1b[31mword")
    'a red \\x1b[31mword'
    """
    if text.isprintable():
        return text
    return "".join(map(_harmless_character, text))


def _harmless_character(character: str) -> str:
    if character in "\t\n\r":
        return " "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS:
        return repr(character)[1:-1]
    return character


def columns(text: str) -> int:
    """Return how many columns a terminal needs for harmless text: East Asian wide 2, combining 0."""
    return len(text) if text.isascii() else sum(map(_character_columns, text))


def _character_columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int) -> str:
    """Return text as one harmless line of at most ``width`` columns, marked with … where it is cut.

    Args:
        text: Of any length; only its start is read.
        width: Columns, at least 1.
    """
    # More characters than columns can only be combining ones: a bounded read of a text of any length.
    line = harmless(" ".join(text[: 8 * width + 100].split()))
    if columns(line) <= width:
        return line
    kept, used = [], 0
    for character in line:
        used += _character_columns(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, elastic: Sequence[int] = ()) -> str:
    """Lay out rows in aligned columns, as wide as the terminal allows.

    Args:
        header: One name a column.
        rows: One text a column each; made harmless here.
        elastic: Columns that are cut to share the room the others leave; they hold text and stand
            left, columns whose every cell is a number stand right.

    Returns:
        Lines, each ended by a newline.
    """
    cells = [[harmless(name) for name in header], *([*row] for row in rows)]
    fixed = [i for i in range(len(header)) if i not in elastic]
    for row in cells:
        for i in fixed:
            row[i] = harmless(row[i])
    widths = {i: max(columns(row[i]) for row in cells) for i in fixed}
    if elastic:
        total = shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns
        room = total - sum(widths.values()) - 2 * (len(header) - 1)
        share = max(12, room // len(elastic))
        for row in cells:
            for i in elastic:
                row[i] = fit(row[i], share)
        widths |= {i: max(columns(row[i]) for row in cells) for i in elastic}
    right = {i for i in fixed if len(cells) > 1 and all(_is_number(row[i]) for row in cells[1:])}
    return "".join(_line(row, widths, right) for row in cells)


def _line(row: Sequence[str], widths: dict[int, int], right: set[int]) -> str:
    padded = []
    for i, cell in enumerate(row):
        space = " " * (widths[i] - columns(cell))
        padded.append(space + cell if i in right else cell + space)
    return "  ".join(padded).rstrip() + "\n"


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "", 1).removeprefix("-").isdecimal() or text in ("", "-")
