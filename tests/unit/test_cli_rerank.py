"""``minice rerank`` and ``minice score`` around a stand-in encoder: order, carried keys, edges."""

import json
import math

import numpy as np
import pytest

from minice.cli import encoder, main, rerank, score
from minice.errors import IntegrityError


class StandIn:
    """An encoder whose logit of a passage is the number it starts with."""

    model_id = "stand-in:0"

    def __init__(self):
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def score_pairs(self, pairs):
        self.calls.append(pairs)
        return np.array([float(passage.split()[0]) for _, passage in pairs], dtype=np.float32)


@pytest.fixture
def stand_in(monkeypatch):
    made = StandIn()
    for verb in (rerank, score):
        monkeypatch.setattr(verb, "open_encoder", lambda arguments: made)
    return made


@pytest.fixture
def no_model(monkeypatch):
    def fail(arguments):
        raise AssertionError("a model was opened")

    for verb in (rerank, score):
        monkeypatch.setattr(verb, "open_encoder", fail)


@pytest.fixture
def run(tmp_path, capsysbinary):
    def run(verb, content, *options, name="notes.jsonl", query=("q",)):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        code = main([verb, *(query if verb == "rerank" else ()), str(path), *options])
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode().replace(str(tmp_path) + "/", "")

    return run


def rows(out):
    return [json.loads(line) for line in out.splitlines()]


def test_best_first_with_what_made_the_number(run, stand_in):  # FR 28
    code, out, err = run("rerank", "-1 a\n3.49 b\n0 c\n", name="notes.txt")
    assert (code, err) == (0, "")
    assert rows(out) == [
        {"rank": 1, "index": 1, "logit": 3.49, "score": 1 / (1 + math.exp(-float(np.float32(3.49)))),
         "model_id": "stand-in:0", "text": "3.49 b"},
        {"rank": 2, "index": 2, "logit": 0.0, "score": 0.5, "model_id": "stand-in:0", "text": "0 c"},
        {"rank": 3, "index": 0, "logit": -1.0, "score": math.exp(-1) / (1 + math.exp(-1)),
         "model_id": "stand-in:0", "text": "-1 a"},
    ]  # fmt: skip
    assert stand_in.calls == [[("q", "-1 a"), ("q", "3.49 b"), ("q", "0 c")]]


def test_order_follows_the_logit_where_scores_are_equal(run, stand_in):  # FR 28, FR 29
    found = rows(run("rerank", "50 a\n60 b\n50 c\n", name="n.txt")[1])
    assert [row["index"] for row in found] == [1, 0, 2]
    assert len({row["score"] for row in found}) == 1


def test_ties_keep_input_order(run, stand_in):  # FR 49
    found = rows(run("rerank", "1 a\n2 b\n1 c\n2 d\n1 e\n", name="n.txt")[1])
    assert [row["index"] for row in found] == [1, 3, 0, 2, 4]


@pytest.mark.parametrize(("top_n", "expected"), [("1", 1), ("2", 2), ("3", 3), ("99", 3)])
def test_top_n_cuts_behind_the_sort(run, stand_in, top_n, expected):  # FR 47
    found = rows(run("rerank", "1 a\n2 b\n3 c\n", "--top-n", top_n, name="n.txt")[1])
    assert [row["index"] for row in found] == [2, 1, 0][:expected]


@pytest.mark.parametrize("output", ["jsonl", "table"])
def test_top_n_zero_and_no_passages_need_no_model(run, no_model, output):  # FR 13, FR 65
    assert run("rerank", "1 a\n", "--top-n", "0", "--format", output, name="n.txt") == (0, "", "")
    assert run("rerank", "\n \n", "--format", output, name="n.txt") == (0, "", "")
    assert run("rerank", "", "--format", output) == (0, "", "")
    assert run("score", "\n", "--format", output) == (0, "", "")


def test_top_n_zero_still_reads_the_input(run, no_model):
    code, out, err = run("rerank", '{"text": 3}\n', "--top-n", "0")
    assert (code, out) == (2, "")
    assert err == "minice: error: notes.jsonl:1: expected a string under 'text', got a number\n"


def test_other_keys_come_back_as_they_were_written(run, stand_in):  # FR 56
    record = r'{"id": 12345678901234567890123, "text": "1 \ud800", "price": 1.10, "tags": [ "a" ], "x": {}}'
    _, out, _ = run("rerank", record + "\r\n")
    ours, own = out.split('"stand-in:0", ')
    assert own == record[1:] + "\n"
    assert list(json.loads(ours + '"stand-in:0"}')) == ["rank", "index", "logit", "score", "model_id"]


def test_keys_named_like_ours_stand_under_input(run, stand_in):
    _, out, _ = run("rerank", '{"score": 0.10, "text": "1", "rank": "first", "input": [1]}\n')
    assert out.endswith('"input": {"score": 0.10, "rank": "first", "input": [1]}, "text": "1"}\n')
    (row,) = rows(out)
    assert (row["rank"], row["index"], row["logit"]) == (1, 0, 1.0)
    # Ranking a ranking keeps working, and loses nothing.
    (again,) = rows(run("rerank", out)[1])
    assert again["input"]["input"] == row["input"]
    assert again["text"] == "1"


def test_rank_is_free_where_score_does_not_write_it(run, stand_in):
    _, out, _ = run("score", '{"query": "q", "passage": "2", "rank": 7}\n')
    assert rows(out)[0]["rank"] == 7


def test_score_keeps_input_order(run, stand_in):
    content = '{"query": "a", "passage": "-5", "id": 1}\n\n{"passage": "5", "query": "b"}\n'
    code, out, err = run("score", content)
    assert (code, err) == (0, "")
    assert [(r["index"], r["logit"], r["query"], r.get("id")) for r in rows(out)] == [
        (0, -5.0, "a", 1),
        (1, 5.0, "b", None),
    ]
    assert stand_in.calls == [[("a", "-5"), ("b", "5")]]


def test_logits_are_written_with_the_fewest_digits_that_read_back(run, stand_in):
    _, out, _ = run("rerank", "0.1 a\n1e-7 b\n-12345.678 c\n", name="n.txt")
    texts = [line.split('"logit": ')[1].split(",")[0] for line in out.splitlines()]
    assert texts == ["0.1", "1e-07", "-12345.678"]
    assert [np.float32(text) for text in texts] == [np.float32(t) for t in ("0.1", "1e-7", "-12345.678")]


def test_fields_choose_what_is_read(run, stand_in):
    content = '{"title": "1", "text": "x"}\n{"text": "2"}\n{"title": "", "text": "3"}\n'
    found = rows(run("rerank", content, "--fields", "title, text")[1])
    assert stand_in.calls == [[("q", "1 x"), ("q", "2"), ("q", "3")]]
    assert found[0] == {**found[0], "title": "", "text": "3"}


def test_a_title_is_never_read_in_silence(run, stand_in):
    run("rerank", '{"title": "9", "text": "1"}\n')
    assert stand_in.calls == [[("q", "1")]]
    code, _, err = run("rerank", '{"title": "9", "body": "1"}\n')
    assert code == 2
    assert err == "minice: error: notes.jsonl:1: expected the key 'text', got 'title', 'body'\n"


@pytest.mark.parametrize("value", ["", "title,,text", "title,title", ","])
def test_fields_are_names(run, no_model, value):
    code, _, err = run("rerank", "{}", "--fields", value)
    assert code == 2
    assert "--fields: expected names with a comma between them, each once" in err


def test_a_field_nobody_has_is_an_error(run, no_model):  # FR 147
    code, _, err = run("rerank", '{"title": "a"}\n{"text": "b"}\n', "--fields", "titel,text")
    assert code == 2
    assert err == "minice: error: --fields: no record has the field 'titel'; did you mean 'title'?\n"


@pytest.mark.parametrize(
    ("verb", "content", "where"),
    [
        ("rerank", '{"text": "1"}\nnot json\n', "notes.jsonl:2: expected one JSON object"),
        ("rerank", b'{"text": "1"}\n{"text": "\xff"}\n', "notes.jsonl:2: expected UTF-8, got byte 0xff at"),
        ("score", '{"query": "q"}\n', "notes.jsonl:1: expected the key 'passage', got 'query'"),
        ("score", '{"query": null, "passage": ""}\n', "notes.jsonl:1: expected a string under 'query'"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_input_names_its_line(run, no_model, verb, content, where):
    code, out, err = run(verb, content)
    assert (code, out) == (2, "")
    assert err.startswith(f"minice: error: {where}")


def test_every_mistake_at_once(no_model, capsysbinary):
    options = ["--top-n", "-1", "--format=xml", "--fieldz", "a", "--threads", "0", "--max-length", "4"]
    assert main(["rerank", "q", *options]) == 2
    out, err = capsysbinary.readouterr()
    assert out == b""
    assert err.decode().splitlines() == [
        "minice: error: unknown option '--fieldz': did you mean --fields?",
        "minice: error: --top-n: expected a whole number of at least 0, got '-1'",
        "minice: error: --format: expected jsonl or table, got 'xml'",
        "minice: error: --threads: expected a whole number of at least 1, got '0'",
        "minice: error: --max-length: expected a whole number of at least 5, got '4'",
        "minice: error: FILE is missing: the passages, or - for stdin",
        "Run: minice rerank --help",
    ]


def test_values_that_do_not_go_together(run, no_model):
    code, _, err = run("rerank", "{}", "--fields", "a,b", "--input-format", "text")
    assert code == 2
    assert "--fields needs JSONL" in err


@pytest.mark.parametrize("verb", [None, "--frobnicate", "rerankk", "--top-n", "help"])
def test_the_verb_is_needed_and_known(verb, capsysbinary):
    assert main([] if verb is None else [verb, "x"]) == 2
    out, err = capsysbinary.readouterr()
    assert out == b""
    assert err.startswith(b"minice: error: ")
    if verb == "rerankk":
        assert b"did you mean rerank?" in err


@pytest.mark.parametrize("verb", [[], ["rerank"], ["score"], ["demo"], ["models"], ["verify"], ["quantize"]])
def test_help_goes_to_stdout_and_has_an_example(verb, capsysbinary):
    assert main([*verb, "--help"]) == 0
    out, err = capsysbinary.readouterr()
    assert err == b""
    assert b"example:\n  minice " in out
    assert max(map(len, out.decode().splitlines())) <= 110


def test_version(capsysbinary):
    from minice import __version__

    assert main(["--version"]) == 0
    assert capsysbinary.readouterr().out.decode() == f"minice {__version__}\n"


def test_an_error_of_the_model_keeps_its_exit_code(run, monkeypatch):
    def fail(arguments):
        raise IntegrityError("sha256 mismatch", where="minice-l6")

    monkeypatch.setattr(rerank, "open_encoder", fail)
    assert run("rerank", "1 a", name="n.txt") == (5, "", "minice: error: minice-l6: sha256 mismatch\n")


def test_ctrl_c_is_quiet(run, monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(rerank, "open_encoder", interrupt)
    assert run("rerank", "1 a", name="n.txt") == (130, "", "")


def test_a_table_shows_no_control_characters(run, stand_in, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = run(
        "rerank", '{"text": "1 \\u001b[2J\\u009b31m hidden\\nline"}\n{"text": "2 日本"}\n', "--format=table"
    )
    assert code == 0
    assert out.splitlines() == [
        "rank  index  logit   score  passage",
        "   1      1  2.000  0.8808  2 日本",
        r"   2      0  1.000  0.7311  1 \x1b[2J\x9b31m hidden line",
        "model: stand-in:0",
    ]
    assert "\x1b" not in run("score", '{"query": "\\u001b[2J", "passage": "1"}\n', "--format=table")[1]


def test_control_characters_do_not_reach_the_terminal_through_an_error(run, no_model):
    code, _, err = run("rerank", '{"\\u001b[2J": "x"}\n')
    assert code == 2
    assert "\x1b" not in err


def test_a_hundred_thousand_lines(run, stand_in):
    content = "".join(f'{{"text": "{i % 1000} words", "id": {i}}}\n' for i in range(100_000))
    code, out, _ = run("rerank", content)
    assert code == 0
    found = rows(out)
    assert len(found) == 100_000
    assert [row["id"] for row in found[:3]] == [999, 1999, 2999]
    assert max(map(len, stand_in.calls)) <= encoder.CHUNK
    assert sum(map(len, stand_in.calls)) == 100_000


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_no_pair_is_lost_at_the_edge_of_a_chunk(run, stand_in, monkeypatch, n):  # FR 73
    monkeypatch.setattr(encoder, "CHUNK", 3)
    found = rows(run("rerank", "".join(f"{i}\n" for i in range(n)), name="n.txt")[1])
    assert [row["logit"] for row in found] == [float(i) for i in reversed(range(n))]


def test_sigmoid_is_stable():  # FR 36
    assert encoder.sigmoid(-1000.0) == 0.0
    assert encoder.sigmoid(1000.0) == 1.0
    assert encoder.sigmoid(2.0) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-16)
    values = [encoder.sigmoid(x) for x in (16.5, 17.0, 18.0)]
    assert values == sorted(set(values))
