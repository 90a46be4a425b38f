"""Laws of encoding: what is read equals what the tokenizers package reads, whatever was skipped."""

import functools
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_tokenizer
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from strategies import long_nasty_texts, nasty_texts, normalizers
from tokenizers import Tokenizer

import minice
from minice.encoding import PairTokenizer, encode_pair, pad_pairs, plan_batches, truncated_lengths
from minice.encoding.pairs import passage_tokens_needed
from minice.encoding.prefix import Cutter
from minice.encoding.tokenizer_file import parse_tokenizer_file

DATA = (Path(minice.__file__).parent / "artifacts" / "builtin" / "tokenizer.json").read_bytes()
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
LENGTHS = st.integers(0, 600)
MAX_LENGTHS = st.integers(5, 512)


@functools.cache
def tokenizer(mode="reference"):
    return PairTokenizer.from_bytes(DATA, special_tokens=mode)


@functools.cache
def reference():
    plain = Tokenizer.from_str(DATA.decode())
    plain.no_padding()
    plain.no_truncation()
    return plain


@functools.cache
def truncating(max_length):
    tokenizer = Tokenizer.from_str(DATA.decode())
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


@functools.cache
def tiny_file():
    """The small tokenizer's file with other normalizer settings, and the library's reading of it."""
    return json.loads(tiny_tokenizer())


def full_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def library_words(library):
    normalizer, pre_tokenizer = library.normalizer, library.pre_tokenizer
    return lambda text: [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))]


@pytest.mark.skipif(
    version("tokenizers") in ("0.23.1", "0.23.2"), reason="these are not longest_first (see unit tests)"
)
@SLOW
@given(query=nasty_texts(), passage=nasty_texts(max_size=120), max_length=st.sampled_from([5, 16, 17, 64, 512]))
@example(query="", passage="", max_length=5)
@example(query="[SEP]", passage="[SEP" + "a" * 200 + "]", max_length=16)
def test_a_pair_equals_the_pair_encoding_of_the_tokenizers_package(query, passage, max_length):
    (pair,) = tokenizer().encode(query, [passage], max_length=max_length)
    expected = truncating(max_length).encode(query, passage)
    assert (pair.input_ids.tolist(), pair.token_type_ids.tolist()) == (expected.ids, expected.type_ids)


@SLOW
@given(text=long_nasty_texts(), needed=st.integers(1, 300))
def test_prefix_ids_are_the_head_of_the_full_ids(text, needed):
    assert tokenizer()._read(text, needed) == full_ids(reference(), text)[:needed]


@SLOW
@given(text=long_nasty_texts(), needed=st.integers(1, 3_000), normalizer=normalizers, literal=st.booleans())
def test_prefix_ids_are_exact_for_every_normalizer(text, needed, normalizer, literal):
    data = json.dumps(tiny_file() | {"normalizer": normalizer}).encode()
    library = Tokenizer.from_str(data.decode())
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = literal
    small = PairTokenizer.from_bytes(data, special_tokens="literal" if literal else "reference")
    assert small._read(text, needed) == full_ids(library, text)[:needed]


@SLOW
@given(text=nasty_texts(max_size=150), size=st.integers(1, 40))
def test_pieces_of_any_size_have_the_ids_of_the_whole(text, size):
    """Cuts every few characters: far more often than reading a prefix needs."""
    file = parse_tokenizer_file(DATA, literal=False)
    cutter = Cutter(file, library_words(reference()))
    pieces, position = [], 0
    while position < len(text):
        end = cutter._cut(cutter._separator, text, position + size)
        pieces.append(text[position:end])
        position = end
    assert "".join(pieces) == text
    ids = [token for piece in pieces for token in full_ids(reference(), piece)]
    assert ids == full_ids(reference(), text)


@SLOW
@given(text=nasty_texts(max_size=200))
def test_literal_text_holds_no_control_token(text):
    (pair,) = tokenizer("literal").encode(text, [text], max_length=512)
    special = np.isin(pair.input_ids, [0, 101, 102, 103])
    assert special.sum() == 3
    assert pair.token_type_ids.sum() == len(pair) - np.flatnonzero(special)[1] - 1


@SLOW
@given(text=st.text(st.characters(), max_size=200))
def test_any_str_is_text(text):
    """Surrogates included."""
    (pair,) = tokenizer().encode(text, [text], max_length=64)
    assert len(pair) <= 64
    assert pair.input_ids[[0, -1]].tolist() == [101, 102]


@given(query=LENGTHS, passage=LENGTHS, max_length=MAX_LENGTHS)
def test_truncation_fills_the_room_and_takes_from_the_longer_side(query, passage, max_length):
    room = max_length - 3
    first, second = truncated_lengths(query, passage, max_length=max_length)
    assert first + second == min(query + passage, room)
    assert 0 <= first <= query
    assert 0 <= second <= passage
    # Only a side that is at least as long as the other one's rest is cut, and never below half of the room.
    assert first == query or (first >= room // 2 and first >= min(second, room // 2))
    assert second == passage or (second >= room // 2 and second >= first - 1)


@given(query=LENGTHS, passage=LENGTHS, max_length=MAX_LENGTHS)
def test_sides_are_alike_but_for_ties(query, passage, max_length):
    assume(query != passage)
    assert (
        truncated_lengths(query, passage, max_length=max_length)
        == (truncated_lengths(passage, query, max_length=max_length)[::-1])
    )


@given(query=LENGTHS, passage=LENGTHS, max_length=MAX_LENGTHS)
def test_what_is_not_read_of_a_passage_changes_nothing(query, passage, max_length):
    needed = passage_tokens_needed(query, max_length=max_length)
    assert truncated_lengths(query, min(passage, needed), max_length=max_length) == (
        truncated_lengths(query, passage, max_length=max_length)
    )


@given(
    lengths=st.lists(st.integers(0, 700), max_size=60),
    budget=st.integers(1, 5_000),
    multiple=st.sampled_from([1, 8, 32, 64]),
)
def test_every_index_is_planned_once_within_the_budget_longest_first_and_stable(lengths, budget, multiple):
    batches = plan_batches(lengths, max_batch_tokens=budget, multiple=multiple)
    order = [index for batch in batches for index in batch]
    assert order == sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for batch in batches:
        width = -(-max(lengths[index] for index in batch) // multiple) * multiple
        assert len(batch) * width <= budget or len(batch) == 1
    # Filled: one more row would not have fitted into any but the last.
    for batch in batches[:-1]:
        width = -(-lengths[batch[0]] // multiple) * multiple
        assert (len(batch) + 1) * width > budget


@given(lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12), multiple=st.integers(1, 40))
def test_padded_rows_hold_their_pairs(lengths, multiple):
    pairs = [encode_pair([7] * a, [9] * b, cls_id=1, sep_id=2, max_length=64) for a, b in lengths]
    batch = pad_pairs(pairs, pad_id=3, multiple=multiple)
    assert batch.input_ids.shape == batch.attention_mask.shape == batch.token_type_ids.shape
    assert batch.input_ids.shape[1] % multiple == 0
    for row, pair in enumerate(pairs):
        mask = batch.attention_mask[row] == 1
        assert batch.input_ids[row, mask].tolist() == pair.input_ids.tolist()
        assert batch.token_type_ids[row, mask].tolist() == pair.token_type_ids.tolist()
        assert set(batch.input_ids[row, ~mask]) <= {3}
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
