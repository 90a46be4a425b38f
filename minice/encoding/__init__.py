"""Text -> numbers: tokens, pairs, batches."""

from minice.encoding.batching import PaddedBatch, pad_pairs, plan_batches
from minice.encoding.pairs import PairEncoding, encode_pair, truncated_lengths, validate_max_length
from minice.encoding.tokenizer import PairTokenizer

__all__ = [
    "PaddedBatch",
    "PairEncoding",
    "PairTokenizer",
    "encode_pair",
    "pad_pairs",
    "plan_batches",
    "truncated_lengths",
    "validate_max_length",
]
