"""(query ids, passage ids) -> one pair as the model reads it: truncation, [CLS]/[SEP], segment ids."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minice.errors import ConfigError

# [CLS] query [SEP] passage [SEP]
SPECIAL_TOKENS = 3
# Room for at least one token of either side.
SHORTEST_MAX_LENGTH = SPECIAL_TOKENS + 2
# Texts of at least this many tokens count as equally long; see passage_tokens_needed.
LENGTH_LIMIT = 8_192


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairEncoding:
    """One encoded pair, without padding.

    Attributes:
        input_ids: [T] int64, ``[CLS] query [SEP] passage [SEP]``.
        token_type_ids: [T] int64, 0 up to and including the first [SEP] that the encoder placed, then 1.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]

    def __len__(self) -> int:
        """T, special tokens included."""
        return len(self.input_ids)


def validate_max_length(max_length: int, *, positions: int | None = None) -> int:
    """Check the largest number of tokens in a pair, special tokens included.

    Args:
        max_length: What the caller asks for.
        positions: Rows of the model's position table; None where no model is at hand.

    Returns:
        ``max_length`` as a plain int.

    Raises:
        ConfigError: Not an integer, below 5 (three special tokens and one token of either side) or
            beyond the position table.
    """
    allowed = f"from {SHORTEST_MAX_LENGTH} to {positions}" if positions else f"of at least {SHORTEST_MAX_LENGTH}"
    try:
        value = operator.index(max_length)
    except TypeError:
        value = 0
    # The limit is never clipped in silence: a model has no row for a token past its position table.
    if isinstance(max_length, bool) or value < SHORTEST_MAX_LENGTH or (positions and value > positions):
        raise ConfigError(f"expected an integer {allowed}, got {max_length!r}", where="max_length")
    return value


def truncated_lengths(query_length: int, passage_length: int, *, max_length: int) -> tuple[int, int]:
    """Return how many tokens of each side are kept, longest first.

    If both fit, nothing is cut. Otherwise the shorter side keeps up to half of the room and the longer
    one gets the rest; at equal length the passage counts as the longer.

    Source: ``truncate_encodings`` of the tokenizers package, strategy ``longest_first``, in closed form.
    Versions 0.23.1 and 0.23.2 of that package differ where both sides exceed ``max_length``: they clip
    both to ``max_length`` before comparing, so the passage always counts as the longer there.

    Args:
        query_length: Tokens of the query, without special tokens.
        passage_length: Tokens of the passage, without special tokens.
        max_length: Largest number of tokens in the pair, special tokens included; at least 5.

    Returns:
        Tokens kept of the query and of the passage.

    >>> truncated_lengths(4, 20, max_length=16)
    (4, 9)
    >>> truncated_lengths(20, 20, max_length=16)
    (6, 7)
    >>> truncated_lengths(21, 20, max_length=16)
    (7, 6)
    """
    room = max_length - SPECIAL_TOKENS
    if query_length + passage_length <= room:
        return query_length, passage_length
    if query_length > passage_length:
        kept = min(passage_length, room // 2)
        return room - kept, kept
    kept = min(query_length, room // 2)
    return kept, room - kept


def query_tokens_needed(*, max_length: int) -> int:
    """Return how many tokens of a query can matter: its length decides what a passage keeps."""
    return max(LENGTH_LIMIT, max_length - SPECIAL_TOKENS)


def passage_tokens_needed(query_length: int, *, max_length: int) -> int:
    """Return how many tokens of a passage can matter beside a query: all that follow change nothing.

    A query within half of the room is kept whole, so the passage gets what it leaves. Beside a longer
    query the passage may get its half, and where the halves are unequal the larger one goes to the
    longer side: whether the passage is at least as long as the query must then be known. That is the only
    reason to read further than the model sees, and it ends at ``LENGTH_LIMIT`` tokens.

    Args:
        query_length: Tokens of the query, read as far as ``query_tokens_needed``.
        max_length: Largest number of tokens in the pair, special tokens included.

    >>> passage_tokens_needed(9, max_length=512)
    500
    >>> passage_tokens_needed(300, max_length=512)
    300
    >>> passage_tokens_needed(300, max_length=511)
    254
    """
    room = max_length - SPECIAL_TOKENS
    half = room // 2
    if query_length <= half:
        return room - query_length
    return query_length if room % 2 else half


def encode_pair(
    query_ids: Sequence[int], passage_ids: Sequence[int], *, cls_id: int, sep_id: int, max_length: int
) -> PairEncoding:
    """Join the ids of the two sides into what the model reads.

    Args:
        query_ids: Ids of the query, without special tokens; tokens are cut from the end.
        passage_ids: The same for the passage.
        cls_id: Id of [CLS].
        sep_id: Id of [SEP].
        max_length: Largest number of tokens in the pair, special tokens included; at least 5.

    >>> pair = encode_pair([7, 8], [9], cls_id=1, sep_id=2, max_length=16)
    >>> pair.input_ids.tolist(), pair.token_type_ids.tolist()
    ([1, 7, 8, 2, 9, 2], [0, 0, 0, 0, 1, 1])
    """
    first, second = truncated_lengths(len(query_ids), len(passage_ids), max_length=max_length)
    input_ids = np.empty(first + second + SPECIAL_TOKENS, np.int64)  # [T]
    input_ids[0] = cls_id
    input_ids[1 : first + 1] = query_ids[:first]
    input_ids[first + 1] = sep_id
    input_ids[first + 2 : -1] = passage_ids[:second]
    input_ids[-1] = sep_id
    token_type_ids = np.zeros(len(input_ids), np.int64)  # [T]
    # By place, not by looking for [SEP]: a text may hold that token too.
    token_type_ids[first + 2 :] = 1
    return PairEncoding(input_ids=input_ids, token_type_ids=token_type_ids)
