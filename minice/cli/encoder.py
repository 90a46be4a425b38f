"""What the scoring verbs share: the options that choose a model, opening it, and lines made of logits."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from minice.cli.arguments import Arguments, Option, local_path, read_choice, read_count, read_text
from minice.cli.reading import Record
from minice.cli.writing import progress, to_json

if TYPE_CHECKING:
    import numpy as np

    from minice.cross_encoder import CrossEncoder

# Pairs in one call: encoded pairs stay in memory until the call is done, and progress shows between two calls.
# A logit depends on its pair alone, so the numbers are the same for any value.
CHUNK = 512

FORMAT = Option(
    name="format",
    metavar="jsonl|table",
    read=read_choice("jsonl", "table"),
    help="output; default: a table on a terminal, else JSONL",
)
MODEL_DIR = Option(name="model-dir", metavar="DIR", help="look for model files in this folder only")
MODEL_OPTIONS = (
    Option(
        name="model",
        metavar="ID",
        read=read_text,
        help="a model that `minice models` lists; default: the embedded one",
    ),
    MODEL_DIR,
    Option(
        name="precision",
        metavar="fp32|int8",
        read=read_choice("fp32", "int8"),
        help="which of the model's files; default: the first that is pinned",
    ),
    Option(
        name="engine",
        metavar="numpy|onnxruntime",
        read=read_choice("numpy", "onnxruntime"),
        default="numpy",
        help="what runs the model; onnxruntime is an extra: pip install 'minice[onnxruntime]'",
    ),
    Option(name="threads", metavar="N", read=read_count(1), help="default: the CPUs of this process"),
    Option(name="max-length", metavar="N", read=read_count(5), help="tokens in one pair; default: the model's"),
    Option(
        name="max-batch-tokens",
        metavar="N",
        read=read_count(1),
        help="tokens in one batch; changes speed only",
    ),
    Option(
        name="special-tokens",
        metavar="reference|literal",
        read=read_choice("reference", "literal"),
        default="reference",
        help="what [SEP] and its like in a text are: special tokens, or just text",
    ),
)


def model_dir(arguments: Arguments) -> str | None:
    """Return the folder of ``--model-dir`` as the file system calls it."""
    text = arguments["model_dir"]
    return None if text is None else local_path(text)


def open_encoder(arguments: Arguments) -> "CrossEncoder":
    """Open the model that the options name."""
    # Imported here: help and argument mistakes need neither NumPy nor a model.
    from minice.cross_encoder import CrossEncoder

    return CrossEncoder.open(
        arguments["model"],
        model_dir=model_dir(arguments),
        precision=arguments["precision"],
        engine=arguments["engine"],
        threads=arguments["threads"],
        max_length=arguments["max_length"],
        max_batch_tokens=arguments["max_batch_tokens"],
        special_tokens=arguments["special_tokens"],
    )


def score_pairs(encoder: "CrossEncoder", pairs: Sequence[tuple[str, str]]) -> "list[np.float32]":
    """Return the logit of each (query, passage) pair, in order, in bounded memory.

    Where there is more than one chunk, people who watch stderr see how far it came.

    Args:
        encoder: What scores.
        pairs: [N] pairs.
    """
    logits: list[np.float32] = []
    with progress(len(pairs)) if len(pairs) > CHUNK else nullcontext() as report:
        for start in range(0, len(pairs), CHUNK):
            logits.extend(encoder.score_pairs(pairs[start : start + CHUNK]))
            if report:
                report(len(logits))
    return logits


def best_first(logits: "Sequence[np.float32]") -> list[int]:
    """Return indices by falling logit, equal ones in input order.

    By the raw logit, because sigmoids of high logits may be equal.
    """
    return sorted(range(len(logits)), key=lambda i: -float(logits[i]))


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)) in float64, without overflow.

    >>> sigmoid(0.0), sigmoid(-1000.0), sigmoid(1000.0)
    (0.5, 0.0, 1.0)
    """
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def result_line(record: Record, logit: "np.float32", model_id: str, **places: int) -> str:
    """Return one JSON line: our keys, then the record's own as they were written.

    Keys of the record that ours would hide stand under ``input``; that name is ours for the same reason.

    Args:
        record: What was scored.
        logit: Written with the fewest digits that read back as the same float32.
        model_id: What made the logit.
        places: ``rank`` and ``index``, as far as the verb has them.
    """
    ours = {name: str(place) for name, place in places.items()}
    ours |= {"logit": str(logit), "score": repr(sigmoid(float(logit))), "model_id": to_json(model_id)}
    own = record.members()
    hidden = [(key, raw) for key, raw in own if key in ours or key == "input"]
    free = [(key, raw) for key, raw in own if not (key in ours or key == "input")]
    if hidden:
        ours["input"] = _object(hidden)
    return _object([*ours.items(), *free])


def _object(members: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{to_json(key)}: {raw}" for key, raw in members) + "}"


def table_numbers(logit: "np.float32") -> Iterator[str]:
    """Return logit and score as tables show them."""
    yield f"{float(logit):.3f}"
    yield f"{sigmoid(float(logit)):.4f}"
