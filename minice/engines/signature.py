"""What a graph of any form takes and gives: inputs, the logits, and the tables that bound ids and lengths.

For engines that run a graph without knowing what it computes; ``bert`` proves much more.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from minice.engines.onnx_file import Array, Node, OnnxModel, ValueInfo
from minice.errors import GraphError

_INT32, _INT64 = 6, 7  # TensorProto.DataType
_FLOATS: Final = (1, 10, 11)  # float32, float16, float64
_INPUT_TYPES: Final[dict[int, "np.dtype[Any]"]] = {_INT32: np.dtype(np.int32), _INT64: np.dtype(np.int64)}
_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids")
_FUSED_EMBEDDINGS: Final = ("EmbedLayerNormalization", "QEmbedLayerNormalization")
# What lies between a stored table and the rows that are picked from it, or between an input and its use as an index.
_DECODING: Final = ("DequantizeLinear", "Cast", "Mul", "Identity", "Reshape", "Unsqueeze", "Squeeze")
_INDEXING: Final = ("Cast", "Identity")
_LONGEST_CHAIN: Final = 10


def checked_inputs(graph: OnnxModel) -> dict[str, np.dtype[Any]]:
    """Type of each input; the names are those of every exporter, and order means nothing.

    Raises:
        GraphError: The graph has other inputs, or fixed sizes.
    """
    names = [value.name for value in graph.inputs]
    if not {"input_ids", "attention_mask"} <= set(names) <= set(_INPUTS):
        raise GraphError(f"expected the inputs {', '.join(_INPUTS)}, got {', '.join(names)[:300]}", where="graph.input")
    for value in graph.inputs:
        if value.elem_type not in _INPUT_TYPES or value.shape not in (None, (None, None)):
            raise GraphError(
                f"expected {value.name} as int64 or int32 with two dimensions of any size, got ONNX type "
                f"{value.elem_type} with {value.shape}; export it with dynamic axes",
                where="graph.input",
            )
    return {value.name: _INPUT_TYPES[value.elem_type] for value in graph.inputs}


def checked_output(graph: OnnxModel) -> str:
    """Name of the logits: the only output, or the one that is called so.

    Raises:
        GraphError: There is no such output, or it is declared as something else than one number a pair.
    """
    outputs = [value for value in graph.outputs if len(graph.outputs) == 1 or value.name == "logits"]
    if len(outputs) != 1:
        names = ", ".join(value.name for value in graph.outputs)[:300]
        raise GraphError(f"expected one output, the logits, got {names}", where="graph.output")
    if outputs[0].elem_type not in _FLOATS:
        raise GraphError(
            f"expected the logits as floating-point numbers, got ONNX type {outputs[0].elem_type}", where="graph.output"
        )
    count = _declared_count(outputs[0])
    if count != 1:
        raise GraphError(f"expected one logit, got {count}", where="graph.output")
    return outputs[0].name


def _declared_count(output: ValueInfo) -> int:
    """Logits of a pair as declared; 1 where that is left open, and the probe will tell."""
    shape = output.shape
    return shape[1] if shape is not None and len(shape) == 2 and shape[1] is not None else 1


def vocabulary_rows(graph: OnnxModel) -> int:
    """Rows of the smallest stored table that ``input_ids`` picks from.

    Raises:
        GraphError: There is none.
    """
    producers = _producers(graph)
    found = [
        len(table)
        for table, index in _picks(graph, producers)
        if _origin(index, producers, _INDEXING) == "input_ids" and table.ndim == 2
    ]
    if not found:
        raise GraphError("no BERT cross-encoder: expected a table of embeddings that input_ids picks from, found none")
    return min(found)


def position_rows(graph: OnnxModel) -> int | None:
    """Rows of the table of position embeddings; None if the graph shows none.

    It is as wide as the word embeddings are, and picked from by something else than an input; or a slice is taken
    of it.

    Raises:
        GraphError: As ``vocabulary_rows``.
    """
    vocabulary_rows(graph)
    producers = _producers(graph)
    picks = list(_picks(graph, producers))
    width = next(
        t.shape[1] for t, index in picks if _origin(index, producers, _INDEXING) == "input_ids" and t.ndim == 2
    )
    tables = [table for table, index in picks if _origin(index, producers, _INDEXING) not in _INPUTS]
    for node in graph.nodes:
        if node.op_type == "Slice" and node.inputs:
            table = _stored(graph, node.inputs[0], producers)
            tables += [] if table is None else [table]
    lengths: list[int] = [
        table.shape[-2]
        for table in tables
        if table.ndim in (2, 3) and table.shape[-1] == width and table.dtype != np.int64  # which holds numbers of rows
    ]
    # The largest, because segments have such a table too.
    return max(lengths, default=None)


def _picks(graph: OnnxModel, producers: dict[str, Node]) -> Iterator[tuple[Array, str]]:
    """Each stored table that rows are picked from, and the name of the indices."""
    for node in graph.nodes:
        if node.op_type == "Gather" and len(node.inputs) == 2:
            places = [(node.inputs[0], node.inputs[1])]
        elif node.op_type in _FUSED_EMBEDDINGS and len(node.inputs) >= 5:
            ids, segments, words, positions, types = node.inputs[:5]
            places = [(words, ids), (positions, "")] + ([(types, segments)] if types else [])
        else:
            continue
        for name, index in places:
            table = _stored(graph, name, producers)
            if table is not None:
                yield table, index


def _stored(graph: OnnxModel, name: str, producers: dict[str, Node]) -> Array | None:
    """The tensor of the file that a value is made of: an initializer, or what a Constant holds."""
    name = _origin(name, producers, _DECODING)
    node = producers.get(name)
    if node is None or node.op_type != "Constant":
        return graph.initializers.get(name)
    value = node.attributes.get("value")
    return value if isinstance(value, np.ndarray) else None


def _producers(graph: OnnxModel) -> dict[str, Node]:
    return {output: node for node in graph.nodes for output in node.outputs if output}


def _origin(name: str, producers: dict[str, Node], operators: tuple[str, ...]) -> str:
    """What a value was made of, back through the first inputs of these operators."""
    for _ in range(_LONGEST_CHAIN):
        node = producers.get(name)
        if node is None or node.op_type not in operators or not node.inputs:
            break
        name = node.inputs[0]
    return name
