"""CrossEncoder over the generated model, with both engines: numbers, options, environment, deadlines, life cycle."""

import copy
import json
import math
import pickle
import random
import time

import numpy as np
import onnxruntime
import pytest
import tokenizers
from conftest import LOGIT_ATOL, POSITIONS, tiny_onnx, tiny_tokenizer, write_tiny

import minice
import minice.cross_encoder
from minice.cross_encoder import CrossEncoder
from minice.errors import (
    ClosedError,
    ConfigError,
    GraphError,
    InputError,
    MiniceError,
    ModelNotFoundError,
    ScorerError,
)
from minice.scores import Scores, ScoreScale

QUERY = "how do i undo the last commit"
NASTY = [
    "",
    " \t\n",
    "the",
    "Élan and naïve",
    "日本語",
    "😀🎉",
    "a" * 300,
    "the and " * 200,
    "x.y,z?",
    "[SEP] [CLS] [PAD]",
]


@pytest.fixture(params=["numpy", "onnxruntime"])
def engine(request):
    return request.param


def some_passages(count, seed=0):
    """Words of the tiny vocabulary, 0 to 40 of them a passage, with nasty ones strewn in."""
    rng = random.Random(seed)
    words = ["the", "and", "cat", "sing", "zebra", "q", "1", ",", "run"]
    plain = (" ".join(rng.choices(words, k=rng.randint(0, 40))) for _ in range(count))
    return [rng.choice(NASTY) if rng.random() < 0.1 else passage for passage in plain]


@pytest.fixture(scope="module")
def reference(tiny):
    """Logits of the same file through onnxruntime, one pair at a time, encoded by the tokenizers package."""
    session = onnxruntime.InferenceSession(tiny.model_path.read_bytes(), providers=["CPUExecutionProvider"])
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny.tokenizer_path))
    tokenizer.no_padding()

    def score(query, passages, max_length=POSITIONS):
        tokenizer.enable_truncation(max_length, strategy="longest_first")
        logits = []
        for passage in passages:
            encoding = tokenizer.encode(query, passage)
            columns = (encoding.ids, encoding.attention_mask, encoding.type_ids)
            names = ("input_ids", "attention_mask", "token_type_ids")
            feed = {name: np.array([column]) for name, column in zip(names, columns, strict=True)}
            logits.append(session.run(["logits"], feed)[0][0, 0])
        return np.array(logits, np.float32)

    return score


# --- numbers -------------------------------------------------------------------------------------------


def test_logits_equal_onnxruntime_on_the_same_file(open_tiny, reference):
    passages = NASTY + some_passages(60)
    logits = open_tiny().score(QUERY, passages)
    assert logits.dtype == np.float32
    assert logits.shape == (len(passages),)
    np.testing.assert_allclose(logits, reference(QUERY, passages), rtol=0, atol=LOGIT_ATOL)
    assert np.ptp(logits) > 0.5  # a test on equal numbers would prove nothing


def test_max_length_cuts_pairs(open_tiny, reference):
    passages = some_passages(20)
    logits = open_tiny(max_length=16).score(QUERY, passages)
    np.testing.assert_allclose(logits, reference(QUERY, passages, max_length=16), rtol=0, atol=LOGIT_ATOL)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 63, 64, 65, 100, 257])
def test_every_passage_gets_its_logit(open_tiny, count, assert_same):  # FR 73, FR 13, FR 19
    encoder = open_tiny(max_batch_tokens=64)
    passages = some_passages(count)
    logits = encoder.score(QUERY, passages)
    assert logits.shape == (count,)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    alone = [encoder.score(QUERY, [passage])[0] for passage in passages]
    assert_same(alone, logits)  # FR 31, FR 75, FR 76


def test_logits_follow_their_passages_through_any_order(open_tiny, assert_same):
    encoder = open_tiny()
    passages = some_passages(80)
    logits = encoder.score(QUERY, passages)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(passages))
        shuffled = encoder.score(QUERY, [passages[index] for index in order])
        assert_same(shuffled, logits[order])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("max_batch_tokens", [None, 1, 64, 100_000])
def test_threads_and_budget_change_no_bit(open_tiny, threads, max_batch_tokens, assert_same):
    passages = some_passages(70)
    expected = open_tiny().score(QUERY, passages)
    logits = open_tiny(threads=threads, max_batch_tokens=max_batch_tokens).score(QUERY, passages)
    assert_same(logits, expected)


def test_pairs_and_passages_are_the_same_thing(open_tiny, assert_same):
    encoder = open_tiny()
    passages = some_passages(20)
    queries = [QUERY, "the zebra", ""]
    pairs = [(query, passage) for passage in passages for query in queries]
    logits = encoder.score_pairs(pairs)
    for place, query in enumerate(queries):
        assert_same(logits[place :: len(queries)], encoder.score(query, passages))
    assert encoder.score_pairs([]).shape == (0,)


def test_any_iterable_of_texts(open_tiny, assert_same):
    encoder = open_tiny()
    passages = some_passages(10)
    expected = encoder.score(QUERY, passages)
    for iterable in (tuple(passages), iter(passages), (p for p in passages), dict.fromkeys(passages)):
        unique = list(dict.fromkeys(passages)) if isinstance(iterable, dict) else passages
        assert_same(encoder.score(QUERY, iterable), encoder.score(QUERY, unique))
    assert_same(encoder.score_pairs((QUERY, p) for p in passages), expected)


def test_blank_passages_tie(open_tiny):  # FR 17
    first, second, third = open_tiny().score(QUERY, [" ", "\n\t", ""])
    assert first == second == third


def test_whitespace_changes_nothing(open_tiny):  # FR 10
    encoder = open_tiny()
    tidy, messy = encoder.score("q", ["email access"]), encoder.score(" q ", ["  email   access\n"])
    assert tidy.tobytes() == messy.tobytes()


def test_surrogates_are_repaired(open_tiny):  # FR 20
    logits = open_tiny().score("q", ["ok", "bad \ud800 text", "\ud83d\udc4d"])
    assert np.isfinite(logits).all()


def test_arguments_stay_as_they_were(open_tiny):  # FR 56
    encoder = open_tiny()
    passages = some_passages(12)
    before = copy.deepcopy(passages)
    first = encoder.score(QUERY, passages)
    kept = first.copy()
    encoder.score("the zebra", passages)
    assert passages == before
    assert first.tobytes() == kept.tobytes()  # a later call does not write into an earlier answer


def test_special_tokens_in_texts(open_tiny):  # FR 12
    typed = ["foo [SEP] bar [CLS] [PAD] baz"]
    reference_mode, literal = open_tiny(), open_tiny(special_tokens="literal")
    assert np.isfinite(reference_mode.score("q", typed)).all()
    assert reference_mode.score("q", typed)[0] != literal.score("q", typed)[0]
    plain = some_passages(5)
    assert reference_mode.score("q", plain).tobytes() == literal.score("q", plain).tobytes()


# --- wrong input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "passages", "where"),
    [
        (None, ["a"], "query"),
        (5, [], "query"),
        ("q", ["a", None, "b"], "passages[1]"),  # FR 15
        ("q", ["a", "b", b"c"], "passages[2]"),
        ("q", "one text", "passages"),
        ("q", b"bytes", "passages"),
        ("q", None, "passages"),
        ("q", 5, "passages"),
    ],
)
def test_wrong_texts_are_named(open_tiny, query, passages, where):
    with pytest.raises(InputError) as caught:
        open_tiny().score(query, passages)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("pairs", "where"),
    [
        ([("q", "p"), ("q", None)], "pairs[1].passage"),
        ([(None, "p")], "pairs[0].query"),
        ("ab", "pairs"),
        (None, "pairs"),
        ([("q", "p"), ("q",)], "pairs[1]"),
        ([("q", "p"), "qp"], "pairs[1]"),
        ([("q", "p"), 5], "pairs[1]"),
    ],
)
def test_wrong_pairs_are_named(open_tiny, pairs, where):
    with pytest.raises(InputError) as caught:
        open_tiny().score_pairs(pairs)
    assert caught.value.where == where


# --- options -------------------------------------------------------------------------------------------

WRONG_OPTIONS = [
    ("engine", "onnx", "numpy"),
    ("engine", None, "numpy"),
    ("engine", ["numpy"], "numpy"),
    ("threads", 0, "1"),
    ("threads", True, "1"),
    ("threads", 1.0, "1"),
    ("max_batch_tokens", 0, "1"),
    ("max_batch_tokens", "64", "1"),
    ("max_batch_tokens", False, "1"),
    ("special_tokens", "litteral", "literal"),
    ("special_tokens", None, "reference"),
    ("max_length", 4, "5"),
    ("max_length", 513, "512"),
    ("max_length", 768, "512"),  # FR 7
    ("max_length", True, "5"),
    ("max_length", 16.0, "5"),
    ("max_length", "16", "5"),
    ("precision", "fp16", "int8"),  # FR 72, FR 147
    ("precision", 8, "int8"),
    ("model", 5, "text"),
    ("model_dir", 5, "folder"),
]


@pytest.mark.parametrize(("option", "value", "expected"), WRONG_OPTIONS)
def test_wrong_options_are_refused_at_open(option, value, expected):  # FR 104
    with pytest.raises(ConfigError) as caught:
        CrossEncoder.open(**{option: value})
    assert caught.value.where == option
    assert expected in caught.value.message
    assert str(value) in caught.value.message or type(value).__name__ in caught.value.message


def test_unknown_options_are_errors():
    with pytest.raises(TypeError):
        CrossEncoder.open(max_len=16)


@pytest.mark.parametrize("max_length", [5, np.int64(17), POSITIONS])
def test_the_whole_range_of_max_length_works(open_tiny, max_length):
    encoder = open_tiny(max_length=max_length)
    assert np.isfinite(encoder.score(QUERY, NASTY)).all()
    assert f"max_length={max_length};" in encoder.model_id


# --- which model ---------------------------------------------------------------------------------------


@pytest.fixture
def clean_environment(monkeypatch, tmp_path):
    """No variable of ours, and an empty home."""
    for name in ("MINICE_MODEL", "MINICE_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINICE_HOME", str(tmp_path / "home"))
    return monkeypatch


def test_the_embedded_model_only_where_none_is_named(clean_environment):
    assert CrossEncoder.open().info()["model"] == "minice-l6"
    with pytest.raises(ModelNotFoundError):
        CrossEncoder.open("ms-marco-MiniLM-L6-v2")
    with pytest.raises(ModelNotFoundError, match="minice-l6"):
        CrossEncoder.open("minice-l7")
    clean_environment.setenv("MINICE_MODEL", "ms-marco-MiniLM-L6-v2")
    with pytest.raises(ModelNotFoundError):
        CrossEncoder.open()
    assert CrossEncoder.open("minice-l6").info()["model"] == "minice-l6"  # the argument wins
    clean_environment.setenv("MINICE_MODEL", "nonsense")
    with pytest.raises(ModelNotFoundError, match="no model is pinned as 'nonsense'") as caught:
        CrossEncoder.open()
    assert caught.value.where == "MINICE_MODEL"


def test_blank_variables_are_unset(clean_environment):  # FR 145
    for blank in ("", "  "):
        clean_environment.setenv("MINICE_MODEL", blank)
        clean_environment.setenv("MINICE_MODEL_DIR", blank)
        assert CrossEncoder.open().info()["model"] == "minice-l6"


def test_a_given_folder_is_the_only_one(clean_environment, tmp_path):  # FR 136
    with pytest.raises(ModelNotFoundError):
        CrossEncoder.open(model_dir=tmp_path)
    clean_environment.setenv("MINICE_MODEL_DIR", str(tmp_path))
    with pytest.raises(ModelNotFoundError):
        CrossEncoder.open()


def test_model_id_holds_all_that_can_change_a_score(open_tiny, tiny, tmp_path, engine):  # FR 35
    plain = open_tiny()
    digest = tiny.files().model_sha256
    assert plain.model_id == (
        f"tiny@{digest[:12]};precision=fp32;scheme=fp32;max_length=64;special_tokens=reference;engine={engine}"
    )
    other = write_tiny(tmp_path, tiny_onnx(seed=8), tiny_tokenizer())
    variants = [open_tiny(other), open_tiny(max_length=32), open_tiny(special_tokens="literal")]
    variants.append(open_tiny(engine={"numpy": "onnxruntime", "onnxruntime": "numpy"}[engine]))
    assert len({encoder.model_id for encoder in [plain, *variants]}) == 5
    # Neither of these can (beyond rounding).
    assert open_tiny(threads=3, max_batch_tokens=17).model_id == plain.model_id


def test_info_is_json_and_loads_nothing(open_tiny, tiny):
    encoder = open_tiny()
    cold = json.loads(json.dumps(encoder.info()))
    assert cold["loaded"] is False
    assert cold["engine_info"] is None
    assert cold["sha256"] == tiny.files().model_sha256
    assert cold["model_id"] == encoder.model_id
    assert (cold["precision"], cold["scale"], cold["max_length"]) == ("fp32", "logit", POSITIONS)
    encoder.warm()
    warm = json.loads(json.dumps(encoder.info()))
    assert warm["loaded"] is True
    assert warm["engine_info"]["threads"] >= 1
    assert "tiny@" in repr(encoder)


# --- answer and its deadline ---------------------------------------------------------------------------


def test_answer_says_what_its_numbers_are(open_tiny):
    encoder = open_tiny()
    passages = some_passages(9)
    answer = encoder.answer(QUERY, iter(passages), deadline=time.monotonic() + 600)
    assert isinstance(answer, Scores)
    assert answer.values.tobytes() == encoder.score(QUERY, passages).tobytes()
    assert (answer.scale, answer.model_id, answer.member) == (ScoreScale.LOGIT, encoder.model_id, "tiny")
    assert encoder.answer(QUERY, [], deadline=math.inf).values.shape == (0,)


def test_a_deadline_in_the_past_starts_nothing(open_tiny, monkeypatch):
    encoder = open_tiny()
    monkeypatch.setattr(minice.cross_encoder, "open_engine", None)  # would be a TypeError
    for deadline in (time.monotonic() - 1, 0.5):  # the second is a duration by mistake
        with pytest.raises(ScorerError, match=r"before the work began.* give time\.monotonic\(\) \+ seconds") as caught:
            encoder.answer(QUERY, ["a"], deadline=deadline)
        assert "tiny@" in str(caught.value)


def test_a_deadline_ends_a_call_between_batches(open_tiny, monkeypatch):
    encoder = open_tiny(threads=1, max_batch_tokens=64)
    encoder.warm()
    now = [100.0]
    monkeypatch.setattr(minice.cross_encoder.time, "monotonic", lambda: now[0])
    engine = encoder._loaded.engine
    forward = engine._forward
    ran = []

    def slow(pairs):
        ran.append(len(pairs))
        now[0] += 1
        return forward(pairs)

    monkeypatch.setattr(engine, "_forward", slow)
    with pytest.raises(ScorerError, match=r"scoring \(checkpoint") as caught:
        encoder.answer(QUERY, ["the " * 50] * 40, deadline=103.0)
    assert "tiny@" in str(caught.value)
    assert 3 <= len(ran) <= 6  # and not 40
    assert encoder.score(QUERY, ["a"]).shape == (1,)  # the next call is as good as new


@pytest.mark.parametrize("deadline", [True, "1", math.nan, [1]])
def test_wrong_deadlines(open_tiny, deadline):
    with pytest.raises(InputError) as caught:
        open_tiny().answer(QUERY, ["a"], deadline=deadline)
    assert caught.value.where == "deadline"


# --- loading -------------------------------------------------------------------------------------------


def test_nothing_to_score_loads_nothing(open_tiny, monkeypatch):  # FR 13
    monkeypatch.setattr(minice.cross_encoder, "open_engine", None)
    encoder = open_tiny()
    assert encoder.score(QUERY, []).shape == (0,)
    assert encoder.score_pairs(iter([])).dtype == np.float32
    assert not encoder.info()["loaded"]


def test_bytes_are_let_go_once_loaded(open_tiny):
    encoder = open_tiny()
    encoder.warm()
    assert encoder._source is None


def test_a_failed_load_is_tried_again(open_tiny, monkeypatch):
    encoder = open_tiny()
    with monkeypatch.context() as patch:

        def fail(*_arguments, **_options):
            raise GraphError("no memory today")

        patch.setattr(minice.cross_encoder, "open_engine", fail)
        for _ in range(2):
            with pytest.raises(GraphError, match=r"model 'tiny'.*no memory today"):
                encoder.score(QUERY, ["a"])
    assert encoder.score(QUERY, ["a"]).shape == (1,)


def test_a_tokenizer_with_more_ids_than_the_table_is_an_error_at_load(open_tiny, tmp_path):
    model = write_tiny(tmp_path, tiny_onnx(), tiny_tokenizer(extra=2))
    with pytest.raises(GraphError, match=r"66 token ids.* 64"):
        open_tiny(model).warm()


def test_a_pin_longer_than_the_position_table_is_an_error_at_load(open_tiny, tmp_path):
    model = write_tiny(tmp_path, tiny_onnx(), tiny_tokenizer(), max_length=POSITIONS + 1)
    with pytest.raises(GraphError, match=r"65 tokens.* 64"):
        open_tiny(model).warm()
    assert open_tiny(model, max_length=POSITIONS).score(QUERY, ["the " * 99]).shape == (1,)


@pytest.mark.parametrize("damage", ["model", "tokenizer"])
def test_unusable_files_with_the_right_digest_are_typed_errors(open_tiny, tmp_path, damage):
    parts = {"model": tiny_onnx(), "tokenizer": tiny_tokenizer()} | {damage: b"\x08\x07 not what it should be"}
    model = write_tiny(tmp_path, parts["model"], parts["tokenizer"])
    with pytest.raises(MiniceError):
        open_tiny(model).warm()


# --- close, pickle, public names -----------------------------------------------------------------------


def test_closed_encoders_refuse_everything(open_tiny):
    encoder = open_tiny()
    encoder.warm()
    encoder.close()
    encoder.close()
    uses = [
        lambda: encoder.score(QUERY, ["a"]),
        lambda: encoder.score(QUERY, []),
        lambda: encoder.score_pairs([]),
        lambda: encoder.answer(QUERY, ["a"]),
        encoder.warm,
        lambda: pickle.dumps(encoder),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="tiny"):
            use()
    assert encoder.info()["closed"] is True
    assert encoder._loaded is None


def test_context_manager_closes(open_tiny):
    with open_tiny() as encoder:
        assert encoder.score(QUERY, ["a"]).shape == (1,)
    with pytest.raises(ClosedError):
        encoder.score(QUERY, ["a"])


def test_close_without_any_use(open_tiny):
    open_tiny().close()


def test_pickling_opens_the_same_model_again(clean_environment):
    encoder = CrossEncoder.open(max_length=128, special_tokens="literal", threads=1)
    clean_environment.setenv("MINICE_MODEL", "ms-marco-MiniLM-L6-v2")  # decided already, when it was opened
    twin = pickle.loads(pickle.dumps(encoder))
    assert twin is not encoder
    assert twin.model_id == encoder.model_id
    assert copy.copy(encoder).model_id == encoder.model_id


def test_an_encoder_over_some_other_lock_cannot_be_pickled(open_tiny):
    with pytest.raises(TypeError, match="open"):
        pickle.dumps(open_tiny())


def test_public_names():
    assert minice.CrossEncoder is CrossEncoder
    assert minice.Scores is Scores
    assert minice.InputError is InputError
    assert set(minice.__all__) <= set(dir(minice))
    assert all(getattr(minice, name) is not None for name in minice.__all__)
    with pytest.raises(AttributeError, match="CrossEncodr"):
        minice.CrossEncodr  # noqa: B018 - the access is the test
