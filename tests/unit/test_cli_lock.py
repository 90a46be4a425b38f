"""``minice lock``: what it reads, what it asks, what it prints, and that a model opens by what it printed."""

import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
from conftest import GRAPHS, POSITIONS, run_python, tiny_onnx, tiny_tokenizer
from onnx import TensorProto, helper

from minice import cli
from minice.artifacts import make_pin
from minice.artifacts.lock import Lock, known_lock, parse_lock, shipped_lock
from minice.artifacts.make_pin import add_to_lock, read_config, read_graph
from minice.artifacts.store import open_model
from minice.errors import GraphError, InputError, LockError
from minice.scores import ScoreScale

CONFIG = {"max_position_embeddings": 512, "id2label": {"0": "LABEL_0"}}
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.fixture(scope="module")
def graph() -> bytes:
    return tiny_onnx()


@pytest.fixture
def folder(graph: bytes, tmp_path: Path, monkeypatch) -> Path:
    """A model as repositories have it: the graph in onnx/, everything else beside that folder."""
    monkeypatch.delenv("MINICE_LOCK", raising=False)
    monkeypatch.setenv("MINICE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx" / "model.onnx").write_bytes(graph)
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer())
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(capsysbinary, monkeypatch):
    """Runs the verb; with ``answers`` on a terminal, at whose end there is nothing more."""

    def run(*argv, answers: str | None = None):
        monkeypatch.setattr(sys, "stdin", io.StringIO() if answers is None else Terminal(answers))
        code = cli.main(["lock", *map(str, argv)])
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    return run


def pin_of(out: str):
    (pin,) = parse_lock(out).models
    return pin


# --- what is printed -----------------------------------------------------------------------------------


def test_a_printed_lock_opens_the_model(run, folder, tmp_path, graph) -> None:
    (folder / "vocab.txt").write_text("[PAD]\n", encoding="utf-8")
    code, out, err = run(folder, "--id", "mine")
    assert code == 0
    pin = pin_of(out)
    assert (pin.id, pin.license, pin.max_length, pin.scale) == ("mine", "NOASSERTION", POSITIONS, ScoreScale.LOGIT)
    assert [(file.role, file.path, file.optional) for file in pin.files] == [
        ("model", "onnx/model.onnx", False),
        ("tokenizer", "tokenizer.json", False),
        ("config", "config.json", False),
        ("vocab", "vocab.txt", True),
    ]
    assert (pin.files[0].precision, pin.files[0].scheme) == ("fp32", None)
    # What was read is told with its source, on stderr only.
    assert f"max-length: {POSITIONS} (the graph's position table)\n" in err
    assert "scale: logit (config.json: one label)\n" in err
    assert "license: NOASSERTION (SPDX's word for a licence that nobody stated)\n" in err
    assert f"model: onnx/model.onnx, {len(graph):,} bytes, fp32 (the graph keeps weights as float32)\n" in err
    lock = tmp_path / "my lock"
    lock.write_text(out, encoding="utf-8")
    known = known_lock({"MINICE_LOCK": str(lock)})
    assert open_model(known.find("mine"), model_dir=folder, environ={}).model == graph


def test_the_command_at_the_end_works(run, folder, tmp_path, monkeypatch, capsysbinary) -> None:
    _, out, err = run(folder, "--id", "mine")
    assert f"its files are looked for in {str(tmp_path / 'home' / 'mine')!r}, or in the folder that" in err
    assert err.endswith(f"Run: MINICE_LOCK=my.lock minice verify mine --model-dir {folder}\n")
    (tmp_path / "my.lock").write_text(out, encoding="utf-8")
    monkeypatch.setenv("MINICE_LOCK", str(tmp_path / "my.lock"))
    assert cli.main(["verify", "mine", "--model-dir", str(folder)]) == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == 3
    assert run(folder, "--id", "mine")[1] == out  # an own pin may be made again, whatever the variable names


def test_every_option_goes_into_the_pin(run, folder) -> None:
    options = ["--max-length", 32, "--scale", "probability", "--license", "MIT", "--precision", "fp32"]
    options += ["--repository", "me/model", "--revision", "ab" * 20, "--model-file", "onnx/model.onnx", "--yes"]
    _, out, err = run(folder, "--id", "mine", *options)
    pin = pin_of(out)
    assert (pin.max_length, pin.scale, pin.license) == (32, ScoreScale.PROBABILITY, "MIT")
    assert (pin.repository, pin.revision) == ("me/model", "ab" * 20)
    assert "max-length:" not in err  # what was given needs no source
    assert "scale:" not in err


def test_a_flat_folder(run, folder) -> None:
    (folder / "onnx" / "model.onnx").rename(folder / "other.onnx")
    assert pin_of(run(folder, "--id", "mine")[1]).files[0].path == "other.onnx"
    (folder / "onnx").rmdir()
    assert pin_of(run(folder, "--id", "mine")[1]).files[0].path == "other.onnx"


# --- what is asked -------------------------------------------------------------------------------------


def test_a_terminal_confirms_each_value(run, folder) -> None:
    code, out, err = run(folder, "--id", "mine", answers="\n\n\n")
    assert code == 0
    assert out == run(folder, "--id", "mine", "--yes", answers="")[1]
    assert f"max-length (the graph's position table; Enter takes {POSITIONS}): " in err
    assert "scale (config.json: one label; Enter takes logit): " in err
    assert "Enter takes NOASSERTION): " in err


def test_a_typed_value_replaces_and_a_bad_one_is_asked_again(run, folder) -> None:
    answers = f"many\n{POSITIONS + 1}\n 32 \nprobable\nprobability\nMIT\n"
    _, out, err = run(folder, "--id", "mine", answers=answers)
    pin = pin_of(out)
    assert (pin.max_length, pin.scale, pin.license) == (32, ScoreScale.PROBABILITY, "MIT")
    assert "expected a whole number of at least 5, got 'many'" in err
    assert f"expected at most {POSITIONS}, the rows of the graph's position table, got {POSITIONS + 1}" in err
    assert "expected logit or probability, got 'probable'" in err
    assert err.count("max-length (") == 3


def test_what_was_given_is_not_asked(run, folder) -> None:
    code, out, err = run(folder, "--id", "mine", "--scale", "logit", "--license", "MIT", answers="\n")
    assert (code, pin_of(out).license) == (0, "MIT")
    assert "scale (" not in err


@pytest.mark.parametrize("answers", ["", "\n", "\n\n"])
def test_no_pin_without_all_answers(run, folder, answers) -> None:
    code, out, err = run(folder, "--id", "mine", answers=answers)
    assert (code, out) == (2, "")
    assert "the answers ended, so nothing is pinned; --yes takes the values that were read" in err


def test_no_pin_after_an_interrupt(run, folder, tmp_path, monkeypatch) -> None:
    def interrupted(self) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Terminal, "readline", interrupted)
    code, out, _ = run(folder, "--id", "mine", "--add-to", tmp_path / "my.lock", answers="")
    assert (code, out, (tmp_path / "my.lock").exists()) == (130, "", False)


def test_what_nobody_says_is_an_error_that_names_every_option(run, folder, monkeypatch) -> None:
    (folder / "config.json").unlink()
    (folder / "onnx" / "model.onnx").write_bytes((GRAPHS / "bert-ort-fused.onnx").read_bytes())
    monkeypatch.setattr(make_pin, "position_rows", lambda graph: None)  # as of one without such a table
    for more in ((), ("--yes",)):
        code, out, err = run(folder, "--id", "mine", *more)
        assert (code, out) == (2, "")
        assert "error: --max-length is missing: neither the graph nor config.json says how many tokens" in err
        assert "error: --scale is missing: neither the graph nor config.json declares" in err
    code, out, err = run(folder, "--id", "mine", answers="\n64\n\nlogit\n\n")
    assert (code, pin_of(out).max_length) == (0, 64)  # on a terminal it is asked, and Enter is no answer


# --- what is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, "sentence_transformers.activation_fn is Identity"),
        # The library applies it afterwards, so the file gives raw logits all the same.
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, "sbert_ce_default_activation_function is Sig"),
        ({"num_labels": 1}, "one label"),
        ({"id2label": {"0": "x"}}, "one label"),
        ({}, None),
        ({"num_labels": True}, None),
        ({"id2label": [], "sentence_transformers": "Sigmoid", "sbert_ce_default_activation_function": None}, None),
    ],
)
def test_scale_is_read_where_config_declares_it(config, source) -> None:
    fact = read_config(json.dumps(config).encode()).scale
    assert (fact is None) is (source is None)
    if fact is not None:
        assert fact.value == "logit"
        assert source in fact.source


@pytest.mark.parametrize("value", [512, 64])
def test_positions_of_config(value) -> None:
    fact = read_config(json.dumps({"max_position_embeddings": value}).encode()).positions
    assert fact is not None
    assert (fact.value, fact.source) == (str(value), "config.json: max_position_embeddings")


@pytest.mark.parametrize("value", [True, "512", 4, -1, 5.5, None])
def test_positions_that_are_none(value) -> None:
    assert read_config(json.dumps({"max_position_embeddings": value}).encode()).positions is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b" ", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "expected an object, got list"),
        (b'{"id2label": {"0": "no", "1": "yes"}}', "it declares 2 labels"),
        (b'{"num_labels": 3}', "it declares 3 labels"),
    ],
)
def test_config_that_cannot_be_used(run, folder, data, message) -> None:
    (folder / "config.json").write_bytes(data)
    code, out, err = run(folder, "--id", "mine")
    assert (code, out) == (2, "")
    assert f"error: {folder / 'config.json'}: {message}" in err


def test_the_smaller_of_config_and_graph(run, folder) -> None:
    (folder / "config.json").write_text('{"max_position_embeddings": 40, "num_labels": 1}', encoding="utf-8")
    _, out, err = run(folder, "--id", "mine")
    assert pin_of(out).max_length == 40
    assert "max-length: 40 (config.json: max_position_embeddings)" in err


def test_a_pair_longer_than_the_table(run, folder) -> None:
    code, out, err = run(folder, "--id", "mine", "--max-length", POSITIONS + 1)
    assert (code, out) == (2, "")
    assert f"error: --max-length: expected at most {POSITIONS}, the rows of the graph's position table" in err


# --- graphs --------------------------------------------------------------------------------------------


def edited(data: bytes, change) -> bytes:
    model = onnx.load_model_from_string(data)
    change(model)
    return model.SerializeToString()


def test_our_own_int8_file(run, folder) -> None:
    from minice.artifacts.quantize import write_quantized

    written = write_quantized(folder / "onnx" / "model.onnx")
    # Beside its source it is no second model: the source is what is pinned, and quantizing finds the rest.
    assert pin_of(run(folder, "--id", "mine")[1]).files[0].precision == "fp32"
    _, out, err = run(folder, "--id", "mine", "--model-file", "onnx/model.int8.onnx")
    assert (pin_of(out).files[0].precision, pin_of(out).files[0].scheme) == ("int8", "int8-weight-only/1")
    assert "int8, scheme int8-weight-only/1 (the graph's minice.scheme)" in err
    assert pin_of(out).files[0].size == written.path.stat().st_size


@pytest.mark.parametrize(
    ("name", "scheme", "told"),
    [
        ("bert-dynamic-int8", "int8-dynamic", "DynamicQuantizeLinear"),
        ("bert-int8-cast", "int8-weight-only", "rounds no activation"),
        ("bert-int8-dequantize", "int8-weight-only", "rounds no activation"),
    ],
)
def test_another_int8_file_is_not_called_ours(run, folder, name, scheme, told) -> None:
    (folder / "onnx" / "model.onnx").write_bytes((GRAPHS / f"{name}.onnx").read_bytes())
    code, out, err = run(folder, "--id", "mine", "--max-length", 16)
    assert code == 0
    assert (pin_of(out).files[0].precision, pin_of(out).files[0].scheme) == ("int8", scheme)
    assert told in err
    assert ("needs --engine onnxruntime" in err) is (name == "bert-dynamic-int8")
    files = open_model(pin_of(out), model_dir=folder, environ={})
    assert (files.precision, files.scheme) == ("int8", scheme)


def small_graph(*nodes, **initializers) -> bytes:
    """A graph that is no BERT: ids in, one number out, through the nodes."""
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in initializers.items()]
    return helper.make_model(helper.make_graph(list(nodes), "g", inputs, [output], tensors)).SerializeToString()


@pytest.mark.parametrize(
    ("operators", "scheme"),
    [
        (["QuantizeLinear", "QLinearMatMul"], "int8-static"),
        (["QAttention"], "int8-static"),
        (["DynamicQuantizeLinear", "QAttention"], "int8-dynamic"),
        (["MatMulInteger"], "int8-dynamic"),
        (["MatMul"], None),
    ],
)
def test_schemes_by_operators(operators, scheme) -> None:
    nodes = [helper.make_node(name, ["input_ids"], [f"out{name}"]) for name in operators]
    facts = read_graph(small_graph(*nodes, helper.make_node("Identity", ["input_ids"], ["logits"])))
    assert (facts.scheme, facts.precision) == (scheme, "fp32" if scheme is None else "int8")
    assert facts.refusal
    assert facts.positions is None


def test_weights_that_no_pin_can_name() -> None:
    import numpy as np

    nodes = [helper.make_node("Identity", ["input_ids"], ["logits"])]
    with pytest.raises(GraphError, match="got mostly float16"):
        read_graph(small_graph(*nodes, w=np.zeros((4, 4), np.float16)))
    with pytest.raises(GraphError, match="got an operator for smaller ones, MatMulNBits"):
        read_graph(small_graph(helper.make_node("MatMulNBits", ["input_ids"], ["logits"])))


def test_a_graph_that_ends_in_a_sigmoid_gives_probabilities(run, folder, graph) -> None:
    def add_sigmoid(model) -> None:
        model.graph.node[-1].output[0] = "raw"
        model.graph.node.append(helper.make_node("Sigmoid", ["raw"], ["p"]))
        model.graph.node.append(helper.make_node("Identity", ["p"], ["logits"]))

    (folder / "onnx" / "model.onnx").write_bytes(edited(graph, add_sigmoid))
    code, out, err = run(folder, "--id", "mine")
    assert (code, pin_of(out).scale) == (0, ScoreScale.PROBABILITY)
    assert "scale: probability (the graph ends in a Sigmoid)" in err


def test_a_graph_for_the_other_engine_is_pinned_with_the_reason(run, folder) -> None:
    (folder / "onnx" / "model.onnx").write_bytes((GRAPHS / "bert-ort-fused.onnx").read_bytes())
    code, out, err = run(folder, "--id", "mine")
    assert code == 0
    assert pin_of(out).max_length == POSITIONS  # the table is there in a form that the other engine runs
    assert "note: the numpy engine cannot run it, so it needs --engine onnxruntime: " in err


def refused(run, folder, data: bytes) -> str:
    (folder / "onnx" / "model.onnx").write_bytes(data)
    code, out, err = run(folder, "--id", "mine")
    assert (code, out) == (6, "")
    assert err.startswith(f"minice: error: {folder / 'onnx' / 'model.onnx'}")
    return err


def test_two_labels_are_refused(run, folder) -> None:
    err = refused(run, folder, (GRAPHS / "bert-two-labels.onnx").read_bytes())
    assert "expected one logit for each pair, [N, 1] or [N], got an output of shape [None, 2]" in err


def test_external_data_is_refused(run, folder, graph) -> None:
    # FR 168: another file's path in the graph is never followed
    def elsewhere(model) -> None:
        tensor = model.graph.initializer[-1]
        onnx.external_data_helper.set_external_data(tensor, "../../secret")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL

    assert "external data" in refused(run, folder, edited(graph, elsewhere))


def test_what_is_no_model_is_refused(run, folder) -> None:
    refused(run, folder, b"no model")


# --- folders -------------------------------------------------------------------------------------------


def failed(run, *argv, code: int = 2) -> str:
    got, out, err = run(*argv)
    assert (got, out) == (code, "")
    return err


def test_several_models_are_listed(run, folder, graph) -> None:
    (folder / "onnx" / "model_O1.onnx").write_bytes(graph)
    (folder / "model.onnx").write_bytes(graph)
    err = failed(run, folder, "--id", "mine")
    assert "it holds 3 .onnx files; choose by --model-file: model.onnx, onnx/model.onnx, onnx/model_O1.onnx" in err
    out = run(folder, "--id", "mine", "--model-file", "onnx/model_O1.onnx")[1]
    assert pin_of(out).files[0].path == "onnx/model_O1.onnx"
    out = run(folder, "--id", "mine", "--model-file", folder / "model.onnx")[1]
    assert pin_of(out).files[0].path == "model.onnx"


@pytest.mark.parametrize("name", ["../outside.onnx", "/outside.onnx", ".", "onnx/../.."])
def test_a_model_file_lies_in_the_folder(run, folder, name) -> None:
    assert f"error: --model-file: expected a file in {str(folder)!r}, got {name!r}" in failed(
        run, folder, "--id", "mine", "--model-file", name
    )


def test_what_a_folder_must_hold(run, folder, tmp_path) -> None:
    assert "there is no 'no.onnx' in " in failed(run, folder, "--id", "mine", "--model-file", "no.onnx")
    for nothing in (tmp_path / "nowhere", folder / "tokenizer.json"):
        assert f"error: {nothing}: expected a folder, found none" in failed(run, nothing, "--id", "mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "expected onnx/model.onnx or model.onnx in it, found no .onnx file" in failed(run, empty, "--id", "mine")
    (folder / "tokenizer.json").unlink()
    assert f"error: {folder}: expected tokenizer.json in it, found none" in failed(run, folder, "--id", "mine")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert f"error: {folder / 'tokenizer.json'}: " in failed(run, folder, "--id", "mine")
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer())
    (folder / "vocab.txt").write_bytes(b"")
    assert f"error: {folder / 'vocab.txt'}: it is empty" in failed(run, folder, "--id", "mine")


def test_a_pointer_is_no_model(run, folder) -> None:
    # FR 140
    (folder / "onnx" / "model.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "is a Git LFS pointer of " in failed(run, folder, "--id", "mine")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_the_folder_does_not_hang(run, folder) -> None:
    os.mkfifo(folder / "vocab.txt")
    assert "is not a regular file but a pipe, socket or device" in failed(run, folder, "--id", "mine")


def test_a_snapshot_of_the_hubs_cache(run, folder, tmp_path, graph) -> None:
    (folder / "onnx" / "model.onnx").rename(tmp_path / "blob")
    (folder / "onnx" / "model.onnx").symlink_to(tmp_path / "blob")
    assert pin_of(run(folder, "--id", "mine")[1]).files[0].size == len(graph)


def test_a_precision_that_the_file_has_not(run, folder) -> None:
    err = failed(run, folder, "--id", "mine", "--precision", "int8")
    assert "error: --precision: onnx/model.onnx is fp32: the graph keeps weights as float32" in err


# --- names ---------------------------------------------------------------------------------------------


def test_names_of_shipped_pins_are_taken(run, folder) -> None:
    taken = "belongs to 'ms-marco-MiniLM-L6-v2', a model that minice pins itself; choose another"
    err = failed(run, folder, "--id", "MS-marco-MiniLM-L6-v2")
    assert f"error: --id: the name 'MS-marco-MiniLM-L6-v2' {taken}" in err
    name = "cross-encoder/ms-marco-MiniLM-L-6-v2"
    err = failed(run, folder, "--id", "mine", "--repository", name, "--revision", "ab" * 20)
    assert f"error: --repository: the name {name!r} {taken}" in err


def test_mistakes_are_told_at_once(run, folder) -> None:
    err = failed(run, folder, "--scale", "stars", "--revision", "AB", "--license", "", "--max-length", "4")
    for mistake in (
        "--id is missing: ",
        "--scale: expected logit or probability, got 'stars'",
        "--revision: expected 40 lowercase hex digits, got 'AB'",
        "--license: expected an SPDX licence expression, got ''",
        "--max-length: expected a whole number of at least 5, got '4'",
    ):
        assert mistake in err
    err = failed(run, folder, "--id", "a/b", "--revision", "ab" * 20)
    assert "--id: expected letters, digits, '.', '_' and '-', at most 100, got 'a/b'" in err
    assert "--repository and --revision go together" in err


# --- --add-to ------------------------------------------------------------------------------------------


def test_add_to_makes_a_lock_and_lengthens_it(run, folder, tmp_path) -> None:
    lock = tmp_path / "my.lock"
    code, out, err = run(folder, "--id", "one", "--add-to", lock)
    assert (code, out) == (0, "")
    assert err.endswith(f"Run: MINICE_LOCK={lock} minice verify one --model-dir {folder}\n")
    first = lock.read_text(encoding="utf-8")
    commented = f"# mine\n{first}\n\n# the end"
    lock.write_text(commented, encoding="utf-8")
    lock.chmod(0o640)
    assert run(folder, "--id", "two", "--add-to", lock)[:2] == (0, "")
    text = lock.read_text(encoding="utf-8")
    assert text.startswith(commented)
    assert [pin.id for pin in parse_lock(text).models] == ["one", "two"]
    assert lock.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "my.lock"]


def test_add_to_changes_no_pin(run, folder, tmp_path) -> None:
    lock = tmp_path / "my.lock"
    run(folder, "--id", "one", "--add-to", lock)
    before = lock.read_bytes()
    code, _, err = run(folder, "--id", "one", "--add-to", lock)
    assert code == 0
    assert f"{str(lock)!r} holds this pin already; nothing was changed" in err
    for name in ("one", "ONE"):
        err = failed(run, folder, "--id", name, "--license", "MIT", "--add-to", lock, code=3)
        assert f"error: --add-to: {str(lock)!r}: the name {name!r} belongs to another pin there, 'one'" in err
    assert lock.read_bytes() == before


def test_add_to_follows_a_link(run, folder, tmp_path) -> None:
    (tmp_path / "link").symlink_to("target")
    run(folder, "--id", "one", "--add-to", tmp_path / "target")
    assert run(folder, "--id", "two", "--add-to", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert len(parse_lock((tmp_path / "target").read_text(encoding="utf-8")).models) == 2


@pytest.mark.parametrize("content", [b"not = a lock", b"\xff", b"lock-version = 2"])
def test_add_to_what_is_no_lock(run, folder, tmp_path, content) -> None:
    lock = tmp_path / "my.lock"
    lock.write_bytes(content)
    failed(run, folder, "--id", "one", "--add-to", lock, code=3)
    assert lock.read_bytes() == content


def test_a_full_disk_leaves_the_lock_as_it_was(run, folder, tmp_path, monkeypatch) -> None:
    lock = tmp_path / "my.lock"
    run(folder, "--id", "one", "--add-to", lock)
    before = lock.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    err = failed(run, folder, "--id", "two", "--add-to", lock)
    assert f"error: --add-to: cannot write {str(lock)!r}: No space left on device" in err
    assert lock.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "my.lock"]
    assert "cannot write" in failed(run, folder, "--id", "two", "--add-to", tmp_path / "no" / "my.lock")


def test_a_pin_that_the_text_cannot_take() -> None:
    """A lock may end in a table that a [[model]] header cannot follow."""
    pin = shipped_lock().models[0]
    text = 'lock-version = 1\nmodel = [{id = "x", license = "MIT", max-length = 5, scale = "logit", file = ['
    file = '{{role = "{}", path = "{}", size = 1, sha256 = "{}"{}}}'
    files = [file.format("model", "m", "0" * 64, ', precision = "fp32"'), file.format("tokenizer", "t", "0" * 64, "")]
    with pytest.raises(LockError):
        add_to_lock(f"{text}{', '.join(files)}]}}]", pin)
    assert parse_lock(add_to_lock("", pin)) == Lock(models=(pin,))


def test_a_bad_config_is_an_input_error() -> None:
    with pytest.raises(InputError) as caught:
        read_config(b"{")
    assert caught.value.where == "config.json"


def test_a_tokenizer_with_more_ids_than_the_graph_knows_is_refused(run, folder) -> None:
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer(extra=2))
    code, out, err = run(folder, "--id", "mine")
    assert (code, out) == (2, "")
    assert "the tokenizer has 66 token ids, the graph's embedding table has 64" in err


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
def test_pins_that_are_added_at_once_are_all_there(folder, tmp_path) -> None:
    lock = tmp_path / "my.lock"
    code = "import sys; from minice.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [[str(folder), "--id", f"mine{number}", "--add-to", str(lock)] for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda more: run_python(code, "lock", *more), arguments))
    assert [one.returncode for one in done] == [0] * 6, done[0].stderr
    assert {pin.id for pin in parse_lock(lock.read_text()).models} == {f"mine{number}" for number in range(6)}


def test_line_ends_stay_what_they_are(folder, graph, run) -> None:
    first = run(folder, "--id", "first")[1]
    text = first.replace("\n", "\r\n")
    added = add_to_lock(text, pin_of(run(folder, "--id", "second")[1]))
    assert added.startswith(text.rstrip())
    assert added.count("\n") == added.count("\r\n")
