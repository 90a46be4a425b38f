"""``minice rerank``: a query and passages in, passages in the order of their logits out."""

from collections.abc import Iterable

from minice.cli.arguments import Arguments, Command, Option, Positional, read_choice, read_count, read_text
from minice.cli.encoder import FORMAT, MODEL_OPTIONS, best_first, open_encoder, result_line, score_pairs, table_numbers
from minice.cli.reading import (
    Record,
    check_fields,
    choose_input_format,
    join_fields,
    json_records,
    read_lines,
    string_member,
    text_records,
)
from minice.cli.writing import choose_format, table, write


def run(arguments: Arguments) -> int:
    """Rank the passages of a file or of stdin."""
    records = _read_records(arguments)
    if not records or arguments["top_n"] == 0:
        return 0  # nothing to say, and no model is needed to say it
    with open_encoder(arguments) as encoder:
        logits = score_pairs(encoder, [(arguments["query"], *record.texts) for record in records])
        model_id = encoder.model_id
    order = best_first(logits)[: arguments["top_n"]]
    if choose_format(arguments["format"]) == "jsonl":
        for rank, i in enumerate(order, 1):
            write(result_line(records[i], logits[i], model_id, rank=rank, index=i) + "\n")
        return 0
    rows = [[str(rank), str(i), *table_numbers(logits[i]), records[i].texts[0]] for rank, i in enumerate(order, 1)]
    write(table(["rank", "index", "logit", "score", "passage"], rows, elastic=[4]))
    write(f"model: {model_id}\n")
    return 0


def _read_records(arguments: Arguments) -> list[Record]:
    lines = read_lines(arguments["file"])
    fields = arguments["fields"]
    asked = "jsonl" if fields else arguments["input_format"]
    if choose_input_format(asked, arguments["file"], lines) == "text":
        return text_records(lines)
    if not fields:
        return json_records(lines, lambda line, record: (string_member(line, record, "text"),))
    check_fields(fields, lines)
    return json_records(lines, lambda line, record: (join_fields(line, record, fields),))


def _read_fields(text: str) -> tuple[str, ...]:
    fields = tuple(name.strip() for name in read_text(text).split(","))
    if not all(fields) or len(set(fields)) < len(fields):
        raise ValueError(f"expected names with a comma between them, each once, got {text!r}")
    return fields


def _check(arguments: Arguments) -> Iterable[str]:
    if arguments["fields"] and arguments["input_format"] == "text":
        yield "--fields needs JSONL; it does not go with --input-format text"


COMMAND = Command(
    name="rerank",
    summary="a query and passages in, a ranking out",
    description="""\
Scores every passage of FILE with QUERY and writes them best first, each with its logit and
score = sigmoid(logit). Input is UTF-8: one passage a line (blank lines are skipped), or JSONL, one object
with a string under "text" a line. Other keys are kept in the output; keys named like one of ours (rank,
index, logit, score, model_id, input) stand there under "input". index is the 0-based place of the
passage among the passages read. Equal logits keep input order.""",
    example="""\
minice rerank "how do I undo the last commit" notes.jsonl --top-n 3
cat passages.txt | minice rerank "how do I undo the last commit" - --format jsonl""",
    run=run,
    positionals=(
        Positional(name="QUERY", help="what to look for, in quotes", read=read_text),
        Positional(name="FILE", help="the passages, or - for stdin"),
    ),
    options=(
        Option(name="top-n", metavar="N", read=read_count(0), help="how many to put out; default: all"),
        Option(
            name="fields",
            metavar="A,B",
            read=_read_fields,
            help='read these keys instead of "text", joined by one space; missing, null or empty ones are left out',
        ),
        Option(
            name="input-format",
            metavar="auto|text|jsonl",
            read=read_choice("auto", "text", "jsonl"),
            default="auto",
            help="auto: by the name (.jsonl .ndjson .json-lines; .txt .md), else JSONL if the first "
            "non-blank line is a JSON object; one JSON document (an array, an object over several lines) is refused",
        ),
        FORMAT,
        *MODEL_OPTIONS,
    ),
    check=_check,
)
