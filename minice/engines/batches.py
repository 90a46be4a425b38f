"""What engines ask of pairs, and how much of a call one batch takes; the same for every engine."""

from collections.abc import Sequence

from minice.encoding.pairs import PairEncoding
from minice.errors import InputError


def checked_lengths(pairs: Sequence[PairEncoding], *, positions: int, vocabulary: int) -> list[int]:
    """Return the number of tokens in each of [N] pairs.

    Raises:
        InputError: A pair is empty, longer than the model's ``positions``, or holds an id outside of
            0 to ``vocabulary - 1``; ``where`` names it.
    """
    lengths = [len(pair) for pair in pairs]
    for index, (pair, length) in enumerate(zip(pairs, lengths, strict=True)):
        if not 1 <= length <= positions:
            raise InputError(
                f"expected 1 to {positions} tokens, got {length}; encode with a smaller max_length",
                where=f"pairs[{index}]",
            )
        lowest, highest = int(pair.input_ids.min()), int(pair.input_ids.max())
        if lowest < 0 or highest >= vocabulary:
            raise InputError(
                f"expected token ids from 0 to {vocabulary - 1}, got {lowest if lowest < 0 else highest}; "
                "the tokenizer does not belong to this model",
                where=f"pairs[{index}].input_ids",
            )
    return lengths


def fair_budget(max_batch_tokens: int, tokens: int, threads: int) -> int:
    """Return the tokens of a batch: at most ``max_batch_tokens``, and so few that every thread has a batch.

    >>> fair_budget(1024, 600, 2)
    300
    """
    return max(1, min(max_batch_tokens, -(-tokens // threads)))
