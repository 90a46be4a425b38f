"""``minice score``: pairs in, logits out, input order kept."""

from typing import Any

from minice.cli.arguments import Arguments, Command, Positional
from minice.cli.encoder import FORMAT, MODEL_OPTIONS, open_encoder, result_line, score_pairs, table_numbers
from minice.cli.reading import Line, json_records, read_lines, string_member
from minice.cli.writing import choose_format, table, write


def run(arguments: Arguments) -> int:
    """Score the pairs of a file or of stdin."""
    records = json_records(read_lines(arguments["file"]), _pair)
    if not records:
        return 0
    with open_encoder(arguments) as encoder:
        logits = score_pairs(encoder, [(record.texts[0], record.texts[1]) for record in records])
        model_id = encoder.model_id
    if choose_format(arguments["format"]) == "jsonl":
        for i, (record, logit) in enumerate(zip(records, logits, strict=True)):
            write(result_line(record, logit, model_id, index=i) + "\n")
        return 0
    rows = [[str(i), *table_numbers(logits[i]), *record.texts] for i, record in enumerate(records)]
    write(table(["index", "logit", "score", "query", "passage"], rows, elastic=[3, 4]))
    write(f"model: {model_id}\n")
    return 0


def _pair(line: Line, record: dict[str, Any]) -> tuple[str, ...]:
    return string_member(line, record, "query"), string_member(line, record, "passage")


COMMAND = Command(
    name="score",
    summary="pairs in, logits and scores out, input order kept",
    description="""\
Reads JSONL in UTF-8, one object with strings under "query" and "passage" a line, and writes each with
its logit and score = sigmoid(logit), in input order. Other keys are kept; keys named like one of ours
(index, logit, score, model_id, input) stand in the output under "input".""",
    example="minice score pairs.jsonl",
    run=run,
    positionals=(Positional(name="FILE", help="the pairs, or - for stdin"),),
    options=(FORMAT, *MODEL_OPTIONS),
)
