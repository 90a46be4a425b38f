"""The onnxruntime engine: what it runs, what it refuses, and the settings of its session."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import BERTS, GRAPHS, LOGIT_ATOL, POSITIONS, VOCABULARY, run_python, tiny_onnx
from onnx import TensorProto, helper

from minice.artifacts.lock import shipped_lock
from minice.artifacts.store import open_model
from minice.cli import main
from minice.cross_encoder import CrossEncoder
from minice.encoding.pairs import LENGTH_LIMIT, PairEncoding, encode_pair
from minice.encoding.tokenizer import PairTokenizer
from minice.engines import check_engine_options, open_engine, ort_engine
from minice.engines.ort_engine import OrtEngine
from minice.errors import (
    ClosedError,
    ConfigError,
    EngineUnavailableError,
    GraphError,
    InputError,
    MiniceError,
    ScorerError,
)

RUNS = [*BERTS, "bert-relu", "bert-int8-cast", "bert-int8-dequantize", "bert-ort-fused", "distilbert"]
OTHERS_TOO = ["bert-ort-fused", "bert-dynamic-int8"]  # the NumPy engine refuses these


def graph(name):
    return (GRAPHS / f"{name}.onnx").read_bytes()


def some_pairs(count, *, vocabulary=VOCABULARY, longest=POSITIONS, seed=3):
    random = np.random.default_rng(seed)
    sides = (random.integers(5, vocabulary, random.integers(1, longest)).tolist() for _ in range(2 * count))
    return [encode_pair(next(sides), next(sides), cls_id=2, sep_id=3, max_length=longest) for _ in range(count)]


def alone(model, pairs):
    """Logits of plain onnxruntime without any setting of ours, one pair at a time."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    logits = []
    for pair in pairs:
        feeds = {"input_ids": pair.input_ids[None], "token_type_ids": pair.token_type_ids[None]}
        feeds["attention_mask"] = np.ones_like(feeds["input_ids"])
        logits.append(session.run(None, {name: feeds[name] for name in names})[0].item())
    return np.array(logits, np.float32)


def edited(change, model=None):
    """The tiny model (or another one), changed by a function of its protobuf."""
    proto = onnx.load_model_from_string(tiny_onnx() if model is None else model)
    change(proto)
    return proto.SerializeToString()


@pytest.fixture
def opened():
    """Opens engines, and closes them afterwards."""
    engines = []

    def open_one(model, **options):
        engines.append(open_engine(model, engine="onnxruntime", **options))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


# --- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_logits_are_those_of_plain_onnxruntime(opened, name):
    engine = opened(graph(name), threads=2)
    pairs = some_pairs(50)
    # The reference is quantized in its activations too if nothing forbids that: the float graph stands in for it.
    reference = graph("bert-int8-cast" if name == "bert-int8-dequantize" else name)
    logits = engine.logits(pairs)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, alone(reference, pairs), rtol=0, atol=LOGIT_ATOL)
    assert np.ptp(logits) > 2 * LOGIT_ATOL  # equal numbers would prove nothing
    assert engine.info()["scores_depend_on_batch"] is False
    # FR 75, FR 76: what is in a batch does not matter
    order = np.random.default_rng(0).permutation(len(pairs))
    shuffled = engine.logits([pairs[index] for index in order])
    np.testing.assert_allclose(shuffled, logits[order], rtol=0, atol=LOGIT_ATOL)
    one_by_one = np.concatenate([engine.logits([pair]) for pair in pairs])
    np.testing.assert_allclose(one_by_one, logits, rtol=0, atol=LOGIT_ATOL)


@pytest.mark.parametrize("name", [name for name in RUNS if name not in OTHERS_TOO])
def test_both_engines_agree(opened, name):
    pairs = some_pairs(40)
    theirs = open_engine(graph(name)).logits(pairs)
    np.testing.assert_allclose(opened(graph(name)).logits(pairs), theirs, rtol=0, atol=LOGIT_ATOL)


@pytest.mark.parametrize("name", OTHERS_TOO)
def test_the_numpy_engine_points_to_this_one(opened, name):
    with pytest.raises(GraphError, match=r"--engine onnxruntime, engine='onnxruntime'"):
        open_engine(graph(name))
    assert np.isfinite(opened(graph(name)).logits(some_pairs(5))).all()


def test_info_says_when_scores_depend_on_the_batch(opened):  # FR 75
    engine = opened(graph("bert-dynamic-int8"), threads=1)
    info = engine.info()
    assert info["scores_depend_on_batch"] is True
    assert info["rounding_operators"] == ["DynamicQuantizeLinear", "MatMulInteger"]
    pairs = some_pairs(40)
    one_by_one = np.concatenate([engine.logits([pair]) for pair in pairs])
    assert np.abs(engine.logits(pairs) - one_by_one).max() > 10 * LOGIT_ATOL  # so it is true
    np.testing.assert_allclose(one_by_one, alone(graph("bert-dynamic-int8"), pairs), rtol=0, atol=LOGIT_ATOL)


def test_activations_that_are_rounded_to_a_fixed_range_are_told_too(opened):
    def round_activations(proto):
        for name, value in {"step": np.float32(0.05), "offset": np.int8(0)}.items():
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
        tanh = next(node for node in proto.graph.node if node.op_type == "Tanh")
        tanh.input[0] = "rounded"
        pooler = next(node for node in proto.graph.node if node.op_type == "Gemm")
        place = list(proto.graph.node).index(pooler) + 1
        proto.graph.node.insert(place, helper.make_node("QuantizeLinear", [pooler.output[0], "step", "offset"], ["q"]))
        proto.graph.node.insert(place + 1, helper.make_node("DequantizeLinear", ["q", "step", "offset"], ["rounded"]))

    info = opened(edited(round_activations)).info()
    assert (info["scores_depend_on_batch"], info["rounding_operators"]) == (True, ["QuantizeLinear"])


def test_quantized_weights_stay_weights(opened):
    pairs = some_pairs(40)
    exact = open_engine(graph("bert-int8-dequantize")).logits(pairs)
    np.testing.assert_allclose(opened(graph("bert-int8-dequantize")).logits(pairs), exact, rtol=0, atol=LOGIT_ATOL)
    session = ort_engine._open_session(graph("bert-int8-dequantize"))
    assert session.get_session_options().get_session_config_entry("session.disable_quant_qdq") == "1"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("max_batch_tokens", [1, 64, 100_000])
def test_budget_and_threads(opened, threads, max_batch_tokens):
    pairs = some_pairs(30)
    engine = opened(tiny_onnx(), threads=threads, max_batch_tokens=max_batch_tokens)
    np.testing.assert_allclose(engine.logits(pairs), alone(tiny_onnx(), pairs), rtol=0, atol=LOGIT_ATOL)
    assert engine.logits([]).shape == (0,)


def test_batches_stay_within_the_budget(opened, monkeypatch):  # FR 80, FR 81
    engine = opened(tiny_onnx(), threads=2, max_batch_tokens=128)
    shapes = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda padded: (shapes.append(padded.input_ids.shape), run(padded))[1])
    pairs = some_pairs(75)
    engine.logits(pairs)
    assert all(rows * length <= 128 for rows, length in shapes)
    padded, real = sum(rows * length for rows, length in shapes), sum(map(len, pairs))
    assert padded / real < 1.3


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_full_size(opened, precision, request):
    folder = request.getfixturevalue("shared") / "models" / "minice-l6" if precision == "fp32" else None
    files = open_model(shipped_lock().find("minice-l6"), model_dir=folder, precision=precision)
    texts = ["Bread needs flour, water, salt and yeast.", "", "git reset " * 200, "日本語 😀 [SEP]"]
    pairs = PairTokenizer.from_bytes(files.tokenizer).encode("how do I undo the last commit", texts, max_length=512)
    engine = opened(files.model)
    assert (engine.vocabulary, engine.positions) == (30_522, 512)
    logits = engine.logits(pairs)
    np.testing.assert_allclose(logits, alone(files.model, pairs), rtol=0, atol=LOGIT_ATOL)
    np.testing.assert_allclose(logits, open_engine(files.model).logits(pairs), rtol=0, atol=LOGIT_ATOL)


# --- what a graph takes and gives ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RUNS, "bert-dynamic-int8"])
def test_tables_are_found_in_every_form(opened, name):
    engine = opened(graph(name))
    assert (engine.vocabulary, engine.positions) == (128, 64)  # tests/data/graphs/README.md


def test_positions_that_are_a_slice_of_a_table(opened):
    def fold(proto):
        (table,) = (t for t in proto.graph.initializer if t.name == "bert.embeddings.position_embeddings.weight")
        (pick,) = (n for n in proto.graph.node if n.op_type == "Gather" and n.input[0] == table.name)
        (cut,) = (n for n in proto.graph.node if pick.input[1] in n.output)
        cut.input[0] = table.name
        added = next(n for n in proto.graph.node if pick.output[0] in n.input)
        added.input[list(added.input).index(pick.output[0])] = cut.output[0]
        proto.graph.node.remove(pick)
        # Rows are the first dimension of a table, and the second one of the ids that stood here.
        cut.input.append("zero")
        cut.input[3] = "zero"
        del cut.input[4:]

    engine = opened(edited(fold))
    assert engine.positions == POSITIONS
    pairs = some_pairs(20)
    np.testing.assert_allclose(engine.logits(pairs), alone(tiny_onnx(), pairs), rtol=0, atol=LOGIT_ATOL)


def test_segments_that_a_buffer_chooses_are_no_positions(opened):
    def forget_segments(proto):
        pick = next(node for node in proto.graph.node if "token_type_ids" in node.input)
        pick.input[1] = "all_first"
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros((1, POSITIONS), np.int64), "segment_buffer")
        )
        length = next(node for node in proto.graph.node if node.op_type == "Slice").input[2]
        cut = helper.make_node("Slice", ["segment_buffer", "zero", length, "first"], ["all_first"])
        proto.graph.node.insert(list(proto.graph.node).index(pick), cut)
        for node in [node for node in proto.graph.node if length in node.output]:
            proto.graph.node.remove(node)
            proto.graph.node.insert(1, node)
        del proto.graph.input[2]

    engine = opened(edited(forget_segments))
    assert engine.positions == POSITIONS


def test_a_buffer_of_position_numbers_is_no_table(opened):
    # As wide as it is long, it has the shape of one.
    assert opened(tiny_onnx(hidden=POSITIONS)).positions == POSITIONS


def test_positions_of_a_constant_node(opened):
    def inline(proto):
        (table,) = (t for t in proto.graph.initializer if t.name == "bert.embeddings.position_embeddings.weight")
        proto.graph.node.insert(0, helper.make_node("Constant", [], ["inline"], value=table))
        (pick,) = (n for n in proto.graph.node if table.name in n.input)
        pick.input[0] = "inline"
        proto.graph.initializer.remove(table)

    assert opened(edited(inline)).positions == POSITIONS


def test_no_position_table_is_no_limit_of_the_model(opened):
    def forget(proto):
        (pick,) = (n for n in proto.graph.node if n.op_type == "Gather" and "position_embeddings" in n.input[0])
        added = next(n for n in proto.graph.node if pick.output[0] in n.input)
        kept = next(name for name in added.input if name != pick.output[0])
        after = next(n for n in proto.graph.node if added.output[0] in n.input)
        after.input[list(after.input).index(added.output[0])] = kept
        for node in (pick, added):
            proto.graph.node.remove(node)

    engine = opened(edited(forget))
    assert engine.positions == LENGTH_LIMIT
    assert engine.logits(some_pairs(3, longest=300)).shape == (3,)


def test_inputs_of_32_bits(opened):
    def narrow(proto):
        for value in proto.graph.input:
            value.type.tensor_type.elem_type = TensorProto.INT32
        for node in proto.graph.node:
            for place, name in enumerate(node.input):
                if name == "input_ids" and node.op_type == "Shape":
                    node.input[place] = "input_ids"

    engine = opened(edited(narrow))
    pairs = some_pairs(20)
    np.testing.assert_allclose(engine.logits(pairs), alone(tiny_onnx(), pairs), rtol=0, atol=LOGIT_ATOL)


def test_one_of_several_outputs(opened):
    def name_another(proto):
        product = next(node for node in proto.graph.node if node.op_type == "Softmax")
        proto.graph.output.insert(0, helper.make_tensor_value_info(product.output[0], TensorProto.FLOAT, None))

    pairs = some_pairs(10)
    engine = opened(edited(name_another))
    np.testing.assert_allclose(engine.logits(pairs), alone(tiny_onnx(), pairs), rtol=0, atol=LOGIT_ATOL)

    def call_it_something_else(proto):
        name_another(proto)
        proto.graph.node[-1].output[0] = proto.graph.output[1].name = "score"

    with pytest.raises(GraphError, match="expected one output, the logits, got"):
        opened(edited(call_it_something_else))


def test_flat_logits(opened):
    def flatten(proto):
        proto.graph.node[-1].output[0] = "column"
        proto.graph.node.append(helper.make_node("Squeeze", ["column", "first"], ["logits"]))
        del proto.graph.output[0].type.tensor_type.shape.dim[1]

    pairs = some_pairs(10)
    engine = opened(edited(flatten))
    np.testing.assert_allclose(engine.logits(pairs), alone(tiny_onnx(), pairs), rtol=0, atol=LOGIT_ATOL)


# --- refusals ------------------------------------------------------------------------------------------


def test_two_labels(opened):  # FR 25
    with pytest.raises(GraphError, match="expected one logit, got 2"):
        opened(graph("bert-two-labels"))

    def undeclared(proto):
        proto.graph.output[0].type.tensor_type.shape.dim[1].Clear()

    with pytest.raises(GraphError, match="expected one logit, got 2"):  # only running it shows
        opened(edited(undeclared, graph("bert-two-labels")))


def test_external_data_is_refused_before_onnxruntime_sees_it(opened, monkeypatch):  # FR 168
    monkeypatch.setattr(ort_engine, "_open_session", None)  # would be a TypeError

    def move_out(proto):
        table = proto.graph.initializer[0]
        onnx.external_data_helper.set_external_data(table, location="../../etc/passwd")
        table.ClearField("raw_data")

    with pytest.raises(GraphError, match="external"):
        opened(edited(move_out))


def rename_input(proto):
    for node in proto.graph.node:
        node.input[:] = ["ids" if name == "input_ids" else name for name in node.input]
    proto.graph.input[0].name = "ids"


def give_integers(proto):
    proto.graph.node[-1].output[0] = "column"
    proto.graph.node.append(helper.make_node("Cast", ["column"], ["logits"], to=TensorProto.INT64))
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64


def give_a_sequence(proto):
    proto.graph.node[-1].output[0] = "column"
    proto.graph.node.append(helper.make_node("SequenceConstruct", ["column"], ["logits"]))
    value = helper.make_tensor_sequence_value_info("logits", TensorProto.FLOAT, None)
    proto.graph.output[0].CopyFrom(value)


def fix_length(proto):
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 32


def ask_for_floats(proto):
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.FLOAT


def no_table(proto):
    (pick,) = (n for n in proto.graph.node if n.op_type == "Gather" and "word_embeddings" in n.input[0])
    pick.input[0] = "nowhere"


def unknown_operator(proto):
    next(node for node in proto.graph.node if node.op_type == "Erf").op_type = "Erfolg"


def fails_when_run(proto):
    next(t for t in proto.graph.initializer if t.name == "split").CopyFrom(
        onnx.numpy_helper.from_array(np.array([0, 0, 7, 8]), "split")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_input, "expected the inputs input_ids, attention_mask, token_type_ids, got ids"),
        (give_integers, "as floating-point numbers, got ONNX type 7"),
        (give_a_sequence, "as floating-point numbers"),
        (fix_length, "two dimensions of any size"),
        (ask_for_floats, "as int64 or int32"),
        (no_table, "embeddings that input_ids picks from"),
        (unknown_operator, "cannot load the graph"),
        (fails_when_run, "loads and does not run"),
    ],
)
def test_other_graphs(opened, change, message, capfd):
    with pytest.raises(GraphError, match=message):
        opened(edited(change))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("data", [b"", b"\x08\x07", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 99])
def test_bytes_that_are_no_model(opened, data):
    with pytest.raises(GraphError):
        opened(data)


def test_pairs_that_do_not_fit(opened):  # FR 7
    engine = opened(tiny_onnx())
    long = PairEncoding(input_ids=np.full(65, 5), token_type_ids=np.zeros(65, np.int64))
    with pytest.raises(InputError, match="1 to 64") as caught:
        engine.logits([*some_pairs(1), long])
    assert caught.value.where == "pairs[1]"
    strange = PairEncoding(input_ids=np.array([2, 64, 3]), token_type_ids=np.zeros(3, np.int64))
    with pytest.raises(InputError, match="does not belong"):
        engine.logits([strange])


def test_a_failure_in_the_middle_names_the_model(open_tiny, monkeypatch):
    encoder = open_tiny(engine="onnxruntime")
    encoder.warm()

    class Broken:
        def run(self, *_arguments):
            raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(encoder._loaded.engine, "_session", Broken())
    with pytest.raises(ScorerError, match=r"model 'tiny@.*onnxruntime failed on a batch of shape .*: out of memory"):
        encoder.score("the", ["a", "b"])
    assert encoder._loaded.engine._running == 0


# --- the package itself --------------------------------------------------------------------------------


@pytest.fixture
def without_onnxruntime(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    for name in [name for name in sys.modules if name.split(".")[0] == "onnxruntime"]:
        monkeypatch.delitem(sys.modules, name)
    return monkeypatch


def test_a_missing_package_is_told_at_open(without_onnxruntime, capsys, tmp_path):
    with pytest.raises(EngineUnavailableError, match=r"pip install 'minice\[onnxruntime\]'") as caught:
        CrossEncoder.open(engine="onnxruntime")
    assert (caught.value.where, caught.value.exit_code, caught.value.http_status) == ("engine", 7, 501)
    (tmp_path / "notes.txt").write_text("a note\n", encoding="utf-8")
    assert main(["rerank", "q", str(tmp_path / "notes.txt"), "--engine", "onnxruntime"]) == 7
    assert "minice[onnxruntime]" in capsys.readouterr().err
    CrossEncoder.open().close()  # the other engine needs nothing of it
    check_engine_options(engine="numpy", threads=None, max_batch_tokens=None)


def test_wrong_options_go_before_a_missing_package(without_onnxruntime):
    with pytest.raises(ConfigError):
        check_engine_options(engine="onnxruntime", threads=0, max_batch_tokens=None)


def test_a_broken_package(without_onnxruntime):
    without_onnxruntime.setitem(sys.modules, "onnxruntime", None)  # its import fails
    with pytest.raises(EngineUnavailableError, match="onnxruntime"):
        OrtEngine(tiny_onnx())


@pytest.mark.parametrize("code", ["raise RuntimeError('half')", "raise ImportError('libonnx')", "", "import gone.away"])
def test_half_an_installation(without_onnxruntime, tmp_path, code):
    (tmp_path / "onnxruntime.py").write_text(code)
    without_onnxruntime.syspath_prepend(tmp_path)
    with pytest.raises(EngineUnavailableError, match="onnxruntime"):
        OrtEngine(tiny_onnx())


def test_ctrl_c_during_the_import_is_ctrl_c(without_onnxruntime, tmp_path):
    (tmp_path / "onnxruntime.py").write_text(
        "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt as cause:\n    raise ImportError from cause\n"
    )
    without_onnxruntime.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        OrtEngine(tiny_onnx())


@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
def test_a_daemon_thread_that_scores_does_not_abort_the_end(engine):
    code = """
import sys, threading, time
from minice import CrossEncoder
encoder = CrossEncoder.open(engine=sys.argv[1], threads=2)
passages = ["bread needs flour " * (i % 20 + 1) for i in range(60)]
encoder.score("how to bake", passages)
def busy():
    while True:
        encoder.score("how to bake", passages)
threading.Thread(target=busy, daemon=True).start()
time.sleep(0.2)
"""
    done = run_python(code, engine)
    assert done.returncode == 0, done.stderr


# --- settings, threads, memory, forks ------------------------------------------------------------------


def test_session_settings(opened):  # FR 120, FR 122, FR 127, FR 128
    engine = opened(tiny_onnx(), threads=3)
    options = engine._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (True, False)
    for name in ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning"):
        assert options.get_session_config_entry(name) == "0"
    assert options.optimized_model_filepath == ""
    assert engine._session.get_providers() == ["CPUExecutionProvider"]
    info = json.loads(json.dumps(engine.info()))
    assert (info["threads"], info["memory_arena"], info["memory_pattern"], info["spinning"]) == (3, True, False, False)
    assert (info["exact_across_batches"], info["version"]) == (False, onnxruntime.__version__)


def test_a_closed_engine_says_so(opened):
    engine = opened(tiny_onnx())
    engine.close()
    with pytest.raises(ClosedError):
        engine.logits(some_pairs(1))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of a process where Linux shows them")
def test_threads_are_ours_follow_the_affinity_and_sleep(tiny):  # FR 127, FR 128
    code = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from minice.engines import open_engine
import numpy as np
from minice.encoding.pairs import encode_pair
import onnxruntime
before = len(os.listdir("/proc/self/task"))
model = open(sys.argv[1] + "/model.onnx", "rb").read()
engine = open_engine(model, engine="onnxruntime")
print(engine.threads, len(os.listdir("/proc/self/task")) - before)
wide = open_engine(model, engine="onnxruntime", threads=3)
pairs = [encode_pair([5] * 9, [6] * n, cls_id=2, sep_id=3, max_length=64) for n in range(40)]
wide.logits(pairs)
print(len(os.listdir("/proc/self/task")) - before)
start = time.process_time()
time.sleep(0.5)
print(time.process_time() - start < 0.0125)
"""
    done = run_python(code, tiny.folder)
    assert (done.stdout.split(), done.stderr) == (["1", "0", "3", "True"], "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process where Linux shows it")
@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
def test_memory_does_not_grow_with_the_shapes_that_ran(engine):  # FR 119, FR 120
    code = """
import random, sys
from minice import CrossEncoder

def resident_mib():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

encoder = CrossEncoder.open(engine=sys.argv[1], threads=2)
choose = random.Random(1)
marks = []
for call in range(150):
    encoder.score("undo a commit", ["word " * choose.randint(1, 60) for _ in range(choose.randint(1, 8))])
    marks.append(resident_mib())
print(marks[-1] - marks[29])
"""
    done = run_python(code, engine, timeout_s=120)
    assert done.stderr == ""
    assert float(done.stdout) < 40


def test_the_fork_of_a_running_session_opens_another(opened, monkeypatch):  # FR 117
    sessions = []
    open_session = ort_engine._open_session
    monkeypatch.setattr(ort_engine, "_open_session", lambda model: (sessions.append(1), open_session(model))[1])
    engine = opened(tiny_onnx(), threads=1)
    pairs = some_pairs(5)
    expected = engine.logits(pairs).tobytes()
    engine.reset_in_child()  # as after a fork with nothing under way: the session is as good as before
    engine._workers.reset_in_child()
    assert engine.logits(pairs).tobytes() == expected
    assert len(sessions) == 1
    with engine._running_session():
        engine.reset_in_child()  # as after a fork in the middle of a run
    engine._running = 0  # the run that went on was the parent's
    assert engine.logits(pairs).tobytes() == expected
    assert len(sessions) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be made read-only there")
def test_nothing_is_written(tiny, tmp_path):  # FR 142
    for path in (tiny.model_path, tiny.tokenizer_path, tiny.folder / "models.lock"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]}
    tmp_path.chmod(0o555)
    from conftest import OPEN_TINY

    done = run_python(
        OPEN_TINY + 'print(open_tiny().score("the", ["a"]).shape)', tmp_path, "onnxruntime", HOME="/nonexistent"
    )
    tmp_path.chmod(0o755)
    assert (done.stdout, done.stderr) == ("(1,)\n", "")
    assert {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]} == before


@pytest.mark.parametrize("seed", range(6))
def test_damaged_graphs_are_typed_errors_or_run(seed):
    # What hashes to a pin is not damaged; but a pin can be made of anything.
    random = np.random.default_rng(seed)
    for _ in range(10):
        data = bytearray(graph("bert-ort-fused"))
        at = int(random.integers(0, 2_000 if random.random() < 0.5 else len(data)))
        data[at] ^= int(random.integers(1, 256))
        try:
            engine = open_engine(bytes(data), engine="onnxruntime", threads=1)
            assert engine.logits(some_pairs(2, longest=min(64, engine.positions))).shape == (2,)
            engine.close()
        except MiniceError:
            pass


def test_command_line(tmp_path: Path, capsys):
    notes = tmp_path / "notes.txt"
    notes.write_text("git stash saves work\nUndo a commit with git reset\nBread\n", encoding="utf-8")
    lines = {}
    for engine in ("numpy", "onnxruntime"):
        assert main(["rerank", "undo the last commit", str(notes), "--engine", engine, "--format", "jsonl"]) == 0
        lines[engine] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(line["model_id"].endswith(f"engine={engine}") for line in lines[engine])
    for ours, theirs in zip(*lines.values(), strict=True):
        assert ours["text"] == theirs["text"]
        assert ours["logit"] == pytest.approx(theirs["logit"], abs=LOGIT_ATOL)
