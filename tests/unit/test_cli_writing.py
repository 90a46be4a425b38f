"""The command line's output: nothing a terminal would act on, columns that line up, JSON that is UTF-8."""

import json

import pytest

from minice.cli.writing import choose_format, columns, fit, harmless, table, to_json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ünïcode 日本 😀", "plain ünïcode 日本 😀"),
        ("a\tb\nc\rd", "a b c d"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b31m", r"\x9b31m"),
        ("\x07\x00\x7f", r"\x07\x00\x7f"),
        ("user\u202etxt.exe", r"user\u202etxt.exe"),
        ("a\u2028b", r"a\u2028b"),
        ("\ud800", r"\ud800"),
        ("👩\u200d👩\u200d👧", "👩\u200d👩\u200d👧"),
    ],
)
def test_harmless(text, expected):
    assert harmless(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("abc", 3), ("日本", 4), ("e\u0301", 1), ("é", 1), ("😀", 2), ("", 0), ("ｱ", 1)]
)
def test_columns(text, expected):
    assert columns(text) == expected


@pytest.mark.parametrize("text", ["", "short", "x" * 50, "日本" * 30, "e\u0301" * 40, "a\nb  c\x1b" * 9, "😀 " * 40])
@pytest.mark.parametrize("width", [12, 13, 40])
def test_fit_never_exceeds_the_width(text, width):
    line = fit(text, width)
    assert columns(line) <= width
    assert line.endswith("…") == (columns(harmless(" ".join(text.split()))) > width)


def test_fitting_a_long_text_reads_a_part_of_it():
    assert fit("word " * 10_000_000, 12) == "word word w…"


def test_table_lines_up(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [["1", "-0.500", "日本語 note"], ["12", "13.250", "a long passage that will be cut\x1b here"]]
    assert table(["rank", "logit", "passage"], rows, elastic=[2]).splitlines() == [
        "rank   logit  passage",
        "   1  -0.500  日本語 note",
        "  12  13.250  a long passage that will…",
    ]


def test_a_narrow_terminal_still_gets_a_passage(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    assert table(["rank", "passage"], [["1", "words and more words"]], elastic=[1]).splitlines()[1] == (
        "   1  words and m…"
    )


def test_json_is_readable_and_always_utf8():  # FR 20
    assert to_json({"a": "日本 😀"}) == '{"a": "日本 😀"}'
    broken = {"a": "日 \ud800"}
    assert json.loads(to_json(broken).encode("utf-8")) == broken


def test_format_follows_what_was_asked_then_the_terminal(monkeypatch, capsys):
    assert choose_format("table") == "table"
    assert choose_format(None) == "jsonl"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert choose_format(None) == "table"
    assert choose_format("jsonl") == "jsonl"
