"""``minice quantize``: write the int8 file of a model beside its fp32 file, and say what rounding did."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minice.cli.arguments import Arguments, Command, Positional, local_path
from minice.cli.encoder import FORMAT, MODEL_DIR, model_dir
from minice.cli.writing import choose_format, complain, table, to_json, write
from minice.errors import InputError, ModelNotFoundError

if TYPE_CHECKING:
    from minice.artifacts.comparison import Comparison
    from minice.artifacts.quantize import WrittenModel
    from minice.artifacts.receipt import Digest

MODEL_NAMES = ("onnx/model.onnx", "model.onnx")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is to be quantized.

    Attributes:
        path: The fp32 file.
        expected: Its pinned digest; None where a path was named, whose file is taken as it is.
        tokenizer: The tokenizer beside it, for the comparison; None if there is none.
    """

    path: Path
    expected: "Digest | None"
    tokenizer: Path | None


def run(arguments: Arguments) -> int:
    """Quantize, compare both files on the built-in pairs, and report."""
    from minice.artifacts.comparison import compare_models
    from minice.artifacts.quantize import write_quantized
    from minice.artifacts.store import read_unpinned

    source = _source(arguments["dir-or-id"], model_dir(arguments))
    written = write_quantized(source.path, expected=source.expected)
    # The digest that was quantized, so that both sides of the comparison are what the receipt says.
    before = read_unpinned(source.path, written.model.source)
    tokenizer = None if source.tokenizer is None else read_unpinned(source.tokenizer)
    comparison = compare_models(before, written.model.data, tokenizer=tokenizer)
    if choose_format(arguments["format"]) == "jsonl":
        write(to_json(_as_json(source, written, comparison)) + "\n")
    else:
        write(_as_table(source, written, comparison))
    if not _pinned_as(written):
        complain(
            f"minice: note: no pinned model has the fp32 file {str(source.path)!r}, so its int8 file cannot be "
            "opened by id; that needs an entry in models.lock"
        )
    return 0


def _source(name: str, folder: str | None) -> Source:
    """Take the argument for a file or folder if there is one of that name, else for a model."""
    path = Path(local_path(name))
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        return _of_pin(name, folder)
    for inside in MODEL_NAMES:
        if (path / inside).is_file():
            return _of_file(path / inside)
    raise InputError(f"expected {' or '.join(MODEL_NAMES)} in it, found neither", where=str(path))


def _of_file(path: Path) -> Source:
    # Published models keep the graph in a folder onnx/ below the tokenizer.
    places = [path.parent, path.parent.parent] if path.parent.name == "onnx" else [path.parent]
    tokenizers = [place / "tokenizer.json" for place in places]
    tokenizer = next((tokenizer for tokenizer in tokenizers if tokenizer.is_file()), None)
    return Source(path=path, expected=None, tokenizer=tokenizer)


def _of_pin(name: str, folder: str | None) -> Source:
    from minice.artifacts.lock import shipped_lock
    from minice.artifacts.receipt import Digest
    from minice.artifacts.store import locate

    try:
        pin = shipped_lock().find(name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error.message}; nor is there a file or folder of that name", where=error.where
        ) from None
    file = pin.file("model", "fp32")
    paths = {report.name: report for report in locate(pin, model_dir=folder)}
    path, tokenizer = paths[file.path].path, paths[pin.file("tokenizer").path].path
    if path is None:
        raise ModelNotFoundError(
            f"quantizing needs the fp32 file {file.path!r}, which is not on disk. {paths[file.path].message}",
            where=pin.id,
        )
    return Source(
        path=Path(path),
        expected=Digest(sha256=file.sha256, size=file.size),
        tokenizer=None if tokenizer is None else Path(tokenizer),
    )


def _pinned_as(written: "WrittenModel") -> str | None:
    """Return the id of the pin whose fp32 file was quantized."""
    from minice.artifacts.lock import shipped_lock

    source = written.model.source.sha256
    return next((pin.id for pin in shipped_lock().models if source in {file.sha256 for file in pin.files}), None)


def _as_json(source: Source, written: "WrittenModel", comparison: "Comparison") -> dict[str, object]:
    model = written.model
    return {
        "source": {"path": str(source.path), "size": model.source.size, "sha256": model.source.sha256},
        "result": {"path": str(written.path), "size": model.result.size, "sha256": model.result.sha256},
        "receipt": str(written.receipt_path),
        "pinned_as": _pinned_as(written),
        "scheme": model.receipt.scheme,
        "minice": model.receipt.minice,
        "onnx": model.receipt.onnx,
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "bytes_before": tensor.bytes_before,
                "bytes_after": tensor.bytes_after,
                "largest_error": tensor.largest_error,
                "mean_error": tensor.mean_error,
            }
            for tensor in model.tensors
        ],
        "largest_error": model.largest_error,
        "mean_error": model.mean_error,
        "comparison": {
            "pairs": comparison.pairs,
            "texts": comparison.texts,
            "largest_logit_difference": comparison.largest_difference,
            "kendall_tau": comparison.kendall_tau,
            "top_1_agreement": comparison.top_1,
        },
    }


def _as_table(source: Source, written: "WrittenModel", comparison: "Comparison") -> str:
    model = written.model
    rows = [
        [
            tensor.name,
            "x".join(map(str, tensor.shape)),
            f"{tensor.bytes_before:,}",
            f"{tensor.bytes_after:,}",
            f"{tensor.largest_error:.6f}",
            f"{tensor.mean_error:.6f}",
        ]
        for tensor in model.tensors
    ]
    header = ["tensor", "shape", "bytes before", "after", "largest error", "mean error"]
    facts = [
        ["source", f"{source.path} ({model.source.size:,} bytes)"],
        ["result", f"{written.path} ({model.result.size:,} bytes)"],
        ["receipt", str(written.receipt_path)],
        ["pinned as", _pinned_as(written) or "nothing"],
        [
            "weights",
            f"{len(model.tensors)} tensors, error at most {model.largest_error:.6f}, mean {model.mean_error:.6f}",
        ],
        [
            "logits",
            f"differ by at most {comparison.largest_difference:.4f} ({comparison.pairs} pairs, {comparison.texts})",
        ],
        ["ranks", f"Kendall tau {comparison.kendall_tau:.4f}, same first passage {comparison.top_1:.1%}"],
    ]
    return table(header, rows) + "\n" + table(["what", "value"], facts)


COMMAND = Command(
    name="quantize",
    summary="write a model's int8 file beside its fp32 file",
    description="""\
Rounds the matrices of the encoder to int8 (weights only), writes model.int8.onnx and a receipt beside
model.onnx, and compares both on built-in pairs. DIR-OR-ID is a folder with onnx/model.onnx or
model.onnx, or such a file, else a model that `minice models` lists. Needs: pip install 'minice[quantize]'.""",
    example="minice quantize ms-marco-MiniLM-L6-v2",
    run=run,
    positionals=(Positional(name="DIR-OR-ID", help="a folder, or a model that `minice models` lists"),),
    options=(FORMAT, MODEL_DIR),
)
