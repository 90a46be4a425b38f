"""``minice quantize``: write the int8 file of a model, and say what rounding did."""

from typing import TYPE_CHECKING

from minice.cli.arguments import Arguments, Command, Positional, local_path
from minice.cli.encoder import FORMAT, MODEL_DIR, model_dir
from minice.cli.writing import choose_format, complain, table, to_json, write

if TYPE_CHECKING:
    from minice.artifacts.comparison import Comparison
    from minice.artifacts.quantize import Source, WrittenModel


def run(arguments: Arguments) -> int:
    """Quantize, compare both files on the built-in pairs, and report."""
    from minice.artifacts.comparison import compare_models
    from minice.artifacts.lock import known_lock
    from minice.artifacts.quantize import find_source, write_quantized
    from minice.artifacts.store import read_unpinned

    source = find_source(local_path(arguments["dir-or-id"]), model_dir=model_dir(arguments), lock=known_lock())
    written = write_quantized(source.path, expected=source.expected, target=source.target)
    # The digest that was quantized, so that both sides of the comparison are what the receipt says.
    before = read_unpinned(source.path, written.model.source)
    comparison = compare_models(before, written.model.data, tokenizer=source.tokenizer)
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


def _pinned_as(written: "WrittenModel") -> str | None:
    """Return the id of the pin whose fp32 file was quantized."""
    from minice.artifacts.lock import known_lock

    source = written.model.source.sha256
    return next((pin.id for pin in known_lock().models if source in {file.sha256 for file in pin.files}), None)


def _as_json(source: "Source", written: "WrittenModel", comparison: "Comparison") -> dict[str, object]:
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


def _as_table(source: "Source", written: "WrittenModel", comparison: "Comparison") -> str:
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
model.onnx, and compares both on built-in pairs. Nothing is written into the hub's cache: the files made of
a model that lies there go into MINICE_HOME. DIR-OR-ID is a folder with onnx/model.onnx or
model.onnx, or such a file; the name of a model that `minice models` lists goes first (./NAME is the
folder). --model-dir goes with such a name only. Needs: pip install 'minice[quantize]', or '.[quantize]'.""",
    example="minice quantize ms-marco-MiniLM-L6-v2",
    run=run,
    positionals=(Positional(name="DIR-OR-ID", help="a folder, or a model that `minice models` lists"),),
    options=(FORMAT, MODEL_DIR),
)
