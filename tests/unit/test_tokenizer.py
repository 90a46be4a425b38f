"""Texts to pairs: equality with the tokenizers package, odd texts, odd files, very long texts."""

import enum
import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from conftest import run_python, tiny_tokenizer
from tokenizers import Tokenizer

import minice
from minice.encoding import PairTokenizer, prefix
from minice.errors import ConfigError, InputError

BUILTIN = Path(minice.__file__).parent / "artifacts" / "builtin" / "tokenizer.json"
DATA = BUILTIN.read_bytes()
TEXTS = json.loads((Path(__file__).parents[1] / "data" / "texts.json").read_text(encoding="utf-8"))
NATURAL, NASTY = TEXTS["natural"], TEXTS["nasty"]
CLS, SEP, PAD, UNK = 101, 102, 0, 100
MILLION = 1_000_000

# These two clip each side to max_length before they compare lengths, so that the passage counts as the longer
# wherever both are longer than that; every other version from 0.20.0 to 0.23.3 is as the one before.
ORACLE_CLIPS = pytest.mark.skipif(
    version("tokenizers") in ("0.23.1", "0.23.2"),
    reason="tokenizers 0.23.1 and 0.23.2 are not longest_first where both sides exceed max_length",
)


def oracle(data=DATA, *, max_length=512):
    tokenizer = Tokenizer.from_str(data.decode())
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return PairTokenizer.from_bytes(DATA)


@pytest.fixture(scope="module")
def literal():
    return PairTokenizer.from_bytes(DATA, special_tokens="literal")


def unpacked(pairs):
    return [(pair.input_ids.tolist(), pair.token_type_ids.tolist()) for pair in pairs]


def expected(reference, pairs):
    encodings = [reference.encode(query, passage) for query, passage in pairs]
    return [(encoding.ids, encoding.type_ids) for encoding in encodings]


def ids(tokenizer, text):
    """The ids of one text, without special tokens."""
    (pair,) = tokenizer.encode("", [text], max_length=100_000)
    return pair.input_ids.tolist()[2:-1]


def sample_texts(count, seed):
    """Natural and nasty texts of all lengths, glued by all kinds of separators and by none."""
    rng = random.Random(seed)
    glue = [
        "",
        " ",
        " ",
        " ",
        "\n",
        "\t",
        "\u3000",
        "\u200b",
        "\x00",
        "\x0b",
        "\x85",
        ".",
        "-",
        "[SEP]",
        "中",
        "\u0301",
    ]
    texts = []
    for _ in range(count):
        parts = rng.choices(NATURAL + NASTY, k=rng.choice([1, 1, 2, 3, 5, 8, 40, 40, 40]))
        text = "".join(part + rng.choice(glue) for part in parts)
        start = rng.randrange(len(text) // 4 + 1)
        texts.append(text[start : start + rng.choice([20, 100, 400, 10_000, 10_000, 10_000])])
    return texts


def changed(*path, value, data=DATA):
    """The tokenizer.json with one value replaced."""
    content = json.loads(data)
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return json.dumps(content).encode()


# --- equality with the tokenizers package ---------------------------------------------------------------


@ORACLE_CLIPS
def test_4600_pairs_of_natural_and_nasty_text_equal_the_reference(tokenizer):
    texts = sample_texts(4_600, seed=1)
    pairs = list(zip(texts, reversed(texts), strict=True))
    found = unpacked(tokenizer.encode_pairs(pairs, max_length=512))
    assert found == expected(oracle(), pairs)
    # The sample reaches both sides of truncation, and control tokens.
    assert 500 < sum(len(ids) == 512 for ids, _ in found) < 4_000
    assert sum(ids.count(SEP) > 2 for ids, _ in found) > 100


def test_every_nasty_text_equals_the_reference_on_either_side(tokenizer):
    pairs = [(text, "a passage") for text in NASTY] + [("a query", text) for text in NASTY]
    assert unpacked(tokenizer.encode_pairs(pairs, max_length=512)) == expected(oracle(), pairs)


@ORACLE_CLIPS
def test_every_pair_of_lengths_to_30_equals_the_reference_at_16(tokenizer):  # FR 1, 2, 3
    reference = oracle(max_length=16)
    passages = [" ".join(["two"] * length) for length in range(31)]
    for length in range(31):
        query = " ".join(["one"] * length)
        pairs = [(query, passage) for passage in passages]
        found = tokenizer.encode(query, passages, max_length=16)
        assert unpacked(found) == expected(reference, pairs)
        assert [len(pair) for pair in found] == [min(16, length + other + 3) for other in range(31)]


@ORACLE_CLIPS
def test_the_boundaries_at_512_equal_the_reference(tokenizer):  # FR 2, 7
    lengths = [0, 1, 2, 253, 254, 255, 256, 507, 508, 509, 510, 511, 512, 513, 700]
    passages = [" ".join(["two"] * length) for length in lengths]
    reference = oracle()
    for length in lengths:
        query = " ".join(["one"] * length)
        found = unpacked(tokenizer.encode(query, passages, max_length=512))
        assert found == expected(reference, [(query, passage) for passage in passages])


def test_lengths_are_told_apart_to_8191_and_count_as_equal_from_8192(tokenizer):
    def kept(query, passage):
        (pair,) = tokenizer.encode("one " * query, ["two " * passage], max_length=512)
        return pair.input_ids.tolist().count(2028), pair.input_ids.tolist().count(2048)

    assert kept(8_192, 8_191) == (255, 254)
    assert kept(8_192, 8_192) == (254, 255)
    # The only deviation from the reference, which would keep (255, 254) here.
    assert kept(8_193, 8_192) == (254, 255)
    assert kept(20_000, 8_191) == (255, 254)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False, None])
@pytest.mark.parametrize("chinese", [True, False])
@pytest.mark.parametrize("clean", [True, False])
def test_the_normalizer_settings_of_the_file_are_followed(lowercase, strip_accents, chinese, clean):
    settings = {
        "type": "BertNormalizer",
        "clean_text": clean,
        "handle_chinese_chars": chinese,
        "strip_accents": strip_accents,
        "lowercase": lowercase,
    }
    data = changed("normalizer", value=settings)
    texts = [text * 3 for text in NASTY] + [" ".join(NATURAL[:40]), " ".join(NATURAL[40:])]
    pairs = [("é 中 query", text) for text in texts]
    found = unpacked(PairTokenizer.from_bytes(data).encode_pairs(pairs, max_length=512))
    assert found == expected(oracle(data), pairs)


def test_leftovers_of_training_are_cleared():  # FR 7
    truncation = {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 128},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    data = changed("padding", value=padding, data=changed("truncation", value=truncation))
    leftover = PairTokenizer.from_bytes(data)
    assert [len(pair) for pair in leftover.encode("q", ["", "w " * 900], max_length=512)] == [4, 512]


# --- promises about text --------------------------------------------------------------------------------


def test_white_space_does_not_change_ids(tokenizer):  # FR 10
    plain, spaced = tokenizer.encode_pairs([("q", "email access"), (" q ", "  email   access\n")], max_length=512)
    assert plain.input_ids.tolist() == spaced.input_ids.tolist()


def test_blank_texts_are_empty(tokenizer):  # FR 17
    pairs = tokenizer.encode("", ["", " ", "\n\t", "\u3000\u200b"], max_length=512)
    assert unpacked(pairs) == [([CLS, SEP, SEP], [0, 0, 1])] * 4


def test_emoji_are_unknown_words_that_tie(tokenizer):  # FR 21
    first, *others = tokenizer.encode("party", ["😀", "🎉", "💀", "👨‍👩‍👧", "🇩🇪"], max_length=512)
    assert first.input_ids.tolist()[3] == UNK
    assert unpacked(others) == unpacked([first]) * 4


@pytest.mark.parametrize(
    ("composed", "decomposed"),
    [("Ti\u1ebfng Vi\u1ec7t", "Tie\u0302\u0301ng Vie\u0323\u0302t"), ("d\u00e9j\u00e0 vu", "de\u0301ja\u0300 vu")],
)
def test_composed_and_decomposed_spellings_have_the_same_ids(tokenizer, composed, decomposed):  # FR 22
    assert composed != decomposed
    assert ids(tokenizer, composed) == ids(tokenizer, decomposed) != []


def test_typed_control_tokens_are_control_tokens_in_reference_mode(tokenizer):  # FR 12
    (pair,) = tokenizer.encode("q", ["foo [SEP] bar [CLS] [PAD] baz"], max_length=512)
    found = pair.input_ids.tolist()
    assert (found.count(SEP), found.count(CLS), found.count(PAD)) == (3, 2, 1)
    assert pair.token_type_ids.tolist() == [0] * 3 + [1] * (len(pair) - 3)


def test_typed_control_tokens_are_text_in_literal_mode(literal):  # FR 12
    vocabulary = json.loads(DATA)["model"]["vocab"]
    (pair,) = literal.encode("q [SEP]", ["[SEP][PAD]"], max_length=512)
    typed = [vocabulary[token] for token in ("[", "sep", "]")]
    padded = [vocabulary[token] for token in ("[", "pad", "]")]
    assert pair.input_ids.tolist() == [CLS, vocabulary["q"], *typed, SEP, *typed, *padded, SEP]
    assert pair.token_type_ids.tolist() == [0] * 6 + [1] * 7


def test_literal_mode_is_reference_mode_for_texts_without_control_tokens(tokenizer, literal):
    pairs = [(text, text) for text in [*NATURAL, *NASTY] if "[" not in text]
    found = unpacked(literal.encode_pairs(pairs, max_length=512))
    assert found == unpacked(tokenizer.encode_pairs(pairs, max_length=512))


@pytest.mark.parametrize(
    ("mode", "hint"), [("litteral", "Did you mean 'literal'"), ("x", "'reference' or"), (None, "got None")]
)
def test_an_unknown_mode_names_the_known_ones(mode, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        PairTokenizer.from_bytes(DATA, special_tokens=mode)
    assert caught.value.where == "special_tokens"


def test_surrogate_pairs_are_joined_and_lone_ones_replaced(tokenizer):  # FR 20
    texts = ["ok \ud83d\udc4d", "bad \ud800 text", "\udc00", "a\ud83d", "\ufeffx \ud800"]
    repaired = ["ok 👍", "bad \ufffd text", "\ufffd", "a\ufffd", "\ufeffx \ufffd"]
    found = tokenizer.encode("q \udcff", texts, max_length=512)
    assert unpacked(found) == unpacked(tokenizer.encode("q \ufffd", repaired, max_length=512))


class Loud(str):
    """A str whose methods say something else than it holds."""

    def __str__(self):
        return "loud"

    def __getitem__(self, key):
        return "loud"

    def __iter__(self):
        return iter("loud")


class Note(str, enum.Enum):  # noqa: UP042 - its str() is not its content, which is the point
    FIRST = "email access"


def test_subclasses_of_str_are_read_by_their_content(tokenizer):
    texts = [Loud("email access"), Note.FIRST, np.str_("email access")]
    found = tokenizer.encode(Loud("q"), texts, max_length=512)
    assert unpacked(found) == unpacked(tokenizer.encode("q", ["email access"], max_length=512)) * 3


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda texts: (text for text in texts), np.array, dict.fromkeys])
def test_passages_may_be_any_iterable(tokenizer, kind):
    texts = ["one", "two two"]
    found = tokenizer.encode("q", kind(texts), max_length=512)
    assert unpacked(found) == expected(oracle(), [("q", text) for text in texts])


def test_no_passages_make_no_pairs(tokenizer):  # FR 13
    assert tokenizer.encode("q", [], max_length=512) == []
    assert tokenizer.encode("q", (text for text in ()), max_length=512) == []
    assert tokenizer.encode_pairs([], max_length=512) == []


@pytest.mark.parametrize(("bad", "name"), [(None, "NoneType"), (5, "int"), (b"x", "bytes"), (["x"], "list")])
def test_what_is_no_text_is_named_with_its_place_and_type(tokenizer, bad, name):  # FR 15
    calls = {
        "query": lambda: tokenizer.encode(bad, ["a"], max_length=512),
        "passages[1]": lambda: tokenizer.encode("q", ["a", bad, "b"], max_length=512),
        "pairs[1].query": lambda: tokenizer.encode_pairs([("q", "a"), (bad, "b")], max_length=512),
        "pairs[1].passage": lambda: tokenizer.encode_pairs([("q", "a"), ["q", bad]], max_length=512),
    }
    for where, call in calls.items():
        with pytest.raises(InputError, match=f"got {name}") as caught:
            call()
        assert caught.value.where == where


@pytest.mark.parametrize("bad", ["one text", b"one text", bytearray(b"x"), None, 5])
def test_one_text_is_no_list_of_passages(tokenizer, bad):
    with pytest.raises(InputError, match=f"got (one )?{type(bad).__name__}") as caught:
        tokenizer.encode("q", bad, max_length=512)
    assert caught.value.where == "passages"
    with pytest.raises(InputError) as caught:
        tokenizer.encode_pairs(bad, max_length=512)
    assert caught.value.where == "pairs"


@pytest.mark.parametrize("bad", ["ab", ("a",), ("a", "b", "c"), None, {"a": 1, "b": 2}])
def test_a_pair_is_two_texts(tokenizer, bad):
    with pytest.raises(InputError, match=r"\(query, passage\)") as caught:
        tokenizer.encode_pairs([("q", "p"), bad], max_length=512)
    assert caught.value.where == "pairs[1]"


def test_a_max_length_below_five_is_refused(tokenizer):
    with pytest.raises(ConfigError):
        tokenizer.encode("q", ["p"], max_length=4)
    with pytest.raises(ConfigError):
        tokenizer.encode_pairs([], max_length=4)


def test_what_engines_ask_of_a_tokenizer(tokenizer):
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) == (CLS, SEP, PAD)
    assert tokenizer.vocabulary_size == 30_522
    assert PairTokenizer.from_bytes(tiny_tokenizer()).vocabulary_size == 64


# --- threads and processes ------------------------------------------------------------------------------


def test_many_threads_encode_as_one_does(tokenizer):  # FR 107
    texts = sample_texts(120, seed=2)
    serial = unpacked(tokenizer.encode("a query", texts, max_length=128))
    barrier = threading.Barrier(16)

    def work(seed):
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        barrier.wait()
        for index in order:
            (pair,) = tokenizer.encode("a query", [texts[index]], max_length=128)
            assert unpacked([pair]) == [serial[index]]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [None] * 16


class Spy:
    """Stands before the library's tokenizer: counts calls and characters, and has no method but ``encode``."""

    def __init__(self, inner):
        self.inner = inner
        self.texts = []

    def encode(self, text, **options):
        assert options == {"add_special_tokens": False}
        self.texts.append(text)
        return self.inner.encode(text, **options)

    @property
    def characters(self):
        return sum(map(len, self.texts))


@pytest.fixture
def spied():
    tokenizer = PairTokenizer.from_bytes(DATA)
    tokenizer._tokenizer = Spy(tokenizer._tokenizer)
    return tokenizer


def test_a_query_is_tokenized_once_a_call(spied):
    spied.encode("the query", ["a", "b", "c"], max_length=512)
    assert spied._tokenizer.texts == ["the query", "a", "b", "c"]
    spied._tokenizer.texts.clear()
    spied.encode_pairs([("q1", "a"), ("q2", "b"), ("q1", "c")], max_length=512)
    assert sorted(spied._tokenizer.texts) == ["a", "b", "c", "q1", "q2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_process_encodes_in_silence():  # FR 116
    code = """
import os, sys
from minice.encoding import PairTokenizer
before = dict(os.environ)
tokenizer = PairTokenizer.from_bytes(open(sys.argv[1], "rb").read())
work = lambda: [p.input_ids.tolist() for p in tokenizer.encode("a query", ["some text " * 40] * 50, max_length=64)]
mine = work()
child = os.fork()
if child == 0:
    os._exit(0 if work() == mine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert dict(os.environ) == before
"""
    done = run_python(code, BUILTIN, timeout_s=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_the_room_does_not_load_the_library():
    code = "import sys, minice.encoding; print('tokenizers' in sys.modules)"
    assert run_python(code).stdout.split() == ["False"]


# --- very long texts ------------------------------------------------------------------------------------

# Each is five million bytes of UTF-8; what it stands for, and the ids that it has.
GIANTS = {
    "prose": ("the quick brown fox. ", 512),
    "ideographs": ("中文字", 512),
    "brackets": ("[", 512),
    "control tokens": ("[SEP]", 512),
    "one word": ("a", 4 + 1),
    "one word in another script": ("กขคงจ", 4 + 1),
    "a word of letters and NULs": ("a\0", 4 + 1),
    "words of a thousand letters": ("a" * 1_000 + " ", 512),
    "emoji": ("😀😂", 4 + 1),
    "syllables": ("한국어", 4 + 1),
    "punctuation beyond ASCII": ("。", 512),
    "kana": ("ひらがなとカタカナ、", 512),
    "NULs": ("\0", 4),
    "spaces": (" ", 4),
    "NULs and spaces": ("\0 ", 4),
}


def giant(name):
    unit, _ = GIANTS[name]
    return unit * (5 * MILLION // len(unit.encode()))


@pytest.mark.parametrize("name", GIANTS)
def test_a_giant_text_costs_one_full_pair_and_a_scan(spied, name):  # FR 171, 172
    text = giant(name)
    (pair,) = spied.encode("q", [text], max_length=512)
    assert len(pair) == GIANTS[name][1]
    # A full pair of ordinary text is about 2,500 characters, of words of the greatest length 60,000.
    assert spied._tokenizer.characters < 80_000
    spied._tokenizer.texts.clear()
    spied.encode(text, ["p"], max_length=512)
    # A query is read to 8,192 tokens.
    assert spied._tokenizer.characters < 1_200_000


@pytest.mark.parametrize("unit", ["\u0301", "\ufe0f", "\u034f", "\u0301\u034f\u302e", "\u200b\u0301"])
def test_a_giant_word_of_marks_is_read_short(spied, unit):
    text = "a" + unit * (5 * MILLION // len(unit) // 5) + "b"
    spied.encode("q", [text], max_length=512)
    if "\u302e" not in unit:  # that mark is kept: the word is unknown for its length
        assert ids(spied, text) == ids(spied, "ab")
    assert spied._tokenizer.characters < 2_000


def test_a_giant_word_after_half_a_control_token_is_read_short(spied):
    (pair,) = spied.encode("q", ["[SEP" + "a" * MILLION + "SEP]"], max_length=512)
    assert len(pair) == 4 + len(["[", "[UNK]", "]"])
    assert spied._tokenizer.characters < 2_000


def test_a_giant_text_takes_little_memory():  # FR 171
    code = """
import sys
from minice.encoding import PairTokenizer
tokenizer = PairTokenizer.from_bytes(open(sys.argv[1], "rb").read())
texts = ["the quick brown fox. " * 240_000, "a" * 5_000_000, "[" * 5_000_000, "\\0" * 5_000_000]
tokenizer.encode("warm", ["up " * 9_000], max_length=512)
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = peak()
for text in texts:
    tokenizer.encode("q", [text], max_length=512)
    tokenizer.encode(text, ["p", text], max_length=512)
print((peak() - before) // 1024)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc, which this platform lacks")
    done = run_python(code, BUILTIN)
    assert done.stderr == ""
    assert int(done.stdout) < 100  # MiB; the library alone takes 2,600 for the brackets


# Long enough to be cut and shortened, short enough for the library to read whole.
LONG_CORES = {
    "letters": "a" * 5_000,
    "hex": "0123456789abcdef" * 400,
    "letters and NULs": "ab\0" * 3_000,
    "few letters among NULs": ("a" + "\0" * 200) * 40,
    "exactly the longest word": "b" * 50 + "\0\u200b" * 3_000 + "c" * 50,
    "one more than the longest word": "b" * 50 + "\0\u200b" * 3_000 + "c" * 51,
    "marks": "e" + "\u0301\u0323" * 3_000,
    "marks that stay": ("e\u302e\u0301\u034f\u302a" * 2_000),
    "few marks that stay": "e\u302e" + "\u0301" * 2_000 + "\u302a" + "\u034f" * 2_000 + "\u302e\U0001d165",
    "Thai": "กขคงจฉชซ" * 500,
    "emoji": "👨‍👩‍👧" * 900,
    "ideographic stops": "。" * 4_000,
    "kana and stops": "かな、カナ。" * 900,
    "not less than": "≮" * 3_000,
    "brackets": "[" * 4_000,
    "control tokens": "[SEP]" * 900,
    "half control tokens": "[SEP" * 900,
    "NULs": "\0" * 5_000,
    "spaces": " \t\u3000" * 2_000,
    "deleted and spaces": "\x0b\u200b \ufeff" * 1_500,
    "Hangul": "한국어" * 900,
    "private use": "\ue000\uf8ff" * 1_500,
    "dotted I": "İ" * 2_000,
    "every block": "".join(map(chr, range(0x80, 0xD800, 7))),
}
EDGES = ["", "x", "x ", "[SEP]", "[SEP", "SEP]", "\u0301", "中", "\u302e", "。", "\0"]


@pytest.mark.parametrize("core", LONG_CORES)
def test_long_runs_have_the_ids_that_the_library_gives_them(tokenizer, literal, core):
    reference = Tokenizer.from_str(DATA.decode())
    for shift in (0, 4):
        for before, after in zip(EDGES, EDGES[shift:] + EDGES[:shift], strict=True):
            text = f"{before}{LONG_CORES[core]}{after} end"
            assert ids(tokenizer, text) == reference.encode(text, add_special_tokens=False).ids, (before, after)
    text = LONG_CORES[core]
    reference.encode_special_tokens = True
    assert ids(literal, text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("strip_accents", [True, False])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("core", LONG_CORES)
def test_long_runs_are_exact_for_other_normalizers(core, clean, strip_accents):
    content = json.loads(tiny_tokenizer())
    content["normalizer"] |= {"clean_text": clean, "strip_accents": strip_accents}
    data = json.dumps(content).encode()
    reference = oracle(data, max_length=100_000)
    small = PairTokenizer.from_bytes(data)
    for before, after in (("", ""), ("x ", "b"), ("[SEP", "SEP]"), ("\u302e", "\u0301")):
        text = before + LONG_CORES[core] + after
        assert ids(small, text) == reference.encode(text, add_special_tokens=False).ids


def test_what_separates_marks_is_not_left_out():
    """Two marks that stay change places, unless a character that itself leaves no trace stands between them."""
    content = json.loads(tiny_tokenizer())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {"e\u302e\U0001d165": 64, "e\U0001d165\u302e": 65}
    data = json.dumps(content).encode()
    small, reference = PairTokenizer.from_bytes(data), oracle(data, max_length=16)
    for barrier, expected_id in (("\u034f", 64), ("\u0301", 65), ("\u0301\u034f", 64), ("\0", 65), ("\ufe0f", 64)):
        text = "e" + "\u0301" * 100 + "\u302e" + barrier * 3_000 + "\U0001d165" + "\u0301" * 100
        assert ids(small, text) == [expected_id] == reference.encode(text, add_special_tokens=False).ids


# --- added tokens beyond the usual five -----------------------------------------------------------------


def added(content, **flags):
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": 64, "content": content} | usual | flags


@pytest.mark.parametrize(
    "token",
    [
        added("covid", normalized=True),
        added("covid"),
        added("a.b-c"),
        added("--"),
        added("a b"),
        added(" ab"),
        added("a\0b"),
        added("中a"),
        added("a-b", normalized=True),
        added("-ab-", single_word=True),
        added("ab", single_word=True),
        added("[M]", lstrip=True, rstrip=True),
        added("[M]", special=True),
        added("x" * 80),
        added("。"),
    ],
    ids=lambda token: "-".join([token["content"][:8], *(name for name, value in token.items() if value is True)]),
)
def test_added_tokens_are_never_cut_through(token, monkeypatch):
    # Pieces of a few characters, so that every place is tried.
    monkeypatch.setattr(prefix, "_SMALLEST_PIECE", 1)
    monkeypatch.setattr(prefix, "_LARGEST_PIECE", 3)
    content = json.loads(tiny_tokenizer())
    content["added_tokens"].append(token)
    data = json.dumps(content).encode()
    reference = oracle(data, max_length=100_000)
    small = PairTokenizer.from_bytes(data)
    assert small.vocabulary_size == 65
    rng = random.Random(token["content"])
    parts = [token["content"], token["content"], token["content"][:1], token["content"].upper(), *"ab ._-中[M]\0\u0301"]
    texts = ["".join(rng.choices(parts, k=rng.choice([5, 700]))) for _ in range(60)]
    texts += [
        "\0".join(token["content"]) * 3,
        token["content"] * 900,
        "a" * 3_000 + token["content"] + "b" * 3_000,
        f"{'-' * 700}a{'-' * 700}",
    ]
    for text in texts:
        pieces = small._cutter.pieces(text, 1)
        found = [token for piece in pieces for token in small._tokenizer.encode(piece, add_special_tokens=False).ids]
        assert found == reference.encode(text, add_special_tokens=False).ids
        assert small._read(text, 9) == found[:9]


def test_literal_mode_keeps_added_words():
    content = json.loads(tiny_tokenizer())
    content["added_tokens"].append(added("covid", normalized=True))
    small = PairTokenizer.from_bytes(json.dumps(content).encode(), special_tokens="literal")
    assert ids(small, "a Covid") == [content["model"]["vocab"]["a"], 64]
    assert 3 not in ids(small, "[SEP]")


def test_literal_mode_unlearns_control_tokens_that_the_file_does_not_call_special():
    content = json.loads(tiny_tokenizer())
    for token in content["added_tokens"]:
        token["special"] = False
    data = json.dumps(content).encode()
    assert ids(PairTokenizer.from_bytes(data), "[SEP]") == [3]
    assert 3 not in ids(PairTokenizer.from_bytes(data, special_tokens="literal"), "[SEP]")


# --- files that are no BERT tokenizer -------------------------------------------------------------------

BYTE_LEVEL = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "0 bytes that are not JSON"),
        (b"version https://git-lfs", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "not JSON"),
        (b"[]", "no object: list"),
        (b"{}", "normalizer null instead of BertNormalizer"),
        (json.dumps(BYTE_LEVEL).encode(), "normalizer null instead of BertNormalizer"),
        (changed("normalizer", value={"type": "NFC"}), "normalizer NFC instead"),
        (changed("normalizer", "lowercase", value="yes"), "package reads, got"),
        (changed("normalizer", "clean_text", value="yes"), "normalizer.clean_text yes"),
        (changed("pre_tokenizer", value=BYTE_LEVEL["pre_tokenizer"]), "pre_tokenizer ByteLevel instead"),
        (changed("model", value=BYTE_LEVEL["model"]), "model BPE instead of WordPiece"),
        (changed("model", "vocab", value=[]), "model.vocab"),
        (changed("model", "vocab", value={"[UNK]": -1}), "model.vocab"),
        (changed("model", "unk_token", value="<unk>"), "model.unk_token <unk>"),
        (changed("model", "unk_token", value=["[UNK]"]), "model.unk_token"),
        (changed("model", "max_input_chars_per_word", value=-1), "max_input_chars_per_word -1"),
        (changed("model", "vocab", value={"[UNK]": 0}, data=changed("added_tokens", value=[])), r"without \[CLS\] and"),
        (changed("added_tokens", value={"[CLS]": 0}), "added_tokens"),
        (changed("added_tokens", value=[{"content": None, "id": 1}]), "added_tokens"),
        (changed("post_processor", value=None), "post_processor null that"),
        (
            changed("post_processor", value={"type": "BertProcessing", "sep": ["[SEP]", 5], "cls": ["[CLS]", 6]}),
            "BertProcessing that does not make",
        ),
    ],
)
def test_a_file_that_is_no_bert_tokenizer_is_a_config_error(data, found):
    with pytest.raises(ConfigError, match=found) as caught:
        PairTokenizer.from_bytes(data)
    assert caught.value.where == "tokenizer.json"
    assert len(str(caught.value)) < 600


def test_the_older_post_processor_is_the_same_frame(tokenizer):
    older = {"type": "BertProcessing", "sep": ["[SEP]", SEP], "cls": ["[CLS]", CLS]}
    same = PairTokenizer.from_bytes(changed("post_processor", value=older))
    assert unpacked(same.encode("q", ["p"], max_length=16)) == unpacked(tokenizer.encode("q", ["p"], max_length=16))


def test_no_mutation_of_a_file_gets_past_the_error():
    """Whatever is changed in the JSON: a ConfigError or a tokenizer that encodes, never the library's panic."""
    rng = random.Random(3)
    values = [None, True, False, 0, -1, 2**40, 0.5, "", "x", "[CLS]", [], {}, [[]], [0], {"type": "WordPiece"}]

    def places(node, path=()):
        if isinstance(node, dict | list):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, value in items:
                yield (*path, key)
                # The vocabulary's entries are all alike; a few of them are enough.
                if key != "vocab":
                    yield from places(value, (*path, key))

    original = json.loads(tiny_tokenizer())
    paths = [*places(original), ("model", "vocab", "a"), ("model", "vocab", "[CLS]"), ("model", "vocab", "[UNK]")]
    encoded = refused = 0
    for path in paths:
        for value in [*rng.sample(values, 6), "remove"]:
            content = json.loads(tiny_tokenizer())
            part = content
            for key in path[:-1]:
                part = part[key]
            if value == "remove":
                del part[path[-1]]
            else:
                part[path[-1]] = value
            try:
                PairTokenizer.from_bytes(json.dumps(content).encode()).encode("ab [SEP]", ["é zz 中"], max_length=9)
                encoded += 1
            except ConfigError:
                refused += 1
    assert encoded > 50
    assert refused > 300


def test_truncated_and_flipped_bytes_are_refused_or_read():
    rng = random.Random(4)
    data = tiny_tokenizer()
    encoded = refused = 0
    for _ in range(300):
        broken = bytearray(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        for _ in range(rng.randrange(1, 4)):
            if broken:
                broken[rng.randrange(len(broken))] = rng.randrange(32, 127)
        try:
            PairTokenizer.from_bytes(bytes(broken)).encode("ab", ["é zz 中"], max_length=9)
            encoded += 1
        except ConfigError:
            refused += 1
    assert encoded + refused == 300
    assert min(encoded, refused) > 5
