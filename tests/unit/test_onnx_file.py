"""The ONNX reader: equal to the onnx package on real files, and unmoved by hostile ones."""

import contextlib
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from minice.engines.onnx_file import OnnxModel, read_onnx
from minice.errors import GraphError

GRAPHS = sorted((Path(__file__).parents[1] / "data" / "graphs").glob("*.onnx"))
MEBIBYTE = 1 << 20


# Writing protobuf by hand, to write what the onnx package would not.


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def chunk(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value & (1 << 64) - 1)


OPSET_14 = chunk(8, integer(2, 14))
VALID_NODE = chunk(4, b"Add") + chunk(1, b"x") + chunk(1, b"y") + chunk(2, b"z")


def graph_of(*parts: bytes) -> bytes:
    return OPSET_14 + chunk(7, b"".join(parts))


def with_initializer(tensor: onnx.TensorProto) -> bytes:
    graph = helper.make_graph([], "g", [], [], [tensor])
    return helper.make_model(graph).SerializeToString()


def attribute_model(**attributes: object) -> bytes:
    graph = helper.make_graph([helper.make_node("Any", ["x"], ["y"], **attributes)], "g", [], [])
    return helper.make_model(graph).SerializeToString()


def only_initializer(data: bytes) -> np.ndarray:
    return next(iter(read_onnx(data).initializers.values()))


# Real files.


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_reads_what_the_onnx_package_reads(path: Path) -> None:
    data = path.read_bytes()
    ours, theirs = read_onnx(data), onnx.load_model_from_string(data)
    assert ours.opsets == {opset.domain: opset.version for opset in theirs.opset_import}
    assert [value.name for value in ours.inputs] == [value.name for value in theirs.graph.input]
    assert [value.elem_type for value in ours.outputs] == [TensorProto.FLOAT]
    assert all(value.shape == (None, None) for value in ours.inputs)
    assert ours.initializers.keys() == {tensor.name for tensor in theirs.graph.initializer}
    for tensor in theirs.graph.initializer:
        expected = numpy_helper.to_array(tensor)
        found = ours.initializers[tensor.name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)
    for node, expected_node in zip(ours.nodes, theirs.graph.node, strict=True):
        assert (node.op_type, node.domain) == (expected_node.op_type, expected_node.domain)
        assert (node.inputs, node.outputs) == (tuple(expected_node.input), tuple(expected_node.output))
        assert node.attributes.keys() == {attribute.name for attribute in expected_node.attribute}
        for attribute in expected_node.attribute:
            assert_same_attribute(node.attributes[attribute.name], helper.get_attribute_value(attribute))


def assert_same_attribute(found: object, expected: object) -> None:
    if isinstance(expected, TensorProto):
        np.testing.assert_array_equal(found, numpy_helper.to_array(expected), strict=True)
    elif isinstance(expected, bytes):
        assert found == expected.decode()
    else:
        assert found == (tuple(expected) if isinstance(expected, list) else expected)


def test_tensors_are_read_only_views_of_the_buffer() -> None:
    data = (GRAPHS[0].parent / "bert-dynamo-opset18.onnx").read_bytes()
    whole = np.frombuffer(data, np.uint8)
    tensors = [tensor for tensor in read_onnx(data).initializers.values() if tensor.size]
    assert all(np.shares_memory(tensor, whole) for tensor in tensors)
    assert not any(tensor.flags.writeable for tensor in read_onnx(memoryview(bytearray(data))).initializers.values())


def test_metadata_and_other_operator_sets_are_kept() -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []), opset_imports=[helper.make_opsetid("com.x", 3)])
    helper.set_model_props(model, {"scheme": "int8"})
    found = read_onnx(model.SerializeToString())
    assert (found.metadata, found.opsets) == ({"scheme": "int8"}, {"com.x": 3})


def test_an_initializer_gives_an_input_its_value() -> None:
    declared = helper.make_tensor_value_info("w", TensorProto.FLOAT, [1])
    graph = helper.make_graph([], "g", [declared], [], [numpy_helper.from_array(np.zeros(1, np.float32), "w")])
    assert read_onnx(helper.make_model(graph).SerializeToString()).inputs == ()


@pytest.mark.parametrize(
    ("data_type", "values"),
    [
        (TensorProto.FLOAT, [0.5, -2.0, 3.0]),
        (TensorProto.INT8, [-127, 0, 127]),
        (TensorProto.UINT8, [0, 128, 255]),
        (TensorProto.INT32, [-(2**31), 0, 2**31 - 1]),
        (TensorProto.INT64, [-(2**63), 0, 2**63 - 1]),
        (TensorProto.BOOL, [True, False, True]),
    ],
)
def test_numbers_that_are_not_raw(data_type: int, values: list[float]) -> None:
    tensor = helper.make_tensor("w", data_type, [3], values)
    assert not tensor.raw_data
    np.testing.assert_array_equal(
        only_initializer(with_initializer(tensor)), numpy_helper.to_array(tensor), strict=True
    )


def test_repeated_numbers_need_not_be_packed() -> None:
    # data_type 1, dims 2, float_data 1.0 and 2.0 one by one
    one_by_one = b"".join(varint(4 << 3 | 5) + np.float32(x).tobytes() for x in (1.0, 2.0))
    data = graph_of(chunk(5, integer(1, 2) + integer(2, 1) + chunk(8, b"w") + one_by_one))
    assert only_initializer(data).tolist() == [1.0, 2.0]


def test_an_empty_tensor_and_a_scalar() -> None:
    for values in (np.zeros((0, 3), np.float32), np.float32(7)):
        found = only_initializer(with_initializer(numpy_helper.from_array(np.asarray(values), "w")))
        assert found.shape == values.shape


# What is refused, and where.


def refused(data: bytes, match: str) -> GraphError:
    with pytest.raises(GraphError, match=match) as caught:
        read_onnx(data)
    return caught.value


def external_tensor(location: bool) -> onnx.TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2])
    if location:
        tensor.data_location = TensorProto.EXTERNAL
    else:
        tensor.external_data.add(key="location", value="../../secret")
    return tensor


@pytest.mark.parametrize("location", [True, False])
def test_external_data_is_refused(location: bool) -> None:
    # FR 168: neither the marker nor an entry alone opens another file
    error = refused(with_initializer(external_tensor(location)), "external data")
    assert error.where == "graph.initializer['w']"
    error = refused(attribute_model(value=external_tensor(location)), "external data")
    assert error.where == "graph.node[0].attribute['value']"


def test_graphs_within_graphs_are_refused() -> None:
    inner = helper.make_graph([], "inner", [], [])
    assert refused(attribute_model(body=inner), "attribute of type 5").where == "graph.node[0].attribute['body']"
    assert refused(attribute_model(bodies=[inner]), "attribute of type 10")


def test_parts_that_would_change_the_meaning_are_refused() -> None:
    refused(graph_of() + chunk(25, chunk(1, b"f")), "functions")
    refused(graph_of() + chunk(20, b""), "training information")
    refused(graph_of(chunk(15, b"")), "sparse")
    refused(graph_of(chunk(1, VALID_NODE + chunk(8, b"overload"))), "overload")


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (integer(1, -2) + integer(2, 1), "negative"),
        (integer(1, 3) + integer(2, 1) + chunk(9, bytes(8)), "holds 2 numbers"),
        (integer(1, 2) + integer(2, 1), "holds 0 numbers"),
        (integer(1, 2) + integer(2, 1) + chunk(9, bytes(7)), "do not divide"),
        (integer(1, 2) + integer(2, 99) + chunk(9, bytes(8)), "data type 99"),
        (integer(1, 2) + chunk(9, bytes(8)), "data type 0"),
        (integer(1, 2) + integer(2, 1) + chunk(9, bytes(8)) + chunk(4, bytes(8)), "in fields"),
        (integer(1, 1) + integer(2, 1) + integer(7, 1), "in fields"),
        (integer(1, 1) + integer(2, 3) + integer(5, 128), "outside -128..127"),
        (integer(1, 1) + integer(2, 9) + chunk(9, b"\2"), "booleans"),
        (integer(1, 0) + integer(1, 1 << 40) + integer(1, 1 << 40) + integer(2, 1), "too large"),
        (integer(1, 1) * 33 + integer(2, 1) + chunk(9, bytes(4)), "33 dimensions"),
        (integer(1, 2) + integer(2, 1) + chunk(9, bytes(8)) + chunk(9, bytes(8)), "stand once"),
        (integer(1, 2) + integer(2, 1) + integer(9, 5), "wire type"),
    ],
)
def test_malformed_tensors(tensor: bytes, match: str) -> None:
    assert refused(graph_of(chunk(5, tensor + chunk(8, b"x"))), match).where == "graph.initializer['x']"


def test_malformed_graphs_say_where() -> None:
    good = chunk(1, VALID_NODE)
    assert refused(graph_of(good, chunk(1, chunk(1, b"x"))), "an operator").where == "graph.node[1]"
    assert refused(graph_of(good, chunk(1, chunk(4, b"\xff"))), "UTF-8").where == "graph.node[1]"
    assert refused(graph_of(chunk(1, VALID_NODE + chunk(7, b"d" * 1001))), "1001 bytes").where == "graph.node[0]"
    tensor = chunk(8, b"w") + integer(2, 1) + chunk(9, bytes(4))
    assert refused(graph_of(chunk(5, tensor), chunk(5, tensor)), "no other").where == "graph.initializer['w']"
    assert refused(graph_of(chunk(5, integer(2, 1))), "a name").where == "graph.initializer[0]"
    assert refused(graph_of(chunk(11, b"")), "a name").where == "graph.input[0]"
    attribute = chunk(5, chunk(1, b"a") + integer(20, 2) + integer(3, 1))
    assert refused(graph_of(chunk(1, VALID_NODE + attribute * 2)), "a name each").where == "graph.node[0]"
    refused(b"", "no ONNX model|not an ONNX model")
    refused(b"version https://git-lfs.github.com/spec/v1\n", "protobuf|ONNX")


@pytest.mark.parametrize(
    "attribute",
    [
        integer(20, 2) + varint(2 << 3 | 5) + bytes(4),  # says integer, holds a float
        integer(20, 2) + integer(3, 1) + chunk(6, b""),  # an integer, and a graph
        integer(20, 2) + integer(3, 1) + chunk(21, b"ref"),
        integer(3, 1),  # no type
    ],
)
def test_attributes_that_contradict_themselves(attribute: bytes) -> None:
    data = graph_of(chunk(1, VALID_NODE + chunk(5, chunk(1, b"a") + attribute)))
    assert refused(data, "attribute of type").where == "graph.node[0].attribute['a']"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 11,  # an integer that never ends
        b"\x3a\x05",  # a graph of five bytes, of which none is there
        b"\x3a" + b"\xff" * 9 + b"\x01",  # a graph of 2 ** 64 bytes
        b"\x3b\x3c",  # a group
        b"\x3f",  # wire type 7
        b"\x02\x00",  # field 0
        b"\x39\x00",  # eight bytes, of which one is there
    ],
)
def test_broken_wire_format(data: bytes) -> None:
    refused(data, "protobuf")
    refused(graph_of(data), "protobuf")


def test_every_truncation_is_refused_or_is_a_smaller_model() -> None:
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    data = helper.make_model(
        helper.make_graph([helper.make_node("Add", ["w", "w"], ["y"], k=1)], "g", [], [], [tensor])
    ).SerializeToString()
    for length in range(len(data)):
        with contextlib.suppress(GraphError):
            assert isinstance(read_onnx(data[:length]), OnnxModel)


# A few bytes must not become many, nor take long.


def many(number: int, content: bytes, count: int) -> bytes:
    return chunk(number, content) * count


EMOJI_NAME = ("\N{GRINNING FACE}" + "a" * 900).encode()
AMPLIFIERS = {
    "empty nodes": graph_of(many(1, b"", 200_000)),
    "smallest nodes": graph_of(many(1, chunk(4, b"A") + chunk(2, b"x"), 100_000)),
    "unknown fields": integer(15, 0) * 500_000,
    "wide names": graph_of(many(1, chunk(4, b"A") + many(1, EMOJI_NAME, 3), 1_000)),
    "packed integers": graph_of(
        chunk(1, chunk(4, b"A") + chunk(5, chunk(1, b"a") + integer(20, 7) + chunk(8, bytes(1 << 20))))
    ),
    "packed floats": graph_of(
        chunk(1, chunk(4, b"A") + chunk(5, chunk(1, b"a") + integer(20, 6) + chunk(7, bytes(1 << 20))))
    ),
    "integers in a tensor": graph_of(chunk(5, chunk(8, b"w") + integer(2, 7) + chunk(7, bytes(1 << 20)))),
    "floats one by one": graph_of(chunk(5, chunk(8, b"w") + integer(2, 1) + (varint(4 << 3 | 5) + bytes(4)) * 200_000)),
    "dimensions": graph_of(chunk(5, chunk(8, b"w") + integer(2, 1) + chunk(1, b"\1" * 200_000))),
    "initializers": graph_of(many(5, chunk(8, b"w") + integer(2, 1), 100_000)),
    "inputs": graph_of(many(11, chunk(1, b"w"), 100_000)),
    "metadata": many(14, chunk(1, b"a"), 100_000),
}


@pytest.mark.parametrize("data", AMPLIFIERS.values(), ids=AMPLIFIERS.keys())
def test_hostile_files_stay_small(data: bytes) -> None:
    tracemalloc.start(1)
    try:
        with pytest.raises(GraphError):
            read_onnx(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Beside the buffer itself: half its size and the reader's allowance, with a little for the error.
    assert peak < len(data) / 2 + 4.5 * MEBIBYTE
