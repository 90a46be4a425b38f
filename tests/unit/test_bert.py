"""Recognition: any exporter's BERT is found by structure, and whatever computes something else is refused."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import BERTS, GRAPHS, LOGIT_ATOL
from onnx import TensorProto, helper, numpy_helper

from minice.engines.bert import recognize_bert
from minice.engines.onnx_file import read_onnx
from minice.engines.weights import BertWeights, Matrix, Table, reference_logits
from minice.errors import GraphError

INT8 = ("bert-int8-cast", "bert-int8-dequantize")
RUNS = (*BERTS, *INT8, "bert-relu", "distilbert")

Edit = Callable[[onnx.ModelProto], object]


def load(name: str) -> onnx.ModelProto:
    return onnx.load(GRAPHS / f"{name}.onnx")


def recognized(model: onnx.ModelProto | str) -> BertWeights:
    data = (GRAPHS / f"{model}.onnx").read_bytes() if isinstance(model, str) else model.SerializeToString()
    return recognize_bert(read_onnx(data))


def onnxruntime_logits(data: bytes, ids: np.ndarray, types: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    # onnxruntime would otherwise quantize activations around DequantizeLinear.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(data, options)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": types}
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})[0].reshape(-1)


def assert_agrees(weights: BertWeights, data: bytes) -> None:
    random = np.random.default_rng(7)
    for length in (3, 4, 13, weights.positions):
        ids = random.integers(0, weights.vocabulary, (3, length))
        types = random.integers(0, max(weights.segments, 1), (3, length))
        found = reference_logits(weights, list(zip(ids, types, strict=True)))
        np.testing.assert_allclose(found, onnxruntime_logits(data, ids, types), rtol=0, atol=LOGIT_ATOL)


def initializer(model: onnx.ModelProto, ending: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name.endswith(ending))


def replace(model: onnx.ModelProto, ending: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensor = initializer(model, ending)
    changed = change(numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(changed), tensor.name))


def node_of(model: onnx.ModelProto, op_type: str, place: int = 0) -> onnx.NodeProto:
    return [node for node in model.graph.node if node.op_type == op_type][place]


# What runs.


@pytest.mark.parametrize("name", RUNS)
def test_recognized_weights_give_the_logits_of_onnxruntime(name: str) -> None:
    weights = recognized(name)
    assert (weights.hidden, weights.heads, weights.head_size, len(weights.layers)) == (32, 4, 8, 2)
    assert (weights.positions, weights.vocabulary) == (64, 128)
    assert weights.segments == (0 if name == "distilbert" else 2)
    assert weights.activation == ("relu" if name == "bert-relu" else "gelu")
    assert weights.pooler_activation == ("relu" if name == "distilbert" else "tanh")
    assert weights.weight_scheme == ("int8-weight-only" if name in INT8 else "fp32")
    assert_agrees(weights, (GRAPHS / f"{name}.onnx").read_bytes())


@pytest.mark.parametrize("name", BERTS)
def test_each_part_is_the_one_that_the_exporter_named(name: str) -> None:
    weights, tensors = recognized(name), read_onnx((GRAPHS / f"{name}.onnx").read_bytes()).initializers
    assert weights.word_embeddings.name == "bert.embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(weights.position_embeddings, tensors["bert.embeddings.position_embeddings.weight"])
    for index, layer in enumerate(weights.layers):
        parts = {
            "attention.self.query": layer.query,
            "attention.self.key": layer.key,
            "attention.self.value": layer.value,
            "attention.output.dense": layer.attention_output,
            "attention.output.LayerNorm": layer.attention_norm,
            "intermediate.dense": layer.intermediate,
            "output.dense": layer.output,
            "output.LayerNorm": layer.output_norm,
        }
        for part, found in parts.items():
            np.testing.assert_array_equal(found.bias, tensors[f"bert.encoder.layer.{index}.{part}.bias"])
        assert layer.query.weight.name in tensors
        assert layer.output_norm.epsilon == pytest.approx(1e-12)
    assert (weights.pooler.weight.name, weights.classifier.weight.name) == (
        "bert.pooler.dense.weight",
        "classifier.weight",
    )
    assert weights.pooler.weight.transposed


def test_large_weights_are_views_and_small_ones_aligned_copies() -> None:
    data = (GRAPHS / "bert-ort-basic.onnx").read_bytes()
    weights, whole = recognize_bert(read_onnx(data)), np.frombuffer(data, np.uint8)
    for values in (weights.word_embeddings.values, *(linear.weight.values for linear in weights.linears())):
        assert np.shares_memory(values, whole)
    for vector in (weights.embedding_norm.weight, *(linear.bias for linear in weights.linears())):
        assert vector.flags.aligned
        assert not np.shares_memory(vector, whole)


def test_a_logit_without_its_own_axis() -> None:
    # FR 25: [N] is one logit as well
    model = load("bert-ort-basic")
    node_of(model, "Gemm", -1).output[0] = "two-dimensional"
    axis = numpy_helper.from_array(np.array([1]), "last-axis")
    model.graph.initializer.append(axis)
    model.graph.node.append(helper.make_node("Squeeze", ["two-dimensional", "last-axis"], ["logits"]))
    del model.graph.output[0].type.tensor_type.shape.dim[1]
    assert_agrees(recognized(model), model.SerializeToString())


def test_weights_as_matmul_and_transpose_instead_of_gemm() -> None:
    model = load("bert-ort-basic")
    for place in (0, 0):
        gemm = node_of(model, "Gemm", place)
        x, weight, bias = gemm.input
        output = gemm.output[0]
        model.graph.node.remove(gemm)
        model.graph.node.extend(
            [
                helper.make_node("Transpose", [weight], [f"{weight}.T"], perm=[1, 0]),
                helper.make_node("MatMul", [x, f"{weight}.T"], [f"{output}.product"]),
                helper.make_node("Add", [bias, f"{output}.product"], [output]),
            ]
        )
    weights = recognized(model)
    assert weights.pooler.weight.transposed
    assert_agrees(weights, model.SerializeToString())


def test_the_first_token_by_slice() -> None:
    model = load("bert-ort-basic")
    gather = next(node for node in model.graph.node if "/pooler/Gather" in node.output[0])
    for name, values in {"zero": [0], "one": [1]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(values), name))
    model.graph.node.append(helper.make_node("Slice", [gather.input[0], "zero", "one", "one"], ["sliced"]))
    model.graph.node.append(helper.make_node("Squeeze", ["sliced", "one"], [gather.output[0]]))
    model.graph.node.remove(gather)
    assert_agrees(recognized(model), onnx.shape_inference.infer_shapes(model).SerializeToString())


def test_one_scale_for_a_whole_tensor() -> None:
    model = load("bert-int8-dequantize")
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_s") and "embeddings" not in tensor.name:
            tensor.CopyFrom(numpy_helper.from_array(np.float32(0.002), tensor.name))
    weights = recognized(model)
    assert weights.layers[0].intermediate.weight.scale is not None
    assert weights.layers[0].intermediate.weight.scale.tolist() == [np.float32(0.002)] * 64
    assert_agrees(weights, model.SerializeToString())


@pytest.mark.shared
@pytest.mark.parametrize("folder", ["minice-l6"])
def test_full_size_model(shared: Path, folder: str) -> None:
    data = (shared / "models" / folder / "model.onnx").read_bytes()
    tracemalloc.start(1)
    try:
        weights = recognize_bert(read_onnx(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (weights.hidden, weights.heads, len(weights.layers), weights.positions) == (384, 12, 6, 512)
    assert peak < len(data) / 8
    random = np.random.default_rng(0)
    ids, types = random.integers(0, weights.vocabulary, (2, 50)), random.integers(0, 2, (2, 50))
    found = reference_logits(weights, list(zip(ids, types, strict=True)))
    np.testing.assert_allclose(found, onnxruntime_logits(data, ids, types), rtol=0, atol=LOGIT_ATOL)


# What does not run, and why.


def refused(model: onnx.ModelProto | str, match: str) -> GraphError:
    with pytest.raises(GraphError, match=match) as caught:
        recognized(model)
    return caught.value


def test_two_logits_are_refused() -> None:
    # FR 25
    assert refused("bert-two-labels", "expected one logit, got 2").where == "graph.output"


@pytest.mark.parametrize("name", ["bert-ort-fused", "bert-dynamic-int8"])
def test_graphs_that_only_onnxruntime_can_run(name: str) -> None:
    assert refused(name, "the onnxruntime engine can run it").where.startswith("graph.node[")


def test_activations_without_per_row_weights_are_named() -> None:
    model = load("bert-relu")
    node_of(model, "Relu").op_type = "Tanh"
    assert "got Tanh" in refused(model, "expected ReLU or the erf form of GELU").message


def value(model: onnx.ModelProto, ending: str) -> str:
    names = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return next(name for name in names if name.endswith(ending))


def rewire(output: str, old: str, new: str) -> Edit:
    """Let the node that makes one value read another one."""

    def edit(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.output[0].endswith(output))
        position = list(node.input).index(value(model, old))
        node.input[position] = value(model, new)

    return edit


def set_attribute(op_type: str, place: int, **values: Any) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        node = node_of(model, op_type, place)
        for name, value in values.items():
            for attribute in [old for old in node.attribute if old.name == name]:
                node.attribute.remove(attribute)
            node.attribute.append(helper.make_attribute(name, value))

    return edit


def change(ending: str, to: Callable[[np.ndarray], np.ndarray]) -> Edit:
    return lambda model: replace(model, ending, to)


def swapped(array: np.ndarray) -> np.ndarray:
    array[..., [40, 41]] = array[..., [41, 40]]
    return array


def static_shape(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 64


def extra_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["b", "s"]))


def second_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(model.graph.output[0])


def late_causal_mask(model: onnx.ModelProto) -> None:
    """Hide from each token those more than 60 behind it."""
    node = node_of(model, "GreaterOrEqual")
    model.graph.initializer.append(numpy_helper.from_array(np.array(60), "sixty"))
    model.graph.node.append(helper.make_node("Add", [node.input[0], "sixty"], ["horizon"]))
    node.input[0], node.input[1] = "horizon", value(model, "bert/Unsqueeze_8_output_0")


def second_token(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "second"))
    rewire("/pooler/Gather_output_0", "bert/Constant_3_output_0", "/Constant_6_output_0")(model)


# Each makes another function of bert-ort-basic's graph that still runs; some differ only for long inputs.
ELSE: dict[str, tuple[Edit, str]] = {
    "gelu factor": (
        change("layer.1/intermediate/intermediate_act_fn/Constant_2_output_0", lambda x: x * 1.001),
        "GELU",
    ),
    "gelu inside": (
        change("layer.1/intermediate/intermediate_act_fn/Constant_output_0", lambda x: x * 1.000002),
        "GELU",
    ),
    "score scale": (change("attention/self/Constant_6_output_0", lambda x: x * 1.00001), r"times 1 / sqrt\(8\)"),
    "square": (change("embeddings/LayerNorm/Constant_output_0", lambda x: x * 1.5), "squares"),
    "epsilon": (change("LayerNorm/Constant_1_output_0", lambda x: x + 2), "epsilon between 0 and 1, got 2"),
    "another token": (second_token, "first token"),
    "softmax axis": (set_attribute("Softmax", 0, axis=2), "something else than the BERT"),
    "mean axis": (set_attribute("ReduceMean", 0, axes=[1]), "something else than the BERT"),
    "head order": (set_attribute("Transpose", 0, perm=[0, 2, 1, 3]), "cannot be computed"),
    "long positions": (change("onnx::Slice_48", swapped), "position embeddings of tokens 0 to 63"),
    "late causal mask": (late_causal_mask, "attention mask that leaves unmasked tokens alone"),
    "mask value": (change("/Constant_28_output_0", lambda x: x + 1), "something else|attention mask"),
    "query of words": (
        rewire("layer.0/attention/self/query/MatMul_output_0", "LayerNorm/Add_1_output_0", "embeddings/Add_1_output_0"),
        "query and key of one value",
    ),
    "shortcut": (
        rewire(
            "layer.0/attention/output/Add_output_0", "embeddings/LayerNorm/Add_1_output_0", "embeddings/Add_1_output_0"
        ),
        "attention and shortcut of one value",
    ),
    "feed-forward shortcut": (
        rewire(
            "layer.0/output/Add_output_0",
            "layer.0/attention/output/LayerNorm/Add_1_output_0",
            "embeddings/Add_1_output_0",
        ),
        "feed-forward and shortcut of one value",
    ),
    "words twice": (
        rewire("token_type_embeddings/Gather_output_0", "token_type_ids", "input_ids"),
        "cannot be computed|one table each",
    ),
    "words by token types": (
        rewire("word_embeddings/Gather_output_0", "input_ids", "token_type_ids"),
        "one table each",
    ),
    "not finite": (change("layer.1.output.dense.bias", lambda x: x * np.inf), "no trained weight|ordinary input"),
    "NaN in a row": (
        change("word_embeddings.weight", lambda x: np.where(np.arange(128)[:, None] == 99, np.nan, x).astype("f4")),
        "no trained weight",
    ),
    "static shape": (static_shape, "two dimensions of any size, got ONNX type 7 with \\(None, 64\\)"),
    "extra input": (extra_input, "got input_ids, attention_mask, token_type_ids, position_ids"),
    "second output": (second_output, "expected one output"),
    "beta": (set_attribute("Gemm", 0, beta=0.5), "a bias and no factors"),
}


@pytest.mark.parametrize("name", ELSE)
def test_graphs_that_compute_something_else_are_refused(name: str) -> None:
    edit, match = ELSE[name]
    model = load("bert-ort-basic")
    edit(model)
    refused(model, match)


def test_a_mask_that_does_not_reach_long_inputs_is_refused() -> None:
    model = load("bert-dynamo-opset18")
    # Indices in steps of six: one for each probe, which broadcasts, and eleven for 64 tokens.
    replace(model, "val_22", lambda step: step * 6)
    refused(model, "attention mask that leaves unmasked tokens alone")


def test_mixed_up_heads_are_refused_where_the_logits_hardly_tell() -> None:
    model = load("distilbert")
    name = "/distilbert/transformer/layer.0/attention/Constant_6_output_0"
    node = next(node for node in model.graph.node if node.output[0] == name)
    # The context is put together as [N, T, heads, D] instead of [N, heads, T, D]: logits move by about 1e-5.
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(1)))
    refused(model, "something else than the BERT that its weights describe: hidden states")


@pytest.mark.parametrize("op_type", ["Add", "Mul", "Div", "Gemm", "MatMul", "Tanh", "Gather", "Softmax"])
def test_nodes_with_a_wrong_number_of_inputs_are_refused(op_type: str) -> None:
    for count in (0, 4):
        model = load("bert-ort-basic")
        node = node_of(model, op_type, -1)
        node.input[:] = ["input_ids"] * count
        assert refused(model, "is not what ONNX defines").where.startswith("graph.node[")


def test_a_scale_along_the_inputs_is_refused() -> None:
    model = load("bert-int8-dequantize")
    set_attribute("DequantizeLinear", 0, axis=0)(model)
    refused(model, "a scale for each of 32 outputs")


def test_zero_points_are_refused() -> None:
    model = load("bert-int8-dequantize")
    node = node_of(model, "DequantizeLinear")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(32, np.int8), "zero-points"))
    node.input.append("zero-points")
    refused(model, "a weight of float32 or scaled int8")


# The records.


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_dense_weights_are_fresh_aligned_and_exact(transposed: bool, quantized: bool) -> None:
    values = np.arange(-6, 6, dtype=np.int8 if quantized else np.float32).reshape(4, 3)
    scale = np.array([0.5, 2, 0.25], np.float32) if quantized else None
    expected = values.astype(np.float32) * (1 if scale is None else scale)
    stored = np.frombuffer(b"?" + (values.T if transposed else values).tobytes(), values.dtype, 12, 1)
    matrix = Matrix(values=stored.reshape((3, 4) if transposed else (4, 3)), scale=scale, transposed=transposed)
    dense = matrix.dense()
    assert matrix.shape == (4, 3)
    assert (dense.flags.c_contiguous, dense.flags.aligned, dense.dtype) == (True, True, np.float32)
    np.testing.assert_array_equal(dense, expected)
    assert dense is not matrix.dense()


@pytest.mark.parametrize("quantized", [False, True])
def test_rows_of_a_table_without_copying_the_table(quantized: bool) -> None:
    values = np.arange(400_000).astype(np.int8 if quantized else np.float32)
    stored = np.frombuffer(b"?" + values.tobytes(), values.dtype, 400_000, 1).reshape(-1, 4)
    scale = np.linspace(0.5, 1, 100_000, dtype=np.float32)[:, None] if quantized else None
    table = Table(values=stored, scale=scale)
    tracemalloc.start(1)
    try:
        rows = table.rows(np.array([99_999, 0, 99_999]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000
    assert (table.shape, rows.shape, rows.dtype, rows.flags.writeable) == ((100_000, 4), (3, 4), np.float32, True)
    expected = stored[[99_999, 0, 99_999]].astype(np.float32)
    np.testing.assert_array_equal(rows, expected if scale is None else expected * scale[[99_999, 0, 99_999]])


@pytest.mark.parametrize("op", ["Gemm", "Tanh", "Gather"])
@pytest.mark.parametrize("damage", ["no inputs", "many inputs", "tensor attributes"])
def test_nodes_that_do_not_fit_their_operator_are_graph_errors(op: str, damage: str) -> None:
    for index in range(len([node for node in load(BERTS[1]).graph.node if node.op_type == op])):
        model = load(BERTS[1])
        node = [node for node in model.graph.node if node.op_type == op][index]
        if damage == "no inputs":
            del node.input[:]
        elif damage == "many inputs":
            node.input.extend([node.input[0]] * 4)
        else:
            for attribute in node.attribute:
                attribute.type = onnx.AttributeProto.TENSOR
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(np.ones((2, 2), np.float32)))
            if not node.attribute:
                continue
        with pytest.raises(GraphError):
            recognized(model)
