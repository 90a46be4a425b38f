"""fp32 ONNX in, int8 weight-only ONNX out.

Source: the scheme "int8-weight-only/1" of DESIGN.md. The matrices of the encoder layers and of the pooler are
rounded per output channel, the word-embedding table per row: symmetric int8 with ``scale = max|w| / 127`` in
float32, half to even, clipped to +-127. Everything else, and every activation, stays float32.
"""

import hashlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from minice import __version__
from minice.artifacts.hub_cache import cache_folder
from minice.artifacts.lock import Lock, ModelPin, known_lock
from minice.artifacts.receipt import (
    SCHEME,
    Digest,
    Receipt,
    format_receipt,
    quantized_path,
    receipt_path,
)
from minice.artifacts.store import inspect, install_folder, locate, not_on_disk, open_model, read_unpinned
from minice.engines.bert import BertWeights, Matrix, Table, recognize_bert
from minice.engines.onnx_file import read_onnx
from minice.errors import ConfigError, EngineUnavailableError, GraphError, InputError, ModelNotFoundError

__all__ = [
    "SCHEME",
    "DeepCheck",
    "QuantizedModel",
    "QuantizedTensor",
    "QuantizedWeights",
    "Source",
    "WrittenModel",
    "find_source",
    "quantize_model",
    "quantize_weights",
    "verify_deep",
    "write_quantized",
]

_SOURCE_NAMES: Final = ("onnx/model.onnx", "model.onnx")
SCHEME_KEY: Final = "minice.scheme"  # in the model's metadata properties
LARGEST: Final = 127  # not 128: the scheme is symmetric

# From this version of the file format on, an initializer need not also be a graph input.
_IR_VERSION: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeights:
    """A rounded tensor.

    Attributes:
        values: int8, shaped as the weights.
        scale: float32, shaped to broadcast with ``values``; ``values * scale`` is near the weights.
    """

    values: NDArray[np.int8]
    scale: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """What became of one tensor.

    Attributes:
        name: What the file calls it.
        shape: As it lies in the file.
        bytes_before: Of float32.
        bytes_after: Of int8 and its scales.
        largest_error: Largest absolute difference of a weight.
        mean_error: Mean absolute difference of its weights.
    """

    name: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    largest_error: float
    mean_error: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedModel:
    """A quantized ONNX file and how it came about.

    Attributes:
        data: The file.
        source: What the fp32 file hashes to.
        result: What ``data`` hashes to.
        tensors: The tensors that were rounded, in the order of the file.
        onnx: Version of the onnx package that serialized ``data``.
    """

    data: bytes
    source: Digest
    result: Digest
    tensors: tuple[QuantizedTensor, ...]
    onnx: str

    @property
    def largest_error(self) -> float:
        """Largest absolute difference of any rounded weight."""
        return max(tensor.largest_error for tensor in self.tensors)

    @property
    def mean_error(self) -> float:
        """Mean absolute difference of all rounded weights."""
        counts = [tensor.bytes_before for tensor in self.tensors]
        return float(np.average([tensor.mean_error for tensor in self.tensors], weights=counts))

    @property
    def receipt(self) -> Receipt:
        """The record to keep beside the file."""
        return Receipt(source=self.source, result=self.result, scheme=SCHEME, minice=__version__, onnx=self.onnx)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WrittenModel:
    """A quantized model that was written: what it is, and the paths of the file and of its receipt."""

    model: QuantizedModel
    path: Path
    receipt_path: Path


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """An fp32 file to quantize.

    Attributes:
        path: Where it lies.
        expected: What it has to hash to; None if no pin says.
        tokenizer: The model's tokenizer.json, for a comparison on texts; None if there is none.
        target: Where the int8 file goes: beside it, or into the model's own folder if it lies in the hub's cache.
    """

    path: Path
    expected: Digest | None
    tokenizer: bytes | None
    target: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepCheck:
    """Whether quantizing the source again gives the int8 file that is used.

    Attributes:
        expected: The int8 file's digest, from the pin or the receipt.
        got: The digest of quantizing again.
        matches: Whether they are the same.
        message: The same as a sentence.
    """

    expected: Digest
    got: Digest
    matches: bool
    message: str


def quantize_weights(weights: NDArray[np.float32], *, axis: int) -> QuantizedWeights:
    """Round weights to int8 with one scale for each channel.

    An all-zero channel, and one so small that its scale is zero in float32, gets the scale 1.

    Args:
        weights: [R, C] finite float32.
        axis: The channels' axis; 0 gives scales [R, 1], 1 gives scales [C].

    >>> rounded = quantize_weights(np.array([[127, -2.5], [0, 0]], np.float32), axis=0)
    >>> rounded.values.tolist(), rounded.scale.tolist()
    ([[127, -2], [0, 0]], [[1.0], [1.0]])
    """
    peak = np.abs(weights).max(axis=1 - axis, keepdims=axis == 0)
    scale = np.asarray(peak / np.float32(LARGEST), np.float32)
    scale[scale == 0] = 1
    # The clip is for scales so small that they have few bits: there w / scale can pass 127.
    values = np.clip(np.rint(weights / scale), -LARGEST, LARGEST).astype(np.int8)
    return QuantizedWeights(values=values, scale=scale)


def quantize_model(data: bytes) -> QuantizedModel:
    """Quantize an fp32 BERT cross-encoder; the same bytes and the same onnx package give the same bytes.

    Args:
        data: An ONNX file.

    Returns:
        The int8 file, what it was made of, and what rounding did to each tensor.

    Raises:
        GraphError: Not a BERT encoder with a one-logit head.
        InputError: The weights are quantized already, or not finite.
        EngineUnavailableError: The onnx package is missing.
    """
    onnx = _onnx()
    weights = recognize_bert(read_onnx(data))
    if weights.weight_scheme != "fp32":
        raise InputError(
            f"expected a model with fp32 weights, got one in {weights.weight_scheme}: it is quantized already",
            where="model",
        )
    targets = _targets(weights)
    rounded = {name: _rounded(target) for name, target in targets.items()}
    model = onnx.load_model_from_string(data)
    _rewrite(onnx, model, targets, rounded)
    result: bytes = model.SerializeToString(deterministic=True)
    _check(onnx, result, weights)
    return QuantizedModel(
        data=result,
        source=_digest(data),
        result=_digest(result),
        tensors=tuple(_measured(target, rounded[name]) for name, target in targets.items()),
        onnx=onnx.__version__,
    )


def find_source(
    target: str | os.PathLike[str],
    *,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    lock: Lock | None = None,
) -> Source:
    """Find what somebody wants to quantize: a pinned model by any of its names, else a folder or a file.

    A name goes first; ``./name`` is the folder. A folder holds ``onnx/model.onnx`` or ``model.onnx``.

    Args:
        target: A name of a pin, or a path.
        model_dir: The only folder to look for a pin's files in; does not go with a path.
        environ: As for ``open_model``.
        lock: Whose names are known; ``known_lock`` by default.

    Raises:
        ModelNotFoundError: No such pin, folder or file; or the pin's fp32 file is not on disk.
        ConfigError: The pin has no fp32 file, or ``model_dir`` is given with a path; or the path lies in the hub's
            cache, which is not written to.
        InputError: The folder holds no model, or a file cannot be read.
        IntegrityError: The pin's tokenizer is not what it should be.
    """
    lock = known_lock(environ) if lock is None else lock
    name = os.fspath(target)
    if any(name in pin.names for pin in lock.models):
        return _pinned_source(lock.find(name), model_dir, environ)
    path = Path(name)
    if not os.path.exists(path):  # noqa: PTH110 - Path.exists may raise
        try:
            lock.find(name)  # says which are known, and which one was perhaps meant
        except ModelNotFoundError as error:
            raise ModelNotFoundError(
                f"{error.message}; nor is there a file or folder of that name", where=error.where
            ) from None
    if model_dir is not None:
        raise ConfigError(f"goes with the id of a model only, and {name!r} is a path; leave it out", where="model_dir")
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir may raise
        inside = [path / inner for inner in _SOURCE_NAMES]
        # What exists and is no regular file is refused when it is read, by its own name.
        found = next((model for model in inside if os.path.lexists(model)), None)
        if found is None:
            raise InputError(f"expected {' or '.join(_SOURCE_NAMES)} in it, found neither", where=str(path))
        path = found
    if _is_cached(path, environ):
        raise ConfigError(
            "it lies in the hub's cache, which minice does not write to; give the name of a model that `minice models` "
            "lists, or a copy of the file",
            where=str(path),
        )
    return Source(path=path, expected=None, tokenizer=_tokenizer_near(path), target=_beside(path))


def _is_cached(path: Path, environ: Mapping[str, str]) -> bool:
    """Whether what is written beside a file would come into a repository of the hub's cache."""
    cache, _ = cache_folder(environ)
    folder = Path(os.path.realpath(path.parent))
    if cache is None or not folder.is_relative_to(os.path.realpath(cache)):
        return False
    inside = folder.relative_to(os.path.realpath(cache)).parts
    return bool(inside) and inside[0].startswith("models--")


def _beside(path: Path) -> Path:
    return path.with_name(quantized_path(path.name))


def _pinned_source(pin: ModelPin, model_dir: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Source:
    file, tokenizer = pin.file("model", "fp32"), pin.file("tokenizer")
    reports = {report.name: report for report in locate(pin, model_dir=model_dir, environ=environ)}
    if reports[file.path].place == "hub-cache":
        # There a file is the one by its bytes; the first of the right size need not be.
        reports = {report.name: report for report in inspect(pin, model_dir=model_dir, environ=environ)}
    path, beside = reports[file.path].path, reports[tokenizer.path].path
    if path is None:
        raise _without_source(pin, model_dir, environ)
    digest = Digest(sha256=tokenizer.sha256, size=tokenizer.size)
    target = _beside(Path(path))
    if reports[file.path].place == "hub-cache":
        target = install_folder(pin, model_dir=model_dir, environ=environ) / quantized_path(file.path)
    return Source(
        path=Path(path),
        expected=Digest(sha256=file.sha256, size=file.size),
        tokenizer=None if beside is None else read_unpinned(Path(beside), digest),
        target=target,
    )


def _without_source(
    pin: ModelPin, model_dir: str | os.PathLike[str] | None, environ: Mapping[str, str], *, then: str = ""
) -> ModelNotFoundError:
    why = "quantizing needs the fp32 file, which is"
    if not then:
        then = f"minice quantize {pin.id}" + ("" if model_dir is None else f" --model-dir {_quoted(model_dir)}")
        if "int8" in pin.precisions:
            why = f"the int8 file of this model is pinned and need not be made; {why}"
    error = not_on_disk(pin, pin.file("model", "fp32"), model_dir=model_dir, environ=environ, then=then)
    return ModelNotFoundError(f"{why} {error.message}", where=error.where)


def _quoted(folder: str | os.PathLike[str]) -> str:
    return shlex.quote(os.fspath(folder))


def _tokenizer_near(model: Path) -> bytes | None:
    """The tokenizer.json of a folder in either of the two layouts: the graph may lie in onnx/ below it."""
    for folder in (model.parent, *([model.parent.parent] if model.parent.name == "onnx" else [])):
        with suppress(InputError):
            return read_unpinned(folder / "tokenizer.json")
    return None


def write_quantized(
    source: str | os.PathLike[str], *, expected: Digest | None = None, target: Path | None = None
) -> WrittenModel:
    """Quantize a file, and write the result and its receipt.

    Each is written to a temporary file in the same folder, read back, and moved into its place. The receipt is
    last: an int8 file without a receipt, or with that of another file, is never used, so a crash in between
    leaves nothing that passes for a model.

    Args:
        source: An fp32 ONNX file.
        expected: What it has to hash to; None takes it as it is. The receipt of a file that no lock pins makes
            no model of the result: the store will not use it.
        target: Where the result goes; its folder is made. None: beside the source. The receipt goes beside it.

    Raises:
        InputError: The file cannot be read, its folder cannot be written to, or it is quantized already.
        IntegrityError: The file is not what was expected.
        GraphError, EngineUnavailableError: As ``quantize_model``; ``where`` starts with the path.
    """
    path = Path(source)
    data = read_unpinned(path, expected)
    try:
        model = quantize_model(data)
    except (GraphError, InputError) as error:
        inside = "" if error.where in ("", "model") else f":{error.where}"
        raise type(error)(error.message, where=f"{path}{inside}") from error
    target = _beside(path) if target is None else target
    receipt = Path(receipt_path(str(target)))
    mode = path.stat().st_mode & 0o666  # who may read the source may read the result
    replaces = os.path.lexists(target)
    _write(target, model.data, mode)
    try:
        _write(receipt, format_receipt(model.receipt).encode(), mode)
    except InputError:
        if not replaces:  # else the receipt of what was there may fit: quantizing again gives the same bytes
            with suppress(OSError):
                target.unlink()
        raise
    return WrittenModel(model=model, path=target, receipt_path=receipt)


def verify_deep(
    pin: ModelPin,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> DeepCheck:
    """Quantize a model's fp32 file again, and compare with its int8 file.

    Args:
        pin: Which model.
        model_dir: As for ``open_model``.
        environ: As for ``open_model``.

    Raises:
        ConfigError, ModelNotFoundError, IntegrityError: As ``open_model``, which reads both files.
        GraphError, EngineUnavailableError: As ``quantize_model``.
    """
    files = open_model(pin, model_dir=model_dir, precision="int8", environ=environ)
    reports = locate(pin, model_dir=model_dir, environ=environ)
    if not any(report.path for report in reports if report.precision == "fp32"):
        there = "" if model_dir is None else f" --model-dir {_quoted(model_dir)}"
        raise _without_source(pin, model_dir, environ, then=f"minice verify {pin.id} --deep{there}")
    expected = Digest(sha256=files.model_sha256, size=len(files.model))
    source = open_model(pin, model_dir=model_dir, precision="fp32", environ=environ)
    again = quantize_model(source.model)
    if again.result == expected:
        message = f"quantizing {source.paths['model']!r} again gives the same {expected.size:,} bytes"
    else:
        message = (
            f"quantizing {source.paths['model']!r} again gives other bytes: expected sha256 {expected.sha256}, got "
            f"{again.result.sha256} (minice {__version__}, onnx {again.onnx}; other versions may serialize "
            "differently)"
        )
    return DeepCheck(expected=expected, got=again.result, matches=again.result == expected, message=message)


def _onnx() -> Any:
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.shape_inference
    except ImportError as error:
        raise EngineUnavailableError(
            "quantizing needs the onnx package; run: pip install 'minice[quantize]', or in a checkout of minice: "
            "pip install '.[quantize]'",
            where="onnx",
        ) from error
    return onnx


def _digest(data: bytes) -> Digest:
    return Digest(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


# --- which tensors, and their rounding -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Target:
    """A tensor to round: its [R, C] values as they lie in the file, the axis of its channels."""

    name: str
    values: NDArray[np.float32]
    axis: int
    table: bool


def _targets(weights: BertWeights) -> dict[str, _Target]:
    """The tensors that the scheme rounds, by name; one that several layers share is there once."""
    targets: dict[str, _Target] = {}
    for part in _parts(weights):
        table = isinstance(part, Table)
        axis = 0 if isinstance(part, Table) or part.transposed else 1
        target = _Target(name=part.name, values=np.array(part.values, dtype=np.float32), axis=axis, table=table)
        first = targets.setdefault(part.name, target)
        if (first.axis, first.table) != (axis, table):
            raise GraphError(
                f"this graph cannot be quantized: {part.name!r} is used in two ways that need different scales"
            )
    return targets


def _parts(weights: BertWeights) -> Iterator[Matrix | Table]:
    yield weights.word_embeddings
    for layer in weights.layers:
        attention = (layer.query, layer.key, layer.value, layer.attention_output)
        yield from (linear.weight for linear in (*attention, layer.intermediate, layer.output))
    yield weights.pooler.weight


def _rounded(target: _Target) -> QuantizedWeights:
    if not np.isfinite(target.values).all():
        raise InputError("a weight is infinite or not a number; such weights cannot be quantized", where=target.name)
    return quantize_weights(target.values, axis=target.axis)


def _measured(target: _Target, rounded: QuantizedWeights) -> QuantizedTensor:
    error = np.abs(target.values - rounded.values * rounded.scale)
    return QuantizedTensor(
        name=target.name,
        shape=(target.values.shape[0], target.values.shape[1]),
        bytes_before=target.values.nbytes,
        bytes_after=rounded.values.nbytes + rounded.scale.nbytes,
        largest_error=float(error.max()),
        mean_error=float(error.mean(dtype=np.float64)),
    )


# --- the graph -----------------------------------------------------------------------------------------


def _rewrite(onnx: Any, model: Any, targets: Mapping[str, _Target], rounded: Mapping[str, QuantizedWeights]) -> None:
    """Put the rounded tensors into the graph.

    A matrix keeps its name: ``Cast(int8) x scale`` produces what was an initializer, so whoever used it, once
    or twice or through an Identity or a Transpose, still does. A lookup in the table becomes a lookup in the
    int8 rows and one in their scales, so that no engine has to hold the table in float32.
    """
    graph = model.graph
    name_of = _Names(graph)
    initializers, nodes, first = [], [], []
    pairs = {name: (name_of(f"{name}.int8"), name_of(f"{name}.scale")) for name in targets}
    for tensor in graph.initializer:
        if tensor.name not in targets:
            initializers.append(tensor)
    for name, pair in pairs.items():
        initializers += _tensors(onnx, pair, rounded[name])
    aliases = _aliases(graph, targets)
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] in targets:
            continue
        name = aliases.get(node.input[0], "") if node.op_type == "Gather" else ""
        if name and targets[name].table and _axis(node) == 0:
            nodes += _lookup(onnx, node, pairs[name], name_of)
        else:
            nodes.append(node)
    nodes = _without_unused_aliases(graph, nodes, aliases)
    used = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
    for name, pair in pairs.items():
        if name in used:
            first += _matrix(onnx, name, pair, name_of)
    inputs = [value for value in graph.input if value.name not in targets]
    # Copied before the fields are emptied, because that would free what the lists refer to.
    _replace(graph.node, first + nodes)
    _replace(graph.initializer, initializers)
    _replace(graph.input, inputs)
    # The new initializers are no graph inputs, which the oldest files would require.
    model.ir_version = max(model.ir_version, _IR_VERSION)
    onnx.helper.set_model_props(
        model, {**{entry.key: entry.value for entry in model.metadata_props}, SCHEME_KEY: SCHEME}
    )


class _Names:
    """Names that nothing in a graph has yet; the same graph and wishes give the same names."""

    def __init__(self, graph: Any) -> None:
        self._taken = {value.name for values in (graph.input, graph.output, graph.value_info) for value in values}
        self._taken |= {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            self._taken |= {node.name, *node.input, *node.output}

    def __call__(self, wish: str) -> str:
        name, count = wish, 1
        while name in self._taken:
            count += 1
            name = f"{wish}.{count}"
        self._taken.add(name)
        return name


def _tensors(onnx: Any, names: tuple[str, str], rounded: QuantizedWeights) -> list[Any]:
    kinds = ((onnx.TensorProto.INT8, rounded.values), (onnx.TensorProto.FLOAT, rounded.scale.astype("<f4")))
    return [
        onnx.helper.make_tensor(name, kind, values.shape, values.tobytes(), raw=True)
        for name, (kind, values) in zip(names, kinds, strict=True)
    ]


def _matrix(onnx: Any, name: str, pair: tuple[str, str], name_of: _Names) -> list[Any]:
    """``name = Cast(int8 -> float) x scale``."""
    cast = name_of(f"{name}.float")
    return [
        _node(onnx, "Cast", [pair[0]], cast, name_of, to=onnx.TensorProto.FLOAT),
        _node(onnx, "Mul", [cast, pair[1]], name, name_of),
    ]


def _lookup(onnx: Any, gather: Any, pair: tuple[str, str], name_of: _Names) -> list[Any]:
    """``output = Cast(Gather(int8 rows)) x Gather(scale)``."""
    ids, output = gather.input[1], gather.output[0]
    rows, cast, scale = (name_of(f"{output}.{part}") for part in ("int8", "float", "scale"))
    return [
        _node(onnx, "Gather", [pair[0], ids], rows, name_of, axis=0),
        _node(onnx, "Cast", [rows], cast, name_of, to=onnx.TensorProto.FLOAT),
        _node(onnx, "Gather", [pair[1], ids], scale, name_of, axis=0),
        _node(onnx, "Mul", [cast, scale], output, name_of),
    ]


def _node(onnx: Any, op_type: str, inputs: list[str], output: str, name_of: _Names, **attributes: int) -> Any:
    name = name_of(f"{output}/{op_type}")
    return onnx.helper.make_node(op_type, inputs, [output], name=name, **attributes)


def _aliases(graph: Any, targets: Mapping[str, _Target]) -> dict[str, str]:
    """Names that stand for a target, Identity nodes followed; they may be in any order in the file."""
    identity = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity"}
    aliases = {name: name for name in targets}
    for start in identity:
        name, steps = start, 0
        while name in identity and steps <= len(identity):
            name, steps = identity[name], steps + 1
        if name in targets:
            aliases[start] = name
    return aliases


def _without_unused_aliases(graph: Any, nodes: list[Any], aliases: Mapping[str, str]) -> list[Any]:
    """Leave out Identity nodes whose lookups were all replaced, which would keep the table alive in float32."""
    while True:
        used = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
        kept = [node for node in nodes if node.op_type != "Identity" or node.output[0] not in aliases.keys() - used]
        if len(kept) == len(nodes):
            return kept
        nodes = kept


def _axis(node: Any) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)


def _replace(field: Any, values: list[Any]) -> None:
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)


def _check(onnx: Any, result: bytes, weights: BertWeights) -> None:
    """Make sure that the result is valid ONNX, and that all the scheme leaves alone was left alone.

    A tensor that is one of the rounded and one of the others at once would have changed both.
    """
    try:
        onnx.checker.check_model(result, full_check=True)
        again = recognize_bert(read_onnx(result))
    except (GraphError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"this graph cannot be quantized: the result would not be right: {error}") from error
    for before, after in zip(_untouched(weights), _untouched(again), strict=True):
        if not np.array_equal(before, after):
            raise GraphError(
                "this graph cannot be quantized: a tensor that is to be rounded is used as one that is not, too"
            )


def _untouched(weights: BertWeights) -> Iterator[NDArray[np.float32]]:
    yield weights.position_embeddings
    if weights.token_type_embeddings is not None:
        yield weights.token_type_embeddings
    norms = [weights.embedding_norm]
    linears = [weights.pooler, weights.classifier]
    for layer in weights.layers:
        norms += [layer.attention_norm, layer.output_norm]
        linears += [layer.query, layer.key, layer.value, layer.attention_output, layer.intermediate, layer.output]
    for norm in norms:
        yield from (norm.weight, norm.bias)
    yield from (linear.bias for linear in linears)
    yield weights.classifier.weight.dense()


# --- files ---------------------------------------------------------------------------------------------


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a whole file, or leave what was there."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        if Path(temporary).read_bytes() != data:
            raise OSError("what was read back is not what was written")
        Path(temporary).replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot write {str(path)!r}: {reason}; make its folder writable", where="source") from error
    finally:
        if temporary:
            with suppress(OSError):  # it has moved, normally
                Path(temporary).unlink()


def _sync_folder(folder: Path) -> None:
    """Make the new name durable; not every system and file system can, and the bytes are safe either way."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
