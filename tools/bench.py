"""Measure both engines of minice against the prototype and plain onnxruntime, interleaved, in one run.

    python tools/bench.py [--rounds 9] [--threads 2] [--json FILE]

Throughput: 100 passages of 25 to 180 words with one query, encoded once; every system scores the same pairs in
turn, round after round, so that a change in the machine's speed meets all of them. Medians are printed, and the
medians of the per-round ratios to minice's engines on the same weights. Absolute times mean little; the ratios do.

Processes, for each engine and precision: time of ``import minice`` inside a fresh interpreter; a cold ``minice
rerank`` of 20 passages from process start to last byte, and that process's peak memory; and the memory of a process
that scores 1,000 mixed passages (5 to 400 words).

What a run needs and does not find (onnxruntime, the fp32 model or the prototype in ../shared) is said and left out.
"""

import argparse
import functools
import importlib.util
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minice.artifacts.lock import shipped_lock
from minice.artifacts.store import open_model
from minice.encoding.batching import pad_pairs, plan_batches
from minice.encoding.pairs import PairEncoding
from minice.encoding.tokenizer import PairTokenizer
from minice.engines import open_engine
from minice.engines.bert import BertWeights, recognize_bert
from minice.engines.onnx_file import read_onnx
from minice.errors import MiniceError

SHARED = Path(__file__).resolve().parents[2] / "shared"
ENGINES = ("numpy", "onnxruntime")
PADDED_BUDGETS = (512, 1024, 2048, 4096)
QUERY = "how do i undo the last commit without losing my changes"

System = Callable[[], Sequence[float] | NDArray[np.float32]]


def passages(tokenizer_json: bytes, count: int, fewest: int, most: int, *, seed: int = 7) -> list[str]:
    """Seeded passages of ``fewest`` to ``most`` whole words of the vocabulary."""
    vocabulary = json.loads(tokenizer_json)["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2)
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(words, k=chosen.randint(fewest, most))) for _ in range(count)]


def onnxruntime_system(model: bytes, pairs: list[PairEncoding], *, threads: int, workers: int, budget: int) -> System:
    """Plain onnxruntime: length-sorted batches of at most ``budget`` padded tokens.

    ``workers`` Python threads run whole batches (run() releases the GIL) with ``threads`` intra-op threads each.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def forward(batch: list[int]) -> Any:
        padded = pad_pairs([pairs[index] for index in batch])
        feeds = {
            "input_ids": padded.input_ids,
            "attention_mask": padded.attention_mask,
            "token_type_ids": padded.token_type_ids,
        }
        return session.run(None, feeds)[0].reshape(-1)

    def run() -> NDArray[np.float32]:
        logits = np.empty(len(pairs), np.float32)
        batches = plan_batches([len(pair) for pair in pairs], max_batch_tokens=budget)
        with ThreadPoolExecutor(workers) as pool:
            for batch, values in zip(batches, pool.map(forward, batches), strict=True):
                logits[batch] = values
        return logits

    return run


def prototype_system(weights: BertWeights, pairs: list[PairEncoding], threads: int) -> System:
    """The prototype with its own arrangement: workers run whole batches of about 2,048 tokens."""
    from threadpoolctl import threadpool_limits

    module = _load_prototype()
    model = _prototype_model(module, weights)
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i]))
    batches: list[list[int]] = []
    used = 0
    for index in order:
        if not batches or used + len(pairs[index]) > 2048:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += len(pairs[index])

    def forward(batch: list[int]) -> Any:
        chosen = [pairs[index] for index in batch]
        return module.forward(
            model,
            np.concatenate([pair.input_ids for pair in chosen]),
            np.concatenate([pair.token_type_ids for pair in chosen]),
            [len(pair) for pair in chosen],
        )

    def run() -> NDArray[np.float32]:
        logits = np.empty(len(pairs), np.float32)
        with threadpool_limits(1), ThreadPoolExecutor(threads) as pool:
            for batch, values in zip(batches, pool.map(forward, batches), strict=True):
                logits[batch] = values
        return logits

    return run


def _load_prototype() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ragged_bert", SHARED / "prototype" / "ragged_bert.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(SHARED / "prototype")
    module = importlib.util.module_from_spec(spec)
    # It reads its weights from safetensors; here they come from the ONNX file that everybody else runs.
    sys.modules.setdefault("safetensors", ModuleType("safetensors"))
    sys.modules.setdefault("safetensors.numpy", ModuleType("safetensors.numpy"))
    spec.loader.exec_module(module)
    return module


def _prototype_model(module: ModuleType, weights: BertWeights) -> Any:
    model = module.Bert.__new__(module.Bert)
    scale = np.float32(1 / np.sqrt(weights.head_size))
    model.we = weights.word_embeddings.rows(np.arange(weights.vocabulary))
    model.pe = np.array(weights.position_embeddings)
    model.te = np.array(weights.token_type_embeddings)
    model.eg, model.eb = weights.embedding_norm.weight, weights.embedding_norm.bias
    model.L = []
    for layer in weights.layers:
        q, k, v = (linear.weight.dense() for linear in (layer.query, layer.key, layer.value))
        model.L.append(
            {
                "qkv": np.ascontiguousarray(np.concatenate([q * scale, k, v], 1)),
                "qkvb": np.concatenate([layer.query.bias * scale, layer.key.bias, layer.value.bias]),
                "o": layer.attention_output.weight.dense(),
                "ob": layer.attention_output.bias,
                "g1": layer.attention_norm.weight,
                "b1": layer.attention_norm.bias,
                "f1": layer.intermediate.weight.dense(),
                "f1b": layer.intermediate.bias,
                "f2": layer.output.weight.dense(),
                "f2b": layer.output.bias,
                "g2": layer.output_norm.weight,
                "b2": layer.output_norm.bias,
            }
        )
    model.pw, model.pb = weights.pooler.weight.dense(), weights.pooler.bias
    model.cw, model.cb = weights.classifier.weight.dense(), weights.classifier.bias
    return model


def throughput(rounds: int, threads: int) -> tuple[dict[str, Any], list[str]]:
    """Interleaved medians of every system that this machine has, and what was left out."""
    left_out: list[str] = []
    pin = shipped_lock().find("minice-l6")
    int8 = open_model(pin, environ={})
    pairs = PairTokenizer.from_bytes(int8.tokenizer).encode(
        QUERY, passages(int8.tokenizer, 100, 25, 180), max_length=pin.max_length
    )
    models = {"int8": int8.model}
    try:
        models["fp32"] = open_model(pin, model_dir=SHARED / "models" / "minice-l6", precision="fp32").model
    except MiniceError as error:
        left_out.append(f"fp32: {error.message}")
    systems: dict[str, tuple[str, System]] = {}  # name -> (precision, what runs)
    for precision, model in models.items():
        numpy_engine = open_engine(model, threads=threads)
        systems[f"minice numpy, {precision}"] = (precision, functools.partial(numpy_engine.logits, pairs))
        if (SHARED / "prototype").is_dir():
            weights = recognize_bert(read_onnx(model))
            systems[f"prototype, {precision}"] = (precision, prototype_system(weights, pairs, threads))
        if importlib.util.find_spec("onnxruntime"):
            ort_engine = open_engine(model, engine="onnxruntime", threads=threads)
            systems[f"minice onnxruntime, {precision}"] = (precision, functools.partial(ort_engine.logits, pairs))
            arrangements = [(threads, 1, budget) for budget in PADDED_BUDGETS] + [(1, threads, 512)]
            for intra_op, workers, budget in arrangements:
                name = f"onnxruntime, {workers} x {intra_op} threads, sorted, {budget} padded tokens, {precision}"
                run = onnxruntime_system(model, pairs, threads=intra_op, workers=workers, budget=budget)
                systems[name] = (precision, run)
    if not (SHARED / "prototype").is_dir():
        left_out.append("the prototype: not in ../shared")
    if not importlib.util.find_spec("onnxruntime"):
        left_out.append("onnxruntime: not installed (pip install '.[bench]')")
    times = _interleave({name: run for name, (_, run) in systems.items()}, rounds)
    rows: dict[str, dict[str, float | None]] = {}
    for name, values in times.items():
        rows[name] = {
            "median_ms": statistics.median(values) * 1000,
            "pairs_per_s": len(pairs) / statistics.median(values),
        }
        for engine in ENGINES:
            ours = times.get(f"minice {engine}, {systems[name][0]}")
            ratios = None if ours is None else [theirs / own for theirs, own in zip(values, ours, strict=True)]
            rows[name][f"time_relative_to_{engine}"] = None if ratios is None else statistics.median(ratios)
    return {"tokens": sum(map(len, pairs)), "systems": rows}, left_out


def _interleave(systems: dict[str, System], rounds: int) -> dict[str, list[float]]:
    """Run every system once a round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for round_ in range(rounds + 1):
        for name, run in systems.items():
            print(f"round {round_} of {rounds}: {name}", file=sys.stderr, flush=True)
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def import_time(rounds: int) -> float:
    """Median seconds of ``import minice`` inside a fresh interpreter."""
    code = "import time; start = time.perf_counter(); import minice; print(time.perf_counter() - start)"
    return statistics.median(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(rounds)
    )


def variants() -> list[tuple[str, str, list[str]]]:
    """Engine, precision and the options of the command line that select them, as far as this machine has them."""
    folder = SHARED / "models" / "minice-l6"
    precisions = {"int8": ["--precision", "int8"]}
    if folder.is_dir():
        precisions["fp32"] = ["--precision", "fp32", "--model-dir", str(folder)]
    engines = [name for name in ENGINES if name == "numpy" or importlib.util.find_spec(name)]
    return [
        (engine, precision, [*options, "--engine", engine])
        for precision, options in precisions.items()
        for engine in engines
    ]


def cold_rerank(rounds: int, options: list[str]) -> dict[str, float]:
    """Median wall seconds and peak MiB of ``minice rerank`` over 20 passages, each run in a new process."""
    tokenizer = open_model(shipped_lock().find("minice-l6"), environ={}).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "passages.txt"
        path.write_text("\n".join(passages(tokenizer, 20, 25, 180)), encoding="utf-8")
        command = [sys.executable, "-m", "minice", "rerank", QUERY, str(path), *options]
        runs = [_measure(command) for _ in range(rounds)]
    return {
        "wall_s": statistics.median(wall for wall, _ in runs),
        "peak_mib": statistics.median(peak for _, peak in runs),
    }


def memory(options: list[str]) -> float:
    """Peak MiB of a process that scores 1,000 mixed passages."""
    tokenizer = open_model(shipped_lock().find("minice-l6"), environ={}).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "passages.txt"
        path.write_text("\n".join(passages(tokenizer, 1_000, 5, 400)), encoding="utf-8")
        return _measure([sys.executable, "-m", "minice", "rerank", QUERY, str(path), *options])[1]


def _measure(command: list[str]) -> tuple[float, float]:
    """Wall seconds from start to last byte, and peak resident MiB, of one process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    if process.stdout is None or not process.stdout.read():
        raise RuntimeError(f"no output from {command}")
    wall = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} from {command}")
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return wall, usage.ru_maxrss / unit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything to this file as well")
    options = parser.parse_args()
    # Processes first: a child's peak counts the parent's memory at the fork, so the parent must still be small.
    imported = import_time(options.rounds)
    processes = []
    for engine, precision, selected in variants():
        print(f"processes: {engine}, {precision}", file=sys.stderr, flush=True)
        cold = cold_rerank(options.rounds, selected)
        processes.append({"engine": engine, "precision": precision, **cold, "peak_mib_1000": memory(selected)})
    table, left_out = throughput(options.rounds, options.threads)
    names = ("numpy", "tokenizers", "threadpoolctl", "onnxruntime")
    versions = {name: version(name) for name in names if importlib.util.find_spec(name)}
    result: dict[str, Any] = {
        "machine": {"processor": _processor(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "commit": _commit(),
        "command": shlex.join(["python", "tools/bench.py", *sys.argv[1:]]),
        "versions": versions,
        "throughput": table,
        "import_s": imported,
        "processes": processes,
        "left_out": left_out,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    print(f"{_processor()}, Python {platform.python_version()}, {told}, commit {result['commit']}")
    print(f"{result['command']}: {options.threads} threads, {table['tokens']} tokens in 100 pairs\n")
    print("| system | median ms | pairs/s | time relative to minice numpy | to minice onnxruntime |")
    print("|---|--:|--:|--:|--:|")
    for name, row in table["systems"].items():
        ratios = [row[f"time_relative_to_{engine}"] for engine in ENGINES]
        shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        print(f"| {name} | {row['median_ms']:.0f} | {row['pairs_per_s']:.1f} | {' | '.join(shown)} |")
    print(f"\nimport minice: {imported:.3f} s\n")
    print("| process | cold rerank of 20 passages | its peak | peak over 1,000 mixed passages |\n|---|--:|--:|--:|")
    for row in processes:
        peaks = f"{row['peak_mib']:.0f} MiB | {row['peak_mib_1000']:.0f} MiB"
        print(f"| {row['engine']}, {row['precision']} | {row['wall_s']:.2f} s | {peaks} |")
    for line in left_out:
        print(f"left out: {line}")


def _commit() -> str:
    """What is measured, with a mark where the tree has changes."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
