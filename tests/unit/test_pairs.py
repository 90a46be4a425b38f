"""Truncation, special tokens and segment ids, in arithmetic."""

import dataclasses

import numpy as np
import pytest

from minice.encoding.pairs import (
    LENGTH_LIMIT,
    encode_pair,
    passage_tokens_needed,
    query_tokens_needed,
    truncated_lengths,
    validate_max_length,
)
from minice.errors import ConfigError

CLS, SEP = 101, 102
HALF = (512 - 3) // 2  # 254; the longer side may have 255


def encode(query, passage, *, max_length=512):
    return encode_pair([1] * query, [2] * passage, cls_id=CLS, sep_id=SEP, max_length=max_length)


@pytest.mark.parametrize(
    ("query", "passage", "kept"),
    [
        (0, 0, (0, 0)),
        (0, 600, (0, 509)),  # FR 1
        (600, 0, (509, 0)),  # FR 1: the same in the other order
        (9, 500, (9, 500)),
        (9, 501, (9, 500)),
        (400, 400, (HALF, HALF + 1)),  # FR 3: at equal length the passage counts as the longer
        (401, 400, (HALF + 1, HALF)),
        (400, 401, (HALF, HALF + 1)),
        (254, 255, (254, 255)),
        (255, 254, (255, 254)),
        (255, 255, (254, 255)),
        (254, 256, (254, 255)),
        (256, 254, (255, 254)),
        (40, 900, (40, 469)),  # FR 4: a query within its half is never cut
        (900, 40, (469, 40)),
    ],
)
def test_the_longer_side_is_cut_first(query, passage, kept):
    assert truncated_lengths(query, passage, max_length=512) == kept


@pytest.mark.parametrize(("query", "passage"), [(0, 0), (0, 600), (600, 0), (1, 1), (3, 600), (600, 600)])
def test_a_pair_is_framed_and_its_segments_are_told_by_place(query, passage):  # FR 1, 2
    pair = encode(query, passage)
    first, second = truncated_lengths(query, passage, max_length=512)
    assert pair.input_ids.tolist() == [CLS, *[1] * first, SEP, *[2] * second, SEP]
    assert pair.token_type_ids.tolist() == [0] * (first + 2) + [1] * (second + 1)
    assert len(pair) == min(512, query + passage + 3)
    assert pair.input_ids.dtype == pair.token_type_ids.dtype == np.int64


def test_a_separator_among_the_ids_moves_no_segment():  # FR 12
    pair = encode_pair([1, SEP, 1], [SEP, 2], cls_id=CLS, sep_id=SEP, max_length=16)
    assert pair.token_type_ids.tolist() == [0] * 5 + [1] * 3


def test_tokens_are_cut_from_the_end():
    pair = encode_pair(range(10, 30), range(30, 50), cls_id=1, sep_id=2, max_length=12)
    assert pair.input_ids.tolist() == [1, 10, 11, 12, 13, 2, 30, 31, 32, 33, 34, 2]


def test_the_smallest_pair_has_one_token_of_each_side():
    assert encode(9, 9, max_length=5).input_ids.tolist() == [CLS, 1, SEP, 2, SEP]


def test_an_encoding_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        encode(1, 1).input_ids = np.zeros(1)


@pytest.mark.parametrize("max_length", range(5, 25))
def test_no_more_of_a_passage_is_needed_than_changes_the_pair(max_length):
    for query in range(45):
        needed = passage_tokens_needed(query, max_length=max_length)
        for passage in range(60):
            expected = truncated_lengths(query, passage, max_length=max_length)
            assert truncated_lengths(query, min(passage, needed), max_length=max_length) == expected
        one_less = (truncated_lengths(query, min(passage, needed - 1), max_length=max_length) for passage in range(60))
        assert any(
            kept != truncated_lengths(query, passage, max_length=max_length) for passage, kept in enumerate(one_less)
        )


def test_a_query_is_read_as_far_as_lengths_are_told_apart():
    assert query_tokens_needed(max_length=512) == LENGTH_LIMIT == 8_192
    # A room beyond the limit must still be filled.
    assert query_tokens_needed(max_length=10_003) == 10_000


@pytest.mark.parametrize("value", [5, 511, 512, np.int64(64)])
def test_a_max_length_within_the_position_table_is_taken(value):
    assert validate_max_length(value, positions=512) == value
    assert type(validate_max_length(value, positions=512)) is int


@pytest.mark.parametrize("value", [4, 0, -1, 513, 768, 512.0, "512", None, True])  # FR 7
def test_a_max_length_outside_the_position_table_is_refused(value):
    with pytest.raises(ConfigError, match="from 5 to 512") as caught:
        validate_max_length(value, positions=512)
    assert caught.value.where == "max_length"


def test_without_a_model_only_the_lower_end_is_known():
    assert validate_max_length(10_000) == 10_000
    with pytest.raises(ConfigError, match="at least 5, got 4"):
        validate_max_length(4)
