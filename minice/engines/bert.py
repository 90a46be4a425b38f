"""Recognize a BERT cross-encoder in an ONNX graph.

Recognition goes by structure alone: from the logits backwards, each part must be what BERT has there, whatever the
exporter called or ordered it. What is found is then proven: the weights, put through BERT as the textbook has it,
must give the logits that the graph itself gives for small inputs, and whatever could differ only for longer ones
(positions, the attention mask) is looked at in full length.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minice.engines.onnx_file import Array, Node, OnnxModel
from minice.engines.trace import SHAPE, Program, Run
from minice.engines.weights import (
    Activation,
    BertWeights,
    LayerWeights,
    Linear,
    Matrix,
    Norm,
    PoolerActivation,
    Table,
    reference_head,
    reference_logits,
    reference_states,
)
from minice.errors import GraphError

__all__ = ["BertWeights", "LayerWeights", "Linear", "Matrix", "Norm", "Table", "recognize_bert", "reference_logits"]

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_FLOAT32, _INT64 = 1, 7  # TensorProto.DataType
_ELSEWHERE = "the onnxruntime engine can run it if onnxruntime can (--engine onnxruntime, engine='onnxruntime')"

# Two ways of rounding through all layers differ by about 1e-6 at numbers of ordinary size.
_TOLERANCE = 1e-5
# Constants of a formula are float32 in the file.
_CONSTANT_TOLERANCE = 3e-7

# Between two parts of a model stand a handful of moves.
_LONGEST_CHAIN = 100
_MOST_POSITIONS = 1 << 16

# Operators that move numbers without changing them. That they move them to the right place is proven by running them.
_MOVES = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten")

# Within it no layer can overflow float32 on the way, where engines would differ.
_LARGEST_WEIGHT = 1e4


def recognize_bert(model: OnnxModel) -> BertWeights:
    """Find the weights of a BERT cross-encoder in a graph, and prove that they are all it computes.

    Args:
        model: A graph of ``input_ids``, ``attention_mask`` and perhaps ``token_type_ids``, each int64 [N, T],
            with one output, the logits, [N, 1] or [N].

    Returns:
        The weights; large ones are views of the file. They stand for the graph as it is without padding, with an
        attention mask of ones.

    Raises:
        GraphError: The graph is malformed, is no BERT with one logit, or computes something else than its
            weights say; the message names what was found.
    """
    try:
        return _recognized(model)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        # Structure is followed before operators are run, and a hostile node may lack the inputs or attributes
        # that its operator must have: such a node has no meaning that could be lost here.
        raise GraphError(f"malformed graph: a node's inputs or attributes do not fit its operator ({error})") from error


def _recognized(model: OnnxModel) -> BertWeights:
    program = Program(model)
    output = _check_signature(model)
    recognizer = _Recognizer(program, output)
    head = recognizer.head(output)
    probes = [_Probe.of(program, rows=2, length=5), _Probe.of(program, rows=1, length=3)]
    run = program.run(_feeds(model, probes), [output, head.states])
    logits = [_one_logit(values, probe) for values, probe in zip(run.values[output], probes, strict=True)]
    weights = recognizer.bert(head, run)
    _check_probes(weights, probes, run.values[head.states], logits)
    recognizer.check_full_length(weights)
    return weights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Probe:
    """A small input without padding, [B, T], that differs from token to token."""

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]

    @classmethod
    def of(cls, program: Program, *, rows: int, length: int) -> "_Probe":
        """Make a probe within what the graph's tables hold."""
        vocabulary, segments = (_rows_gathered(program, name) for name in ("input_ids", "token_type_ids"))
        ids = np.arange(1, rows * length + 1).reshape(rows, length) * 7919
        halves = np.arange(length) * 2 // length
        return cls(input_ids=ids % vocabulary, token_type_ids=np.tile(halves % segments, (rows, 1)))

    def pairs(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield each row as a pair."""
        return zip(self.input_ids, self.token_type_ids, strict=True)


def _rows_gathered(program: Program, name: str) -> int:
    """Count the rows of the smallest stored table that this input picks from."""
    tables = (
        program.model.initializers.get(node.inputs[0])
        for node in program.model.nodes
        if node.op_type == "Gather" and node.inputs[1:] == (name,)
    )
    return min((len(table) for table in tables if table is not None and table.size), default=1)


def _check_signature(model: OnnxModel) -> str:
    """Check the declared inputs and outputs; returns the name of the output."""
    names = [value.name for value in model.inputs]
    if sorted(names) not in (sorted(_INPUTS), sorted(_INPUTS[:2])):
        raise GraphError(f"expected the inputs {', '.join(_INPUTS)}, got {', '.join(names)[:300]}", where="graph.input")
    for value in model.inputs:
        if value.elem_type != _INT64 or value.shape not in (None, (None, None)):
            raise GraphError(
                f"expected {value.name} as int64 with two dimensions of any size, got ONNX type {value.elem_type} "
                f"with {value.shape}; {_ELSEWHERE}",
                where="graph.input",
            )
    if len(model.outputs) != 1 or model.outputs[0].elem_type != _FLOAT32:
        raise GraphError(
            f"expected one output, the logits as float32, got {len(model.outputs)} of the ONNX types "
            f"{[value.elem_type for value in model.outputs[:9]]}",
            where="graph.output",
        )
    return model.outputs[0].name


def _feeds(model: OnnxModel, probes: Sequence[_Probe]) -> dict[str, list[Array]]:
    feeds: dict[str, list[Array]] = {
        "input_ids": [probe.input_ids for probe in probes],
        "attention_mask": [np.ones_like(probe.input_ids) for probe in probes],
        "token_type_ids": [probe.token_type_ids for probe in probes],
    }
    return {value.name: feeds[value.name] for value in model.inputs}


def _one_logit(values: Array, probe: _Probe) -> Array:
    rows = len(probe.input_ids)
    if values.shape not in ((rows, 1), (rows,)) or values.dtype != np.float32:
        count = values.shape[1] if values.ndim == 2 and len(values) == rows else "something else"
        raise GraphError(
            f"expected one logit, got {count}: {values.dtype} of shape {values.shape} for {rows} pairs",
            where="graph.output",
        )
    return values.reshape(rows)


def _check_probes(
    weights: BertWeights, probes: Sequence[_Probe], states: Sequence[Array], logits: Sequence[Array]
) -> None:
    """Compare what the graph makes of the probes with what its weights make of them.

    The last hidden states of all tokens are compared too: they show what the logits hardly depend on.
    """
    pairs = [pair for probe in probes for pair in probe.pairs()]
    starts = np.cumsum([0, *(len(ids) for ids, _ in pairs[:-1])])
    with np.errstate(all="ignore"):  # whatever the weights are
        expected = reference_states(weights, pairs)
        found = [array.reshape(-1, weights.hidden) for array in states if array.shape[-1:] == (weights.hidden,)]
        _check_equal("hidden states", np.concatenate(found or [expected[:0]]), expected)
        _check_equal("logits", np.concatenate(logits), reference_head(weights, expected[starts]))


def _check_equal(what: str, found: Array, expected: Array) -> None:
    tolerance = _TOLERANCE * (1 + np.abs(expected).max())
    if not np.isfinite(expected).all():
        raise GraphError(f"the model's weights make {what} that are not finite of an ordinary input")
    if found.shape != expected.shape or not (np.abs(found - expected) <= tolerance).all():
        raise GraphError(
            f"the graph computes something else than the BERT that its weights describe: {what} of shape {found.shape} "
            f"like {found.reshape(-1)[:3]}, expected {expected.shape} like {expected.reshape(-1)[:3]}; {_ELSEWHERE}",
            where="graph.output",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """What makes the logits of ``states``, the name of the last hidden states."""

    pooler: Linear
    pooler_activation: PoolerActivation
    classifier: Linear
    states: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Residual:
    """``linear(source) + shortcut``; the last two are names of values."""

    linear: Linear
    source: str
    shortcut: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attention:
    """Attention of ``source``, the name of a value, to itself."""

    query: Linear
    key: Linear
    value: Linear
    heads: int
    source: str


class _Recognizer:
    """Walks a graph backwards from the logits, part by part; whatever is not BERT's is refused where it stands."""

    def __init__(self, program: Program, output: str) -> None:
        self.program = program
        self.sources = program.sources([output])
        self.run = Run(values={}, scalars={}, shapes={})
        # What must hold for every shape of the input: masks are zero, numbers stay what they are,
        # position embeddings are the rows of their table.
        self.masks: set[str] = set()
        self.numbers: dict[str, float] = {}
        self.positions = ""
        self.heads: set[int] = set()
        self.activations: set[Activation] = set()

    def head(self, output: str) -> _Head:
        """Recognize pooler and classifier."""
        classifier, pooled = self.linear(output, "the classifier")
        activation = self.made_by(pooled, ("Tanh", "Relu"), "the pooler's tanh or ReLU")
        pooler, first = self.linear(activation.inputs[0], "the pooler")
        return _Head(
            pooler=pooler,
            pooler_activation="tanh" if activation.op_type == "Tanh" else "relu",
            classifier=classifier,
            states=self.first_token(first),
        )

    def bert(self, head: _Head, run: Run) -> BertWeights:
        """Recognize the whole graph, with what a run showed of shapes and of numbers that depend on them."""
        self.run = run
        layers: list[LayerWeights] = []
        norm, total = self.norm(head.states)
        while any(self.is_linear(part) for part in self.made_by(total, ("Add",), "a sum").inputs):
            layer, value = self.layer(norm, total)
            layers.append(layer)
            norm, total = self.norm(value)
        if len(self.heads) != 1 or len(self.activations) != 1:
            raise GraphError(f"expected layers of one kind, got {self.heads} heads and {self.activations}")
        words, positions, types = self.embeddings(total)
        weights = BertWeights(
            word_embeddings=words,
            position_embeddings=positions,
            token_type_embeddings=types,
            embedding_norm=norm,
            layers=tuple(reversed(layers)),
            pooler=head.pooler,
            pooler_activation=head.pooler_activation,
            classifier=head.classifier,
            heads=self.heads.pop(),
            activation=self.activations.pop(),
        )
        _check_weights(weights)
        return weights

    def check_full_length(self, weights: BertWeights) -> None:
        """Look at what could differ for longer inputs than the probes, in the longest one."""
        probe = _Probe.of(self.program, rows=1, length=weights.positions)
        wanted = [self.positions, *self.masks, *self.numbers]
        found = self.program.run(_feeds(self.program.model, [probe]), wanted).values
        rows, table = found[self.positions][0], weights.position_embeddings
        if rows.size != table.size or not np.array_equal(rows.reshape(table.shape), table):
            raise self.refusal(self.positions, f"position embeddings of tokens 0 to {weights.positions - 1}")
        scores = (1, weights.heads, weights.positions, weights.positions)  # [N, A, T, T]
        for mask in self.masks:
            shape = found[mask][0].shape
            fits = all(size in (1, full) for size, full in zip(shape[::-1], scores[::-1], strict=False))
            if len(shape) > len(scores) or not fits or found[mask][0].any():
                raise self.refusal(mask, "an attention mask that leaves unmasked tokens alone")
        for name, number in self.numbers.items():
            if found[name][0].item() != number:
                raise self.refusal(name, f"the number {number} for any length")

    # Moving through the graph.

    def skip(self, value: str, operators: Sequence[str] = _MOVES) -> str:
        """Go back over nodes that only move numbers."""
        for node in self.chain(value, operators):
            value = node.inputs[0]
        return value

    def chain(self, value: str, operators: Sequence[str]) -> Iterator[Node]:
        """Yield the nodes that made a value one after the other, as far as they are these operators."""
        for _ in range(_LONGEST_CHAIN):
            node = self.program.producers.get(value)
            if node is None or node.op_type not in operators:
                return
            yield node
            value = node.inputs[0]
        raise GraphError(f"more than {_LONGEST_CHAIN} of {', '.join(operators)} in a row", where="graph")

    def node(self, value: str) -> Node | None:
        """Return the node that makes a value, moves aside."""
        return self.program.producers.get(self.skip(value))

    def made_by(self, value: str, operators: Sequence[str], what: str) -> Node:
        """Return the node that makes a value, moves aside, if it is one of these operators."""
        node = self.node(value)
        if node is None or node.op_type not in operators:
            raise self.refusal(value, what)
        return node

    def refusal(self, value: str, what: str) -> GraphError:
        """Say what was expected at this place and what stands there."""
        node = self.node(value)
        found, where = (f"the value {value!r}", "graph") if node is None else (node.op_type, node.where)
        return GraphError(f"no BERT cross-encoder: expected {what}, got {found}; {_ELSEWHERE}", where=where)

    def same(self, value: str, other: str, what: str) -> None:
        """Refuse two values that are not one, moves aside."""
        if self.skip(value) != self.skip(other):
            raise self.refusal(value, f"{what} of one value")

    def is_constant(self, value: str) -> bool:
        return not self.sources.get(value)

    def number(self, value: str) -> float | None:
        """Return a float that is the same in every run, None if the value is something else."""
        if self.is_constant(value):
            arrays: Sequence[Array] = (self.program.constant(value),)
        else:
            arrays = self.run.scalars.get(value, ())
        if not arrays or any(array.size != 1 or array.dtype != np.float32 for array in arrays):
            return None
        number = float(arrays[0].item())
        if not self.is_constant(value):
            self.numbers[value] = number
        return number

    def split(self, node: Node) -> tuple[str, float] | None:
        """Split a node of two operands into a value and a number, for instance ``x`` and 2.0 of ``2.0 * x``."""
        first, second = node.inputs
        for value, number in (
            [(first, second)] if node.op_type in ("Div", "Pow") else [(first, second), (second, first)]
        ):
            if (found := self.number(number)) is not None:
                return value, found
        return None

    def split_constant(self, node: Node, what: str) -> tuple[str, str]:
        """Split a node of two operands into a value and a constant."""
        first, second = node.inputs
        if self.is_constant(first) == self.is_constant(second):
            raise self.refusal(node.outputs[0], what)
        return (second, first) if self.is_constant(first) else (first, second)

    def scaled(self, value: str) -> tuple[str, float]:
        """Go back over moves and multiplications by numbers; returns where that ends and the product."""
        factor = 1.0
        while (node := self.node(value)) is not None and node.op_type in ("Mul", "Div"):
            found = self.split(node)
            if found is None:
                break
            value, number = found
            factor *= number if node.op_type == "Mul" else 1 / number if number else math.inf
        return self.skip(value), factor

    # Stored numbers.

    def stored(self, value: str) -> tuple[str, Array] | None:
        """Return name and numbers of an initializer or a Constant."""
        value = self.skip(value, ("Identity",))
        node = self.program.producers.get(value)
        if node is None or node.op_type == "Constant":
            return value, self.program.constant(value)
        return None

    def dequantized(self, value: str) -> tuple[str, Array, Array] | None:
        """Return name, int8 numbers and their scale, shaped to be multiplied, of ``int8 * scale``."""
        node = self.program.producers.get(value)
        if node is not None and node.op_type == "Mul":
            for cast, scale in (node.inputs, node.inputs[::-1]):
                cast_node = self.program.producers.get(cast)
                stored = self.stored(cast_node.inputs[0]) if cast_node and cast_node.op_type == "Cast" else None
                if stored is not None and stored[1].dtype == np.int8 and self.is_constant(scale):
                    return *stored, self.program.constant(scale)
        if node is not None and node.op_type == "DequantizeLinear":
            stored = self.stored(node.inputs[0])
            centered = len(node.inputs) < 3 or not self.program.constant(node.inputs[2]).any()
            if stored is not None and stored[1].dtype == np.int8 and centered:
                scale_array, axis = self.program.constant(node.inputs[1]), node.attributes.get("axis", 1)
                shape = (-1, 1) if axis in (0, -2) and scale_array.ndim else (1, -1)
                return *stored, scale_array.reshape(shape)
        return None

    def matrix(self, value: str, what: str, *, transposed: bool) -> Matrix:
        """Recognize a constant [in, out], or [out, in] if ``transposed``."""
        for node in self.chain(value, ("Identity", "Transpose")):
            transposed ^= node.op_type == "Transpose"
            value = node.inputs[0]
        if not self.is_constant(value):
            raise self.refusal(value, f"a constant weight for {what}")
        stored = self.stored(value)
        if stored is not None and stored[1].dtype == np.float32 and stored[1].ndim == 2:
            return Matrix(name=stored[0], values=stored[1], transposed=transposed)
        found = self.dequantized(value)
        if found is None or found[1].ndim != 2:
            raise self.refusal(value, f"a weight of float32 or scaled int8 for {what}")
        name, values, scale = found
        channels = values.shape[0 if transposed else 1]
        shape = (1,) * (2 - scale.ndim) + scale.shape
        if scale.size != 1 and shape != ((channels, 1) if transposed else (1, channels)):
            raise self.refusal(value, f"a scale for each of {channels} outputs of {what}")
        return Matrix(name=name, values=values, transposed=transposed, scale=self.spread(scale, (channels,)))

    def spread(self, scale: Array, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return one scale or one for each channel in the shape of all channels."""
        return self.program.keep(np.broadcast_to(scale.reshape(1 if scale.size == 1 else shape), shape))

    def vector(self, value: str, what: str) -> NDArray[np.float32]:
        """Recognize constant numbers along one axis; returns an aligned copy."""
        if not self.is_constant(value):
            raise self.refusal(value, f"a constant for {what}")
        array = self.program.constant(value)
        if array.dtype != np.float32 or array.shape[-1:] != (array.size,):
            raise GraphError(f"{value!r}: expected a float32 vector for {what}, got {array.dtype} {array.shape}")
        return self.program.keep(array.reshape(-1))

    def table(self, value: str, ids: str, what: str) -> Table:
        """Recognize the rows ``ids`` of a constant [rows, H]."""
        node = self.made_by(value, ("Gather", "Mul"), what)
        if node.op_type == "Gather":
            self.same(node.inputs[1], ids, what)
            stored = self.stored(node.inputs[0])
            if stored is not None and stored[1].dtype == np.float32 and stored[1].ndim == 2:
                return Table(name=stored[0], values=stored[1])
            found = self.dequantized(node.inputs[0])
        else:
            found = self.gathered_int8(node, ids)
        if found is None or found[1].ndim != 2 or found[2].dtype != np.float32:
            raise self.refusal(value, what)
        name, values, scale = found
        if scale.size != 1 and scale.shape != (len(values), 1):
            raise self.refusal(value, f"{what} with a scale for each row")
        return Table(name=name, values=values, scale=self.spread(scale, (len(values), 1)))

    def gathered_int8(self, node: Node, ids: str) -> tuple[str, Array, Array] | None:
        """Return name, int8 rows and scales of ``Cast(Gather(rows, ids)) * Gather(scales, ids)``."""
        for rows, scales in (node.inputs, node.inputs[::-1]):
            cast, scale = self.program.producers.get(rows), self.program.producers.get(scales)
            gather = self.program.producers.get(cast.inputs[0]) if cast and cast.op_type == "Cast" else None
            if gather and scale and gather.op_type == scale.op_type == "Gather":
                self.same(gather.inputs[1], ids, "rows and scales")
                self.same(scale.inputs[1], ids, "rows and scales")
                stored, factors = self.stored(gather.inputs[0]), self.stored(scale.inputs[0])
                if stored is not None and factors is not None and stored[1].dtype == np.int8:
                    return *stored, factors[1]
        return None

    # Parts of a BERT.

    def is_linear(self, value: str) -> bool:
        """Tell a dense layer from whatever else is added up."""
        node = self.node(value)
        if node is None or node.op_type != "Add":
            return node is not None and node.op_type == "Gemm"
        summands = [self.node(part) for part in node.inputs]
        return any(summand is not None and summand.op_type == "MatMul" for summand in summands)

    def linear(self, value: str, what: str) -> tuple[Linear, str]:
        """Recognize a dense layer; returns it and what it is applied to."""
        node = self.made_by(value, ("Add", "Gemm"), f"{what}, a dense layer")
        if node.op_type == "Gemm":
            plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
            if len(node.inputs) < 3 or any(node.attributes.get(key, one) != one for key, one in plain.items()):
                raise self.refusal(value, f"{what} with a bias and no factors")
            x, weight, bias = node.inputs
            matrix = self.matrix(weight, what, transposed=bool(node.attributes.get("transB", 0)))
        else:
            product, bias = self.split_constant(node, f"{what} with a constant bias")
            x, weight = self.made_by(product, ("MatMul",), f"{what}, a product with a weight").inputs
            matrix = self.matrix(weight, what, transposed=False)
        return Linear(weight=matrix, bias=self.vector(bias, f"the bias of {what}")), x

    def norm(self, value: str) -> tuple[Norm, str]:
        """Recognize a layer normalization, fused or not; returns it and what is normalized."""
        what = "a layer normalization"
        node = self.made_by(value, ("LayerNormalization", "Add"), what)
        if node.op_type == "LayerNormalization":
            if len(node.inputs) < 3:
                raise self.refusal(value, f"{what} with a bias")
            x, weight, bias = node.inputs
            attribute = node.attributes.get("epsilon", 1e-5)
            epsilon = attribute if isinstance(attribute, float) else math.nan  # a run would have refused others
        else:
            product, bias = self.split_constant(node, what)
            ratio, weight = self.split_constant(self.made_by(product, ("Mul",), what), what)
            x, epsilon = self.standardized(self.made_by(ratio, ("Div",), what), what)
        found = Norm(weight=self.vector(weight, what), bias=self.vector(bias, what), epsilon=epsilon)
        return found, x

    def standardized(self, ratio: Node, what: str) -> tuple[str, float]:
        """Recognize ``(x - mean) / sqrt(mean of squares + epsilon)``; returns x and epsilon."""
        x = self.centered(ratio.inputs[0], what)
        root = self.made_by(ratio.inputs[1], ("Sqrt",), what)
        found = self.split(self.made_by(root.inputs[0], ("Add",), what))
        if found is None:
            raise self.refusal(root.inputs[0], f"{what} with an epsilon")
        variance, epsilon = found
        square = self.made_by(self.made_by(variance, ("ReduceMean",), what).inputs[0], ("Pow", "Mul"), what)
        if square.op_type == "Mul":
            self.same(square.inputs[0], square.inputs[1], what)
        elif self.split(square) != (square.inputs[0], 2.0):
            raise self.refusal(square.outputs[0], f"{what} with squares")
        self.same(self.centered(square.inputs[0], what), x, what)
        return x, epsilon

    def centered(self, value: str, what: str) -> str:
        """Recognize ``x - mean of x``; returns x."""
        x, mean = self.made_by(value, ("Sub",), what).inputs
        self.same(self.made_by(mean, ("ReduceMean",), what).inputs[0], x, what)
        return x

    def layer(self, norm: Norm, total: str) -> tuple[LayerWeights, str]:
        """Recognize an encoder layer from the sum under its last normalization; returns it and its input."""
        feed_forward = self.residual(total)
        intermediate, source = self.linear(self.activation(feed_forward.source), "a layer's intermediate")
        self.same(source, feed_forward.shortcut, "feed-forward and shortcut")
        attention_norm, attention_total = self.norm(source)
        attended = self.residual(attention_total)
        attention = self.attention(attended.source)
        self.same(attention.source, attended.shortcut, "attention and shortcut")
        layer = LayerWeights(
            query=attention.query,
            key=attention.key,
            value=attention.value,
            attention_output=attended.linear,
            attention_norm=attention_norm,
            intermediate=intermediate,
            output=feed_forward.linear,
            output_norm=norm,
        )
        self.heads.add(attention.heads)
        return layer, attention.source

    def residual(self, total: str) -> _Residual:
        """Recognize the sum of a dense layer and a shortcut."""
        first, second = self.made_by(total, ("Add",), "a sum with a shortcut").inputs
        part, shortcut = (first, second) if self.is_linear(first) else (second, first)
        linear, source = self.linear(part, "a layer's output")
        return _Residual(linear=linear, source=source, shortcut=shortcut)

    def activation(self, value: str) -> str:
        """Recognize ReLU or the exact GELU, ``x / 2 * (1 + erf(x / sqrt(2)))``; returns x."""
        what = "ReLU or the erf form of GELU as activation"
        node = self.made_by(value, ("Relu", "Gelu", "Mul"), what)
        self.activations.add("relu" if node.op_type == "Relu" else "gelu")
        if node.op_type != "Mul":
            return node.inputs[0]
        # Multiplied in any order: x, 1/2 and 1 + erf.
        factor, parts, values = 1.0, list(node.inputs), list[str]()
        while parts and len(values) < 3:
            part = parts.pop()
            number, inner = self.number(part), self.node(part)
            if number is not None:
                factor *= number
            elif inner is not None and inner.op_type == "Mul":
                parts += inner.inputs
            else:
                values.append(part)
        for x, sum_ in (values, values[::-1]) if len(values) == 2 and factor == 0.5 else ():
            argument = self.erf_argument(sum_)
            if argument is not None:
                self.same(argument, x, what)
                return x
        raise self.refusal(value, what)

    def erf_argument(self, value: str) -> str | None:
        """Return x of ``1 + erf(x / sqrt(2))``."""
        node = self.node(value)
        found = self.split(node) if node is not None and node.op_type == "Add" else None
        erf_node = self.node(found[0]) if found is not None and found[1] == 1.0 else None
        if erf_node is None or erf_node.op_type != "Erf":
            return None
        x, factor = self.scaled(erf_node.inputs[0])
        return x if math.isclose(factor, math.sqrt(0.5), rel_tol=_CONSTANT_TOLERANCE) else None

    def attention(self, value: str) -> _Attention:
        """Recognize multi-head attention from its context, before the output layer."""
        probabilities, values = self.made_by(value, ("MatMul",), "attention to values").inputs
        softmax = self.made_by(self.unguarded(probabilities), ("Softmax",), "attention's softmax")
        product, factor = self.scores(softmax.inputs[0])
        (queries, query_factor), (keys, key_factor) = map(self.scaled, product.inputs)
        shape, size = self.run.shapes[product.outputs[0]], self.run.shapes[product.inputs[0]][-1]
        factor *= query_factor * key_factor
        if len(shape) != 4 or not math.isclose(factor * math.sqrt(size), 1, rel_tol=_CONSTANT_TOLERANCE):
            raise self.refusal(
                product.outputs[0], f"scores [N, heads, T, T] times 1 / sqrt({size}), got {list(shape)} times {factor}"
            )
        (query, source), (key, key_source), (value_, value_source) = (
            self.linear(name, f"attention's {what}")
            for name, what in ((queries, "query"), (keys, "key"), (values, "value"))
        )
        self.same(key_source, source, "query and key")
        self.same(value_source, source, "query and value")
        return _Attention(query=query, key=key, value=value_, heads=shape[1], source=source)

    def unguarded(self, value: str) -> str:
        """Return x of ``where(isnan(x), 0, x)``, which rows without any unmasked token need."""
        node = self.node(value)
        if node is None or node.op_type != "Where":
            return value
        condition, zero, x = node.inputs
        guard = self.made_by(condition, ("IsNaN",), "a guard against NaN")
        self.same(guard.inputs[0], x, "a guard against NaN")
        if self.number(zero) != 0:
            raise self.refusal(value, "a guard that puts zero for NaN")
        return x

    def scores(self, value: str) -> tuple[Node, float]:
        """Recognize ``(q @ k) * number + mask``; returns the product's node and the number."""
        factor = 1.0
        while True:
            value, more = self.scaled(value)
            factor *= more
            node = self.made_by(value, ("MatMul", "Add"), "attention scores")
            if node.op_type == "MatMul":
                return node, factor
            masks = [part for part in node.inputs if not self.depends_on(part, "input_ids", "token_type_ids")]
            if len(masks) != 1:
                raise self.refusal(value, "scores plus a mask")
            self.masks.add(masks[0])
            value = node.inputs[0] if masks[0] == node.inputs[1] else node.inputs[1]

    def depends_on(self, value: str, *inputs: str) -> bool:
        return not self.sources.get(value, frozenset()).isdisjoint(inputs)

    def embeddings(self, total: str) -> tuple[Table, NDArray[np.float32], NDArray[np.float32] | None]:
        """Recognize the sum of word, position and, where the model has them, token type embeddings."""
        found: dict[frozenset[str], str] = {}
        parts = [total]
        while parts:
            part = parts.pop()
            node = self.node(part)
            if node is not None and node.op_type == "Add":
                parts += node.inputs
                continue
            kind = self.sources.get(part, frozenset()) - {SHAPE}
            if kind in found or kind not in (frozenset(), {"input_ids"}, {"token_type_ids"}):
                raise self.refusal(part, "one table each of words, positions and token types")
            found[kind] = part
        words, types = found.get(frozenset({"input_ids"})), found.get(frozenset({"token_type_ids"}))
        self.positions = found.get(frozenset(), "")
        if words is None or not self.positions:
            raise self.refusal(total, "word and position embeddings")
        return (
            self.table(words, "input_ids", "word embeddings"),
            self.position_table(self.positions),
            None if types is None else self.segment_table(types),
        )

    def integers(self, values: Sequence[str]) -> list[list[int]]:
        """Return the numbers of constants."""
        return [self.program.constant(value).reshape(-1)[:9].tolist() for value in values if self.is_constant(value)]

    def segment_table(self, value: str) -> NDArray[np.float32]:
        table = self.table(value, "token_type_ids", "token type embeddings")
        if table.scale is not None:
            raise self.refusal(value, "token type embeddings as float32")
        return self.program.keep(table.values)

    def position_table(self, value: str) -> NDArray[np.float32]:
        """Recognize a stored [P, H], however its first T rows are taken: that is proven in full length."""
        what = "position embeddings"
        stored = self.stored(self.made_by(value, ("Gather", "Slice"), what).inputs[0])
        if stored is None or stored[1].dtype != np.float32 or not stored[1].size:
            raise self.refusal(value, what)
        table = self.program.keep(stored[1].reshape(-1, stored[1].shape[-1]))
        if len(table) > _MOST_POSITIONS:
            raise self.refusal(value, f"{what} of at most {_MOST_POSITIONS} tokens, {len(table)} rows")
        return table

    def first_token(self, value: str) -> str:
        """Recognize the choice of token 0; returns the hidden states of all."""
        what = "the first token's hidden state"
        node = self.made_by(value, ("Gather", "Slice"), what)
        if node.op_type == "Gather":
            first = node.attributes.get("axis", 0) == 1 and self.integers(node.inputs[1:2]) == [[0]]
        else:
            first = self.integers(node.inputs[1:4]) == [[0], [1], [1]]
        if not first:
            raise self.refusal(value, what)
        return node.inputs[0]


def _check_weights(weights: BertWeights) -> None:
    """Check that the parts fit each other, for a graph that runs may still broadcast, and are numbers to work with."""
    hidden, types = weights.hidden, weights.token_type_embeddings
    inner = weights.layers[0].intermediate.weight.shape[1]
    square = (hidden, hidden)
    shapes = [square, square, square, square, (hidden, inner), (inner, hidden)] * len(weights.layers)
    fits = all(
        linear.weight.shape == shape and linear.bias.shape == shape[1:]
        for linear, shape in zip(weights.linears(), [*shapes, square, (hidden, 1)], strict=True)
    )
    fits &= all(norm.weight.shape == norm.bias.shape == (hidden,) for norm in weights.norms())
    fits &= all(table.shape[1:] == (hidden,) for table in (weights.position_embeddings, types) if table is not None)
    if not fits or not 1 <= weights.heads <= hidden or hidden % weights.heads:
        raise GraphError(f"the shapes of the weights do not fit {weights.heads} heads and a hidden size of {hidden}")
    words = weights.word_embeddings
    _check_numbers(words.values if words.scale is None else words.scale, repr(words.name))
    for linear in weights.linears():
        matrix = linear.weight
        _check_numbers(matrix.values if matrix.scale is None else matrix.scale, repr(matrix.name))
        _check_numbers(linear.bias, "a bias")
    for norm in weights.norms():
        _check_numbers(norm.weight, "a normalization's weight")
        _check_numbers(norm.bias, "a normalization's bias")
        if not 0 < norm.epsilon < 1:
            raise GraphError(f"expected a normalization's epsilon between 0 and 1, got {norm.epsilon}")
    _check_numbers(weights.position_embeddings, "the position embeddings")
    if types is not None:
        _check_numbers(types, "the token type embeddings")


def _check_numbers(values: Array, what: str) -> None:
    low, high = (values.min(), values.max()) if values.size else (math.nan, math.nan)  # NaN if there is one
    if not -_LARGEST_WEIGHT <= low <= high <= _LARGEST_WEIGHT:
        raise GraphError(f"{what} reaches from {low} to {high}: no trained weight is beyond {_LARGEST_WEIGHT:g}")
