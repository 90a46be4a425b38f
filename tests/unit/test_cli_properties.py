"""Laws of the command line's input and output: whatever comes in, nothing is lost and nothing crashes."""

import json
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minice.cli.encoder import best_first, result_line
from minice.cli.reading import Line, json_records, parse_object, raw_members, read_lines, text_records
from minice.cli.writing import columns, fit, harmless
from minice.errors import InputError

OURS = ("rank", "index", "logit", "score", "model_id")
keys = st.one_of(st.sampled_from([*OURS, "input", "text", "id"]), st.text(max_size=5))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
records = st.dictionaries(keys, values, max_size=6)


@given(records, st.booleans(), st.sampled_from([None, 1]), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_record_survives_whatever_its_keys_are(record, escaped, indent, logit):
    line = Line(where="in:1", text=json.dumps(record, ensure_ascii=escaped, indent=indent).replace("\n", " "))
    (scored,) = json_records([line], lambda line, parsed: ("",))
    out = json.loads(result_line(scored, np.float32(logit), "model", rank=1, index=0))
    assert np.float32(out["logit"]) == np.float32(logit)
    hidden = {key: value for key, value in record.items() if key in (*OURS, "input")}
    assert out.get("input", {}) == hidden
    assert {key: value for key, value in out.items() if key not in (*OURS, "input")} == {
        key: value for key, value in record.items() if key not in hidden
    }


@given(st.text())
def test_any_text_is_parsed_or_refused(text):
    line = Line(where="in:1", text=text)
    try:
        parsed = parse_object(line)
    except InputError:
        return
    assert [key for key, _ in raw_members(text)] == list(parsed)


@given(st.binary())
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    try:
        lines = read_lines(str(path))
    except InputError:
        return
    joined = "\n".join(line.text for line in lines)
    assert joined.replace("\r", "").rstrip("\n") == data.decode("utf-8-sig").replace("\r", "").rstrip("\n")
    assert all(record.texts[0].strip() for record in text_records(lines))


@given(st.text(), st.integers(12, 60))
def test_nothing_reaches_a_terminal_that_it_would_act_on(text, width):
    for shown in (harmless(text), fit(text, width)):
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029\u202e" for c in shown)
        shown.encode("utf-8")
    assert columns(fit(text, width)) <= width


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_best_first_is_a_stable_sort(logits):
    order = best_first([np.float32(logit) for logit in logits])
    assert sorted(order) == list(range(len(logits)))
    for before, after in pairwise(order):
        assert logits[before] > logits[after] or (logits[before] == logits[after] and before < after)
