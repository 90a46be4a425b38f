"""The interpreter: each operator equal to onnxruntime, everything else refused before it costs anything."""

import math
import tracemalloc
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from minice.engines.onnx_file import read_onnx
from minice.engines.trace import SHAPE, Program, erf
from minice.errors import GraphError

MEBIBYTE = 1 << 20
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4)
I64 = np.arange(24).reshape(2, 3, 4)
BOOL = np.array([[True, False], [False, True]])
SCALE3 = np.array([0.5, 0.25, 2], np.float32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def model_of(
    *nodes: onnx.NodeProto, opset: int = 14, output: str = "out", inputs: tuple[str, ...] = (), **constants: np.ndarray
) -> bytes:
    """A model without declared types of values, so that only running it finds its faults."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "s"]) for name in inputs],
        [onnx.ValueInfoProto(name=output)],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.other", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def operator_model(op_type: str, arrays: list[np.ndarray | None], attributes: dict[str, Any], opset: int) -> bytes:
    names = ["" if array is None else f"in{index}" for index, array in enumerate(arrays)]
    node = helper.make_node(op_type, names, ["out"], **attributes)
    return model_of(node, opset=opset, **{name: array for name, array in zip(names, arrays, strict=True) if name})


def computed(data: bytes, output: str = "out") -> np.ndarray:
    return Program(read_onnx(data)).run({}, [output]).values[output][0]


OPERATORS: list[tuple[str, list[np.ndarray | None], dict[str, Any], int]] = [
    *((name, [X, X[0, :1]], {}, 14) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min")),
    *((name, [I64, i64(3)], {}, 14) for name in ("Add", "Sub", "Mul", "Div", "Less", "Greater", "Equal")),
    *((name, [X, X[::-1].copy()], {}, 14) for name in ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal")),
    ("And", [BOOL, BOOL[0]], {}, 14),
    ("Or", [BOOL, BOOL[0]], {}, 14),
    ("Not", [BOOL], {}, 14),
    ("Sqrt", [np.abs(X)], {}, 14),
    ("Tanh", [X], {}, 14),
    ("Relu", [X], {}, 14),
    ("Erf", [X], {}, 14),
    ("Gelu", [X], {}, 20),
    ("Gelu", [X], {"approximate": "none"}, 20),
    ("IsNaN", [f32(1, np.nan, np.inf)], {}, 14),
    ("Identity", [X], {}, 14),
    ("Pow", [X, f32(2)], {}, 14),
    ("Pow", [X, i64(3)], {}, 14),
    ("Where", [BOOL, f32(1, 2), scalar(-1)], {}, 14),
    *(("Cast", [X], {"to": to}, 14) for to in (1, 6, 7, 9, 10, 11)),
    ("Cast", [np.array([-3, 7], np.int8)], {"to": 1}, 11),
    ("Cast", [I64], {"to": 1, "saturate": 1}, 19),
    ("DequantizeLinear", [np.array([[1, -2, 3]], np.int8), scalar(0.5)], {}, 11),
    ("DequantizeLinear", [np.array([[1, -2, 3]], np.int8), SCALE3, np.array([1, 0, 2], np.int8)], {}, 14),
    ("DequantizeLinear", [np.array([[1], [200], [3]], np.uint8), SCALE3], {"axis": 0}, 14),
    ("DequantizeLinear", [np.array([[1], [200], [3]], np.uint8), SCALE3], {"axis": -2}, 14),
    ("Shape", [X], {}, 14),
    ("Shape", [X], {"start": 1}, 15),
    ("Shape", [X], {"start": -2, "end": -1}, 15),
    ("Reshape", [X, i64(0, -1)], {}, 11),
    ("Reshape", [X, i64(4, 0, 2)], {}, 14),
    ("Reshape", [np.zeros((0, 3), np.float32), i64(3, 0)], {"allowzero": 1}, 14),
    ("Flatten", [X], {}, 14),
    ("Flatten", [X], {"axis": 0}, 14),
    ("Flatten", [X], {"axis": -1}, 14),
    ("Flatten", [X], {"axis": 3}, 14),
    ("Squeeze", [X[None, :, :1]], {"axes": [0, 2]}, 11),
    ("Squeeze", [X[None, :, :1], i64(-2)], {}, 14),
    ("Squeeze", [X[None, :, :1]], {}, 14),
    ("Unsqueeze", [X], {"axes": [0, 4]}, 11),
    ("Unsqueeze", [X, i64(-1, 1)], {}, 14),
    ("Transpose", [X], {}, 14),
    ("Transpose", [X], {"perm": [2, 0, 1]}, 14),
    ("Expand", [X[:, :1], i64(5, 2, 3, 1)], {}, 14),
    ("Concat", [X, X[:, :2]], {"axis": 1}, 14),
    ("Concat", [X, X], {"axis": -1}, 14),
    ("Range", [scalar(2, np.int64), scalar(11, np.int64), scalar(4, np.int64)], {}, 14),
    ("Range", [scalar(5, np.int64), scalar(0, np.int64), scalar(-2, np.int64)], {}, 14),
    ("Range", [scalar(0), scalar(1), scalar(0.25)], {}, 14),
    ("Range", [scalar(3, np.int64), scalar(0, np.int64), scalar(1, np.int64)], {}, 14),
    ("Constant", [], {"value": numpy_helper.from_array(X)}, 11),
    ("Constant", [], {"value_int": 3}, 14),
    ("Constant", [], {"value_float": 0.5}, 14),
    ("Constant", [], {"value_ints": [3, 4]}, 14),
    ("Constant", [], {"value_floats": [0.5, 4.0]}, 14),
    ("ConstantOfShape", [i64(2, 3)], {}, 14),
    ("ConstantOfShape", [i64(2, 3)], {"value": numpy_helper.from_array(i64(7))}, 14),
    ("ConstantOfShape", [np.zeros(0, np.int64)], {"value": numpy_helper.from_array(np.array([True]))}, 14),
    ("Gather", [X, i64(0, -1)], {"axis": 1}, 14),
    ("Gather", [X, scalar(2, np.int64)], {"axis": -1}, 14),
    ("Gather", [X, np.array([[0, 1]], np.int32)], {}, 14),
    ("GatherND", [X, np.array([[0, -1], [1, 0]])], {}, 14),
    ("GatherND", [X, np.array([[[0, 2, 3]]])], {"batch_dims": 0}, 14),
    ("Slice", [X, i64(1), i64(100)], {}, 14),
    ("Slice", [X, i64(-2, 0), i64(2**63 - 1, 2), i64(2, 1)], {}, 14),
    ("Slice", [X, i64(3, 2), i64(-(2**63), 0), i64(2, 1), i64(-1, -2)], {}, 14),
    ("MatMul", [X, X.reshape(2, 4, 3)], {}, 14),
    ("MatMul", [X, X[0].T.copy()], {}, 14),
    ("Gemm", [X[0], X[1].T.copy(), f32(1, 2, 3)], {}, 14),
    ("Gemm", [X[0], X[1], f32(2)], {"alpha": 0.5, "beta": 3.0, "transB": 1}, 14),
    ("Gemm", [X[0], X[1]], {"transA": 1}, 14),
    ("Softmax", [X], {}, 11),
    ("Softmax", [X], {"axis": 2}, 11),
    ("Softmax", [X], {}, 14),
    ("Softmax", [X], {"axis": 1}, 14),
    ("ReduceMean", [X], {"axes": [-1]}, 14),
    ("ReduceMean", [X], {"axes": [0, 2], "keepdims": 0}, 14),
    ("ReduceMean", [X], {}, 14),
    ("ReduceMean", [X, i64(1)], {}, 18),
    ("ReduceMean", [X], {"noop_with_empty_axes": 1}, 18),
    ("LayerNormalization", [X, f32(1, 2, 3, 4), f32(4, 3, 2, 1)], {"epsilon": 1e-3}, 17),
    ("LayerNormalization", [X, X[0]], {"axis": 1, "stash_type": 1}, 17),
]


@pytest.mark.parametrize(
    ("op_type", "arrays", "attributes", "opset"), OPERATORS, ids=[f"{i}-{case[0]}" for i, case in enumerate(OPERATORS)]
)
def test_operators_equal_onnxruntime(
    op_type: str, arrays: list[np.ndarray | None], attributes: dict[str, Any], opset: int
) -> None:
    data = operator_model(op_type, arrays, attributes, opset)
    # An output needs a type before onnxruntime takes the file.
    model = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(data))
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})[0]
    found = computed(data)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=5e-7)


REFUSED: list[tuple[str, list[np.ndarray | None], dict[str, Any], int, str]] = [
    ("Conv", [X, X], {}, 14, "does not know the operator Conv of opset 14; the onnxruntime engine can run it"),
    ("LayerNormalization", [X, f32(1, 2, 3, 4)], {}, 14, "does not know the operator LayerNormalization of opset 14"),
    ("Gelu", [X], {"approximate": "tanh"}, 20, "tanh form"),
    ("Add", [X, I64], {}, 14, "Add of float32, int64"),
    ("Add", [BOOL, BOOL], {}, 14, "Add of bool"),
    ("And", [X, X], {}, 14, "And of float32"),
    ("Add", [X, f32(1, 2, 3)], {}, 14, "cannot be computed"),
    ("Add", [X], {}, 14, "with 1 inputs"),
    ("Add", [X, None], {}, 14, "with 2 inputs"),
    ("Tanh", [X], {"alpha": 1}, 14, "attributes \\['alpha'\\]"),
    ("Div", [I64, i64(0)], {}, 14, "zero"),
    ("Div", [-I64, i64(2)], {}, 14, "negative"),
    ("Where", [X, X, X], {}, 14, "Where of float32"),
    ("Cast", [X], {"to": 16}, 14, "ONNX type 16"),
    ("Cast", [X], {}, 14, "ONNX type 0"),
    ("Unsqueeze", [X], {"axes": [0]}, 14, "is not what ONNX defines"),
    ("Unsqueeze", [X, i64(0)], {}, 11, "is not what ONNX defines"),
    ("Shape", [X], {"start": 1}, 14, "is not what ONNX defines"),
    ("Reshape", [X, i64(5, -1)], {}, 14, "cannot be computed"),
    ("Reshape", [X, i64(-2, 12)], {}, 14, "Reshape to"),
    ("Reshape", [X, f32(24)], {}, 14, "list of integers"),
    ("Transpose", [X], {"perm": [0, 0, 1]}, 14, "cannot be computed"),
    ("Transpose", [X], {"perm": [0, 1, -1]}, 14, "Transpose with axes"),
    ("Transpose", [X], {"perm": 1}, 14, "expected integers"),
    ("Gather", [X, i64(2)], {}, 14, "cannot be computed"),
    ("Gather", [X, i64(0)], {"axis": 3}, 14, "cannot be computed"),
    ("GatherND", [X, i64(2)], {}, 14, "cannot be computed"),
    ("Slice", [X, i64(0), i64(1), i64(0), i64(0)], {}, 14, "cannot be computed"),
    ("Slice", [X, i64(0, 0), i64(1, 1), i64(0, 0)], {}, 14, "axis 0 twice"),
    ("Concat", [X, X], {}, 14, "without an axis"),
    ("Concat", [X, I64], {"axis": 0}, 14, "Concat of float32, int64"),
    ("Range", [scalar(0), scalar(1), scalar(0)], {}, 14, "steps of zero"),
    ("Range", [scalar(0), scalar(np.nan), scalar(1)], {}, 14, "cannot be computed"),
    ("Range", [i64(0), i64(1), i64(1)], {}, 14, "no single number"),
    ("Constant", [], {"value_int": 1, "value_float": 1.0}, 14, "one value"),
    ("ConstantOfShape", [i64(-1)], {}, 14, "a shape"),
    ("MatMul", [X, f32(1, 2, 3, 4)], {}, 14, "not supported"),
    ("Gemm", [X, X], {}, 14, "Gemm of shapes"),
    ("ReduceMean", [X[:0]], {}, 14, "mean of nothing"),
    ("LayerNormalization", [X[:0], f32(1, 2, 3, 4)], {}, 17, "mean of nothing"),
    ("LayerNormalization", [X, f32(1, 2, 3, 4)], {"epsilon": 1}, 17, "expected a float"),
    ("DequantizeLinear", [np.zeros((2, 2), np.int8), X[0]], {}, 14, "not supported"),
]


@pytest.mark.parametrize(
    ("op_type", "arrays", "attributes", "opset", "match"),
    REFUSED,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(REFUSED)],
)
def test_what_onnx_does_not_define_is_refused(
    op_type: str, arrays: list[np.ndarray | None], attributes: dict[str, Any], opset: int, match: str
) -> None:
    with pytest.raises(GraphError, match=match) as caught:
        computed(operator_model(op_type, arrays, attributes, opset))
    assert caught.value.where == "graph.node[0]"


def test_operators_of_other_domains_are_refused() -> None:
    data = model_of(helper.make_node("Add", ["x", "x"], ["out"], domain="com.other"), x=X)
    with pytest.raises(GraphError, match=r"com\.other\.Add; the onnxruntime engine can run it"):
        computed(data)


@pytest.mark.parametrize("opset", [10, 24])
def test_unknown_opsets_are_refused(opset: int) -> None:
    with pytest.raises(GraphError, match=f"opset 11 to 23, got {opset}"):
        Program(read_onnx(model_of(opset=opset)))


def test_erf_is_within_its_stated_bound() -> None:
    x = np.linspace(-6, 6, 4001)
    exact = np.array([math.erf(value) for value in x])
    assert np.abs(erf(x) - exact).max() <= 1.5e-7


# Order.


def test_nodes_run_in_the_order_that_they_need() -> None:
    nodes = [
        helper.make_node("Add", ["b", "a"], ["out"]),
        helper.make_node("Mul", ["a", "x"], ["b"]),
        helper.make_node("Add", ["x", "x"], ["a"]),
    ]
    assert computed(model_of(*nodes, x=f32(3))).tolist() == [3 * 6 + 6]


def test_a_long_chain_is_no_recursion() -> None:
    count = 2_000  # twice Python's limit of recursion
    nodes = [helper.make_node("Add", [f"v{i}", "one"], [f"v{i + 1}"]) for i in range(count)]
    assert computed(model_of(*nodes[::-1], v0=f32(0), one=f32(1)), f"v{count}").tolist() == [count]


def test_cycles_gaps_and_doubles_are_refused() -> None:
    add = helper.make_node
    with pytest.raises(GraphError, match="depends on itself"):
        computed(model_of(add("Not", ["a"], ["b"]), add("Not", ["b"], ["a"])), "b")
    with pytest.raises(GraphError, match="'a' depends on itself"):
        computed(model_of(add("Not", ["a"], ["a"])), "a")
    with pytest.raises(GraphError, match="nothing makes the value 'gone'") as caught:
        computed(model_of(add("Not", ["gone"], ["out"])))
    assert caught.value.where == "graph.node[0]"
    with pytest.raises(GraphError, match="nothing makes the value ''"):
        Program(read_onnx(model_of())).constant("")
    with pytest.raises(GraphError, match="'out' is made twice") as caught:
        computed(model_of(add("Not", ["x"], ["out"]), add("Not", ["x"], ["out"]), x=BOOL))
    assert caught.value.where == "graph.node[1]"
    with pytest.raises(GraphError, match="'x' is made twice"):
        computed(model_of(add("Not", ["x"], ["x"]), x=BOOL))


def test_nodes_that_nothing_needs_are_left_alone() -> None:
    data = model_of(helper.make_node("Not", ["x"], ["out"]), helper.make_node("Conv", ["gone"], ["unused"]), x=BOOL)
    np.testing.assert_array_equal(computed(data), ~BOOL)


# Several inputs side by side.


def test_sources_tell_numbers_from_shapes_and_constants() -> None:
    data = model_of(
        helper.make_node("Shape", ["ids"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["length"]),
        helper.make_node("Mul", ["length", "one"], ["scaled"]),
        helper.make_node("Add", ["ids", "scaled"], ["out"]),
        helper.make_node("Add", ["one", "one"], ["two"]),
        helper.make_node("Add", ["out", "two"], ["last"]),
        inputs=("ids",),
        one=scalar(1, np.int64),
    )
    feeds = {"ids": [np.zeros((1, 3), np.int64), np.ones((2, 5), np.int64)]}
    program = Program(read_onnx(data))
    sources, run = program.sources(["last"]), program.run(feeds, ["last", "two"])
    assert sources["length"] == sources["scaled"] == {SHAPE}
    assert sources["out"] == {SHAPE, "ids"}
    assert sources["two"] == frozenset()
    assert [array.tolist() for array in run.values["last"]] == [[[5] * 3], [[8] * 5] * 2]
    assert [array.item() for array in run.values["two"]] == [2]
    assert [array.item() for array in run.scalars["length"]] == [3, 5]
    assert run.shapes["out"] == (1, 3)


# A graph must not cost more than a model of its size could.


def node(op_type: str, *names: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, list(names[:-1]), [names[-1]], **attributes)


WIDE, TALL = np.ones((1, 20_000), np.float32), np.ones((20_000, 1), np.float32)
GREEDY = {
    "ConstantOfShape": model_of(node("ConstantOfShape", "s", "out"), s=i64(1 << 20, 1 << 20)),
    "Expand": model_of(node("Expand", "x", "s", "out"), s=i64(1 << 20, 1 << 20), x=f32(1)),
    "Range": model_of(node("Range", "a", "b", "c", "out"), a=scalar(0), b=scalar(1e12), c=scalar(1)),
    "Mul": model_of(node("Mul", "a", "b", "out"), a=WIDE, b=TALL),
    "MatMul": model_of(node("MatMul", "a", "b", "out"), a=TALL, b=WIDE),
    "Where": model_of(node("Where", "c", "a", "b", "out"), a=WIDE, b=TALL, c=np.array([True])),
    "Equal": model_of(node("Equal", "a", "b", "out"), a=WIDE, b=TALL),
    "Gather": model_of(node("Gather", "a", "i", "out"), a=np.ones((3, 3_000), np.float32), i=np.zeros(9_000, np.int64)),
    "GatherND": model_of(
        node("GatherND", "a", "i", "out"), a=np.ones((3, 3_000), np.float32), i=np.zeros((9_000, 1), np.int64)
    ),
    "Softmax": model_of(node("Softmax", "a", "out"), a=np.ones(2_000_000, np.float32)),
    "Erf": model_of(node("Erf", "a", "out"), a=np.ones(2_000_000, np.float32)),
    "Cast": model_of(node("Cast", "a", "out", to=11), a=np.ones(4_000_000, np.int8)),
    "DequantizeLinear": model_of(
        node("DequantizeLinear", "a", "b", "out"), a=np.ones((9, 500_000), np.int8), b=scalar(1)
    ),
    "doubling": model_of(*(node("Concat", f"v{i}", f"v{i}", f"v{i + 1}", axis=0) for i in range(60)), v0=f32(1)),
    "many": model_of(
        *(node("Sqrt", "a", f"w{i}") for i in range(200)),
        node("Concat", *(f"w{i}" for i in range(200)), "out", axis=0),
        a=np.ones(99_000, np.float32),
    ),
    "arithmetic": model_of(
        *(node("MatMul", "a", "v0" if i == 0 else f"v{i}", f"v{i + 1}") for i in range(60)),
        a=np.ones((700, 700), np.float32),
        v0=np.ones((700, 700), np.float32),
    ),
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_graphs_are_refused_in_little_memory(name: str) -> None:
    data = GREEDY[name]
    output = "v60" if b"v60" in data else "out"
    tracemalloc.start(1)
    try:
        with pytest.raises(GraphError, match="more memory or arithmetic than any real model"):
            computed(data, output)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Beside the buffer itself: half its size for reading and half for running, and their allowances of 4 and 8 MiB.
    assert peak < len(data) + 12.5 * MEBIBYTE
