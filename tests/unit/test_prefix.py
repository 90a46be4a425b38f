"""What the places for cuts rest on: how the library treats the characters beside them, one by one."""

import re
import sys

import pytest
from conftest import tiny_tokenizer
from tokenizers import normalizers, pre_tokenizers

from minice.encoding import prefix
from minice.encoding.prefix import Cutter
from minice.encoding.tokenizer_file import parse_tokenizer_file

EVERY_CHARACTER = "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
PLAIN = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
BARE = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}


def library_words(**settings):
    normalizer = normalizers.BertNormalizer(**settings)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return lambda text: [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))]


def members(characters):
    return re.findall(f"[{characters}]", EVERY_CHARACTER)


@pytest.mark.parametrize("settings", [PLAIN, BARE, PLAIN | {"strip_accents": False}, BARE | {"strip_accents": True}])
def test_every_separator_stands_alone(settings):
    words = library_words(**settings)
    chinese = prefix._IDEOGRAPHS if settings["handle_chinese_chars"] else ""
    separators = members(prefix._SPACES + prefix._PUNCTUATION + chinese)
    assert len(separators) == 22 + 32 + (20_902 + 6_582 + 42_711 if chinese else 0)
    for character in separators:
        # A mark on either side moves onto nothing else.
        found = words(f"a\u0323{character}\u0301a")
        alone = [*words("a\u0323"), *words(character), *words("\u0301a")]
        assert found == alone, ascii(character)


def test_every_deleted_character_is_deleted():
    words = library_words(**PLAIN)
    for character in members(prefix._DELETED):
        assert words(f"a{character}a") == ["aa"], ascii(character)


def test_what_looks_like_white_space_but_is_deleted_is_no_separator():
    file = parse_tokenizer_file(tiny_tokenizer(), literal=False)
    cutter = Cutter(file, library_words(**PLAIN))
    for character in "\x0b\x0c\x1c\x1d\x1e\x1f\x85\u200b\ufeff\x00":
        assert cutter._cut(cutter._separator, f"aaa{character}aaa b", 1) == len(f"aaa{character}aaa")


def pieces(text, size, *, literal=False):
    cutter = Cutter(parse_tokenizer_file(tiny_tokenizer(), literal=literal), library_words(**PLAIN))
    return list(cutter.pieces(text, size))


def test_a_short_text_is_one_piece():
    assert pieces("", 300) == []
    assert pieces(" \n\0", 300) == []
    assert pieces("one two", 300) == ["one two"]


def test_pieces_grow():
    assert [len(piece) for piece in pieces("abc " * 1_000, 300)] == [300, 600, 1_200, 4_000 - 300 - 600 - 1_200]


def test_a_control_token_is_never_cut_in_reference_mode():
    text = "a " * 127 + "x[SEP]" * 3
    # The smallest piece ends at 256: behind the bracket in literal mode, before it in reference mode.
    assert len(pieces(text, 1, literal=True)[0]) == 256
    assert pieces(text, 1)[0] == "a " * 127 + "x[SEP]"
