import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnxruntime
import pytest
from conftest import BERTS, GRAPHS, LOGIT_ATOL, POSITIONS, VOCABULARY, tiny_onnx, tiny_tokenizer, write_tiny
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from minice.artifacts import comparison
from minice.artifacts.comparison import compare_models, kendall_tau
from minice.artifacts.lock import parse_lock, shipped_lock
from minice.artifacts.quantize import (
    SCHEME,
    find_source,
    quantize_model,
    quantize_weights,
    verify_deep,
    write_quantized,
)
from minice.artifacts.receipt import Digest, parse_receipt
from minice.artifacts.sample_pairs import SAMPLE_PAIRS
from minice.artifacts.store import BUILTIN, inspect, open_model
from minice.engines import open_engine
from minice.engines.bert import recognize_bert
from minice.engines.onnx_file import read_onnx
from minice.errors import (
    ConfigError,
    EngineUnavailableError,
    GraphError,
    InputError,
    IntegrityError,
    ModelNotFoundError,
)

ROOT = Path(__file__).resolve().parents[2]
RUNS = (*BERTS, "bert-relu")
REFUSED = ["bert-ort-fused", "bert-dynamic-int8", "bert-two-labels"]


def graph(name: str) -> bytes:
    return (GRAPHS / f"{name}.onnx").read_bytes()


def edited(data: bytes, change) -> bytes:
    model = onnx.load_model_from_string(data)
    change(model)
    return model.SerializeToString()


def initializer(model, name: str):
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- rounding ------------------------------------------------------------------------------------------


def test_rounding_by_row_and_by_column() -> None:
    weights = np.array([[254.0, 3.0], [-1.0, 127.0]], np.float32)
    rows = quantize_weights(weights, axis=0)
    assert rows.scale.tolist() == [[254 / 127], [1.0]]
    assert rows.values.tolist() == [[127, 2], [-1, 127]]  # 3 / 2 = 1.5 goes to the even 2
    columns = quantize_weights(weights, axis=1)
    assert columns.scale.tolist() == [254 / 127, 1.0]
    assert columns.values.tolist() == [[127, 3], [0, 127]]  # -1 / 2 = -0.5 goes to the even 0
    assert (rows.values.dtype, rows.scale.dtype) == (np.int8, np.float32)


def test_half_goes_to_even() -> None:
    weights = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    assert quantize_weights(weights, axis=0).values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_zero_channel_gets_scale_one() -> None:
    rounded = quantize_weights(np.array([[0.0, -0.0], [1.0, 0.0]], np.float32), axis=0)
    assert rounded.scale.tolist() == [[1.0], [float(np.float32(1) / np.float32(127))]]
    assert rounded.values.tolist() == [[0, 0], [127, 0]]


def test_scale_that_underflows() -> None:
    tiny = np.float32(1e-45)  # the smallest there is; a 127th of it is zero
    rounded = quantize_weights(np.array([[tiny, -tiny], [tiny * 200, tiny]], np.float32), axis=0)
    assert rounded.scale[0, 0] == 1
    assert rounded.values[0].tolist() == [0, 0]
    assert rounded.scale[1, 0] == 2 * tiny  # 200 / 127 = 1.57, and there is nothing between 1 and 2
    assert rounded.values[1].tolist() == [100, 0]
    clipped = quantize_weights(np.array([[tiny * 180]], np.float32), axis=0)
    assert (clipped.scale[0, 0], clipped.values[0, 0]) == (tiny, 127)  # 180 / 127 = 1.42 goes down to 1


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    st.sampled_from([0, 1]),
)
def test_rounding_error_is_half_a_step(weights: np.ndarray, axis: int) -> None:
    before = weights.copy()
    rounded = quantize_weights(weights, axis=axis)
    assert np.array_equal(weights, before)
    assert np.abs(rounded.values.astype(int)).max() <= 127
    error = np.abs(weights.astype(np.float64) - rounded.values * rounded.scale.astype(np.float64))
    normal = (np.abs(weights).max(axis=1 - axis, keepdims=True) > 1e-35) | (weights == 0)
    assert (error <= 0.5001 * rounded.scale)[np.broadcast_to(normal, weights.shape)].all()


# --- graphs --------------------------------------------------------------------------------------------


def linears(weights):
    for layer in weights.layers:
        yield from (layer.query, layer.key, layer.value, layer.attention_output, layer.intermediate, layer.output)
    yield weights.pooler


def untouched(weights):
    norms = [
        weights.embedding_norm,
        *(norm for layer in weights.layers for norm in (layer.attention_norm, layer.output_norm)),
    ]
    yield from (weights.position_embeddings, weights.token_type_embeddings, weights.classifier.weight.dense())
    yield from (array for norm in norms for array in (norm.weight, norm.bias))
    yield from (linear.bias for linear in (*linears(weights), weights.classifier))


def check_scheme(source: bytes, result: bytes) -> None:
    """What DESIGN.md says of int8, read back through recognition."""
    before, after = recognize_bert(read_onnx(source)), recognize_bert(read_onnx(result))
    assert (before.weight_scheme, after.weight_scheme) == ("fp32", "int8-weight-only")
    rows = quantize_weights(np.array(before.word_embeddings.values), axis=0)
    assert np.array_equal(after.word_embeddings.values, rows.values)
    assert np.array_equal(after.word_embeddings.scale, rows.scale)
    for one, other in zip(linears(before), linears(after), strict=True):
        channels = quantize_weights(one.weight.dense(), axis=1)
        assert np.array_equal(other.weight.dense(), channels.values * channels.scale)
    for one, other in zip(untouched(before), untouched(after), strict=True):
        assert np.array_equal(one, other)


def default_session_logits(data: bytes, pairs) -> np.ndarray:
    session = onnxruntime.InferenceSession(data)
    inputs = {value.name for value in session.get_inputs()}
    logits = []
    for pair in pairs:
        feeds = {
            "input_ids": pair.input_ids[None],
            "attention_mask": np.ones((1, len(pair)), np.int64),
            "token_type_ids": pair.token_type_ids[None],
        }
        used = {name: values for name, values in feeds.items() if name in inputs}
        logits.append(np.ravel(session.run(None, used)[0])[0])
    return np.array(logits)


def engine_logits(data: bytes) -> tuple[np.ndarray, list]:
    engine = open_engine(data, threads=1)
    pairs = [pair for query in comparison._random_pairs(engine) for pair in query]
    try:
        return engine.logits(pairs), pairs
    finally:
        engine.close()


@pytest.mark.parametrize("name", RUNS)
def test_quantized_graph(name: str) -> None:
    source = graph(name)
    quantized = quantize_model(source)
    check_scheme(source, quantized.data)
    onnx.checker.check_model(quantized.data, full_check=True)
    logits, pairs = engine_logits(quantized.data)
    assert np.abs(logits - default_session_logits(quantized.data, pairs)).max() <= LOGIT_ATOL
    fp32, _ = engine_logits(source)
    assert 0 < np.abs(logits - fp32).max() < 0.2  # it was rounded, and only rounded
    assert len(quantized.tensors) == 2 * 6 + 1 + 1
    assert quantized.source == Digest(sha256=sha256(source), size=len(source))
    assert quantized.result == Digest(sha256=sha256(quantized.data), size=len(quantized.data))


def test_graph_without_segments() -> None:
    source = graph("distilbert")
    try:
        recognize_bert(read_onnx(source))
    except GraphError:
        with pytest.raises(GraphError):
            quantize_model(source)
        return
    result = quantize_model(source)
    assert len(result.tensors) == 2 * 6 + 1 + 1
    logits, pairs = engine_logits(result.data)
    assert np.abs(logits - default_session_logits(result.data, pairs)).max() <= LOGIT_ATOL


@pytest.mark.parametrize("name", REFUSED)
def test_graph_that_is_not_recognized(name: str) -> None:
    with pytest.raises(GraphError):
        quantize_model(graph(name))


def test_quantized_already() -> None:
    once = quantize_model(tiny_onnx()).data
    with pytest.raises(InputError, match="it is quantized already") as caught:
        quantize_model(once)
    assert caught.value.where == "model"


@pytest.mark.parametrize("data", [b"", b"not a model", tiny_onnx()[:1000]])
def test_not_onnx(data: bytes) -> None:
    with pytest.raises(GraphError):
        quantize_model(data)


def test_the_same_bytes_in_any_process() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from conftest import tiny_onnx;"
        "from minice.artifacts.quantize import quantize_model; print(quantize_model(tiny_onnx()).result.sha256)"
    )
    digests = {quantize_model(tiny_onnx()).result.sha256}
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        digests.add(done.stdout.strip() or done.stderr)
    assert len(digests) == 1


def test_metadata_names_the_scheme_and_keeps_the_rest() -> None:
    source = edited(tiny_onnx(), lambda model: helper.set_model_props(model, {"author": "somebody"}))
    metadata = read_onnx(quantize_model(source).data).metadata
    assert metadata == {"author": "somebody", "minice.scheme": SCHEME}
    assert SCHEME == "int8-weight-only/1"


def test_the_table_is_never_whole_in_float32() -> None:
    model = read_onnx(quantize_model(tiny_onnx()).data)
    table = "bert.embeddings.word_embeddings.weight"
    users = [node.op_type for node in model.nodes if f"{table}.int8" in node.inputs]
    assert users == ["Gather"]
    assert table not in model.initializers
    assert not any(table in node.outputs for node in model.nodes)


def test_numbers_of_the_report() -> None:
    source = tiny_onnx()
    quantized = quantize_model(source)
    table = next(tensor for tensor in quantized.tensors if tensor.shape == (VOCABULARY, 32))
    assert table.name == "bert.embeddings.word_embeddings.weight"
    assert table.bytes_before == 4 * VOCABULARY * 32
    assert table.bytes_after == VOCABULARY * 32 + 4 * VOCABULARY
    values = np.array(recognize_bert(read_onnx(source)).word_embeddings.values)
    rounded = quantize_weights(values, axis=0)
    error = np.abs(values - rounded.values * rounded.scale)
    assert table.largest_error == error.max()
    assert table.mean_error == pytest.approx(error.mean(), rel=1e-5)
    assert quantized.largest_error == max(tensor.largest_error for tensor in quantized.tensors)
    assert 0 < quantized.mean_error < quantized.largest_error


def logits_agree(source: bytes) -> None:
    """The quantized form of a rearranged graph is right, to both engines."""
    result = quantize_model(source).data
    check_scheme(source, result)
    logits, pairs = engine_logits(result)
    assert np.abs(logits - default_session_logits(result, pairs)).max() <= LOGIT_ATOL


def test_names_do_not_collide() -> None:
    def rename(model) -> None:
        table = "bert.embeddings.word_embeddings.weight"
        names = {"classifier.bias": f"{table}.int8", "classifier.weight": f"{table}.scale"}
        for tensor in model.graph.initializer:
            tensor.name = names.get(tensor.name, tensor.name)
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    logits_agree(edited(tiny_onnx(), rename))


def replace_input(model, old: str, new: str) -> None:
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def test_one_matrix_of_two_layers() -> None:
    query, key = (f"MatMul_bert.encoder.layer.{layer}.attention.self.query" for layer in (0, 1))
    source = edited(tiny_onnx(), lambda model: replace_input(model, key, query))
    result = quantize_model(source)
    assert [tensor.name for tensor in result.tensors].count(query) == 1
    assert len(result.tensors) == 2 * 6 + 1 + 1 - 1
    logits_agree(source)


def test_tensors_behind_identity() -> None:
    def hide(model) -> None:
        copies = []
        for name in ("bert.embeddings.word_embeddings.weight", "MatMul_bert.encoder.layer.0.output.dense"):
            replace_input(model, name, f"{name}/copy2")
            for old, new in ((name, f"{name}/copy"), (f"{name}/copy", f"{name}/copy2")):
                copies.append(helper.make_node("Identity", [old], [new]))
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(copies + nodes)

    source = edited(tiny_onnx(), hide)
    onnx.checker.check_model(source, full_check=True)
    logits_agree(source)
    model = read_onnx(quantize_model(source).data)
    assert sum(node.op_type == "Identity" for node in model.nodes) == 2  # those of the matrix


def test_tensors_in_constant_nodes() -> None:
    names = ("bert.embeddings.word_embeddings.weight", "bert.pooler.dense.weight")

    def move(model) -> None:
        kept = [tensor for tensor in model.graph.initializer if tensor.name not in names]
        moved = [
            helper.make_node("Constant", [], [name], value=initializer(model, name))  # exporters before opset 9
            for name in names
        ]
        kept = [TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*moved, *model.graph.node)]
        del model.graph.initializer[:], model.graph.node[:]
        model.graph.initializer.extend(kept)
        model.graph.node.extend(nodes)

    logits_agree(edited(tiny_onnx(), move))


def test_initializers_that_are_inputs_too() -> None:
    def declare(model) -> None:
        model.ir_version = 3
        for tensor in model.graph.initializer:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))

    source = edited(graph("bert-legacy-eager-opset11"), declare)
    logits_agree(source)
    model = onnx.load_model_from_string(quantize_model(source).data)
    assert model.ir_version >= 4
    assert not {tensor.name for tensor in model.graph.input} & {
        name for tensor in quantize_model(source).tensors for name in (tensor.name, f"{tensor.name}.int8")
    }


def test_table_that_is_the_position_table_too() -> None:
    def share(model) -> None:
        replace_input(
            model,
            "bert.embeddings.position_embeddings.weight",
            "bert.embeddings.word_embeddings.weight",
        )

    source = edited(tiny_onnx(), share)
    assert POSITIONS == VOCABULARY
    with pytest.raises(GraphError, match="cannot be quantized"):
        quantize_model(source)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    name = "MatMul_bert.encoder.layer.1.intermediate.dense"

    def spoil(model) -> None:
        tensor = initializer(model, name)
        weights = numpy_helper.to_array(tensor).copy()
        weights[3, 4] = value
        tensor.CopyFrom(numpy_helper.from_array(weights, name))

    with pytest.raises((InputError, GraphError)):
        quantize_model(edited(tiny_onnx(), spoil))


def test_source_is_not_modified() -> None:
    data = tiny_onnx()
    before = sha256(data)
    quantize_model(data)
    assert sha256(data) == before


def test_onnx_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(EngineUnavailableError, match=r"pip install 'minice\[quantize\]'"):
        quantize_model(b"")


# --- files ---------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return write_tiny(folder, tiny_onnx(), tiny_tokenizer()).model_path


def tiny_pin(source: Path):
    return parse_lock((source.parent / "models.lock").read_text(encoding="utf-8")).find("tiny")


def names(source: Path) -> set[str]:
    return {path.name for path in source.parent.iterdir()}


def test_written_file_is_a_model_of_the_pin(source: Path) -> None:
    written = write_quantized(source)
    assert (written.path, written.receipt_path) == (
        source.with_name("model.int8.onnx"),
        source.with_name("model.int8.onnx.json"),
    )
    files = open_model(tiny_pin(source), model_dir=source.parent, precision="int8", environ={})
    assert files.model == written.model.data == written.path.read_bytes()
    assert (files.precision, files.scheme) == ("int8", SCHEME)
    reports = inspect(tiny_pin(source), model_dir=source.parent, environ={})
    assert [report.status for report in reports] == ["ok"] * 3
    assert names(source) == {
        "model.onnx",
        "tokenizer.json",
        "models.lock",
        "model.int8.onnx",
        "model.int8.onnx.json",
    }


def test_receipt_on_disk(source: Path) -> None:
    written = write_quantized(source)
    text = written.receipt_path.read_text(encoding="utf-8")
    assert list(json.loads(text)) == ["minice", "onnx", "receipt-version", "result", "scheme", "source"]
    receipt = parse_receipt(text.encode())
    assert receipt == written.model.receipt
    assert receipt.source == Digest(sha256=sha256(source.read_bytes()), size=source.stat().st_size)
    assert receipt.result == Digest(sha256=sha256(written.path.read_bytes()), size=written.path.stat().st_size)
    assert receipt.onnx == onnx.__version__


def test_writing_again_changes_nothing(source: Path) -> None:
    written = write_quantized(source)
    before = [path.read_bytes() for path in (written.path, written.receipt_path)]
    write_quantized(source, expected=written.model.source)
    assert [path.read_bytes() for path in (written.path, written.receipt_path)] == before


def test_find_a_pinned_source(source: Path) -> None:
    lock = parse_lock((source.parent / "models.lock").read_text(encoding="utf-8"))
    environ = {"MINICE_MODEL_DIR": str(source.parent)}
    found = find_source("tiny", environ=environ, lock=lock)
    assert found.path == source
    assert found.expected == Digest(sha256=sha256(source.read_bytes()), size=source.stat().st_size)
    assert found.tokenizer == tiny_tokenizer()
    assert find_source("tiny", model_dir=source.parent, environ={}, lock=lock).path == source
    with pytest.raises(ConfigError, match="goes with the id of a model only") as caught:
        find_source(source, model_dir=source.parent, lock=lock)
    assert caught.value.where == "model_dir"
    with pytest.raises(
        ModelNotFoundError, match=r"tiny: quantizing needs the fp32 file, which is not on disk: no 'model\.onnx' in "
    ):
        find_source("tiny", environ={"MINICE_HOME": str(source.parent)}, lock=lock)


def test_find_a_source_by_its_path(source: Path, tmp_path: Path, monkeypatch) -> None:
    for target in (source.parent, str(source.parent), source):
        found = find_source(target)
        assert (found.path, found.expected, found.tokenizer) == (source, None, tiny_tokenizer())
    hub = tmp_path / "hub"
    (hub / "onnx").mkdir(parents=True)
    shutil.copy(source, hub / "onnx")
    assert find_source(hub).path == hub / "onnx" / "model.onnx"
    assert find_source(hub).tokenizer is None
    shutil.copy(source.with_name("tokenizer.json"), hub)
    assert find_source(hub).tokenizer == tiny_tokenizer()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minice-l6").mkdir()
    shutil.copy(source, tmp_path / "minice-l6")
    assert find_source("./minice-l6").path.samefile(tmp_path / "minice-l6" / "model.onnx")
    with pytest.raises(ModelNotFoundError):  # a pin's name is the pin, whatever lies in the working directory
        find_source("minice-l6", environ={"MINICE_HOME": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("minice-l7", "did you mean 'minice-l6'"),
        ("no/such/model.onnx", "nor is there a file or folder of that name"),
    ],
)
def test_nothing_to_quantize(tmp_path: Path, monkeypatch, target: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=message):
        find_source(target, environ={})


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected onnx/model\.onnx or model.onnx in it, found neither") as caught:
        find_source(tmp_path)
    assert caught.value.where == str(tmp_path)


def test_errors_name_the_file(source: Path) -> None:
    written = write_quantized(source)
    with pytest.raises(InputError, match="it is quantized already") as caught:
        write_quantized(written.path)
    assert caught.value.where == str(written.path)
    source.write_bytes(b"no model")
    with pytest.raises(GraphError) as graph:
        write_quantized(source)
    assert graph.value.where.startswith(str(source))


def test_unexpected_source(source: Path) -> None:
    with pytest.raises(IntegrityError):
        write_quantized(source, expected=Digest(sha256="0" * 64, size=source.stat().st_size))
    assert "model.int8.onnx" not in names(source)


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_quantized(tmp_path / "model.onnx")


@pytest.fixture
def cached(source: Path, tmp_path: Path):
    """The small model as the hub's client leaves it: a pin with a repository, links into blobs; and its environment."""
    files = {name: (source.parent / name).read_bytes() for name in ("model.onnx", "tokenizer.json")}
    repository = tmp_path / "hub" / "models--owner--tiny"
    snapshot = repository / "snapshots" / ("ab" * 20)
    for path, name in (("onnx/model.onnx", "model.onnx"), ("tokenizer.json", "tokenizer.json")):
        blob = repository / "blobs" / sha256(files[name])
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(files[name])
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(os.path.relpath(blob, (snapshot / path).parent))
    lines = f'id = "tiny"\nrepository = "owner/tiny"\nrevision = "{"ab" * 20}"'
    text = (source.parent / "models.lock").read_text(encoding="utf-8").replace('id = "tiny"', lines)
    lock = parse_lock(text.replace('path = "model.onnx"', 'path = "onnx/model.onnx"'))
    return snapshot, lock, {"HF_HUB_CACHE": str(tmp_path / "hub"), "MINICE_HOME": str(tmp_path / "home")}


def test_the_int8_file_of_a_cached_model_goes_into_minices_own_folder(cached, tmp_path: Path) -> None:
    # FR 142
    snapshot, lock, environ = cached
    cache = tmp_path / "hub"
    before = sorted(str(path) for path in cache.rglob("*"))
    for path in snapshot.rglob("*.*"):
        path.chmod(0o444)
    found = find_source("tiny", environ=environ, lock=lock)
    target = tmp_path / "home" / "tiny" / "onnx" / "model.int8.onnx"
    assert (found.path, found.target) == (snapshot / "onnx" / "model.onnx", target)
    assert found.tokenizer == tiny_tokenizer()
    written = write_quantized(found.path, expected=found.expected, target=found.target)
    assert (written.path, written.receipt_path) == (target, target.with_name("model.int8.onnx.json"))
    assert sorted(str(path) for path in cache.rglob("*")) == before
    files = open_model(lock.find("tiny"), precision="int8", environ=environ)
    assert files.model == written.model.data
    assert files.paths["model"] == str(target)
    assert verify_deep(lock.find("tiny"), environ=environ).matches


def test_a_cached_source_is_the_snapshot_whose_bytes_match(cached, source: Path) -> None:
    snapshot, lock, environ = cached
    other = snapshot.parent / ("cd" * 20) / "onnx" / "model.onnx"
    other.parent.mkdir(parents=True)
    shutil.copy(source, other)
    model = snapshot / "onnx" / "model.onnx"
    model.unlink()
    model.write_bytes(source.read_bytes()[::-1])
    assert find_source("tiny", environ=environ, lock=lock).path == other
    other.unlink()
    with pytest.raises(ModelNotFoundError, match=r"Not taken from that cache: .*sha256 mismatch in") as caught:
        find_source("tiny", environ=environ, lock=lock)
    assert caught.value.message.endswith("Run: minice fetch tiny && minice quantize tiny")


def test_a_path_into_the_cache_is_not_written_beside(cached, tmp_path: Path) -> None:
    snapshot, lock, environ = cached
    (tmp_path / "link").symlink_to(snapshot)
    for target in (snapshot, snapshot / "onnx" / "model.onnx", tmp_path / "link"):
        with pytest.raises(ConfigError, match="it lies in the hub's cache, which minice does not write to"):
            find_source(target, environ=environ, lock=lock)
    assert find_source(snapshot, environ={"HF_HUB_CACHE": str(tmp_path / "another")}, lock=lock)


def test_a_pointer_is_named_as_one(source: Path) -> None:
    # FR 140
    source.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 140\n")
    for act in (write_quantized, lambda path: write_quantized(find_source(path.parent).path)):
        with pytest.raises(InputError, match="is a Git LFS pointer of 66 bytes and not the file that it stands for"):
            act(source)


def test_a_file_without_its_receipt_is_taken_away_again(source: Path, monkeypatch) -> None:
    # FR 130
    from minice.artifacts import quantize

    real = quantize._write

    def full(path: Path, data: bytes, mode: int) -> None:
        if path.name.endswith(".json"):
            raise InputError("cannot write: No space left on device", where="source")
        real(path, data, mode)

    monkeypatch.setattr(quantize, "_write", full)
    with pytest.raises(InputError, match="No space left"):
        write_quantized(source)
    assert names(source) == {"model.onnx", "tokenizer.json", "models.lock"}
    monkeypatch.undo()
    write_quantized(source)
    monkeypatch.setattr(quantize, "_write", full)
    with pytest.raises(InputError, match="No space left"):
        write_quantized(source)
    assert open_model(tiny_pin(source), model_dir=source.parent, precision="int8", environ={})  # as it was


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_who_may_read_the_source_may_read_the_result(source: Path) -> None:
    source.chmod(0o640)
    written = write_quantized(source)
    assert [path.stat().st_mode & 0o777 for path in (written.path, written.receipt_path)] == [0o640, 0o640]


class Crash(BaseException):
    """Ends the process, as far as the code under test can tell."""


@pytest.mark.parametrize("step", range(6))
def test_a_crash_leaves_nothing_that_passes_for_a_model(source: Path, monkeypatch, step: int) -> None:
    # FR 130: fsync and replace of the result, of its folder, and of the receipt: a crash before each of them
    calls = []

    def crashing(real):
        def call(*arguments, **options):
            calls.append(real)
            if len(calls) == step + 1:
                raise Crash
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", crashing(os.fsync))
    monkeypatch.setattr(Path, "replace", crashing(Path.replace))
    with pytest.raises(Crash):
        write_quantized(source)
    monkeypatch.undo()
    if step == 5:  # after the receipt had its name
        assert open_model(tiny_pin(source), model_dir=source.parent, precision="int8", environ={})
        return
    with pytest.raises((ModelNotFoundError, IntegrityError)):
        open_model(tiny_pin(source), model_dir=source.parent, precision="int8", environ={})
    assert not [name for name in names(source) if name.endswith(".tmp")]


def test_failed_write_keeps_what_was_there(source: Path, monkeypatch) -> None:
    written = write_quantized(source)
    before = written.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_quantized(source)
    assert written.path.read_bytes() == before
    assert len(names(source)) == 5


def test_read_only_folder(source: Path, monkeypatch) -> None:
    def denied(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", denied)
    with pytest.raises(InputError, match="Permission denied; make its folder writable"):
        write_quantized(source)


def test_verify_deep(source: Path) -> None:
    write_quantized(source)
    check = verify_deep(tiny_pin(source), model_dir=source.parent, environ={})
    assert check.matches
    assert check.expected == check.got
    # Somebody who can write a receipt can vouch for other weights; quantizing again is what finds it.
    other = quantize_model(tiny_onnx(seed=8))
    receipt = json.loads(source.with_name("model.int8.onnx.json").read_text(encoding="utf-8"))
    receipt["result"] = {"sha256": other.result.sha256, "size": other.result.size}
    source.with_name("model.int8.onnx").write_bytes(other.data)
    source.with_name("model.int8.onnx.json").write_text(json.dumps(receipt), encoding="utf-8")
    check = verify_deep(tiny_pin(source), model_dir=source.parent, environ={})
    assert not check.matches
    assert other.result.sha256 in check.message
    source.unlink()
    with pytest.raises(ModelNotFoundError):
        verify_deep(tiny_pin(source), model_dir=source.parent, environ={})


# --- comparison ----------------------------------------------------------------------------------------


def test_comparison_on_texts() -> None:
    source = tiny_onnx()
    compared = compare_models(source, quantize_model(source).data, tokenizer=tiny_tokenizer())
    assert (compared.pairs, compared.texts) == (48, "built-in texts")
    assert 0 < compared.largest_difference < 0.5
    assert 0 < compared.kendall_tau <= 1
    assert 0 <= compared.top_1 <= 1


def test_comparison_with_itself() -> None:
    source = tiny_onnx()
    compared = compare_models(source, source)
    assert (compared.largest_difference, compared.kendall_tau, compared.top_1) == (0, 1, 1)


@pytest.mark.parametrize("tokenizer", [None, b"{}", tiny_tokenizer(extra=1)])
def test_comparison_without_a_fitting_tokenizer(tokenizer: bytes | None) -> None:
    source = tiny_onnx()
    compared = compare_models(source, quantize_model(source).data, tokenizer=tokenizer)
    assert (compared.pairs, compared.texts) == (48, "random ids")
    again = compare_models(source, quantize_model(source).data, tokenizer=tokenizer)
    assert again == compared


def test_kendall_tau() -> None:
    order = np.arange(6, dtype=np.float32)
    assert kendall_tau(order, order * 2 - 1) == 1
    assert kendall_tau(order, -order) == -1
    swapped = np.array([1, 0, 2, 3, 4, 5], np.float32)
    assert kendall_tau(order, swapped) == (14 - 1) / 15
    assert kendall_tau(order, np.zeros(6, np.float32)) == 0


def test_sample_pairs() -> None:
    assert [len(passages) for _, passages in SAMPLE_PAIRS] == [6] * 8
    assert len({query for query, _ in SAMPLE_PAIRS}) == 8


# --- the embedded model --------------------------------------------------------------------------------


@pytest.mark.shared
def test_the_embedded_model_is_the_shared_one_quantized(shared: Path) -> None:
    folder = shared / "models" / "minice-l6"
    pin = shipped_lock().find("minice-l6")
    files = open_model(pin, model_dir=folder, precision="fp32", environ={})
    quantized = quantize_model(files.model)
    assert quantized.data == (BUILTIN / "model.int8.onnx").read_bytes()
    assert len(quantized.tensors) == 6 * 6 + 1 + 1
    compared = compare_models(files.model, quantized.data, tokenizer=files.tokenizer)
    assert compared.texts == "built-in texts"
    assert compared.largest_difference < 0.5
    assert compared.kendall_tau > 0.9


@pytest.mark.shared
def test_verify_deep_of_the_embedded_model(shared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "minice-l6"
    folder.mkdir()
    shutil.copy(shared / "models" / "minice-l6" / "model.onnx", folder)
    check = verify_deep(shipped_lock().find("minice-l6"), environ={"MINICE_HOME": str(tmp_path)})
    assert check.matches, check.message


def test_embedded_model_in_a_default_session() -> None:
    data = (BUILTIN / "model.int8.onnx").read_bytes()
    engine = open_engine(data)
    try:
        pairs = [pair for query in comparison._random_pairs(engine)[:2] for pair in query]
        logits = engine.logits(pairs)
    finally:
        engine.close()
    assert np.abs(logits - default_session_logits(data, pairs)).max() <= LOGIT_ATOL


def test_model_notes_state_the_facts() -> None:
    notes = (BUILTIN / "MODEL.md").read_text(encoding="utf-8")
    for file in shipped_lock().find("minice-l6").files:
        assert file.sha256 in notes
        assert f"{file.size:,}" in notes
    assert (BUILTIN / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
