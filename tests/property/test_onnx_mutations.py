"""Damaged and rearranged ONNX files: a GraphError or right answers, never anything else.

Ten thousand mutants from fixed seeds: damaged bytes, damaged structure, and well-formed files with another meaning.
Each is refused with a GraphError, or its weights give the logits that onnxruntime gives for the same bytes. The
rest of the contract (no other exception, no warning, no crash) holds because any of them fails the test.

Where onnxruntime refuses a mutant that the reader accepts, it judges the graph as it was read, written anew. That
happens with what has no bearing on the numbers: two nodes of one name, an operator set that is declared and not used,
and damage within a part that the reader skips, such as documentation.
"""

import random
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import LOGIT_ATOL
from onnx import AttributeProto, TensorProto, helper, numpy_helper

import minice
from minice.encoding.pairs import PairEncoding
from minice.engines.bert import recognize_bert
from minice.engines.numpy_engine import NumpyEngine
from minice.engines.onnx_file import OnnxModel, read_onnx
from minice.engines.weights import BertWeights, reference_logits
from minice.errors import GraphError

PATHS = sorted((Path(__file__).parents[1] / "data" / "graphs").glob("*.onnx"))
REFUSED = {"bert-ort-fused", "bert-dynamic-int8", "bert-two-labels"}
MUTANTS, CHUNKS = 10_000, 20
MEBIBYTE = 1 << 20

Logits = Callable[[dict[str, np.ndarray]], np.ndarray]


@cache
def original(index: int) -> bytes:
    return PATHS[index].read_bytes()


# Oracles.


def run_by_onnxruntime(data: bytes) -> Logits:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # Only weights are quantized here; by default activations around DequantizeLinear would be as well.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(data, options)
    names = {value.name for value in session.get_inputs()}
    return lambda feeds: session.run(None, {name: feeds[name] for name in names})[0]


def oracle(data: bytes) -> Logits:
    """Return what can judge these bytes."""
    try:
        return run_by_onnxruntime(data)
    except Exception:  # noqa: BLE001 - onnxruntime has no common base for its refusals
        return run_by_onnxruntime(written_anew(read_onnx(data)))


def written_anew(model: OnnxModel) -> bytes:
    graph = helper.make_graph(
        [
            helper.make_node(
                node.op_type,
                node.inputs,
                node.outputs,
                domain=node.domain,
                **{
                    name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
                    for name, value in node.attributes.items()
                },
            )
            for node in model.nodes
        ],
        "as-it-was-read",
        [helper.make_tensor_value_info(value.name, value.elem_type, value.shape) for value in model.inputs],
        [helper.make_tensor_value_info(value.name, value.elem_type, value.shape) for value in model.outputs],
        [numpy_helper.from_array(values, name) for name, values in model.initializers.items()],
    )
    opset = helper.make_opsetid("", model.opsets[""])
    return helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()


def assert_right(weights: BertWeights, logits: Logits) -> None:
    """Both forward passes, the plain reference and the engine, give the oracle's logits."""
    numbers = np.random.default_rng(0)
    pairs, expected = [], []
    # No pair is shorter than [CLS] [SEP] [SEP].
    for length in sorted({3, 7, weights.positions}):
        ids = numbers.integers(0, weights.vocabulary, (1, length))
        types = numbers.integers(0, max(weights.segments, 1), (1, length))
        answer = logits({"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": types})
        expected.append(answer.item())
        pairs.append(PairEncoding(input_ids=ids[0], token_type_ids=types[0]))
    found = reference_logits(weights, [(pair.input_ids, pair.token_type_ids) for pair in pairs])
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGIT_ATOL)
    if weights.segments == 1:
        with pytest.raises(GraphError, match="2 segment embeddings"):
            NumpyEngine(weights, threads=1)
        return
    engine = NumpyEngine(weights, threads=1)
    try:
        np.testing.assert_allclose(engine.logits(pairs), expected, rtol=0, atol=LOGIT_ATOL)
    finally:
        engine.close()


# Mutations of bytes.


@cache
def structural_bytes(index: int) -> np.ndarray:
    """Offsets outside of large tensors, where a change is likelier to matter."""
    data = original(index)
    keep = np.ones(len(data), bool)
    for tensor in onnx.load_model_from_string(data).graph.initializer:
        start = data.find(tensor.raw_data) if len(tensor.raw_data) >= 64 else -1
        keep[start : start + len(tensor.raw_data)] &= start < 0
    return np.flatnonzero(keep)


def place(dice: random.Random, index: int) -> int:
    """Choose a byte: of any kind, or more often of the structure."""
    return dice.randrange(len(original(index))) if dice.random() < 0.3 else int(dice.choice(structural_bytes(index)))


def flip_bits(dice: random.Random, index: int) -> bytes:
    data = bytearray(original(index))
    for _ in range(dice.choice((1, 1, 2, 4))):
        data[place(dice, index)] ^= 1 << dice.randrange(8)
    return bytes(data)


def set_bytes(dice: random.Random, index: int) -> bytes:
    data = bytearray(original(index))
    for _ in range(dice.choice((1, 1, 2))):
        data[place(dice, index)] = dice.choice((0, 1, 2, 3, 7, 8, 13, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    return bytes(data)


def truncate(dice: random.Random, index: int) -> bytes:
    return original(index)[: dice.randrange(len(original(index)))]


def cut_out(dice: random.Random, index: int) -> bytes:
    data, start = original(index), place(dice, index)
    return data[:start] + data[start + dice.choice((1, 2, 8, 64, 4_000)) :]


def splice(dice: random.Random, index: int) -> bytes:
    other = original(dice.randrange(len(PATHS)))
    data, start, size = original(index), place(dice, index), dice.choice((1, 4, 16, 100, 2_000))
    source = dice.randrange(len(other))
    return data[:start] + other[source : source + size] + data[start + dice.choice((0, size)) :]


def grow_number(dice: random.Random, index: int) -> bytes:
    """Make a byte the start of a longer integer."""
    data, start = original(index), place(dice, index)
    return (
        data[:start]
        + bytes([data[start] | 0x80])
        + dice.choice((b"\0", b"\x01", b"\x7f", b"\xff" * 9))
        + data[start + 1 :]
    )


# Mutations of meaning: the file stays well-formed.


def constants(graph: onnx.GraphProto) -> list[TensorProto]:
    """Small tensors: numbers of formulas, indices, shapes."""
    inner = [a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.HasField("t")]
    small = [tensor for tensor in graph.initializer if np.prod(tensor.dims) < 100 and not tensor.name.endswith("bias")]
    return inner + small


def rewire(dice: random.Random, model: onnx.ModelProto) -> None:
    graph = model.graph
    values = [tensor.name for tensor in graph.initializer] + [name for node in graph.node for name in node.output]
    node = dice.choice([node for node in graph.node if node.input])
    node.input[dice.randrange(len(node.input))] = dice.choice([*values, "input_ids", "attention_mask"])


def swap_inputs(dice: random.Random, model: onnx.ModelProto) -> None:
    node = dice.choice([node for node in model.graph.node if len(node.input) > 1])
    first, second = dice.sample(range(len(node.input)), 2)
    node.input[first], node.input[second] = node.input[second], node.input[first]


def change_operator(dice: random.Random, model: onnx.ModelProto) -> None:
    dice.choice(model.graph.node).op_type = dice.choice(model.graph.node).op_type


def change_attribute(dice: random.Random, model: onnx.ModelProto) -> None:
    attribute = dice.choice([a for node in model.graph.node for a in node.attribute])
    if attribute.type == AttributeProto.INT:
        attribute.i += dice.choice((-2, -1, 1, 2, 50))
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f *= dice.choice((0, 0.5, 2, -1, 1.0001, float("nan")))
    elif attribute.type == AttributeProto.INTS and attribute.ints:
        attribute.ints[dice.randrange(len(attribute.ints))] = dice.randrange(-3, 6)


def change_constant(dice: random.Random, model: onnx.ModelProto) -> None:
    tensor = dice.choice(constants(model.graph))
    values = numpy_helper.to_array(tensor).copy().reshape(-1)
    if not values.size:
        return
    at = dice.randrange(values.size)
    with np.errstate(all="ignore"):
        if values.dtype == np.bool_:
            values[at] ^= True
        elif values.dtype.kind == "f":
            values[at] *= np.float32(dice.choice((2, -1, 0, 1.0000003, 1.001, np.nan, np.inf)))
        else:
            values[at] += np.array(dice.choice((1, 2, 5, 64, -1, -2))).astype(values.dtype)
    tensor.CopyFrom(numpy_helper.from_array(values.reshape(tensor.dims), tensor.name))


def change_opset(dice: random.Random, model: onnx.ModelProto) -> None:
    model.opset_import[0].version += dice.choice((-3, -2, -1, 1, 2, 3, 9))


def delete_part(dice: random.Random, model: onnx.ModelProto) -> None:
    parts: Any = dice.choice((model.graph.node, model.graph.initializer, model.graph.input, model.graph.output))
    if parts:
        del parts[dice.randrange(len(parts))]


def duplicate_node(dice: random.Random, model: onnx.ModelProto) -> None:
    model.graph.node.append(dice.choice(model.graph.node))


def change_tensor_header(dice: random.Random, model: onnx.ModelProto) -> None:
    tensor = dice.choice(model.graph.initializer)
    if dice.random() < 0.5:
        tensor.data_type = dice.choice((1, 2, 3, 6, 7, 9, 10, 11, 16))
    elif len(tensor.dims) == 2:
        tensor.dims[0], tensor.dims[1] = tensor.dims[1], tensor.dims[0]
    elif tensor.dims:
        tensor.dims[0] += dice.choice((-1, 1))


def change_declaration(dice: random.Random, model: onnx.ModelProto) -> None:
    declared = dice.choice([*model.graph.input, *model.graph.output]).type.tensor_type
    if dice.random() < 0.5:
        declared.elem_type = dice.choice((1, 6, 7, 9))
    elif declared.shape.dim:
        dice.choice(declared.shape.dim).dim_value = dice.choice((1, 2, 64))


MEANINGS = (
    rewire,
    rewire,
    swap_inputs,
    change_operator,
    change_attribute,
    change_constant,
    change_constant,
    change_constant,
    change_opset,
    delete_part,
    duplicate_node,
    change_tensor_header,
    change_declaration,
)


def change_meaning(dice: random.Random, index: int) -> bytes:
    model = onnx.load_model_from_string(original(index))
    dice.choice(MEANINGS)(dice, model)
    return model.SerializeToString()


BYTES = (flip_bits, flip_bits, set_bytes, set_bytes, truncate, cut_out, splice, grow_number)


def mutant(seed: int) -> tuple[int, bytes]:
    """Return the graph that a mutant comes from, and its bytes."""
    dice = random.Random(seed)
    index = dice.randrange(len(PATHS))
    mutate = change_meaning if dice.random() < 0.4 else dice.choice(BYTES)
    return index, mutate(dice, index)


@contextmanager
def no_hang(limit_s: int = 60) -> Iterator[None]:
    """Fail a mutant that never ends; thousands of times what any needs, so no judgement of speed."""

    def fail(*_: object) -> None:
        raise AssertionError(f"still busy after {limit_s} s")

    if not hasattr(signal, "alarm"):
        yield
        return
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Laws.


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_mutants_are_refused_or_right(chunk: int) -> None:
    size = MUTANTS // CHUNKS
    refused = 0
    for seed in range(chunk * size, (chunk + 1) * size):
        index, data = mutant(seed)
        try:
            with no_hang():
                weights = recognize_bert(read_onnx(data))
        except GraphError:
            refused += 1
            continue
        try:
            assert_right(weights, oracle(data))
        except BaseException as error:
            error.add_note(f"mutant {seed} of {PATHS[index].name}")
            raise
    # Both outcomes are common; if one vanished, this test would have stopped testing.
    assert size * 0.4 < refused < size * 0.95


def peak_of_reading(data: bytes) -> int:
    """Bytes that reading and recognition hold at most, the file itself not counted."""
    tracemalloc.start(1)
    try:
        recognize_bert(read_onnx(data))
    except GraphError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_full_size_model_stays_under_twice_its_size() -> None:
    data = (Path(minice.__file__).parent / "artifacts" / "builtin" / "model.int8.onnx").read_bytes()
    assert peak_of_reading(data) < len(data)  # with the file itself: twice its size


def test_mutants_stay_small_in_memory() -> None:
    for seed in range(0, MUTANTS, 100):
        index, data = mutant(seed)
        peak = peak_of_reading(data)
        # Twice the file with the file itself, and 1 MiB: Python's objects for 350 nodes outweigh such small weights.
        assert peak < len(data) + MEBIBYTE, f"mutant {seed} of {PATHS[index].name}"


@pytest.mark.parametrize("path", [path for path in PATHS if path.stem not in REFUSED], ids=lambda path: path.stem)
@pytest.mark.parametrize("seed", range(3))
def test_neither_names_nor_order_matter(path: Path, seed: int) -> None:
    data = path.read_bytes()
    expected, found = recognize_bert(read_onnx(data)), recognize_bert(read_onnx(disguised(data, seed)))
    pairs = [(np.arange(9), np.arange(9) % 2), (np.arange(64), np.zeros(64, np.int64))]
    # To the last bit: the same parts were found.
    np.testing.assert_array_equal(reference_logits(found, pairs), reference_logits(expected, pairs))


def disguised(data: bytes, seed: int) -> bytes:
    """Shuffle nodes and initializers, and rename every value and node but the graph's inputs and outputs."""
    dice, model = random.Random(seed), onnx.load_model_from_string(data)
    graph = model.graph
    kept = {value.name for value in (*graph.input, *graph.output)} | {""}
    names = {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.output}
    numbers = dice.sample(range(len(names)), len(names))
    new = {name: f"v{number}" for name, number in zip(sorted(names), numbers, strict=True)} | {
        name: name for name in kept
    }
    for tensor in graph.initializer:
        tensor.name = new[tensor.name]
    for node in graph.node:
        node.name = ""
        node.input[:] = [new[name] for name in node.input]
        node.output[:] = [new[name] for name in node.output]
    for parts in (graph.node, graph.initializer):
        shuffled = dice.sample(list(parts), len(parts))
        del parts[:]
        parts.extend(shuffled)
    return model.SerializeToString()
