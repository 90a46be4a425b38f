"""Everything the command line reads: UTF-8 text or JSONL, with the line of every mistake.

What a record holds besides the text is carried as it was written: numbers keep their digits and strings
their escapes, because the raw text of each member is put out again, not a parsed copy of it.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from minice.cli.arguments import local_path, nearest
from minice.cli.writing import to_json
from minice.errors import InputError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json-lines")
TEXT_SUFFIXES = (".txt", ".md")
SHOWN = 40  # characters of a line that an error shows
_WHITE = " \t\r\n"  # what JSON calls white space
# A bracket and nothing else, or one before a quotation mark: how documents over several lines start, broken ones too.
_DOCUMENT_START = re.compile(r'[ \t]*(\[[ \t]*)?([\[{][ \t]*"|[\[{][ \t]*$)')


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of an input.

    Attributes:
        where: ``notes.jsonl:3``, as errors name it.
        text: Without its line ending.
    """

    where: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One input record.

    Attributes:
        line: Where it came from.
        is_object: Whether the line is a JSON object, or a passage by itself.
        texts: What the model reads of it: the passage, or query and passage.
    """

    line: Line
    is_object: bool
    texts: tuple[str, ...]

    def members(self) -> list[tuple[str, str]]:
        """Return the record's own keys and their raw JSON, in the order of the input."""
        if self.is_object:
            return raw_members(self.line.text)
        return [("text", to_json(self.line.text))]


def read_lines(name: str) -> list[Line]:
    """Read a file, or stdin for ``-``, as UTF-8 lines; a byte order mark and CRLF are taken off.

    Args:
        name: The file as the user wrote it.

    Raises:
        InputError: No such file, not readable, or not UTF-8; names file, line and byte.
    """
    shown = "<stdin>" if name == "-" else name
    data = _read_bytes(name, shown)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(data, error.start, shown) from None
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # the end of the last line, not a line
    return [Line(where=f"{shown}:{i}", text=line.removesuffix("\r")) for i, line in enumerate(lines, 1)]


def _read_bytes(name: str, shown: str) -> bytes:
    try:
        if name != "-":
            return Path(local_path(name)).read_bytes()
        if sys.stdin is None:
            raise InputError("stdin is closed", where=shown)
        return sys.stdin.buffer.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot be read: {reason}", where=shown) from error


def _not_utf8(data: bytes, start: int, shown: str) -> InputError:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return InputError("is UTF-16; expected UTF-8", where=shown)
    # UnicodeDecodeError counts from behind a byte order mark.
    start += 3 if data.startswith(b"\xef\xbb\xbf") else 0
    line_start = data.rfind(b"\n", 0, start) + 1
    number = data.count(b"\n", 0, start) + 1
    return InputError(
        f"expected UTF-8, got byte 0x{data[start]:02x} at byte {start - line_start + 1} of the line",
        where=f"{shown}:{number}",
    )


def is_blank(line: Line) -> bool:
    """Whether a line holds nothing but white space."""
    return not line.text.strip()


def choose_input_format(asked: str, name: str, lines: Iterable[Line]) -> str:
    """Return ``text`` or ``jsonl``: as asked, else by the file's name, else by the first non-blank line.

    Args:
        asked: ``text``, ``jsonl`` or ``auto``.
        name: The file as the user wrote it; ``-`` for stdin.
        lines: The input.

    Raises:
        InputError: The name does not say, and the input is one JSON document rather than JSONL; or the file's
            name ends in ``.json`` and its first line is not an object by itself.
    """
    if asked != "auto":
        return asked
    suffix = PurePath(name).suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    if suffix in TEXT_SUFFIXES:
        return "text"
    filled = [line for line in lines if not is_blank(line)]
    if not filled:
        return "text"
    if _is_object(filled[0].text):
        return "jsonl"
    if suffix == ".json" or _is_document(filled):
        what = {"[": "a JSON array", "{": "a JSON object that does not end on its line"}
        got = what.get(filled[0].text.lstrip(_WHITE)[:1], "something else")
        raise InputError(
            f"expected JSONL, one object a line, got {got}; write each object on a line of its own (for an array: "
            "jq -c '.[]'), or use --input-format text if every line is a passage",
            where=filled[0].where,
        )
    return "text"


def _is_document(lines: Sequence[Line]) -> bool:
    """Whether lines are one JSON document, or start like one: a passage may start with a bracket, too."""
    if not lines[0].text.lstrip(_WHITE).startswith(("[", "{")):
        return False
    if _DOCUMENT_START.match(lines[0].text):
        return True
    try:
        json.loads("\n".join(line.text for line in lines), parse_int=float)
    except ValueError:
        return False
    except RecursionError:  # nobody nests words that deep
        return True
    return True


def _is_object(text: str) -> bool:
    if not text.lstrip(_WHITE).startswith("{"):
        return False
    try:
        return isinstance(json.loads(text, parse_int=float), dict)
    except (ValueError, RecursionError):
        return False


def text_records(lines: Iterable[Line]) -> list[Record]:
    """Return one passage a line; blank lines are none."""
    return [Record(line=line, is_object=False, texts=(line.text,)) for line in lines if not is_blank(line)]


def json_records(lines: Iterable[Line], texts_of: Callable[[Line, dict[str, Any]], tuple[str, ...]]) -> list[Record]:
    """Return one record a line; empty lines are none.

    Args:
        lines: The input.
        texts_of: Takes from an object what the model reads.

    Raises:
        InputError: A line is not one JSON object; names the line.
    """
    return [
        Record(line=line, is_object=True, texts=texts_of(line, parse_object(line)))
        for line in lines
        if line.text.strip(_WHITE)
    ]


def parse_object(line: Line) -> dict[str, Any]:
    """Parse a line as one JSON object.

    Numbers come back as floats and only serve to say that they are numbers; their digits stay in the line.

    Raises:
        InputError: Not JSON (NaN and Infinity are not), not an object, or a key that stands twice.
    """
    try:
        value = json.loads(line.text, parse_int=float, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        start = line.text if len(line.text) <= SHOWN else f"{line.text[:SHOWN]}..."
        raise InputError(
            f"expected one JSON object, but at character {error.colno}: {error.msg}; the line starts with {start!r}",
            where=line.where,
        ) from None
    except ValueError as error:
        raise InputError(str(error), where=line.where) from None
    except RecursionError:
        raise InputError("JSON is nested too deeply", where=line.where) from None
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, got {kind(value)}", where=line.where)
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def kind(value: object) -> str:
    """Name the JSON type of a value."""
    names = {str: "a string", bool: "a boolean", float: "a number", list: "an array", dict: "an object"}
    return "null" if value is None else names[type(value)]


def raw_members(text: str) -> list[tuple[str, str]]:
    """Split a valid JSON object into its keys and the raw text of their values.

    Args:
        text: What ``parse_object`` accepts.

    >>> raw_members('{"a": 1.50, "b": [2, {"c": 3}]}')
    [('a', '1.50'), ('b', '[2, {"c": 3}]')]
    """
    decoder = json.JSONDecoder(parse_int=float)
    members = []
    place = _skip_white(text, text.index("{") + 1)
    while text[place] != "}":
        key, place = decoder.raw_decode(text, place)
        start = _skip_white(text, _skip_white(text, place) + 1)  # over the colon
        _, end = decoder.raw_decode(text, start)
        members.append((key, text[start:end]))
        place = _skip_white(text, end)
        if text[place] == ",":
            place = _skip_white(text, place + 1)
    return members


def _skip_white(text: str, place: int) -> int:
    while text[place] in _WHITE:
        place += 1
    return place


def string_member(line: Line, record: dict[str, Any], key: str) -> str:
    """Return the text under a key.

    Args:
        line: Where the record came from.
        record: The parsed object.
        key: Which of its keys.

    Raises:
        InputError: There is no such key (says which there are), or its value is not a string.
    """
    if key not in record:
        keys = ", ".join(map(repr, record)) or "no keys"
        raise InputError(f"expected the key {key!r}, got {keys}", where=line.where)
    if not isinstance(record[key], str):
        raise InputError(f"expected a string under {key!r}, got {kind(record[key])}", where=line.where)
    text: str = record[key]
    return text


def join_fields(line: Line, record: dict[str, Any], fields: Sequence[str]) -> str:
    """Join the named fields by one space; a field that is missing, null or empty adds nothing.

    Args:
        line: Where the record came from.
        record: The parsed object.
        fields: Its keys, in the order of the text.

    Raises:
        InputError: A value is not a string, or none of the fields is there.
    """
    present = [field for field in fields if record.get(field) is not None]
    if not present:
        raise InputError(f"has none of the fields {', '.join(map(repr, fields))}", where=line.where)
    return " ".join(filter(None, (string_member(line, record, field) for field in present)))


def check_fields(fields: Sequence[str], lines: Iterable[Line]) -> None:
    """Refuse a field that no record has: a typing error would otherwise lose that field in silence.

    Args:
        fields: The keys that were asked for.
        lines: The input.

    Raises:
        InputError: Names the field and the nearest key of the input.
    """
    keys = {key: None for line in lines if line.text.strip(_WHITE) for key in parse_object(line)}
    for field in fields:
        if keys and field not in keys:
            meant = nearest(field, keys)
            hint = f"did you mean {meant!r}?" if meant else f"keys there: {', '.join(map(repr, keys))}"
            raise InputError(f"no record has the field {field!r}; {hint}", where="--fields")
