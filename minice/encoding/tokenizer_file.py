"""tokenizer.json bytes -> what the encoder must know of the file, or a ConfigError that says what it found."""

import json
from dataclasses import dataclass
from typing import Any

from minice.errors import ConfigError

WHERE = "tokenizer.json"
# What the models of this family call their control tokens; special or not in the file, literal mode unlearns them.
CONTROL_TOKENS = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")
EXPECTED = "expected a BERT tokenizer (BertNormalizer, BertPreTokenizer, WordPiece with [CLS] and [SEP])"
NEXT_STEP = "Use the tokenizer.json that belongs to the model's pin"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedToken:
    """A string that the tokenizers package looks for in a text before it looks at words.

    Attributes:
        content: The string.
        normalized: Looked for in the normalized text; otherwise in the text as it was typed.
        plain: Found wherever it stands and as it stands: neither single_word nor lstrip nor rstrip.
    """

    content: str
    normalized: bool
    plain: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFile:
    """The checked content of a tokenizer.json.

    Attributes:
        text: The JSON for the tokenizers package: what turns one text into ids, in literal mode without the
            control tokens. Truncation and padding, leftovers of training, are not in it.
        added_tokens: What is looked for in a text, in file order.
        clean_text: The normalizer deletes control characters and turns white space into spaces.
        handle_chinese_chars: The normalizer makes a word of each CJK ideograph.
        longest_word: Normalized characters of a word; a longer one is one [UNK].
        cls_id: Id of [CLS].
        sep_id: Id of [SEP].
        pad_id: Id of [PAD]; 0 where the file has none, since padding is masked.
        vocabulary_size: One more than the largest id.
    """

    text: str
    added_tokens: tuple[AddedToken, ...]
    clean_text: bool
    handle_chinese_chars: bool
    longest_word: int
    cls_id: int
    sep_id: int
    pad_id: int
    vocabulary_size: int


def parse_tokenizer_file(data: bytes, *, literal: bool) -> TokenizerFile:
    """Check the bytes of a tokenizer.json before any library sees them.

    Args:
        data: The file's content, UTF-8.
        literal: Leave out the control tokens, so that one typed by a user is plain text.

    Raises:
        ConfigError: Not JSON, or not a BERT tokenizer; ``where`` is ``tokenizer.json``.
    """
    content = _json_object(data)
    normalizer = _component(content, "normalizer", "BertNormalizer")
    _component(content, "pre_tokenizer", "BertPreTokenizer")
    model = _component(content, "model", "WordPiece")
    added = _added_tokens(content)
    vocabulary = _vocabulary(model) | {token["content"]: token["id"] for token in added}
    missing = [name for name in ("[CLS]", "[SEP]") if name not in vocabulary]
    if missing:
        raise not_bert(f"a vocabulary of {len(vocabulary)} tokens without {' and '.join(missing)}")
    _check_post_processor(content.get("post_processor"), vocabulary["[CLS]"], vocabulary["[SEP]"])
    if literal:
        added = [t for t in added if not (t.get("special") or t["content"] in CONTROL_TOKENS)]
    return TokenizerFile(
        text=_single_text_json(content, added),
        added_tokens=tuple(_added_token(token) for token in added if token["content"]),
        clean_text=_flag(normalizer, "clean_text"),
        handle_chinese_chars=_flag(normalizer, "handle_chinese_chars"),
        longest_word=_longest_word(model),
        cls_id=vocabulary["[CLS]"],
        sep_id=vocabulary["[SEP]"],
        pad_id=vocabulary.get("[PAD]", 0),
        vocabulary_size=max(vocabulary.values()) + 1,
    )


def not_bert(found: str) -> ConfigError:
    """Return the error for a file that is no BERT tokenizer: what was expected, and what was found."""
    return ConfigError(f"{EXPECTED}, got {found}. {NEXT_STEP}", where=WHERE)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise not_bert(f"{len(data)} bytes that are not JSON: {error}") from None
    if not isinstance(content, dict):
        raise not_bert(f"JSON that is no object: {type(content).__name__}")
    return content


def _component(content: dict[str, Any], name: str, kind: str) -> dict[str, Any]:
    """Return the part of the file called ``name``, which must be of one kind."""
    part = content.get(name)
    found = part.get("type", "an object without a type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or found != kind:
        raise not_bert(f"{name} {_short(found)} instead of {kind}")
    return part


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not all(_is_id(value) for value in vocabulary.values()):
        raise not_bert("model.vocab that does not map tokens to ids")
    unknown = model.get("unk_token")
    if not isinstance(unknown, str) or unknown not in vocabulary:
        # The library would find this out at the first unknown word.
        raise not_bert(f"model.unk_token {_short(unknown)}, which is not in the vocabulary")
    return vocabulary


def _added_tokens(content: dict[str, Any]) -> list[dict[str, Any]]:
    added = content.get("added_tokens", [])
    if isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and _is_id(token.get("id")) for token in added
    ):
        return added
    raise not_bert("added_tokens that are not a list of objects with content and id")


def _added_token(token: dict[str, Any]) -> AddedToken:
    return AddedToken(
        content=token["content"],
        # The library's own default for tokens that say nothing.
        normalized=bool(token.get("normalized", not token.get("special"))),
        plain=not any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip")),
    )


def _check_post_processor(processor: Any, cls_id: int, sep_id: int) -> None:
    """Check that the file frames a pair as this room does: [CLS] A [SEP] in segment 0, B [SEP] in segment 1."""
    expected = [([cls_id], 0), ("A", 0), ([sep_id], 0), ("B", 1), ([sep_id], 1)]
    try:
        if processor["type"] == "BertProcessing":
            frame = [([processor["cls"][1]], 0), ("A", 0), ([processor["sep"][1]], 0), ("B", 1)]
            frame.append(([processor["sep"][1]], 1))
        else:
            frame = [_template_piece(piece, processor["special_tokens"]) for piece in processor["pair"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        frame = []
    if frame != expected:
        kind = processor.get("type") if isinstance(processor, dict) else processor
        raise not_bert(f"post_processor {_short(kind)} that does not make [CLS] A [SEP] B [SEP] of a pair")


def _template_piece(piece: Any, special_tokens: Any) -> tuple[Any, int]:
    """Return (side or ids, segment) of one piece of a TemplateProcessing."""
    ((kind, content),) = piece.items()
    name = content["id"]
    return name if kind == "Sequence" else special_tokens[name]["ids"], content["type_id"]


def _single_text_json(content: dict[str, Any], added: list[dict[str, Any]]) -> str:
    """Return the part of the file that turns one text into ids.

    Written anew, so that the library reads what was checked (a key may stand twice in JSON), and without what is
    not used here: the library panics at some malformed post-processors.
    """
    unused = dict.fromkeys(("truncation", "padding", "post_processor", "decoder"))
    used = {name: content[name] for name in ("normalizer", "pre_tokenizer", "model")}
    return json.dumps({"version": "1.0", "added_tokens": added} | unused | used)


def _flag(normalizer: dict[str, Any], name: str) -> bool:
    value = normalizer.get(name)
    if not isinstance(value, bool):
        raise not_bert(f"normalizer.{name} {_short(value)} instead of true or false")
    return value


def _longest_word(model: dict[str, Any]) -> int:
    value = model.get("max_input_chars_per_word", 100)
    if not _is_id(value):
        raise not_bert(f"model.max_input_chars_per_word {_short(value)} instead of a number")
    return int(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
