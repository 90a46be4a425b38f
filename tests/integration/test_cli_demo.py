"""``minice demo`` shows what the model and the first stage really say."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from minice import CrossEncoder
from minice.cli import demo, encoder, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _embedded_model(monkeypatch):
    for name in ("MINICE_MODEL", "MINICE_MODEL_DIR", "MINICE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def logits():
    """[query][note] logits of the library."""
    data = demo.load()
    with CrossEncoder.open() as opened:
        return [opened.score(entry["query"], data["notes"]) for entry in data["queries"]]


def test_the_file_is_what_the_tool_writes():
    pytest.importorskip("bm25s")
    spec = importlib.util.spec_from_file_location("make_demo", ROOT / "tools" / "make_demo.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.demo() == demo.load()


def test_there_is_something_to_see():
    data = demo.load()
    assert len(data["notes"]) == len(set(data["notes"])) == 20
    assert len(data["queries"]) == 3
    for entry in data["queries"]:
        scores = [score for _, score in entry["first_stage"]]
        assert len(scores) >= 3
        assert scores == sorted(scores, reverse=True)


def test_every_number_of_the_jsonl_is_the_librarys(logits, capsysbinary):
    assert main(["demo"]) == 0  # no terminal
    out, err = capsysbinary.readouterr()
    assert err == b""
    rows = [json.loads(line) for line in out.decode("utf-8").splitlines()]
    data = demo.load()
    expected = []
    for entry, values in zip(data["queries"], logits, strict=True):
        found = [index for index, _ in entry["first_stage"]]
        scores = dict(map(tuple, entry["first_stage"]))
        for rank, index in enumerate(np.argsort(-values, kind="stable").tolist(), 1):
            expected.append(
                {
                    "query": entry["query"],
                    "rank": rank,
                    "index": index,
                    "first_stage_rank": found.index(index) + 1 if index in found else None,
                    "first_stage_score": scores.get(index),
                    "logit": float(str(values[index])),
                    "score": encoder.sigmoid(float(values[index])),
                    "text": data["notes"][index],
                }
            )
    model_ids = {row.pop("model_id") for row in rows}
    assert rows == expected
    with CrossEncoder.open() as opened:
        assert model_ids == {opened.model_id}


def test_every_number_of_the_table_is_the_librarys(logits, capsysbinary, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # nothing is cut
    assert main(["demo", "--format", "table"]) == 0
    *blocks, footer = capsysbinary.readouterr().out.decode("utf-8").split("\n\n")
    data = demo.load()
    for block, entry, values in zip(blocks, data["queries"], logits, strict=True):
        query, header, *lines = block.splitlines()
        assert query == entry["query"]
        assert header.split() == ["rank", "BM25", "first", "stage", "logit", "minice"]
        assert len(lines) == demo.SHOWN
        order = np.argsort(-values, kind="stable")
        for place, line in enumerate(lines):
            index = int(order[place])
            assert line.endswith(f"{values[index]:.3f}  {data['notes'][index]}")
            if place < len(entry["first_stage"]):
                before, score = entry["first_stage"][place]
                assert line.lstrip().startswith(f"{place + 1}  {score:.2f}  {data['notes'][before]}")
    assert "minice-l6@" in footer
