"""The receipt of a quantized model: which bytes it was made from, by what, and which bytes came out.

`minice quantize` writes one beside each int8 file. It lets the store use a file that no lock pins: the
receipt ties its digest to the digest of a pinned source. It is a record and no signature; who can write into
the folder can write a receipt too, and `minice verify --deep` is what makes the file again and compares.
"""

import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from minice.errors import IntegrityError

SCHEME: Final = "int8-weight-only/1"  # the rounding of DESIGN.md; another rounding is another number
RECEIPT_VERSION: Final = 1
LARGEST_RECEIPT: Final = 65_536  # bytes; ours have about 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """Some bytes, by what they hash to.

    Attributes:
        sha256: 64 lowercase hex digits.
        size: Bytes.
    """

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What was quantized, how, and what came of it. ``minice`` and ``onnx`` are the versions that did it."""

    source: Digest
    result: Digest
    scheme: str
    minice: str
    onnx: str


def quantized_path(path: str) -> str:
    """Return where the int8 file of an fp32 model file goes: into the same folder.

    >>> quantized_path("onnx/model.onnx")
    'onnx/model.int8.onnx'
    """
    source = PurePosixPath(path)
    return str(source.with_name(f"{source.name.removesuffix('.onnx')}.int8.onnx"))


def receipt_path(quantized: str) -> str:
    """Return where the receipt of a quantized file goes: beside it.

    >>> receipt_path("onnx/model.int8.onnx")
    'onnx/model.int8.onnx.json'
    """
    return f"{quantized}.json"


def format_receipt(receipt: Receipt) -> str:
    """Write a receipt as JSON with sorted keys; the same receipt gives the same bytes."""
    values = {
        "minice": receipt.minice,
        "onnx": receipt.onnx,
        "receipt-version": RECEIPT_VERSION,
        "result": {"sha256": receipt.result.sha256, "size": receipt.result.size},
        "scheme": receipt.scheme,
        "source": {"sha256": receipt.source.sha256, "size": receipt.source.size},
    }
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def parse_receipt(data: bytes) -> Receipt:
    """Read a receipt and check its form.

    Raises:
        IntegrityError: Not JSON, or not a receipt; ``where`` names the field, for instance ``source.sha256``.
    """
    try:
        # RecursionError: a few kilobytes of "[" are enough for it.
        values = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the receipt is not JSON: {error}") from error
    top = _fields(
        values,
        "",
        {"minice": str, "onnx": str, "receipt-version": int, "result": dict, "scheme": str, "source": dict},
    )
    _expect(top["receipt-version"] == RECEIPT_VERSION, "receipt-version", RECEIPT_VERSION, top["receipt-version"])
    _expect(top["scheme"] == SCHEME, "scheme", SCHEME, top["scheme"])
    return Receipt(
        source=_digest(top["source"], "source"),
        result=_digest(top["result"], "result"),
        scheme=top["scheme"],
        minice=top["minice"],
        onnx=top["onnx"],
    )


def _digest(values: object, where: str) -> Digest:
    fields = _fields(values, where, {"sha256": str, "size": int})
    sha256, size = fields["sha256"], fields["size"]
    _expect(
        re.fullmatch("[0-9a-f]{64}", sha256) is not None,
        f"{where}.sha256",
        "64 lowercase hex digits",
        repr(sha256),
    )
    _expect(size > 0, f"{where}.size", "a number of bytes above 0", size)
    return Digest(sha256=sha256, size=size)


def _fields(values: object, where: str, kinds: dict[str, type]) -> dict[str, Any]:
    """Return a JSON object's fields after checking that exactly these are there, each of its type."""
    if not isinstance(values, dict):
        raise _wrong(where, "an object", type(values).__name__)
    fields = {str(key): value for key, value in values.items()}
    for key in {**fields, **kinds}:
        place = f"{where}.{key}" if where else key
        _expect(key in kinds, place, "no such field", "one")
        _expect(key in fields, place, kinds.get(key, object).__name__, "nothing")
        # `type(...) is`: true is no size, though bool is an int to Python.
        _expect(type(fields[key]) is kinds[key], place, kinds[key].__name__, type(fields[key]).__name__)
    return fields


def _expect(holds: bool, where: str, expected: object, got: object) -> None:
    if not holds:
        raise _wrong(where, expected, got)


def _wrong(where: str, expected: object, got: object) -> IntegrityError:
    shown = str(got) if len(str(got)) <= 80 else f"{str(got)[:76]}..."
    return IntegrityError(f"the receipt is wrong here: expected {expected}, got {shown}", where=where)
