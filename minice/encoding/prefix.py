"""Where a text may be cut so that its pieces tokenize to exactly the tokens of the whole.

A BERT tokenizer looks at a text in three steps: added tokens such as [SEP] are found in the text as typed;
the normalizer then treats each character by itself, but for the order of neighbouring combining marks; white
space and punctuation separate words, and a word's tokens depend on nothing outside of it. So a cut beside a
character that always stands alone (white space, an ideograph, ASCII punctuation) is invisible, unless an
occurrence of an added token lies across it.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice

from minice.encoding.tokenizer_file import AddedToken, TokenizerFile

# White space that the normalizer keeps: Unicode Zs, Zl, Zp and these controls. It deletes every other control
# and format character, U+000B, 000C and 0085 among them: the letters beside such a character are one word.
_SPACES = " \t\n\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# The assigned characters of the blocks that BertNormalizer isolates, as of Unicode 3.1: a later one may be
# unknown to the library's tables.
_IDEOGRAPHS = "\u3400-\u4db5\u4e00-\u9fa5\U00020000-\U0002a6d6"
_PUNCTUATION = re.escape(string.punctuation)
# Deleted by clean_text, whatever the version of the library's tables.
_DELETED = (
    "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufffd"  # Cc, Cf, U+FFFD
)
_SMALLEST_PIECE = 256  # characters
_LARGEST_PIECE = 65_536  # characters; bounds what the library allocates at once, about 70 bytes each
_LONGEST_TOKEN = 64  # characters; an added token that is longer switches the shortening of runs off
_RUN_PER_CHARACTER = 16  # characters in long runs for each distinct one that the library is asked about

Words = Callable[[str], list[str]]


class Cutter:
    """Cuts texts for one tokenizer; immutable.

    Args:
        file: The tokenizer's settings and added tokens.
        words: What its normalizer and pre-tokenizer make of a text.
    """

    def __init__(self, file: TokenizerFile, words: Words) -> None:
        self._words = words
        self._clean_text = file.clean_text
        self._longest_word = file.longest_word
        self._separators = _SPACES + _PUNCTUATION + (_IDEOGRAPHS if file.handle_chinese_chars else "")
        self._separator = re.compile(f"[{self._separators}]")
        skipped = _SPACES + (_DELETED if file.clean_text else "")
        self._skipped = re.compile(f"[{skipped}]*")
        self._unbroken = tuple(token.content for token in file.added_tokens if not token.normalized)
        self._cuts = all(_is_cuttable(token) for token in file.added_tokens)
        self._shortens = self._cuts and all(_stays_out_of_runs(token) for token in file.added_tokens)
        # Kept at either end of a shortened run: whatever part of an added token may lie there.
        self._run_end = max(map(len, self._unbroken), default=1)
        # Shortening must shorten.
        self._long = max(128, 2 * self._run_end + file.longest_word + 2)
        self._long_run = re.compile(f"[^{self._separators}]{{{self._long},}}")

    def pieces(self, text: str, size: int) -> Iterator[str]:
        """Yield pieces of a text, in order, whose tokens together are exactly the tokens of the text.

        Args:
            text: Any text without surrogates.
            size: About how many characters the first piece should have; later pieces grow.

        Yields:
            Pieces that leave out what has no tokens, and stand in for what is one unknown word however long.
        """
        if not self._cuts:
            yield text
            return
        for piece in self._split(self._separator, text, max(size, _SMALLEST_PIECE)):
            yield from self._bounded(piece, max(size, _SMALLEST_PIECE))

    def _split(self, separator: re.Pattern[str], text: str, size: int) -> Iterator[str]:
        position = 0
        while True:
            # What is deleted or white space has no tokens, at the start of a piece in any number.
            match = self._skipped.match(text, position)
            start = match.end() if match else position
            if start >= len(text):
                return
            position = self._cut(separator, text, start + size)
            yield text[start:position]
            size = min(2 * size, _LARGEST_PIECE)

    def _cut(self, separator: re.Pattern[str], text: str, start: int) -> int:
        """Return the first place at or after ``start`` where a cut changes nothing."""
        for match in separator.finditer(text, max(start - 1, 0)):
            for place in match.span():
                if place >= start and not self._breaks_added_token(text, place):
                    return place
        return len(text)

    def _breaks_added_token(self, text: str, place: int) -> bool:
        return any(
            text.find(token, max(place - len(token) + 1, 0), place + len(token) - 1) >= 0 for token in self._unbroken
        )

    def _bounded(self, piece: str, size: int) -> Iterator[str]:
        """Yield a piece in parts in which no run without a separator is longer than it must be.

        The library needs half a second and 70 MB for each million characters of such a run, more where it
        consists of punctuation beyond ASCII. What a character does in a word does not depend on its
        neighbours, so the library itself is asked about each distinct one, between two letters.
        """
        runs = self._long_run.findall(piece) if self._shortens and len(piece) >= self._long else []
        characters = set().union(*runs)
        if not runs or sum(map(len, runs)) < _RUN_PER_CHARACTER * len(characters):
            # Nothing to shorten, or asking would take longer than reading.
            yield piece
            return
        roles: dict[str, list[str]] = {"letter": [], "removable": [], "deleted": [], "separator": [], "unclear": []}
        for character in characters:
            roles[self._role(character)].append(character)
        separators = self._separators + _class_of(roles["separator"])
        run = re.compile(f"[^{separators}{_class_of(roles['unclear'])}]{{{self._long},}}")
        piece = run.sub(lambda match: self._shorter_run(match[0], roles), piece)
        yield from self._split(re.compile(f"[{separators}]"), piece, size)

    def _role(self, character: str) -> str:
        """Return what one character does between two letters."""
        words = self._words(f"a{character}a")
        if len(words) == 1:
            kept = len(words[0]) - len("aa")
            if kept > 0:
                return "letter"
            # Removing a mark that has a combining class leaves the order of all other marks as it is.
            removable = unicodedata.combining(character) or (self._clean_text and re.match(f"[{_DELETED}]", character))
            return "removable" if removable else "deleted"
        isolated = words[0] == words[-1] == "a" and (len(words) == 2 or (len(words) == 3 and len(words[1]) == 1))
        return "separator" if isolated else "unclear"

    def _shorter_run(self, run: str, roles: dict[str, list[str]]) -> str:
        """Return a run that tokenizes like this one: nothing in it separates words, so it lies in one word.

        Both ends stay: an added token that lies across an end is found as before. None lies within, because
        each holds ASCII punctuation. In between, more letters than a word may have are as good as any number
        of them. Without so many it is the characters that leave no trace that make the run long; some of them
        keep combining marks from changing places, so one of each kind stays between two letters.
        """
        middle = run[self._run_end : -self._run_end]
        # A space stands in no run; it keeps the character class from being empty.
        silent = " " + _class_of(roles["removable"] + roles["deleted"])
        letters = islice(re.finditer(f"[^{silent}]", middle), self._longest_word + 1)
        shorter = "".join(match[0] for match in letters)
        if len(shorter) <= self._longest_word:
            removable = set(roles["removable"])
            shorter = re.sub(
                f"[{silent}]+", lambda m: "".join(c for c in dict.fromkeys(m[0]) if c not in removable), middle
            )
        return run[: self._run_end] + shorter + run[-self._run_end :]


def _is_cuttable(token: AddedToken) -> bool:
    """Whether a cut beside a separator that breaks no occurrence of this token as typed is invisible to it."""
    if not token.plain:
        return False
    if token.normalized:
        # Looked for after deletions, so its occurrences can't be seen in the text; but it holds no separator.
        return token.content.isascii() and token.content.isalnum()
    return not re.search(f"[{_SPACES}{_DELETED}]", token.content)


def _stays_out_of_runs(token: AddedToken) -> bool:
    """Whether no occurrence of this token can lie within a run without separators."""
    punctuated = any(character in string.punctuation for character in token.content)
    return not token.normalized and punctuated and len(token.content) <= _LONGEST_TOKEN


def _class_of(characters: list[str]) -> str:
    """Return characters as they may stand in a character class."""
    return re.escape("".join(characters))
