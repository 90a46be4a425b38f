"""A pin of a user's own model: what its files say about it, and the lock entry made of that.

Nothing here opens a file or asks anybody; `minice lock` does, and shows what was found before it is used.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from minice.artifacts.lock import SHORTEST_PAIR, FilePin, Lock, ModelPin, format_lock, parse_lock
from minice.artifacts.quantize import SCHEME_KEY
from minice.artifacts.receipt import SCHEME
from minice.encoding.tokenizer import PairTokenizer
from minice.engines.bert import recognize_bert
from minice.engines.onnx_file import OnnxModel, read_onnx
from minice.engines.signature import position_rows, vocabulary_rows
from minice.errors import ConfigError, GraphError, InputError, LockError
from minice.scores import ScoreScale

UNKNOWN_LICENSE: Final = "NOASSERTION"  # SPDX's word for "nobody said"

# How the names of operators start that round activations, by the numbers of the batch or by constants of the file;
# and of those that compute with weights of four bits.
_DYNAMIC: Final = ("DynamicQuantize", "MatMulInteger", "ConvInteger")
_STATIC: Final = ("QuantizeLinear", "QLinear", "QGemm", "QAttention", "QEmbed", "QOrdered")
_NARROW: Final = ("MatMulNBits", "MatMulBnb4", "MatMulFpQ4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A value and who says so, for people.

    Attributes:
        value: The value.
        source: For instance "config.json: max_position_embeddings is 512".
    """

    value: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFacts:
    """What a model file says of itself.

    Attributes:
        precision: "fp32" or "int8".
        scheme: As in the lock; None for fp32.
        source: How that was told.
        positions: The longest pair it can read; None where that could not be told.
        vocabulary: Token ids that it knows; None as ``positions``.
        probability: Whether it ends in a sigmoid, so that its numbers are no logits.
        refusal: Why the numpy engine cannot run it; empty if it can.
    """

    precision: str
    scheme: str | None
    source: str
    positions: int | None
    vocabulary: int | None
    probability: bool
    refusal: str


def read_graph(data: bytes) -> GraphFacts:
    """Find out what can be told from an ONNX file's bytes.

    Args:
        data: The file.

    Raises:
        GraphError: It is malformed, keeps its data in another file, has another head than one logit, or stores
            its weights in a way that no pin can name.
    """
    model = read_onnx(data)  # refuses external data
    _check_head(model)
    refusal, weight_only = "", False
    positions: int | None = None
    vocabulary: int | None = None
    try:
        weights = recognize_bert(model)
        positions, vocabulary = len(weights.position_embeddings), weights.vocabulary
        weight_only = weights.weight_scheme != "fp32"
    except GraphError as error:
        refusal = str(error)
        with suppress(GraphError):  # a graph of another form may still show its tables
            positions, vocabulary = position_rows(model), vocabulary_rows(model)
    scheme, source = _scheme(model, weight_only=weight_only)
    return GraphFacts(
        precision="fp32" if scheme is None else "int8",
        scheme=scheme,
        source=source,
        positions=positions,
        vocabulary=vocabulary,
        probability=_last_operator(model) == "Sigmoid",
        refusal=refusal,
    )


def _check_head(model: OnnxModel) -> None:
    if len(model.outputs) != 1:
        names = ", ".join(output.name for output in model.outputs[:9])
        raise GraphError(f"expected one output, a logit for each pair, got {len(model.outputs)}: {names}")
    shape = model.outputs[0].shape
    if shape is not None and (len(shape) > 2 or (len(shape) == 2 and shape[1] not in (1, None))):
        raise GraphError(
            f"expected one logit for each pair, [N, 1] or [N], got an output of shape {list(shape)}: a model with "
            "several labels or with vectors for output is no cross-encoder that minice can use"
        )


def _last_operator(model: OnnxModel) -> str:
    makers = {name: node for node in model.nodes for name in node.outputs if name}
    node = makers.get(model.outputs[0].name)
    for _ in range(len(model.nodes)):
        if node is None or node.op_type not in ("Identity", "Reshape", "Squeeze", "Flatten") or not node.inputs:
            break
        node = makers.get(node.inputs[0])
    return node.op_type if node is not None else ""


def _scheme(model: OnnxModel, *, weight_only: bool) -> tuple[str | None, str]:
    """How the weights are stored (None: as float32), and how that was told."""
    operators = sorted({node.op_type for node in model.nodes})
    for scheme, starts in (("int8-dynamic", _DYNAMIC), ("int8-static", _STATIC)):
        found = [name for name in operators if name.startswith(starts)]
        if found:
            return scheme, f"the graph rounds activations: {', '.join(found[:3])}"
    if narrow := [name for name in operators if name.startswith(_NARROW)]:
        raise GraphError(f"expected weights in float32 or int8, got an operator for smaller ones, {narrow[0]}")
    sizes: dict[str, int] = {}
    for values in model.initializers.values():
        sizes[values.dtype.name] = sizes.get(values.dtype.name, 0) + values.nbytes
    largest = max(sizes, key=lambda name: sizes[name], default="float32")
    if weight_only or largest in ("int8", "uint8"):
        if weight_only and model.metadata.get(SCHEME_KEY) == SCHEME:
            return SCHEME, f"the graph's {SCHEME_KEY}"
        return "int8-weight-only", "the graph keeps weights as int8 and rounds no activation"
    if largest in ("float16", "float64"):
        raise GraphError(
            f"expected weights in float32 or int8, got mostly {largest}: no pin can say that; save the model in float32"
        )
    return None, "the graph keeps weights as float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFacts:
    """What a config.json says of a model; None where it does not."""

    positions: Fact | None = None
    scale: Fact | None = None


def read_config(data: bytes) -> ConfigFacts:
    """Find out what a config.json declares.

    Args:
        data: The file.

    Raises:
        InputError: It is not JSON, or declares several labels.
    """
    try:
        values = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where="config.json") from None
    if not isinstance(values, dict):
        raise InputError(f"expected an object, got {type(values).__name__}", where="config.json")
    labels = _labels(values)
    if labels not in (None, 1):
        raise InputError(
            f"it declares {labels} labels, and only models with one give a score for a pair", where="config.json"
        )
    positions = values.get("max_position_embeddings")
    return ConfigFacts(
        positions=Fact(value=str(positions), source="config.json: max_position_embeddings")
        if _is_count(positions, SHORTEST_PAIR)
        else None,
        scale=_scale(values, labels),
    )


def _labels(values: Mapping[str, Any]) -> int | None:
    """How many labels a config declares, by their names or by their number."""
    names = values.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    number = values.get("num_labels")
    return number if _is_count(number, 1) else None


def _scale(values: Mapping[str, Any], labels: int | None) -> Fact | None:
    """What the numbers of the ONNX file mean, where the config declares it.

    An exported classifier gives its logits; the activation that sentence-transformers stores beside it, be it
    Identity or Sigmoid, is what that library applies afterwards. So either declaration means raw logits here.
    """
    inner = values.get("sentence_transformers")
    declared = {
        "sentence_transformers.activation_fn": inner.get("activation_fn") if isinstance(inner, dict) else None,
        "sbert_ce_default_activation_function": values.get("sbert_ce_default_activation_function"),
    }
    for key, name in declared.items():
        if isinstance(name, str) and name:
            name = name.rpartition(".")[2][:40]
            return Fact(
                value=str(ScoreScale.LOGIT), source=f"config.json: {key} is {name}, which comes after the graph"
            )
    return None if labels is None else Fact(value=str(ScoreScale.LOGIT), source="config.json: one label")


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least  # true is no count, though bool is an int to Python


def check_tokenizer(data: bytes, graph: GraphFacts) -> None:
    """Make sure that minice can read with a tokenizer.json, and that the graph knows its ids.

    Raises:
        ConfigError: It cannot; says what was found.
    """
    size = PairTokenizer.from_bytes(data).vocabulary_size
    if graph.vocabulary is not None and size > graph.vocabulary:
        raise ConfigError(
            f"the tokenizer has {size} token ids, the graph's embedding table has {graph.vocabulary}; expected files "
            "that belong together"
        )


def length_fact(graph: GraphFacts, config: ConfigFacts) -> Fact | None:
    """Return the longest pair that a model can read, as far as graph and config tell: the smaller of the two."""
    facts = [config.positions] if config.positions else []
    if graph.positions is not None:
        facts.append(Fact(value=str(graph.positions), source="the graph's position table"))
    return min(facts, key=lambda fact: int(fact.value), default=None)


def scale_fact(graph: GraphFacts, config: ConfigFacts) -> Fact | None:
    """Return what a model's numbers mean, where graph or config declare it; it is never guessed."""
    if graph.probability:
        return Fact(value=str(ScoreScale.PROBABILITY), source="the graph ends in a Sigmoid")
    return config.scale


def make_pin(
    name: str,
    files: Mapping[str, tuple[str, bytes]],
    graph: GraphFacts,
    *,
    max_length: int,
    scale: str,
    license: str,
    repository: str | None = None,
    revision: str | None = None,
) -> ModelPin:
    """Make a pin of a model's files, and check it as reading it back would.

    Args:
        name: The id.
        files: Role -> path in the model's folder, and bytes.
        graph: What the model file is.
        max_length: Tokens in one pair.
        scale: What the model's numbers mean.
        license: SPDX expression.
        repository: Where it is published.
        revision: Of the repository.

    Raises:
        ConfigError: A pair can be longer than the model can read.
        LockError: A value cannot stand in a lock, for instance a path with a backslash.
    """
    if graph.positions is not None and max_length > graph.positions:
        raise ConfigError(
            f"expected at most {graph.positions}, the rows of the graph's position table, got {max_length}",
            where="max_length",
        )
    pin = ModelPin(
        id=name,
        repository=repository,
        revision=revision,
        license=license,
        max_length=max_length,
        scale=ScoreScale(scale),
        files=tuple(_file(role, path, data, graph) for role, (path, data) in files.items()),
    )
    return parse_lock(format_lock(Lock(models=(pin,)))).models[0]


def _file(role: str, path: str, data: bytes, graph: GraphFacts) -> FilePin:
    model = role == "model"
    return FilePin(
        role=role,
        path=path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        precision=graph.precision if model else None,
        scheme=graph.scheme if model else None,
        optional=role == "vocab",
    )


def add_to_lock(text: str, pin: ModelPin) -> str:
    """Return a lock's text with one more pin at the end; nothing that stands in it already is rewritten.

    Args:
        text: A lock; empty makes a new one.
        pin: What to add. If exactly this stands in the lock, the text comes back as it is.

    Raises:
        LockError: The text is no lock, or a name of the pin is taken in it.
    """
    if not text.strip():
        return format_lock(Lock(models=(pin,)))
    lock = parse_lock(text)
    if pin in lock.models:
        return text
    for name in pin.names:
        other = lock.owner(name)
        if other is not None:
            raise LockError(
                f"the name {name!r} belongs to another pin there, {other.id!r}; choose another, or take that pin out "
                "of the file"
            )
    addition = format_lock(Lock(models=(pin,))).partition("\n")[2]
    end = "\r\n" if "\r\n" in text else "\n"
    result = text.rstrip() + end + addition.replace("\n", end)
    if parse_lock(result).models != (*lock.models, pin):
        raise LockError("the pin cannot be added to this file as it is written; add it by hand")
    return result
