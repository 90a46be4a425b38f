"""The command line's parser: every mistake at once, exact names, no guessing."""

import pytest

from minice.cli.arguments import (
    Command,
    HelpRequested,
    Option,
    Positional,
    nearest,
    parse,
    read_choice,
    read_count,
    read_text,
    usage,
)
from minice.errors import ConfigError

COMMAND = Command(
    name="try",
    summary="a verb",
    description="Does nothing.",
    example="minice try x",
    run=lambda arguments: 0,
    positionals=(
        Positional(name="QUERY", help="what to look for", read=read_text),
        Positional(name="FILE", help="the passages", required=False),
    ),
    options=(
        Option(name="top-n", metavar="N", help="how many", read=read_count(0)),
        Option(name="format", metavar="jsonl|table", help="how", read=read_choice("jsonl", "table")),
        Option(name="deep", help="look closely"),
    ),
    check=lambda arguments: ["deep does not go with table"] * (arguments["deep"] and arguments["format"] == "table"),
)


def mistakes(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(COMMAND, argv)
    *lines, last = caught.value.message.splitlines()
    assert last == "Run: minice try --help"
    return lines


def test_options_may_stand_anywhere_and_defaults_fill_the_rest():
    assert parse(COMMAND, ["--top-n", "3", "q", "--deep", "-"]) == {
        "query": "q", "file": "-", "top_n": 3, "format": None, "deep": True,
    }  # fmt: skip
    assert parse(COMMAND, ["--top-n=0", "q"]) == {
        "query": "q", "file": None, "top_n": 0, "format": None, "deep": False,
    }  # fmt: skip


def test_two_dashes_end_the_options():
    assert parse(COMMAND, ["--", "--deep", "--help"])["query"] == "--deep"


def test_an_empty_text_is_a_text():
    assert parse(COMMAND, ["", "--format=jsonl"])["query"] == ""


@pytest.mark.parametrize("value", ["-1", "1.5", "True", "3 ", "1_0", "٣", "", "+3", "1e3", "9" * 5000])
def test_a_count_is_plain_digits(value):  # FR 63
    (line,) = mistakes("q", "--top-n", value)
    assert line == f"--top-n: expected a whole number of at least 0, got {value!r}"


def test_every_mistake_is_reported():
    assert mistakes("--topn", "3", "--format", "xml", "--top-n", "-1", "--verbose", "--deep=yes") == [
        "unknown option '--topn': did you mean --top-n?",
        "unknown option '--verbose': try takes no such option",
        "--deep takes no value, got 'yes'",
        "--format: expected jsonl or table, got 'xml'",
        "--top-n: expected a whole number of at least 0, got '-1'",
        "QUERY is missing: what to look for",
    ]


def test_values_that_do_not_go_together_are_reported_with_the_rest():
    assert mistakes("q", "f", "x", "y", "--deep", "--format", "table") == [
        "unexpected: 'x' 'y' (one FILE only; put quotes around a value with spaces)",
        "deep does not go with table",
    ]


def test_a_value_is_needed_and_options_come_once():
    assert mistakes("q", "--top-n", "--deep", "--deep") == [
        "--top-n needs a value: how many",
        "--deep is given twice",
    ]
    assert mistakes("q", "--top-n") == ["--top-n needs a value: how many"]
    assert mistakes("q", "--top-n", "1", "--top-n", "2") == ["--top-n is given twice"]


def test_the_value_of_an_unknown_option_is_not_a_second_mistake():
    assert mistakes("--window", "3", "q", "f") == ["unknown option '--window': try takes no such option"]
    assert mistakes("-5 degrees", "f") == ["unknown option '-5 degrees': put -- before a text that starts with a dash"]


def test_names_are_not_abbreviated():
    assert mistakes("q", "--form", "table") == ["unknown option '--form': did you mean --format?"]


def test_a_single_dash_is_not_an_option_prefix():
    assert mistakes("-v") == [
        "unknown option '-v': put -- before a text that starts with a dash",
        "QUERY is missing: what to look for",
    ]


def test_a_query_that_is_not_utf8_is_a_mistake():
    assert mistakes("caf\udce9") == ["QUERY: not valid UTF-8"]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--nonsense", "--help"], ["q", "f", "--help"]])
def test_help_wins_over_mistakes(argv):
    with pytest.raises(HelpRequested):
        parse(COMMAND, argv)


def test_usage_names_everything():
    text = usage(COMMAND)
    assert text.startswith("usage: minice try QUERY [FILE] [options]\n")
    for part in ("QUERY", "--top-n N", "--format jsonl|table", "--deep", "--help", "minice try x"):
        assert part in text


def test_nearest_is_none_when_nothing_is_near():
    assert nearest("titel", ["title", "text"]) == "title"
    assert nearest("zzz", ["title", "text"]) is None
