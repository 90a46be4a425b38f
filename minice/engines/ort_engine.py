"""The onnxruntime engine: the same protocol as the NumPy engine, over an onnxruntime session.

Arrangement, chosen by measurement (README, "The two engines"): as many Python workers as processors, each running
whole batches on one intra-op thread (``run()`` releases the GIL), in batches of at most 512 padded tokens of
which almost none are padding. A session without threads of its own also has none to spin, and none to lose in a fork.

Array letters: B rows of a batch, T tokens of a padded row.
"""

import atexit
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from minice.encoding.batching import PaddedBatch, pad_pairs, plan_batches
from minice.encoding.pairs import LENGTH_LIMIT, PairEncoding
from minice.engines.batches import checked_lengths, fair_budget
from minice.engines.onnx_file import Array, read_onnx
from minice.engines.signature import checked_inputs, checked_output, position_rows, vocabulary_rows
from minice.engines.threads import Workers, available_cpus
from minice.errors import ClosedError, EngineUnavailableError, GraphError, ScorerError

Floats = NDArray[np.float32]

# Padded tokens in a batch, and what rows are padded to a multiple of: measured. Small working sets win here too, and
# onnxruntime gains nothing from round shapes as long as it plans no memory for each of them.
DEFAULT_BATCH_TOKENS: Final = 512
PADDING_MULTIPLE: Final = 1

# Session settings that are not a number of threads. The arena costs less memory than the system's allocator does
# once batches are small (237 against 372 MiB over 1,000 mixed passages, fp32); memory patterns are kept for every
# shape that ever ran, and no two batches have the same one.
_ARENA: Final = True
_MEMORY_PATTERN: Final = False
_SESSION_ENTRIES: Final = {
    # Idle threads that wait in a loop would keep all processors busy.
    "session.intra_op.allow_spinning": "0",
    "session.inter_op.allow_spinning": "0",
    # Quantized weights stay weights: fusing them would quantize activations too, and move scores by 5e-3.
    "session.disable_quant_qdq": "1",
}
_FATAL_ONLY: Final = 4  # severity of what is logged; an error is raised as well, and stderr is the user's


# Operators that round activations to integers: by the range of the whole batch, so that a logit depends on its
# neighbours, or by a fixed one, and then a last bit that differs between batches can still flip a rounding.
_ROUNDING: Final = re.compile("DynamicQuantize.*|QuantizeLinear|QLinear.*|Q(Attention|Gemm)|(MatMul|Conv)Integer.*")


_PROBE_LENGTH: Final = 5


class OrtEngine:
    """Runs any ONNX cross-encoder with one logit on onnxruntime, processors only.

    Args:
        model: The ONNX file. It is kept, because a process that was forked in the middle of a run needs it again.
        threads: Python workers, each running whole batches on one onnxruntime thread; None takes the processors
            of this process.
        max_batch_tokens: Largest batch in padded tokens; a longer pair runs alone. None takes the measured best.

    Raises:
        GraphError: The file is no ONNX, keeps data outside of itself, has other inputs than a BERT, not one logit,
            or cannot be run by the installed onnxruntime.
        EngineUnavailableError: onnxruntime is not installed, or its installation is broken.
    """

    name = "onnxruntime"

    def __init__(self, model: bytes, *, threads: int | None = None, max_batch_tokens: int | None = None) -> None:
        self.threads = available_cpus() if threads is None else threads
        self.max_batch_tokens = DEFAULT_BATCH_TOKENS if max_batch_tokens is None else max_batch_tokens
        graph = read_onnx(model)  # refuses external data, wherever it stands
        self._inputs = checked_inputs(graph)
        self._output = checked_output(graph)
        self.vocabulary = vocabulary_rows(graph)
        self.positions = min(position_rows(graph) or LENGTH_LIMIT, LENGTH_LIMIT)
        self._rounding = sorted({node.op_type for node in graph.nodes if _ROUNDING.fullmatch(node.op_type)})
        self._model = model
        self._session = _open_session(model)
        self._closed = False
        self._workers = Workers(self.threads)
        self._start_empty_handed()
        self._check_probe()
        _engines.add(self)

    def _start_empty_handed(self) -> None:
        self._lock = threading.Lock()  # guards the session's replacement and the number of runs
        self._running = 0

    def logits(self, pairs: Sequence[PairEncoding], *, checkpoint: Callable[[], None] | None = None) -> Floats:
        """Score encoded pairs.

        Args:
            pairs: [N] encodings; ids below ``vocabulary``, at most ``positions`` tokens each.
            checkpoint: Called between batches in the caller's thread; what it raises ends the call.

        Returns:
            [N] float32 logits in input order. How a pair is batched may change the last bits of its logit; where
            ``info()`` says ``scores_depend_on_batch``, it changes more.

        Raises:
            InputError: A pair is empty, too long, or holds an id that the model does not know.
            ScorerError: onnxruntime failed.
        """
        result = np.empty(len(pairs), np.float32)
        lengths = checked_lengths(pairs, positions=self.positions, vocabulary=self.vocabulary)
        budget = fair_budget(self.max_batch_tokens, sum(lengths), self.threads)

        def run(batch: list[int]) -> None:
            result[batch] = self._forward([pairs[index] for index in batch])

        batches = plan_batches(lengths, max_batch_tokens=budget, multiple=PADDING_MULTIPLE)
        self._workers.run_all([partial(run, batch) for batch in batches], checkpoint)
        return result

    def info(self) -> dict[str, object]:
        """What decides speed and numbers, ready for JSON."""
        return {
            "engine": self.name,
            "version": _onnxruntime().__version__,
            "threads": self.threads,
            "arrangement": f"{self.threads} x 1: Python workers x intra-op threads",
            "max_batch_tokens": self.max_batch_tokens,
            "padding_multiple": PADDING_MULTIPLE,
            "memory_arena": _ARENA,
            "memory_pattern": _MEMORY_PATTERN,
            "spinning": False,
            # Padding takes other paths through a kernel than no padding: equal to about 1e-6, not to the bit.
            "exact_across_batches": False,
            "exact_across_threads": False,
            "scores_depend_on_batch": bool(self._rounding),
            "rounding_operators": self._rounding,
        }

    def close(self) -> None:
        """End the worker threads and let the session go."""
        self._closed = True
        self._workers.close()
        with self._lock:
            self._session, self._model = None, b""

    def reset_in_child(self) -> None:
        """After a fork: a session that another thread was using is in an unknown state, and is opened again."""
        if self._running:
            self._session = None
        self._start_empty_handed()

    def _forward(self, pairs: list[PairEncoding]) -> Floats:
        """Logits of one batch, [B]."""
        return self._run(pad_pairs(pairs, multiple=PADDING_MULTIPLE))

    def _run(self, padded: PaddedBatch) -> Floats:
        rows = len(padded.input_ids)
        feeds = {name: getattr(padded, name).astype(kind, copy=False) for name, kind in self._inputs.items()}
        with self._running_session() as session:
            try:
                (logits,) = session.run([self._output], feeds)  # [B, 1] or [B]
            except _failures() as error:
                shape = padded.input_ids.shape
                raise ScorerError(f"onnxruntime failed on a batch of shape {shape}: {_reason(error)}") from error
        return _one_logit(logits, rows)

    @contextmanager
    def _running_session(self) -> Iterator[Any]:
        """The session, counted as in use; opened again in a child that cannot use its parent's."""
        with self._lock:
            if _exiting.is_set():
                raise ScorerError("the interpreter is shutting down")
            if self._closed:
                raise ClosedError("the engine is closed; open another one")
            if self._session is None:
                self._session = _open_session(self._model)
            session = self._session
            self._running += 1
        try:
            yield session
        finally:
            with self._lock:
                self._running -= 1

    def _check_probe(self) -> None:
        """Run two small pairs: whether it runs at all, and gives one logit a pair, only running it shows."""
        length = min(_PROBE_LENGTH, self.positions)
        ids = np.arange(1, 2 * length + 1).reshape(2, length) * 7919 % self.vocabulary
        segments = np.arange(length) * 2 // length
        try:
            self._run(pad_pairs([PairEncoding(input_ids=row, token_type_ids=segments) for row in ids]))
        except ScorerError as error:
            raise GraphError(f"the graph loads and does not run: {error.message}") from error


def require_onnxruntime() -> None:
    """Find out whether onnxruntime is installed, without importing it.

    Raises:
        EngineUnavailableError: It is not.
    """
    import importlib.util
    import sys

    if sys.modules.get("onnxruntime") is None and importlib.util.find_spec("onnxruntime") is None:
        raise EngineUnavailableError(_INSTALL, where="engine")


_INSTALL: Final = "the onnxruntime engine needs a package that is not installed; run: pip install 'minice[onnxruntime]'"


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        if error.name == "onnxruntime":
            raise EngineUnavailableError(_INSTALL, where="engine") from None
        raise EngineUnavailableError(f"onnxruntime cannot be imported: {error}", where="engine") from error
    except ImportError as error:  # a library that it links to, or another NumPy than it was built for
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):  # Ctrl-C in the middle of it
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise EngineUnavailableError(
            f"onnxruntime is installed and cannot be imported: {error}; install it again", where="engine"
        ) from error
    except (RuntimeError, AttributeError, OSError) as error:  # what half an installation does
        raise EngineUnavailableError(
            f"onnxruntime is installed and cannot be imported: {type(error).__name__}: {error}; install it again",
            where="engine",
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):  # a folder that an uninstallation left behind
        raise EngineUnavailableError(_INSTALL, where="engine")
    return onnxruntime


@cache
def _failures() -> tuple[type[Exception], ...]:
    """What onnxruntime raises: classes of its own without a common base, and RuntimeError."""
    native = _onnxruntime().capi.onnxruntime_pybind11_state
    own = (kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception))
    return (*own, RuntimeError)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _open_session(model: bytes) -> Any:
    """A session over verified bytes that neither reads nor writes a file, with every number of threads explicit."""
    ort = _onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = _ARENA
    options.enable_mem_pattern = _MEMORY_PATTERN
    options.log_severity_level = _FATAL_ONLY
    for name, value in _SESSION_ENTRIES.items():
        options.add_session_config_entry(name, value)
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except _failures() as error:
        raise GraphError(f"onnxruntime {ort.__version__} cannot load the graph: {_reason(error)}") from error


def _one_logit(logits: Array, rows: int) -> Floats:
    if logits.shape not in ((rows, 1), (rows,)):
        count = logits.shape[1] if logits.ndim == 2 and len(logits) == rows else "something else"
        raise GraphError(
            f"expected one logit, got {count}: {logits.dtype} of shape {logits.shape} for {rows} pairs",
            where="graph.output",
        )
    return logits.reshape(rows).astype(np.float32, copy=False)


# --- forks and the end -----------------------------------------------------------------------------------

_engines: "weakref.WeakSet[OrtEngine]" = weakref.WeakSet()
_exiting = threading.Event()
_LONGEST_EXIT_S: Final = 10.0


@atexit.register
def _finish_runs() -> None:
    """Wait for batches that run: a thread that comes out of onnxruntime into a dead interpreter aborts the process."""
    _exiting.set()
    end = time.monotonic() + _LONGEST_EXIT_S
    while any(engine._running for engine in list(_engines)) and time.monotonic() < end:
        time.sleep(0.001)


def _reset_in_child() -> None:
    for engine in list(_engines):
        engine.reset_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
