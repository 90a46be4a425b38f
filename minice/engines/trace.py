"""A small interpreter of ONNX graphs, to find out what a graph computes before it is believed.

It knows the operators that exporters write into BERT encoders, in the versions that opsets 11 to 23 define,
and runs several small inputs side by side: a value that depends on no input is computed once for all. It
also follows which inputs, or whether only their shapes, each value depends on.

The graph is not trusted: every operator's result is charged, before it is allocated, to a budget of half the
file's size plus ``_ALLOWANCE`` for what lives at one time, and to a budget of arithmetic for the whole run.

Source: the ONNX operator specification, onnx/docs/Operators.md and Changelog.md.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minice.engines.onnx_file import TENSOR_TYPES, Array, Node, OnnxModel
from minice.errors import GraphError

OPSETS = range(11, 24)

# Among sources: the value depends on the shape of an input.
SHAPE = "shape"

# Live bytes beside half the file's size: room for one dequantized [384, 1536] matrix twice.
_ALLOWANCE = 8 << 20

# Multiplications or elements: a dense layer costs tokens * in * out, which is tokens / 4 per byte of float32.
_WORK_PER_BYTE = 64
_WORK_ALLOWANCE = 100_000_000
_WORK_PER_NODE = 5_000

# What the bookkeeping of one value costs in CPython, in two runs of which one is kept.
_VALUE_COST = 2048

# Values that depend on nothing but shapes are kept for the reader of a run up to this size.
_KEPT_ITEMS = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """What running a graph on several inputs showed.

    Attributes:
        values: What was asked for, one array for each input, or a single one where the value is constant.
        scalars: The same for small values that depend only on shapes.
        shapes: Of every computed value, with the first input.
    """

    values: dict[str, tuple[Array, ...]]
    scalars: dict[str, tuple[Array, ...]]
    shapes: dict[str, tuple[int, ...]]


class Program:
    """An ONNX graph, ready to run on demand: only nodes that a wanted value needs are looked at.

    Attributes:
        model: The graph.
        producers: The node that makes each value.

    Raises:
        GraphError: The opset is unknown, or two nodes make the same value.
    """

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.opset = model.opsets.get("", 0)
        if self.opset not in OPSETS:
            raise GraphError(
                f"expected ONNX opset {OPSETS.start} to {OPSETS.stop - 1}, got {self.opset or 'none'}; "
                "the onnxruntime engine may be able to run it",
                where="opset_import",
            )
        self._meter = _Meter(model.size)  # arithmetic is bounded over all runs
        given = {value.name for value in model.inputs} | model.initializers.keys()
        self.producers: dict[str, Node] = {}
        for node in model.nodes:
            for name in filter(None, node.outputs):
                if name in given or name in self.producers:
                    raise GraphError(f"the value {name!r} is made twice", where=node.where)
                self.producers[name] = node

    def run(self, feeds: Mapping[str, Sequence[Array]], wanted: Collection[str]) -> Run:
        """Compute values.

        Args:
            feeds: Graph inputs by name: one array for each input that runs side by side.
            wanted: Names of values.

        Raises:
            GraphError: A node is unknown, malformed, cannot be computed with these inputs or wants more memory or
                arithmetic than any real model of the file's size; a value is missing or depends on itself.
        """
        order = self._order(wanted, feeds)
        # How many readers are still to come; wanted values have one that never comes.
        readers = dict.fromkeys(wanted, 1)
        for node in order:
            for name in node.inputs:
                readers[name] = readers.get(name, 0) + 1
        values = {name: tuple(arrays) for name, arrays in feeds.items()}
        sources = _sources(order, feeds)
        shapes = {name: arrays[0].shape for name, arrays in values.items()}
        scalars: dict[str, tuple[Array, ...]] = {}
        meter = self._meter
        meter.live = 0
        meter.charge(0, _WORK_PER_NODE * len(order))
        meter.live = _VALUE_COST * len(order)
        with np.errstate(all="ignore"):  # numbers may be anything here
            for node in order:
                name = node.outputs[0]
                arrays = self._compute(node, values, meter)
                values[name], shapes[name] = arrays, arrays[0].shape
                if sources[name] <= {SHAPE} and arrays[0].size <= _KEPT_ITEMS:
                    scalars[name] = arrays
                meter.live += _nbytes(arrays)
                for read in node.inputs:
                    readers[read] -= 1
                    if not readers[read] and read in values:
                        meter.live -= _nbytes(values.pop(read)) if read not in feeds else 0
        constants = self.model.initializers
        found = {name: values[name] if name in values else (constants[name],) for name in wanted}
        return Run(values=found, scalars=scalars, shapes=shapes)

    def sources(self, wanted: Collection[str]) -> dict[str, frozenset[str]]:
        """Find what each value that goes into ``wanted`` depends on, without computing it.

        Returns:
            Names of the graph inputs whose numbers reach a value, ``SHAPE`` where a shape does; nothing for constants.

        Raises:
            GraphError: A node is unknown or malformed; a value is missing or depends on itself.
        """
        inputs = [value.name for value in self.model.inputs]
        order = self._order(wanted, inputs)
        for node in order:
            _operator_of(node, self.opset)
        return _sources(order, inputs)

    def constant(self, name: str) -> Array:
        """Compute a value that depends on no graph input.

        Raises:
            GraphError: As ``run``; the value depends on an input.
        """
        initializer = self.model.initializers.get(name)
        return initializer if initializer is not None else self.run({}, [name]).values[name][0]

    def keep(self, array: Array) -> Array:
        """Return an aligned copy that outlives all runs, charged to their budget."""
        self._meter.live = 0
        self._meter.charge(array.nbytes, 0)
        self._meter.limit -= array.nbytes
        return np.array(array)

    def _order(self, wanted: Collection[str], feeds: Collection[str]) -> list[Node]:
        """Sort the needed nodes so that each stands behind what it reads, and constants right before their reader."""
        order: list[Node] = []
        done: set[int] = set()
        open_: set[int] = set()
        stack: list[tuple[str, Node | None]] = [(name, None) for name in reversed(list(wanted))]
        while stack:
            name, reader = stack[-1]
            node = self.producers.get(name)
            if node is None or node.index in done:
                stack.pop()
                optional = not name and reader is not None
                if node is None and not optional and name not in feeds and name not in self.model.initializers:
                    raise GraphError(f"nothing makes the value {name!r}", where=reader.where if reader else "graph")
            elif node.index in open_ and all(self._is_done(read, done) for read in node.inputs):
                stack.pop()
                done.add(node.index)
                order.append(node)
            elif node.index in open_:
                raise GraphError(f"the value {name!r} depends on itself", where=node.where)
            else:
                open_.add(node.index)
                stack += [(read, node) for read in reversed(node.inputs)]
        return order

    def _is_done(self, name: str, done: Collection[int]) -> bool:
        node = self.producers.get(name)
        return node is None or node.index in done

    def _compute(self, node: Node, values: Mapping[str, tuple[Array, ...]], meter: "_Meter") -> tuple[Array, ...]:
        operator = _operator_of(node, self.opset)
        operands = [self._operand(name, values) for name in node.inputs]
        try:
            return tuple(
                operator.function(_Call(node, self.opset, [arrays[lane % len(arrays)] for arrays in operands], meter))
                for lane in range(max(map(len, operands), default=1))
            )
        except GraphError as error:
            raise error.within(node.where) from None
        # NumPy is the judge of shapes, indices and types; whatever it refuses is the file's fault.
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise GraphError(f"{node.op_type} cannot be computed: {str(error)[:300]}", where=node.where) from error

    def _operand(self, name: str, values: Mapping[str, tuple[Array | None, ...]]) -> tuple[Array | None, ...]:
        return values[name] if name in values else (self.model.initializers.get(name),)


def _sources(order: Sequence[Node], inputs: Collection[str]) -> dict[str, frozenset[str]]:
    sources = {name: frozenset([name]) for name in inputs}
    nothing, shape = frozenset[str](), frozenset([SHAPE])
    for node in order:
        reached = nothing.union(*(sources.get(name, nothing) for name in node.inputs))
        sources.update(dict.fromkeys(node.outputs, shape if node.op_type == "Shape" and reached else reached))
    return sources


def _nbytes(arrays: Sequence[Array]) -> int:
    return sum(array.nbytes for array in arrays)


class _Meter:
    """What a run may still use."""

    def __init__(self, file_size: int) -> None:
        self.live = 0
        self.limit = file_size // 2 + _ALLOWANCE
        self.work = file_size * _WORK_PER_BYTE + _WORK_ALLOWANCE

    def charge(self, size: int, work: int) -> None:
        """Refuse ``size`` bytes or ``work`` steps that are too many."""
        self.work -= work
        if self.live + size > self.limit or self.work < 0:
            raise GraphError("the graph wants more memory or arithmetic than any real model of its size")


class _Call:
    """One application of an operator."""

    __slots__ = ("inputs", "meter", "node", "opset")

    def __init__(self, node: Node, opset: int, inputs: list[Array | None], meter: _Meter) -> None:
        self.node = node
        self.opset = opset
        self.inputs = inputs
        self.meter = meter

    def __getitem__(self, index: int) -> Array:
        """An input; an optional one must be asked for with ``optional``."""
        array = self.optional(index)
        if array is None:
            raise GraphError(f"input {index} is missing")
        return array

    def optional(self, index: int) -> Array | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def charge(self, shape: Sequence[int], itemsize: int = 4, *, work: int = 1, temporaries: int = 0) -> None:
        """Announce a result: ``work`` steps for each element, ``temporaries`` more arrays of its size."""
        count = math.prod(shape)
        self.meter.charge(count * itemsize * (1 + temporaries), count * work)

    def integer(self, name: str, default: int) -> int:
        value = self.node.attributes.get(name, default)
        if not isinstance(value, int):
            raise GraphError(f"attribute {name}: expected an integer, got {type(value).__name__}")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.node.attributes.get(name, default)
        if not isinstance(value, float):
            raise GraphError(f"attribute {name}: expected a float, got {type(value).__name__}")
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of integers from an attribute, None where it is missing."""
        value = self.node.attributes.get(name)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            raise GraphError(f"attribute {name}: expected integers, got {type(value).__name__}")
        return [int(item) for item in value]

    def vector(self, index: int) -> list[int] | None:
        """A list of integers from an input, None where it is missing."""
        array = self.optional(index)
        if array is None:
            return None
        if array.ndim != 1 or array.dtype not in (np.int64, np.int32):
            raise GraphError(f"input {index}: expected a list of integers, got {array.dtype} of shape {array.shape}")
        self.charge(array.shape, 40)
        return [int(item) for item in array.tolist()]

    def axes(self, *, input_since: int) -> list[int] | None:
        """Axes, which moved from an attribute to the second input."""
        return self.integers("axes") if self.opset < input_since else self.vector(1)

    def expect(self, kinds: str, *arrays: Array) -> None:
        """Refuse operands of other kinds (NumPy's letters) or of differing types."""
        types = {array.dtype for array in arrays}
        if len(types) != 1 or any(dtype.kind not in kinds for dtype in types):
            raise GraphError(f"{self.node.op_type} of {', '.join(sorted(map(str, types)))} is not defined")


@dataclass(frozen=True, slots=True)
class _Operator:
    function: Callable[[_Call], Array]
    inputs: tuple[int, int]
    attributes: frozenset[str]


_OPERATORS: dict[str, dict[int, _Operator]] = {}


def _operator(
    name: str, *, since: int = 1, inputs: tuple[int, int] = (1, 1), attributes: str = ""
) -> Callable[[Callable[[_Call], Array]], Callable[[_Call], Array]]:
    """Register a function for an operator from one opset on."""

    def register(function: Callable[[_Call], Array]) -> Callable[[_Call], Array]:
        _OPERATORS.setdefault(name, {})[since] = _Operator(function, inputs, frozenset(attributes.split()))
        return function

    return register


def _operator_of(node: Node, opset: int) -> _Operator:
    """Look a node's operator up and check that the node has its form."""
    versions = {} if node.domain else _OPERATORS.get(node.op_type, {})
    since = max((version for version in versions if version <= opset), default=None)
    if since is None:
        name = f"{node.domain}.{node.op_type}" if node.domain else f"{node.op_type} of opset {opset}"
        raise GraphError(
            f"the numpy engine does not know the operator {name}; the onnxruntime engine can run it "
            "(--engine onnxruntime, engine='onnxruntime')",
            where=node.where,
        )
    operator = versions[since]
    least, most = operator.inputs
    unknown = node.attributes.keys() - operator.attributes
    if not least <= len(node.inputs) <= most or not all(node.inputs[:least]) or unknown:
        raise GraphError(
            f"{node.op_type} of opset {opset} with {len(node.inputs)} inputs and the attributes "
            f"{sorted(node.attributes)[:9]} is not what ONNX defines",
            where=node.where,
        )
    if not node.outputs or not node.outputs[0] or any(node.outputs[1:]):
        raise GraphError(f"expected one output of {node.op_type}, got {len(node.outputs)}", where=node.where)
    return operator


def erf(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the error function.

    Source: Abramowitz and Stegun 7.1.26; absolute error <= 1.5e-7.
    """
    magnitude = np.abs(x, dtype=np.float64)
    t = 1 / (1 + 0.3275911 * magnitude)
    series = np.zeros_like(t)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + coefficient) * t
    return np.asarray(np.copysign(1 - series * np.exp(-magnitude * magnitude), x), np.float64)


# Element by element.

_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}
_COMPARISONS = {"Less": np.less, "Greater": np.greater}
_COMPARISONS_OR_EQUAL = {"LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal}


def _elementwise(function: Callable[..., Any], *, kinds: str) -> Callable[[_Call], Array]:
    """Wrap a NumPy function of two operands of one type."""

    def apply(call: _Call) -> Array:
        call.expect(kinds, call[0], call[1])
        call.charge(np.broadcast_shapes(call[0].shape, call[1].shape), call[0].itemsize)
        return np.asarray(function(call[0], call[1]))

    return apply


for _name, _function in _ARITHMETIC.items():
    _operator(_name, since=7, inputs=(2, 2))(_elementwise(_function, kinds="fiu"))
for _name, _function in _COMPARISONS.items():
    _operator(_name, since=9, inputs=(2, 2))(_elementwise(_function, kinds="fiu"))
for _name, _function in _COMPARISONS_OR_EQUAL.items():
    _operator(_name, since=12, inputs=(2, 2))(_elementwise(_function, kinds="fiu"))
_operator("Equal", since=11, inputs=(2, 2))(_elementwise(np.equal, kinds="fiub"))
_operator("And", since=7, inputs=(2, 2))(_elementwise(np.logical_and, kinds="b"))
_operator("Or", since=7, inputs=(2, 2))(_elementwise(np.logical_or, kinds="b"))
_operator("Max", since=8, inputs=(2, 2))(_elementwise(np.maximum, kinds="fiu"))
_operator("Min", since=8, inputs=(2, 2))(_elementwise(np.minimum, kinds="fiu"))


def _mapped(function: Callable[..., Any], *, kinds: str, temporaries: int = 0) -> Callable[[_Call], Array]:
    """Wrap a NumPy function of one operand; the result has its type."""

    def apply(call: _Call) -> Array:
        call.expect(kinds, call[0])
        call.charge(call[0].shape, call[0].itemsize, temporaries=temporaries)
        return np.asarray(function(call[0])).astype(call[0].dtype, copy=False)

    return apply


_operator("Sqrt", since=6)(_mapped(np.sqrt, kinds="f"))
_operator("Tanh", since=6)(_mapped(np.tanh, kinds="f"))
_operator("Relu", since=6)(_mapped(lambda x: np.maximum(x, 0), kinds="f"))
_operator("Erf", since=9)(_mapped(erf, kinds="f", temporaries=12))
_operator("Not")(_mapped(np.logical_not, kinds="b"))
_operator("Identity")(lambda call: call[0])


@_operator("IsNaN", since=9)
def _is_nan(call: _Call) -> Array:
    call.expect("f", call[0])
    call.charge(call[0].shape)
    return np.isnan(call[0])


@_operator("Gelu", since=20, attributes="approximate")
def _gelu(call: _Call) -> Array:
    x = call[0]
    call.expect("f", x)
    if call.node.attributes.get("approximate", "none") != "none":
        raise GraphError("GELU in its tanh form is not supported; the onnxruntime engine can run it")
    call.charge(x.shape, x.itemsize, temporaries=12)
    return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(x.dtype)


@_operator("Div", since=7, inputs=(2, 2))
def _div(call: _Call) -> Array:
    x, y = call[0], call[1]
    call.expect("fi", x, y)
    call.charge(np.broadcast_shapes(x.shape, y.shape), x.itemsize)
    if x.dtype.kind == "f":
        return np.asarray(np.divide(x, y))
    # ONNX truncates where NumPy rounds down; they agree on what shapes are made of.
    if (x < 0).any() or (y <= 0).any():
        raise GraphError("division of negative integers or by zero")
    return np.asarray(x // y)


@_operator("Pow", since=7, inputs=(2, 2))
def _pow(call: _Call) -> Array:
    base, exponent = call[0], call[1]
    call.expect("f", base)
    if exponent.dtype != base.dtype and (call.opset < 12 or exponent.dtype.kind not in "fi"):
        raise GraphError(f"Pow of {base.dtype} and {exponent.dtype} is not defined")
    call.charge(np.broadcast_shapes(base.shape, exponent.shape), base.itemsize, work=8)
    return np.asarray(np.power(base, exponent.astype(base.dtype)))


@_operator("Where", since=9, inputs=(3, 3))
def _where(call: _Call) -> Array:
    condition, x, y = call[0], call[1], call[2]
    call.expect("b", condition)
    call.expect("fiub", x, y)
    call.charge(np.broadcast_shapes(condition.shape, x.shape, y.shape), x.itemsize)
    return np.asarray(np.where(condition, x, y))


@_operator("Cast", since=9, attributes="to")
@_operator("Cast", since=19, attributes="to saturate")
def _cast(call: _Call) -> Array:
    target = TENSOR_TYPES.get(call.integer("to", 0))
    if target is None:
        raise GraphError(f"Cast to the ONNX type {call.integer('to', 0)} is not supported")
    call.charge(call[0].shape, target.itemsize)
    return call[0].astype(target)


@_operator("DequantizeLinear", since=10, inputs=(2, 3))
@_operator("DequantizeLinear", since=13, inputs=(2, 3), attributes="axis")
def _dequantize(call: _Call) -> Array:
    x, scale, zero = call[0], call[1], call.optional(2)
    call.expect("iu", x)
    if scale.dtype != np.float32 or scale.ndim > 1 or (zero is not None and zero.dtype != x.dtype):
        raise GraphError(f"dequantization of {x.dtype} by {scale.dtype} of shape {scale.shape} is not supported")
    call.charge(x.shape, temporaries=2)
    if zero is not None and zero.shape != scale.shape:
        raise GraphError(f"scale of shape {scale.shape} with a zero point of shape {zero.shape}")
    if scale.size != 1 or scale.ndim:
        axis = range(x.ndim)[call.integer("axis", 1)]
        shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
        scale, zero = scale.reshape(shape), None if zero is None else zero.reshape(shape)
    centered = x if zero is None else x.astype(np.int32) - zero.astype(np.int32)
    return np.asarray(np.multiply(centered, scale, dtype=np.float32))


# Shapes.


@_operator("Shape")
@_operator("Shape", since=15, attributes="start end")
def _shape(call: _Call) -> Array:
    shape = call[0].shape
    return np.array(shape[call.integer("start", 0) : call.integer("end", len(shape))], np.int64)


@_operator("Reshape", since=5, inputs=(2, 2))
@_operator("Reshape", since=14, inputs=(2, 2), attributes="allowzero")
def _reshape(call: _Call) -> Array:
    x, target = call[0], call.vector(1) or []
    if any(dim < -1 for dim in target):
        raise GraphError(f"Reshape to {target[:9]}")
    if not call.integer("allowzero", 0):
        target = [x.shape[axis] if dim == 0 else dim for axis, dim in enumerate(target)]
    call.charge(x.shape, x.itemsize)
    return np.asarray(x.reshape(target))


@_operator("Flatten", since=9, attributes="axis")
def _flatten(call: _Call) -> Array:
    x = call[0]
    axis = range(-x.ndim, x.ndim + 1)[call.integer("axis", 1) + x.ndim]
    axis += x.ndim if axis < 0 else 0
    call.charge(x.shape, x.itemsize)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@_operator("Squeeze", attributes="axes")
@_operator("Squeeze", since=13, inputs=(1, 2))
def _squeeze(call: _Call) -> Array:
    axes = call.axes(input_since=13)
    return call[0].squeeze(axis=tuple(axes) if axes else None)


@_operator("Unsqueeze", attributes="axes")
@_operator("Unsqueeze", since=13, inputs=(2, 2))
def _unsqueeze(call: _Call) -> Array:
    return np.expand_dims(call[0], tuple(call.axes(input_since=13) or ()))


@_operator("Transpose", attributes="perm")
def _transpose(call: _Call) -> Array:
    perm = call.integers("perm")
    if perm is not None and any(axis < 0 for axis in perm):
        raise GraphError(f"Transpose with axes {perm[:9]}")
    return call[0].transpose(perm)


@_operator("Expand", since=8, inputs=(2, 2))
def _expand(call: _Call) -> Array:
    target = call.vector(1) or []
    if any(dim < 0 for dim in target):
        raise GraphError(f"Expand to {target[:9]}")
    shape = np.broadcast_shapes(call[0].shape, tuple(target))
    call.charge(shape, call[0].itemsize)
    return np.broadcast_to(call[0], shape)


@_operator("Concat", since=11, inputs=(1, 1 << 16), attributes="axis")
def _concat(call: _Call) -> Array:
    arrays = [call[index] for index in range(len(call.inputs))]
    call.expect("fiub", *arrays)
    call.charge([sum(array.size for array in arrays)], arrays[0].itemsize)
    if "axis" not in call.node.attributes:
        raise GraphError("Concat without an axis")
    return np.concatenate(arrays, axis=call.integer("axis", 0))


@_operator("Range", since=11, inputs=(3, 3))
def _range(call: _Call) -> Array:
    call.expect("fi", call[0], call[1], call[2])
    if any(call[index].ndim for index in range(3)):
        raise GraphError("Range of what is no single number")
    start, limit, delta = (call[index].item() for index in range(3))
    if delta == 0:
        raise GraphError("Range with steps of zero")
    count = max(0, math.ceil((limit - start) / delta))
    call.charge([count], call[0].itemsize)
    return np.asarray(start + np.arange(count) * delta, call[0].dtype)


@_operator("Constant", since=11, inputs=(0, 0), attributes="value")
@_operator("Constant", since=12, inputs=(0, 0), attributes="value value_float value_floats value_int value_ints")
def _constant(call: _Call) -> Array:
    if len(call.node.attributes) != 1:
        raise GraphError("expected one value of a Constant")
    name, value = next(iter(call.node.attributes.items()))
    kind = {"value": np.ndarray, "value_float": float, "value_int": int}.get(name, tuple)
    if not isinstance(value, kind):
        raise GraphError(f"attribute {name} of a Constant holds {type(value).__name__}")
    return np.asarray(value, None if name == "value" else np.float32 if "float" in name else np.int64)


@_operator("ConstantOfShape", since=9, attributes="value")
def _constant_of_shape(call: _Call) -> Array:
    value = call.node.attributes.get("value", np.zeros(1, np.float32))
    shape = call.vector(0) or []
    if not isinstance(value, np.ndarray) or value.size != 1 or any(dim < 0 for dim in shape):
        raise GraphError(f"ConstantOfShape: expected one number and a shape, got {shape[:9]}")
    call.charge(shape, value.itemsize)
    return np.asarray(np.full(shape, value.reshape(())))


# Picking.


@_operator("Gather", since=11, inputs=(2, 2), attributes="axis")
def _gather(call: _Call) -> Array:
    data, indices = call[0], call[1]
    call.expect("i", indices)
    axis = range(data.ndim)[call.integer("axis", 0)]
    call.charge(data.shape[:axis] + indices.shape + data.shape[axis + 1 :], data.itemsize)
    # Not take(): that copies the whole of an unaligned table.
    return np.asarray(data[(slice(None),) * axis + (indices,)])


@_operator("GatherND", since=11, inputs=(2, 2))
@_operator("GatherND", since=12, inputs=(2, 2), attributes="batch_dims")
def _gather_nd(call: _Call) -> Array:
    data, indices = call[0], call[1]
    call.expect("i", indices)
    if call.integer("batch_dims", 0) or not indices.ndim or not 1 <= indices.shape[-1] <= data.ndim:
        raise GraphError(f"GatherND with indices of shape {indices.shape} is not supported")
    call.charge(indices.shape[:-1] + data.shape[indices.shape[-1] :], data.itemsize, temporaries=2)
    return np.asarray(data[tuple(np.moveaxis(indices, -1, 0))])


@_operator("Slice", since=10, inputs=(3, 5))
def _slice(call: _Call) -> Array:
    starts, ends = call.vector(1) or [], call.vector(2) or []
    axes, steps = call.vector(3), call.vector(4)
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index = [slice(None)] * call[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if index[axis] != slice(None):
            raise GraphError(f"Slice of axis {axis} twice")
        index[axis] = slice(start, end, step)
    return np.asarray(call[0][tuple(index)])


# Arithmetic along axes.


@_operator("MatMul", since=9, inputs=(2, 2))
def _matmul(call: _Call) -> Array:
    x, y = call[0], call[1]
    call.expect("f", x, y)
    if min(x.ndim, y.ndim) < 2:
        raise GraphError(f"MatMul of shapes {x.shape} and {y.shape} is not supported")
    shape = (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1])
    call.charge(shape, x.itemsize, work=x.shape[-1])
    call.charge([x.size + y.size], x.itemsize)  # copies that make operands aligned
    return np.asarray(np.matmul(x, y))


@_operator("Gemm", since=11, inputs=(2, 3), attributes="alpha beta transA transB")
def _gemm(call: _Call) -> Array:
    x = call[0].T if call.integer("transA", 0) else call[0]
    y = call[1].T if call.integer("transB", 0) else call[1]
    bias = call.optional(2)
    call.expect("f", x, y, *([] if bias is None else [bias]))
    if x.ndim != 2 or y.ndim != 2:
        raise GraphError(f"Gemm of shapes {x.shape} and {y.shape}")
    call.charge((len(x), y.shape[1]), x.itemsize, work=x.shape[1], temporaries=3)
    call.charge([x.size + y.size], x.itemsize)
    product = np.matmul(x, y) * x.dtype.type(call.real("alpha", 1.0))
    if bias is None:
        return np.asarray(product)
    return np.asarray(product + np.broadcast_to(bias, product.shape) * x.dtype.type(call.real("beta", 1.0)))


@_operator("Softmax", since=11, attributes="axis")
@_operator("Softmax", since=13, attributes="axis")
def _softmax(call: _Call) -> Array:
    x = call[0]
    call.expect("f", x)
    call.charge(x.shape, x.itemsize, work=8, temporaries=2)
    axis = range(x.ndim)[call.integer("axis", 1 if call.opset < 13 else -1)]
    # Up to opset 12 all axes from this one on are one.
    grouped = x.reshape(*x.shape[:axis], -1) if call.opset < 13 else np.moveaxis(x, axis, -1)
    powers = np.exp(grouped - grouped.max(axis=-1, keepdims=True))
    result = powers / powers.sum(axis=-1, keepdims=True)
    return np.asarray(result.reshape(x.shape) if call.opset < 13 else np.moveaxis(result, -1, axis))


@_operator("ReduceMean", since=11, attributes="axes keepdims")
@_operator("ReduceMean", since=18, inputs=(1, 2), attributes="keepdims noop_with_empty_axes")
def _reduce_mean(call: _Call) -> Array:
    call.expect("f", call[0])
    if not call[0].size:
        raise GraphError("a mean of nothing")
    call.charge(call[0].shape, call[0].itemsize)
    axes = call.axes(input_since=18)
    if not axes and call.integer("noop_with_empty_axes", 0):
        return call[0]
    return np.asarray(call[0].mean(axis=tuple(axes) if axes else None, keepdims=bool(call.integer("keepdims", 1))))


@_operator("LayerNormalization", since=17, inputs=(2, 3), attributes="axis epsilon stash_type")
def _layer_normalization(call: _Call) -> Array:
    x, bias = call[0], call.optional(2)
    call.expect("f", x, call[1], *([] if bias is None else [bias]))
    call.charge(x.shape, x.itemsize, work=8, temporaries=3)
    axes = tuple(range(x.ndim)[call.integer("axis", -1) :])
    if not x.size:
        raise GraphError("a mean of nothing")
    centered = x - x.mean(axis=axes, keepdims=True)
    variance = np.square(centered).mean(axis=axes, keepdims=True)
    result = centered / np.sqrt(variance + x.dtype.type(call.real("epsilon", 1e-5)))
    result = result * np.broadcast_to(call[1], x.shape)
    return np.asarray(result if bias is None else result + np.broadcast_to(bias, x.shape))
