"""Texts that are rich in what tokenizers stumble over."""

from hypothesis import strategies as st

CONTROL_TOKENS = ["[SEP]", "[CLS]", "[PAD]", "[MASK]", "[UNK]", "[SEP", "SEP]", "[[SEP]]", "[ SEP ]", "[sep]"]
# Deleted by BertNormalizer, though some of them look like white space.
DELETED = list("\x00\x0b\x0c\x1c\x1d\x1e\x1f\x85\u00ad\u200b\u200d\u2060\ufeff\ufffd")
WHITE_SPACE = list(" \t\n\r\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000")
MARKS = list("\u0300\u0301\u0323\u034f\u0344\u0f73\u302a\u302e\u0334\ufe0f\u20e3")
IDEOGRAPHS = list("中文㐀龥龿豈﨎\U00020000\U0002a6df\U0002b740")
PUNCTUATION = list(".,-_[]#'$^`") + list("。、·“…¿՞།፡")
WORDS = [
    "the",
    "passage",
    "reranking",
    "İstanbul",
    "café",
    "straße",
    "한국",
    "各",
    "שלום",
    "سلام",
    "ไทย",
    "a" * 101,
    "≮",
    "Å",
]
PIECES = [CONTROL_TOKENS, DELETED, WHITE_SPACE, MARKS, IDEOGRAPHS, PUNCTUATION, WORDS]

pieces = st.one_of(*map(st.sampled_from, PIECES), st.characters(exclude_categories=["Cs"]))


def nasty_texts(*, max_size: int = 40) -> st.SearchStrategy[str]:
    """Texts of up to ``max_size`` pieces."""
    return st.lists(pieces, max_size=max_size).map("".join)


@st.composite
def long_nasty_texts(draw: st.DrawFn) -> str:
    """Texts of some thousand characters that a shuffle makes of a few pieces, with and without long runs."""
    chosen = draw(st.lists(pieces, min_size=1, max_size=8))
    random = draw(st.randoms(use_true_random=False))
    parts = random.choices(chosen, k=draw(st.sampled_from([50, 300, 900])))
    repeats = [piece * random.choice([1, 1, 1, 1, 30, 200]) for piece in parts[:40]]
    return "".join(random.sample(repeats + parts, k=len(repeats) + len(parts)))


normalizers = st.fixed_dictionaries(
    {
        "type": st.just("BertNormalizer"),
        "clean_text": st.booleans(),
        "handle_chinese_chars": st.booleans(),
        "strip_accents": st.sampled_from([None, True, False]),
        "lowercase": st.booleans(),
    }
)
