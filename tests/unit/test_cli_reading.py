"""The command line's input: UTF-8, JSONL and text, and where every mistake stands."""

import io
import json
import sys

import pytest

from minice.cli.reading import (
    Line,
    check_fields,
    choose_input_format,
    join_fields,
    json_records,
    parse_object,
    raw_members,
    read_lines,
    string_member,
    text_records,
)
from minice.errors import InputError


def lines(*texts: str) -> list[Line]:
    return [Line(where=f"notes:{i}", text=text) for i, text in enumerate(texts, 1)]


def read(tmp_path, data: bytes) -> list[str]:
    (tmp_path / "notes.txt").write_bytes(data)
    return [line.text for line in read_lines(str(tmp_path / "notes.txt"))]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\r\ntwo\r\n", ["one", "", "two"]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        (b"\xef\xbb\xbf", []),
        # Only a line feed ends a line: these stand in the middle of one.
        ("a\u2028b\x85c\x0bd\x0ce\rf\n".encode(), ["a\u2028b\x85c\x0bd\x0ce\rf"]),
        ("日本 😀\n".encode(), ["日本 😀"]),
    ],
)
def test_lines(tmp_path, data, expected):
    assert read(tmp_path, data) == expected


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("before", [b"", b"good\n", "日本\n\n".encode()])
def test_bytes_that_are_not_utf8_are_named(tmp_path, mark, before):
    path = tmp_path / "notes.txt"
    path.write_bytes(mark + before + b"ab\xe9cd\n")
    with pytest.raises(InputError) as caught:
        read_lines(str(path))
    place = 3 + (len(mark) if not before else 0)
    number = before.count(b"\n") + 1
    assert caught.value.where == f"{path}:{number}"
    assert caught.value.message == f"expected UTF-8, got byte 0xe9 at byte {place} of the line"


def test_utf16_is_called_by_its_name(tmp_path):
    (tmp_path / "notes.txt").write_bytes("one\n".encode("utf-16"))
    with pytest.raises(InputError, match="is UTF-16; expected UTF-8"):
        read_lines(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["missing.txt", ".", "nul\0byte"])
def test_what_cannot_be_read_is_an_input_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="cannot be read") as caught:
        read_lines(name)
    assert caught.value.where == name


def test_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode()), encoding="ascii"))
    assert read_lines("-") == [Line(where="<stdin>:1", text="é")]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="stdin is closed"):
        read_lines("-")


@pytest.mark.parametrize(
    ("name", "first", "expected"),
    [
        ("a.jsonl", "plain words", "jsonl"),
        ("a.NDJSON", "plain words", "jsonl"),
        ("a.json-lines", "plain words", "jsonl"),
        ("a.txt", '{"text": "x"}', "text"),
        ("a.md", '{"text": "x"}', "text"),
        ("-", '{"text": "x"}', "jsonl"),
        ("-", '  {"text": 1e999}', "jsonl"),
        ("a.log", "{not json", "text"),
        ("a.json", '{"text": "x"}', "jsonl"),
        ("-", "[note] call mum", "text"),
        ("-", "[1] a footnote", "text"),
        ("-", "{braces} in a template", "text"),
    ],
)
def test_auto_goes_by_the_name_then_by_the_first_line(name, first, expected):
    assert choose_input_format("auto", name, lines("", "  ", first, "{")) == expected


def test_what_was_asked_wins_over_the_name():
    assert choose_input_format("text", "a.jsonl", lines("{}")) == "text"
    assert choose_input_format("jsonl", "a.txt", lines("x")) == "jsonl"
    assert choose_input_format("auto", "-", []) == "text"


def test_a_json_document_is_not_taken_for_passages():
    with pytest.raises(InputError, match="expected JSONL, one object a line, got a JSON array"):
        choose_input_format("auto", "a.json", lines("[", '{"text": "x"}', "]"))
    with pytest.raises(InputError, match="expected JSONL, one object a line, got something else"):
        choose_input_format("auto", "a.json", lines("plain words"))


@pytest.mark.parametrize(
    ("document", "got"),
    [
        (["[", '{"text": "x"},', '{"text": "y"}', "]"], "a JSON array"),
        (["", '[{"text": "x"}, {"text": "y"}]'], "a JSON array"),
        (['["x", "y"]'], "a JSON array"),
        (["[1,", "2]"], "a JSON array"),
        (["[[1,", "2]]"], "a JSON array"),
        (['["cut off'], "a JSON array"),
        (["[" * 100_000], "a JSON array"),
        (["{", '  "text": "x"', "}"], "a JSON object"),
        (['{"text": "x"'], "a JSON object"),
        (['{"a":' * 100_000], "a JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["-", "notes", "notes.log"])
def test_a_json_document_is_not_ranked_as_text(name, document, got):
    with pytest.raises(InputError, match=f"expected JSONL, .*got {got}") as caught:
        choose_input_format("auto", name, lines(*document))
    assert "--input-format text" in caught.value.message
    assert caught.value.where == f"notes:{1 + (document[0] == '')}"
    assert choose_input_format("text", name, lines(*document)) == "text"
    assert choose_input_format("auto", "notes.txt", lines(*document)) == "text"


def test_text_skips_blank_lines_and_jsonl_keeps_blank_texts():  # FR 17
    assert [r.texts for r in text_records(lines("one", "", " \t", "two "))] == [("one",), ("two ",)]
    found = json_records(lines('{"text": " "}', "", ' {"text": ""} '), lambda line, r: (r["text"],))
    assert [r.texts for r in found] == [(" ",), ("",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain", "expected one JSON object, but at character 1: Expecting value; the line starts with 'plain'"),
        (
            '{"text": "x"',
            "expected one JSON object, but at character 13: Expecting ',' delimiter; "
            'the line starts with \'{"text": "x"\'',
        ),
        (
            '{"text": "x"} {}',
            'expected one JSON object, but at character 15: Extra data; the line starts with \'{"text": "x"} {}\'',
        ),
        (
            "x" * 41,
            f"expected one JSON object, but at character 1: Expecting value; the line starts with '{'x' * 40}...'",
        ),
        ('["text"]', "expected a JSON object, got an array"),
        ('"text"', "expected a JSON object, got a string"),
        ("3", "expected a JSON object, got a number"),
        ("null", "expected a JSON object, got null"),
        ("true", "expected a JSON object, got a boolean"),
        ('{"text": "x", "n": NaN}', "NaN is not JSON"),
        ('{"text": "x", "n": [-Infinity]}', "-Infinity is not JSON"),
        ('{"text": "x", "text": "y"}', "the key 'text' stands twice in one object"),
        ('{"text": "x", "m": {"a": 1, "\\u0061": 2}}', "the key 'a' stands twice in one object"),
        ('{"text": ' + "[" * 100_000, "JSON is nested too deeply"),
    ],
)
def test_a_line_that_is_not_one_object_is_named(text, message):
    with pytest.raises(InputError) as caught:
        parse_object(Line(where="notes:7", text=text))
    assert str(caught.value) == f"notes:7: {message}"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        ' { "a" : 1 , "b":[ 1,2 ] } ',
        '{"big": 123456789012345678901234567890.10, "tiny": 1e-400, "huge": 1E+999, "zero": -0}',
        '{"digits": ' + "7" * 5000 + "}",
        '{"k\\u0065y": "\\ud800 \\" } , ]", "": {"}": "{"}}',
        '{"nested": {"a": [{"b": null}, true, false]}, "emoji": "😀"}',
    ],
)
def test_members_are_carried_as_they_were_written(text):
    members = raw_members(text)
    assert [key for key, _ in members] == list(parse_object(Line(where="", text=text)))
    for _, raw in members:
        assert raw == raw.strip()
        assert raw in text
    joined = "{" + ",".join(f"{json.dumps(key)}:{raw}" for key, raw in members) + "}"
    assert json.loads(joined, parse_int=str, parse_float=str) == json.loads(text, parse_int=str, parse_float=str)


def test_a_missing_text_names_the_keys_there_are():
    line = Line(where="notes:2", text="")
    with pytest.raises(InputError) as caught:
        string_member(line, {"title": "a", "body": "b"}, "text")
    assert str(caught.value) == "notes:2: expected the key 'text', got 'title', 'body'"
    with pytest.raises(InputError, match="expected the key 'text', got no keys"):
        string_member(line, {}, "text")
    with pytest.raises(InputError, match="expected a string under 'text', got null"):
        string_member(line, {"text": None}, "text")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"title": "a", "text": "b"}, "a b"),
        ({"text": "b", "title": "a", "more": "c"}, "a b"),
        ({"title": "", "text": "b"}, "b"),
        ({"title": None, "text": "b"}, "b"),
        ({"text": "b"}, "b"),
        ({"title": ""}, ""),
        ({"title": " a ", "text": "b"}, " a  b"),
    ],
)
def test_fields_are_joined_by_one_space(record, expected):
    assert join_fields(Line(where="n:1", text=""), record, ("title", "text")) == expected


def test_fields_that_cannot_be_joined():
    line = Line(where="n:4", text="")
    with pytest.raises(InputError, match=r"n:4: expected a string under 'title', got an array"):
        join_fields(line, {"title": ["a"], "text": "b"}, ("title", "text"))
    with pytest.raises(InputError, match=r"n:4: has none of the fields 'title', 'text'"):
        join_fields(line, {"title": None}, ("title", "text"))


def test_a_field_that_no_record_has_names_the_nearest():  # FR 147
    records = lines('{"title": "a", "text": "b"}', "", '{"url": "c"}')
    check_fields(("title", "url"), records)
    with pytest.raises(InputError, match="no record has the field 'titel'; did you mean 'title'"):
        check_fields(("titel", "text"), records)
    with pytest.raises(InputError, match="no record has the field 'xyz'; keys there: 'title', 'text', 'url'"):
        check_fields(("xyz",), records)
    check_fields(("anything",), [])
