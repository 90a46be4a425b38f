"""The padded planner and the padded arrays."""

import numpy as np
import pytest

from minice.encoding import encode_pair, pad_pairs, plan_batches
from minice.errors import ConfigError, InputError


def pair(length):
    """An encoded pair of ``length`` tokens: [CLS] query [SEP] passage [SEP], the query of one token."""
    return encode_pair([7], [9] * (length - 4), cls_id=1, sep_id=2, max_length=512)


@pytest.mark.parametrize(
    ("lengths", "budget", "batches"),
    [
        ([], 128, []),
        ([12], 128, [[0]]),
        ([12, 40, 12, 38], 128, [[1, 3], [0, 2]]),
        ([500], 128, [[0]]),  # above the budget: alone, never rejected
        ([500, 1, 500], 128, [[0], [2], [1]]),
        ([32, 32, 32, 32, 32], 4 * 32, [[0, 1, 2, 3], [4]]),
        ([33, 33, 33], 2 * 64, [[0, 1], [2]]),
        ([20, 20, 20], 1, [[0], [1], [2]]),
        ([0, 0], 1, [[0, 1]]),
    ],
)
def test_batches_are_filled_longest_first(lengths, budget, batches):
    assert plan_batches(lengths, max_batch_tokens=budget) == batches


def test_rows_are_padded_to_the_given_multiple():
    assert plan_batches([9, 9], max_batch_tokens=18, multiple=1) == [[0, 1]]
    assert plan_batches([9, 9], max_batch_tokens=18, multiple=8) == [[0], [1]]


def test_the_default_budget_is_4096_tokens():
    assert [len(batch) for batch in plan_batches([500] * 9)] == [4096 // 512, 1]


def test_lengths_may_be_any_integers_and_stay_as_they_are():
    lengths = np.array([3, 50, 4])
    assert plan_batches(lengths, max_batch_tokens=64) == [[1], [2, 0]]
    assert lengths.tolist() == [3, 50, 4]
    assert plan_batches(iter([3, 50, 4]), max_batch_tokens=64) == [[1], [2, 0]]


@pytest.mark.parametrize("bad", [-1, 2.0, None, "3"])
def test_a_length_that_is_none_is_an_input_error(bad):
    with pytest.raises(InputError) as caught:
        plan_batches([1, 2, bad])
    assert caught.value.where == "lengths[2]"


@pytest.mark.parametrize("bad", [0, -5, 1.5, None, True])
@pytest.mark.parametrize("option", ["max_batch_tokens", "multiple"])
def test_an_option_below_one_is_a_config_error(option, bad):
    with pytest.raises(ConfigError, match="at least 1") as caught:
        plan_batches([1], **{option: bad})
    assert caught.value.where == option


def test_rows_are_laid_out_as_an_onnx_graph_reads_them():
    batch = pad_pairs([pair(5), pair(7)], pad_id=4, multiple=8)
    assert batch.input_ids.tolist() == [[1, 7, 2, 9, 2, 4, 4, 4], [1, 7, 2, 9, 9, 9, 2, 4]]
    assert batch.attention_mask.tolist() == [[1] * 5 + [0] * 3, [1] * 7 + [0]]
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert {array.dtype for array in (batch.input_ids, batch.attention_mask, batch.token_type_ids)} == {
        np.dtype(np.int64)
    }


def test_a_typed_pad_token_is_attended():  # FR 12
    typed = encode_pair([0], [0, 0], cls_id=1, sep_id=2, max_length=16)
    assert pad_pairs([typed], pad_id=0, multiple=1).attention_mask.tolist() == [[1] * 6]


def test_rounding_up_stops_at_the_position_table():  # FR 7
    assert pad_pairs([pair(33)]).input_ids.shape == (1, 64)
    assert pad_pairs([pair(33)], positions=40).input_ids.shape == (1, 40)
    assert pad_pairs([pair(33)], positions=100).input_ids.shape == (1, 64)


def test_no_pairs_make_no_rows():
    assert pad_pairs([]).input_ids.shape == (0, 0)


def test_a_multiple_below_one_is_a_config_error():
    with pytest.raises(ConfigError):
        pad_pairs([pair(5)], multiple=0)
