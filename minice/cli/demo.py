"""``minice demo``: what reranking does to twenty notes and three queries."""

import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from minice.cli.arguments import Arguments, Command
from minice.cli.encoder import FORMAT, MODEL_OPTIONS, best_first, open_encoder, score_pairs, sigmoid
from minice.cli.writing import choose_format, table, to_json, write

if TYPE_CHECKING:
    import numpy as np

SHOWN = 4  # rows a query in the table; JSONL has all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranked:
    """One query, and both orders of the notes.

    Attributes:
        query: The query.
        first_stage: Score of each note that the first stage found, by its index, best first.
        logits: [N] minice's logit of every note.
        order: [N] indices of the notes, best logit first.
    """

    query: str
    first_stage: dict[int, float]
    logits: "list[np.float32]"
    order: list[int]


def load() -> dict[str, Any]:
    """Return the notes, the queries and the first stage's rankings: see tools/make_demo.py."""
    text = (resources.files("minice.cli") / "demo.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def run(arguments: Arguments) -> int:
    """Rank the notes for each query and show both orders."""
    data = load()
    notes = data["notes"]
    with open_encoder(arguments) as encoder:
        rankings = []
        for entry in data["queries"]:
            logits = score_pairs(encoder, [(entry["query"], note) for note in notes])
            found = {int(i): float(score) for i, score in entry["first_stage"]}
            rankings.append(Ranked(query=entry["query"], first_stage=found, logits=logits, order=best_first(logits)))
        model_id = encoder.model_id
    if choose_format(arguments["format"]) == "jsonl":
        for ranked in rankings:
            _write_jsonl(ranked, notes, model_id)
        return 0
    for ranked in rankings:
        _write_table(ranked, notes)
    write(f"First stage: {data['first_stage']}. minice scored all {len(notes)} notes with\n{model_id}\n")
    return 0


def _write_jsonl(ranked: Ranked, notes: list[str], model_id: str) -> None:
    """Write one line a note, in minice's order; a note the first stage did not find has null there."""
    places = {index: place for place, index in enumerate(ranked.first_stage, 1)}
    for rank, i in enumerate(ranked.order, 1):
        row = {
            "query": ranked.query,
            "rank": rank,
            "index": i,
            "first_stage_rank": places.get(i),
            "first_stage_score": ranked.first_stage.get(i),
            "logit": float(str(ranked.logits[i])),  # the shortest digits that read back as the same float32
            "score": sigmoid(float(ranked.logits[i])),
            "model_id": model_id,
            "text": notes[i],
        }
        write(to_json(row) + "\n")


def _write_table(ranked: Ranked, notes: list[str]) -> None:
    found = list(ranked.first_stage.items())
    rows = []
    for rank in range(SHOWN):
        i = ranked.order[rank]
        index, score = found[rank] if rank < len(found) else (None, None)
        before = ["", ""] if index is None else [f"{score:.2f}", notes[index]]
        rows.append([str(rank + 1), *before, f"{float(ranked.logits[i]):.3f}", notes[i]])
    header = ["rank", "BM25", "first stage", "logit", "minice"]
    write(f"{ranked.query}\n{table(header, rows, elastic=[2, 4])}\n")


COMMAND = Command(
    name="demo",
    summary="twenty notes, three queries: first-stage order beside minice's",
    description="""\
Shows, for three queries over twenty notes, the order of a first stage (BM25, precomputed) beside the
order of minice's logits: the first rows as a table, or all of them as JSONL.""",
    example="minice demo --format table",
    run=run,
    options=(FORMAT, *MODEL_OPTIONS),
)
