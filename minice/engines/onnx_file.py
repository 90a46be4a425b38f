"""Read an ONNX file without the onnx package: protobuf bytes to nodes and tensors.

Only what a plain, self-contained inference graph needs is read. Everything that would change the meaning of
a graph and is not understood (subgraphs, functions, external data, sparse tensors) is refused; what cannot
change it (documentation, declared types of inner values) is skipped. Tensors stay views of the buffer.

The file is not trusted. Whatever it says, the objects made from it are charged to a budget before they are
made: half the file's size plus ``_ALLOWANCE``. So a few bytes cannot grow into many, and the work is bounded.

Source: the ONNX specification, onnx/onnx.proto (field numbers below), and the protobuf encoding guide.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from minice.errors import GraphError

Array = NDArray[Any]
AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | Array

# Bytes of Python objects allowed beside half the file's size; real graphs of 350 nodes need about 1 MB.
_ALLOWANCE = 4 << 20

# What things cost in CPython, rounded up: a parsed field with its tuple and list, a short string or number
# in a tuple, a node with its dict. One byte of packed varints makes at most one integer.
_FIELD_COST = 160
_STRING_COST = 80
_NODE_COST = 640
_INTEGER_COST = 48

# Exporters' names have up to about 120 bytes; an error message repeats them.
_LONGEST_NAME = 1_000

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}

# TensorProto.DataType -> its type in memory.
TENSOR_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("u1"),
    3: np.dtype("i1"),
    6: np.dtype("<i4"),
    7: np.dtype("<i8"),
    9: np.dtype("?"),
    10: np.dtype("<f2"),
    11: np.dtype("<f8"),
}
# The same -> TensorProto field of numbers that are not raw: float_data, int32_data or int64_data.
_TYPED_DATA = {1: 4, 2: 5, 3: 5, 6: 5, 7: 7, 9: 5}
_RAW_DATA = 9
_OTHER_TENSOR_DATA = {4, 5, 6, 7, 9, 10, 11}

# AttributeProto.AttributeType -> field number of its value.
_ATTRIBUTE_FIELDS = {1: 2, 2: 3, 3: 4, 4: 5, 6: 7, 7: 8}
_ATTRIBUTE_VALUES = {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14, 15, 22, 23}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Node:
    """One operation.

    Attributes:
        index: Its place in the file.
        op_type: Name of the operator.
        domain: Operator set; "" is ONNX's own.
        inputs: Value names; "" where an optional input is left out.
        outputs: Value names; "" where an optional output is left out.
        attributes: Numbers, strings, tuples of numbers, and tensors as arrays.
    """

    index: int
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, AttributeValue]

    @property
    def where(self) -> str:
        """Path of the node, for errors."""
        return f"graph.node[{self.index}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueInfo:
    """A graph input or output as declared.

    Attributes:
        name: The value's name.
        elem_type: ONNX data type (1 is float32, 7 is int64); 0 where it is not declared.
        shape: Dimensions, None for each symbolic one; None where no shape is declared.
    """

    name: str
    elem_type: int
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OnnxModel:
    """An inference graph.

    Attributes:
        size: Bytes of the file.
        opsets: Version of each operator set; "" is ONNX's own.
        nodes: In the file's order, which need not be an order of execution.
        initializers: Constant tensors by name: read-only views of the buffer, perhaps unaligned.
        inputs: Graph inputs that no initializer gives a value to.
        outputs: Graph outputs.
        metadata: The model's metadata properties.
    """

    size: int
    opsets: dict[str, int]
    nodes: tuple[Node, ...]
    initializers: dict[str, Array]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    metadata: dict[str, str] = field(default_factory=dict)


def read_onnx(buffer: bytes | memoryview) -> OnnxModel:
    """Read a serialized ONNX model.

    Args:
        buffer: The whole file. It must not change while the model is in use: tensors are views of it.

    Returns:
        The graph. Nothing in it has been executed or checked against ONNX's operator schemas.

    Raises:
        GraphError: The bytes are no ONNX model, or one with subgraphs, functions, external or sparse data.
    """
    source = _Source(buffer)
    model = source.message(0, len(source.data))
    for number, what in {20: "training information", 25: "functions"}.items():
        if number in model.fields:
            raise GraphError(f"the model holds {what}, which no engine of minice reads; inline and export it again")
    if 7 not in model.fields:
        raise GraphError("not an ONNX model: expected a graph, found none")
    opsets = dict(_each(model, 8, "opset_import", _opset))
    metadata = dict(_each(model, 14, "metadata_props", lambda entry: (entry.text(1), entry.text(2))))
    try:
        return _graph(model.child(7), size=len(source.data), opsets=opsets, metadata=metadata)
    except GraphError as error:
        raise error.within("graph") from None


class _Source:
    """The buffer and what may still be made from it."""

    def __init__(self, buffer: bytes | memoryview) -> None:
        self.view = memoryview(buffer).cast("B").toreadonly()
        # Indexing bytes is faster than indexing a view of them.
        self.data: bytes | memoryview = buffer if isinstance(buffer, bytes) else self.view
        self.budget = len(self.data) // 2 + _ALLOWANCE

    def spend(self, size: int) -> None:
        """Charge objects that are about to be made."""
        self.budget -= size
        if self.budget < 0:
            raise GraphError(f"{len(self.data)} bytes hold more small parts than any real model of that size")

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Read an unsigned 64-bit integer; returns it and the offset behind it."""
        value = shift = 0
        while at < end and shift < 70:
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at
            shift += 7
        raise GraphError(f"malformed protobuf: no integer ends at byte {at}")

    def message(self, at: int, end: int) -> "_Message":
        """Split one message into its fields, without looking into them."""
        fields: dict[int, list[tuple[int, int, int]]] = {}
        while at < end:
            tag, at = self.varint(at, end)
            number, wire = tag >> 3, tag & 7
            self.spend(_FIELD_COST)
            if wire == _VARINT:
                value, start = self.varint(at, end)
                entry, at = (wire, value, 0), start
            elif wire == _BYTES:
                length, start = self.varint(at, end)
                entry, at = (wire, start, start + length), start + length
            elif wire in _WIDTHS:
                entry, at = (wire, at, at + _WIDTHS[wire]), at + _WIDTHS[wire]
            else:
                raise GraphError(f"malformed protobuf: wire type {wire} at byte {at}")
            if at > end or not 0 < number < 1 << 29:
                raise GraphError(f"malformed or truncated protobuf: field {number} runs to byte {at} of {end}")
            fields.setdefault(number, []).append(entry)
        return _Message(self, fields)


class _Message:
    """Fields of one message by number: (wire type, value or start, end). Getters check type and count."""

    __slots__ = ("fields", "source")

    def __init__(self, source: _Source, fields: dict[int, list[tuple[int, int, int]]]) -> None:
        self.source = source
        self.fields = fields

    def all(self, number: int, wire: int) -> list[tuple[int, int, int]]:
        """Return the entries of a repeated field."""
        entries = self.fields.get(number, [])
        if any(entry[0] != wire for entry in entries):
            raise GraphError(f"malformed protobuf: field {number} has the wrong wire type")
        return entries

    def one(self, number: int, wire: int) -> tuple[int, int, int] | None:
        """Return the entry of a singular field, None where it is missing."""
        entries = self.all(number, wire)
        if len(entries) > 1:
            raise GraphError(f"field {number} must stand once, found {len(entries)} times")
        return entries[0] if entries else None

    def integer(self, number: int, default: int = 0) -> int:
        """Return a signed integer."""
        entry = self.one(number, _VARINT)
        return default if entry is None else _signed(entry[1])

    def integers(self, number: int) -> list[int]:
        """Return a repeated signed integer, packed or not."""
        source, values = self.source, []
        for wire, start, end in self.fields.get(number, []):
            if wire == _VARINT:
                values.append(_signed(start))
                continue
            if wire != _BYTES:
                raise GraphError(f"malformed protobuf: field {number} has the wrong wire type")
            source.spend(_INTEGER_COST * (end - start))
            while start < end:
                value, start = source.varint(start, end)
                values.append(_signed(value))
        return values

    def real(self, number: int) -> float:
        """Return a float."""
        entry = self.one(number, _FIXED32)
        return 0.0 if entry is None else float(struct.unpack_from("<f", self.source.data, entry[1])[0])

    def reals(self, number: int) -> NDArray[np.float32]:
        """Return a repeated float, packed (as a view of the buffer) or not."""
        entries = self.fields.get(number, [])
        if len(entries) == 1 and entries[0][0] == _BYTES:
            return self.source_array(entries[0], np.dtype("<f4"))
        source = self.source.data
        return np.array([struct.unpack_from("<f", source, e[1])[0] for e in self.all(number, _FIXED32)], "<f4")

    def source_array(self, entry: tuple[int, int, int], dtype: np.dtype[Any]) -> Array:
        """View bytes of the buffer as an array of one dimension."""
        _, start, end = entry
        count, rest = divmod(end - start, dtype.itemsize)
        if rest:
            raise GraphError(f"{end - start} bytes do not divide into items of {dtype.itemsize}")
        return np.frombuffer(self.source.view, dtype, count, start) if count else np.empty(0, dtype)

    def text(self, number: int) -> str:
        """Return a string, empty where it is missing."""
        entry = self.one(number, _BYTES)
        return "" if entry is None else self._text(entry)

    def texts(self, number: int) -> tuple[str, ...]:
        """Return a repeated string."""
        return tuple(self._text(entry) for entry in self.all(number, _BYTES))

    def _text(self, entry: tuple[int, int, int]) -> str:
        _, start, end = entry
        if end - start > _LONGEST_NAME:
            raise GraphError(f"a name of {end - start} bytes; expected at most {_LONGEST_NAME}")
        # One wide character makes Python keep four bytes for each.
        self.source.spend(_STRING_COST + 4 * (end - start))
        try:
            return str(self.source.view[start:end], "utf-8")
        except UnicodeDecodeError:
            raise GraphError(f"a name at byte {start} is not UTF-8") from None

    def child(self, number: int) -> "_Message":
        """Return a singular message, an empty one where it is missing."""
        entry = self.one(number, _BYTES)
        return _Message(self.source, {}) if entry is None else self.source.message(entry[1], entry[2])

    def children(self, number: int) -> Iterator["_Message"]:
        """Yield a repeated message."""
        for _, start, end in self.all(number, _BYTES):
            yield self.source.message(start, end)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_Parsed = TypeVar("_Parsed")


def _each(parent: _Message, number: int, what: str, parse: Callable[[_Message], _Parsed]) -> Iterator[_Parsed]:
    """Parse a repeated message; errors say which one."""
    index = 0
    try:
        for index, message in enumerate(parent.children(number)):  # noqa: B007 - the handler reads it
            yield parse(message)
    except GraphError as error:
        raise error.within(f"{what}[{index}]") from None


def _opset(message: _Message) -> tuple[str, int]:
    domain = message.text(1)
    return "" if domain == "ai.onnx" else domain, message.integer(2)


def _graph(graph: _Message, *, size: int, opsets: dict[str, int], metadata: dict[str, str]) -> OnnxModel:
    if 15 in graph.fields:
        raise GraphError("sparse initializers are not read; save the model with dense tensors")
    initializers = _initializers(graph)
    declared = tuple(_each(graph, 11, "input", _value_info))
    return OnnxModel(
        size=size,
        opsets=opsets,
        nodes=tuple(_nodes(graph)),
        initializers=initializers,
        inputs=tuple(value for value in declared if value.name not in initializers),
        outputs=tuple(_each(graph, 12, "output", _value_info)),
        metadata=metadata,
    )


def _initializers(graph: _Message) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for index, message in enumerate(graph.children(5)):
        place = f"initializer[{index}]"
        try:
            name = message.text(8)
            place = f"initializer[{name!r}]" if name else place
            if not name or name in found:
                raise GraphError("expected a name that no other initializer has")
            found[name] = _tensor(message)
        except GraphError as error:
            raise error.within(place) from None
    return found


def _tensor(message: _Message) -> Array:
    """Return a tensor's data in its shape; numbers that are stored raw stay where they are."""
    if 13 in message.fields or message.integer(14):
        raise GraphError(
            "the tensor's data lies in another file (ONNX external data), which minice never opens: "
            "only bytes that were verified are used; save the model as one file"
        )
    data_type = message.integer(2)
    dtype = TENSOR_TYPES.get(data_type)
    if dtype is None:
        raise GraphError(f"tensor of ONNX data type {data_type}: expected one of {sorted(TENSOR_TYPES)}")
    shape = _shape(message.integers(1))
    present = message.fields.keys() & _OTHER_TENSOR_DATA
    if 3 in message.fields or not present <= {_RAW_DATA, _TYPED_DATA.get(data_type)} or len(present) > 1:
        raise GraphError(f"tensor data of type {dtype} in fields {sorted(present)}: expected raw data")
    values = _values(message, dtype, present)
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise GraphError(f"tensor of shape {list(shape)} holds {values.size} numbers")
    return values.reshape(shape)


def _values(message: _Message, dtype: np.dtype[Any], present: set[int]) -> Array:
    """Return a tensor's numbers in one dimension."""
    if _RAW_DATA in present:
        entry = message.one(_RAW_DATA, _BYTES)
        values = message.source_array(entry, dtype) if entry else np.empty(0, dtype)
    elif 4 in present:
        values = message.reals(4)
    elif present:
        values = _integers(message, dtype, present)
    else:
        values = np.empty(0, dtype)
    if dtype == np.bool_ and (values.view(np.uint8) > 1).any():
        raise GraphError("a tensor of booleans holds bytes other than 0 and 1")
    return values


def _integers(message: _Message, dtype: np.dtype[Any], present: set[int]) -> Array:
    numbers = [number for field_number in present for number in message.integers(field_number)]
    limits = np.iinfo(np.uint8 if dtype == np.bool_ else dtype)
    if any(not limits.min <= number <= limits.max for number in numbers):
        raise GraphError(f"a tensor of {dtype} holds a number outside {limits.min}..{limits.max}")
    return np.array(numbers, np.uint8).view(dtype) if dtype == np.bool_ else np.array(numbers, dtype)


def _shape(dims: list[int]) -> tuple[int, ...]:
    # NumPy allows 32 dimensions; beside a zero it still multiplies the other ones.
    room = 1 << 48
    for dim in dims:
        if dim < 0:
            raise GraphError(f"tensor of shape {dims[:8]}: a dimension is negative")
        room //= max(dim, 1)
    if len(dims) > 32 or not room:
        raise GraphError(f"tensor of {len(dims)} dimensions, {dims[:8]}: too large to be true")
    return tuple(dims)


def _nodes(graph: _Message) -> Iterator[Node]:
    for index, message in enumerate(graph.children(1)):
        graph.source.spend(_NODE_COST)
        try:
            yield _node(message, index)
        except GraphError as error:
            raise error.within(f"node[{index}]") from None


def _node(message: _Message, index: int) -> Node:
    op_type, domain = message.text(4), message.text(7)
    if not op_type or message.text(8):
        raise GraphError("expected a node with an operator and without an overload")
    attributes: dict[str, AttributeValue] = {}
    for attribute in message.children(5):
        name = attribute.text(1)
        if not name or name in attributes:
            raise GraphError(f"expected attributes with a name each, got {name!r} again")
        try:
            attributes[name] = _attribute(attribute)
        except GraphError as error:
            raise error.within(f"attribute[{name!r}]") from None
    return Node(
        index=index,
        op_type=op_type,
        domain="" if domain == "ai.onnx" else domain,
        inputs=message.texts(1),
        outputs=message.texts(2),
        attributes=attributes,
    )


def _attribute(message: _Message) -> AttributeValue:
    kind = message.integer(20)
    number = _ATTRIBUTE_FIELDS.get(kind)
    others = (message.fields.keys() & _ATTRIBUTE_VALUES) - {number}
    if number is None or others or 21 in message.fields:
        raise GraphError(f"attribute of type {kind}: expected a number, a string, a tensor or a list of numbers")
    match number:
        case 2:
            return message.real(2)
        case 3:
            return message.integer(3)
        case 4:
            return message.text(4)
        case 5:
            return _tensor(message.child(5))
        case 7:
            reals = message.reals(7)
            message.source.spend(_INTEGER_COST * reals.size)
            return tuple(reals.tolist())
        case _:
            return tuple(message.integers(8))


def _value_info(message: _Message) -> ValueInfo:
    name = message.text(1)
    if not name:
        raise GraphError("expected a value with a name")
    tensor = message.child(2).child(1)
    shape = None
    if 2 in tensor.fields:
        shape = tuple(_dimension(dim) for dim in tensor.child(2).children(1))
    return ValueInfo(name=name, elem_type=tensor.integer(1), shape=shape)


def _dimension(message: _Message) -> int | None:
    return message.integer(1) if 1 in message.fields else None
