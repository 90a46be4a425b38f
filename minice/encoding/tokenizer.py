"""Text -> token ids, one side at a time, with the tokenizers package."""

import difflib
from collections.abc import Iterable
from typing import Any

from minice.encoding.pairs import (
    PairEncoding,
    encode_pair,
    passage_tokens_needed,
    query_tokens_needed,
    validate_max_length,
)
from minice.encoding.prefix import Cutter
from minice.encoding.tokenizer_file import WHERE, parse_tokenizer_file
from minice.errors import ConfigError, InputError

# What becomes of a control token such as "[SEP]" in a user's text.
SPECIAL_TOKENS_MODES = {
    "reference": "is read as that token, as the tokenizers package does",
    "literal": "is text like any other",
}
# English takes five characters a token; with fewer the first piece is often all that must be read.
_CHARACTERS_PER_TOKEN = 5


class PairTokenizer:
    """Encodes pairs exactly as the tokenizers package does; immutable, so safe from many threads.

    Made by ``from_bytes``. Ids, segment ids and truncation equal the package's pair encoding with
    ``longest_first``, up to texts of 8,192 tokens; where both sides are longer than that, the passage
    counts as the longer.

    Attributes:
        vocabulary_size: One more than the largest token id.
        cls_id: Id of [CLS].
        sep_id: Id of [SEP].
        pad_id: Id of [PAD]; 0 where the file has none.
    """

    __slots__ = ("_cutter", "_tokenizer", "cls_id", "pad_id", "sep_id", "vocabulary_size")

    def __init__(self, data: bytes, *, special_tokens: str = "reference") -> None:
        file = parse_tokenizer_file(data, literal=_is_literal(special_tokens))
        self._tokenizer = _load(file.text)
        self.cls_id, self.sep_id, self.pad_id = file.cls_id, file.sep_id, file.pad_id
        self.vocabulary_size = file.vocabulary_size
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer

        def words(text: str) -> list[str]:
            return [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))]

        self._cutter = Cutter(file, words)

    @classmethod
    def from_bytes(cls, data: bytes, *, special_tokens: str = "reference") -> "PairTokenizer":
        """Load a tokenizer.json.

        Args:
            data: The file's content. What it says about truncation and padding is a leftover of
                training and is cleared.
            special_tokens: ``reference`` reads "[SEP]" in a text as that token, as the tokenizers package
                does; ``literal`` reads it as text, for texts of people who are not trusted.

        Raises:
            ConfigError: The bytes are not a BERT tokenizer's (``where`` is ``tokenizer.json``), or
                ``special_tokens`` is unknown.
        """
        return cls(data, special_tokens=special_tokens)

    def encode(self, query: str, passages: Iterable[str], *, max_length: int) -> list[PairEncoding]:
        """Encode one query with each of its passages; the query is tokenized once.

        Args:
            query: The user's text; ``""`` is valid.
            passages: [N] texts; any iterable, read once.
            max_length: Largest number of tokens in a pair, special tokens included.

        Returns:
            [N] encoded pairs, in input order, each of at most ``max_length`` tokens.

        Raises:
            InputError: A text is None or no str (``where`` is ``query`` or ``passages[3]``), or
                ``passages`` is one text.
            ConfigError: ``max_length`` is below 5.
        """
        limit = validate_max_length(max_length)
        query_text = readable_text(query, where="query")
        texts = [readable_text(p, where=f"passages[{i}]") for i, p in enumerate(_items(passages, where="passages"))]
        if not texts:
            return []
        query_ids = self._read(query_text, query_tokens_needed(max_length=limit))
        return [self._encode_passage(query_ids, text, limit) for text in texts]

    def encode_pairs(self, pairs: Iterable[tuple[str, str]], *, max_length: int) -> list[PairEncoding]:
        """Encode pairs; a query that occurs several times is tokenized once.

        Args:
            pairs: [N] (query, passage); any iterable, read once.
            max_length: Largest number of tokens in a pair, special tokens included.

        Returns:
            [N] encoded pairs, in input order.

        Raises:
            InputError: A pair is not two texts; ``where`` is ``pairs[3]`` or ``pairs[3].passage``.
            ConfigError: ``max_length`` is below 5.
        """
        limit = validate_max_length(max_length)
        texts = [_pair_of_texts(pair, where=f"pairs[{i}]") for i, pair in enumerate(_items(pairs, where="pairs"))]
        needed = query_tokens_needed(max_length=limit)
        queries = {query: self._read(query, needed) for query in dict.fromkeys(query for query, _ in texts)}
        return [self._encode_passage(queries[query], passage, limit) for query, passage in texts]

    def _encode_passage(self, query_ids: list[int], passage: str, max_length: int) -> PairEncoding:
        needed = passage_tokens_needed(len(query_ids), max_length=max_length)
        passage_ids = self._read(passage, needed)
        return encode_pair(query_ids, passage_ids, cls_id=self.cls_id, sep_id=self.sep_id, max_length=max_length)

    def _read(self, text: str, needed: int) -> list[int]:
        """Return the first ``needed`` ids of a text, without special tokens."""
        ids: list[int] = []
        for piece in self._cutter.pieces(text, needed * _CHARACTERS_PER_TOKEN):
            # One text at a time: encode_batch starts a thread pool, which does not survive a fork.
            ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
            if len(ids) >= needed:
                break
        return ids[:needed]


def readable_text(value: object, *, where: str) -> str:
    r"""Return a text that can be written as UTF-8: surrogate pairs joined, lone ones replaced by U+FFFD.

    Args:
        value: What the caller gave as a text; subclasses of str are read by their content.
        where: Its place, for the error.

    Raises:
        InputError: ``value`` is not a str.

    >>> readable_text("\ud83d\udc4d \ud800", where="query")
    '👍 �'
    """
    if not isinstance(value, str):
        hint = ". Decode it first" if isinstance(value, bytes | bytearray | memoryview) else ""
        raise InputError(f"expected text (str), got {type(value).__name__}{hint}", where=where)
    # Not str(value): an enum or a host's subclass may print something else than it holds.
    text = str.__str__(value)
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _items(values: Iterable[Any], *, where: str) -> list[Any]:
    """Return the items of a caller's iterable, which must not be a single text."""
    if isinstance(values, str | bytes | bytearray | memoryview):
        # It would be iterated letter by letter.
        raise InputError(f"expected an iterable, got one {type(values).__name__}. Put it in a list", where=where)
    if not isinstance(values, Iterable):
        raise InputError(f"expected an iterable, got {type(values).__name__}", where=where)
    return list(values)


def _pair_of_texts(pair: object, *, where: str) -> tuple[str, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InputError(f"expected a (query, passage) tuple, got {got}", where=where)
    return readable_text(pair[0], where=f"{where}.query"), readable_text(pair[1], where=f"{where}.passage")


def _is_literal(special_tokens: str) -> bool:
    if special_tokens not in SPECIAL_TOKENS_MODES:
        known = " or ".join(repr(mode) for mode in SPECIAL_TOKENS_MODES)
        nearest = difflib.get_close_matches(str(special_tokens), SPECIAL_TOKENS_MODES, n=1)
        hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"expected {known}, got {special_tokens!r}{hint}", where="special_tokens")
    return special_tokens == "literal"


def _load(text: str) -> Any:
    """Return the library's tokenizer. It is never configured afterwards: setters race with readers."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        # The library raises bare Exception for whatever it can't read.
        raise ConfigError(f"expected a file that the tokenizers package reads, got: {error}", where=WHERE) from error
