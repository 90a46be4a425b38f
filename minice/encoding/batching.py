"""Lengths -> batches under a padded-token budget, and the padded arrays of one batch."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minice.encoding.pairs import PairEncoding
from minice.errors import ConfigError, InputError

DEFAULT_MAX_BATCH_TOKENS = 4_096
PADDING_MULTIPLE = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddedBatch:
    """The inputs of an ONNX graph for one batch, named as in the file; int64.

    Attributes:
        input_ids: [B, T], padded with the pad id.
        attention_mask: [B, T], 1 over the tokens of a pair and 0 over padding.
        token_type_ids: [B, T], 0 over padding.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]


def plan_batches(
    lengths: Iterable[int],
    *,
    max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    multiple: int = PADDING_MULTIPLE,
) -> list[list[int]]:
    """Group pairs into batches whose padded size stays within a token budget.

    A batch is padded to its longest row, rounded up to ``multiple``, and costs rows times that. Pairs
    are taken longest first, which keeps padding small; equal lengths keep their input order.

    Args:
        lengths: [N] tokens in each encoded pair, special tokens included.
        max_batch_tokens: Largest padded size of a batch, in tokens.
        multiple: Rows are padded to a multiple of this many tokens.

    Returns:
        Batches of indices into ``lengths``; every index appears exactly once. A pair that is
        longer than the budget runs alone.

    Raises:
        InputError: A length is negative or no integer; ``where`` names its index.
        ConfigError: ``max_batch_tokens`` or ``multiple`` is not an integer of at least 1.

    >>> plan_batches([12, 40, 12, 38], max_batch_tokens=128)
    [[1, 3], [0, 2]]
    """
    sizes = [_length(value, index) for index, value in enumerate(lengths)]
    budget = _positive(max_batch_tokens, "max_batch_tokens")
    step = _positive(multiple, "multiple")
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Longest first, so the row that opened the batch fixes its padded width.
        if not batches or (len(batches[-1]) + 1) * width > budget:
            batches.append([])
            width = _round_up(sizes[index], step)
        batches[-1].append(index)
    return batches


def pad_pairs(
    pairs: Sequence[PairEncoding],
    *,
    pad_id: int = 0,
    multiple: int = PADDING_MULTIPLE,
    positions: int | None = None,
) -> PaddedBatch:
    """Lay pairs out as rows of equal width.

    Args:
        pairs: [B] encoded pairs; none gives arrays of shape [0, 0].
        pad_id: What fills ``input_ids`` after a pair; masked, so its value changes no logit.
        multiple: The width is the longest pair rounded up to this multiple.
        positions: Rows of the model's position table; rounding up stops there, because the graph has
            no position for padding beyond it either.

    Raises:
        ConfigError: ``multiple`` is not an integer of at least 1.

    >>> from minice.encoding.pairs import encode_pair
    >>> pair = encode_pair([7], [8, 9], cls_id=1, sep_id=2, max_length=16)
    >>> batch = pad_pairs([pair], multiple=8)
    >>> batch.input_ids.tolist(), batch.attention_mask.tolist(), batch.token_type_ids.tolist()
    ([[1, 7, 2, 8, 9, 2, 0, 0]], [[1, 1, 1, 1, 1, 1, 0, 0]], [[0, 0, 0, 1, 1, 1, 0, 0]])
    """
    longest = max(map(len, pairs), default=0)
    width = _round_up(longest, _positive(multiple, "multiple"))
    if positions is not None:
        width = max(longest, min(width, positions))
    input_ids = np.full((len(pairs), width), pad_id, np.int64)  # [B, T]
    attention_mask = np.zeros_like(input_ids)
    token_type_ids = np.zeros_like(input_ids)
    for row, pair in enumerate(pairs):
        input_ids[row, : len(pair)] = pair.input_ids
        # By length, not by id: a user may type the pad token.
        attention_mask[row, : len(pair)] = 1
        token_type_ids[row, : len(pair)] = pair.token_type_ids
    return PaddedBatch(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)


def _length(value: int, index: int) -> int:
    try:
        length = operator.index(value)
    except TypeError:
        length = -1
    if length < 0:
        raise InputError(f"expected a number of tokens (an integer >= 0), got {value!r}", where=f"lengths[{index}]")
    return length


def _positive(value: int, where: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ConfigError(f"expected an integer of at least 1, got {value!r}", where=where)
    return number


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
