"""How far a quantized model's logits are from those of its source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from minice.artifacts.sample_pairs import SAMPLE_PAIRS
from minice.encoding.pairs import PairEncoding
from minice.encoding.tokenizer import PairTokenizer
from minice.engines import Engine, open_engine
from minice.errors import MiniceError

_SEED: Final = 20_240
_LONGEST: Final = 512  # tokens in one pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What rounding the weights did to logits and to the order of passages.

    Attributes:
        pairs: Pairs that were scored.
        texts: "built-in texts", or "random ids" where no fitting tokenizer was at hand; the latter say how far
            logits move, and nothing about relevance.
        largest_difference: Largest absolute difference of a logit.
        kendall_tau: Mean over the queries of the rank correlation of both orders; 1 is the same order.
        top_1: Share of the queries whose best passage is the same.
    """

    pairs: int
    texts: str
    largest_difference: float
    kendall_tau: float
    top_1: float


def compare_models(
    source: bytes, quantized: bytes, *, tokenizer: bytes | None = None, threads: int | None = None
) -> Comparison:
    """Score a built-in set of queries with both models and compare.

    Args:
        source: The fp32 ONNX file.
        quantized: The int8 ONNX file made from it.
        tokenizer: The model's tokenizer.json. If it is None, is no tokenizer, or knows more ids than the model,
            pairs of random ids from a fixed seed are scored instead.
        threads: As for ``open_engine``.

    Raises:
        GraphError: One of the files is no BERT cross-encoder.
    """
    engine = open_engine(source, threads=threads)
    try:
        texts, queries = _encoded(engine, tokenizer)
        before = _logits(engine, queries)
    finally:
        engine.close()
    engine = open_engine(quantized, threads=threads)
    try:
        after = _logits(engine, queries)
    finally:
        engine.close()
    return Comparison(
        pairs=before.size,
        texts=texts,
        largest_difference=float(np.abs(before - after).max()),
        kendall_tau=float(np.mean([kendall_tau(a, b) for a, b in zip(before, after, strict=True)])),
        top_1=float(np.mean(before.argmax(axis=1) == after.argmax(axis=1))),
    )


def kendall_tau(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Return the rank correlation of two [N] score lists, N > 1: 1 for the same order, -1 for the reverse.

    A pair that is tied in one list counts as neither agreeing nor disagreeing.

    Args:
        first: [N] scores.
        second: [N] scores of the same items.

    Source: Kendall 1938, A New Measure of Rank Correlation (tau-a).

    >>> kendall_tau(np.float32([1, 2, 3]), np.float32([1, 3, 2]))  # two pairs agree, one does not
    0.3333333333333333
    """
    i, j = np.triu_indices(len(first), k=1)
    return float(np.mean(np.sign(first[i] - first[j]) * np.sign(second[i] - second[j]), dtype=np.float64))


def _logits(engine: Engine, queries: Sequence[Sequence[PairEncoding]]) -> NDArray[np.float32]:
    """[queries, passages]; every query has as many passages."""
    flat = [pair for pairs in queries for pair in pairs]
    return engine.logits(flat).reshape(len(queries), -1)


def _encoded(engine: Engine, tokenizer: bytes | None) -> tuple[str, list[list[PairEncoding]]]:
    fitting = None if tokenizer is None else _fitting(engine, tokenizer)
    if fitting is None:
        return "random ids", _random_pairs(engine)
    longest = min(_LONGEST, engine.positions)
    return "built-in texts", [fitting.encode(query, passages, max_length=longest) for query, passages in SAMPLE_PAIRS]


def _fitting(engine: Engine, data: bytes) -> PairTokenizer | None:
    """The tokenizer, if it is one and all its ids have a row in the model's table."""
    try:
        tokenizer = PairTokenizer.from_bytes(data)
    except MiniceError:
        return None
    return tokenizer if tokenizer.vocabulary_size <= engine.vocabulary else None


def _random_pairs(engine: Engine) -> list[list[PairEncoding]]:
    """As many pairs as there are built-in ones, of ids from a fixed seed and of many lengths."""
    random = np.random.default_rng(_SEED)
    longest = min(_LONGEST, engine.positions)

    def pair() -> PairEncoding:
        length = int(random.integers(min(5, longest), min(longest, 128), endpoint=True))
        types = (np.arange(length) > random.integers(length)).astype(np.int64)
        return PairEncoding(input_ids=random.integers(0, engine.vocabulary, length), token_type_ids=types)

    return [[pair() for _ in passages] for _, passages in SAMPLE_PAIRS]
