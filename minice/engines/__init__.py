"""Engines: encoded pairs in, logits out."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from minice.encoding.pairs import PairEncoding
from minice.engines.threads import blas_limit
from minice.errors import ConfigError, InputError

ENGINES = ("numpy", "onnxruntime")


class Engine(Protocol):
    """What executes a graph.

    Attributes:
        name: What the user calls it.
        positions: Largest number of tokens in one pair.
        vocabulary: Token ids that the model knows: 0 to ``vocabulary - 1``.
    """

    name: str
    positions: int
    vocabulary: int

    def logits(
        self, pairs: Sequence[PairEncoding], *, checkpoint: Callable[[], None] | None = None
    ) -> NDArray[np.float32]:
        """Score [N] encoded pairs; [N] float32 logits in input order.

        ``checkpoint`` is called between batches; what it raises ends the call.
        """
        ...

    def info(self) -> dict[str, object]:
        """What decides speed and numbers, ready for JSON."""
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...


def check_engine_options(*, engine: str, threads: int | None, max_batch_tokens: int | None) -> None:
    """Refuse options that no engine could follow.

    Raises:
        ConfigError: An unknown engine; ``threads`` or ``max_batch_tokens`` is not a whole number >= 1.
        EngineUnavailableError: The engine's package is not installed.
    """
    if engine not in ENGINES:
        raise ConfigError(f"expected one of {', '.join(ENGINES)}, got {engine!r}", where="engine")
    for name, value in (("threads", threads), ("max_batch_tokens", max_batch_tokens)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"expected a whole number >= 1 or None, got {value!r}", where=name)
    if engine == "onnxruntime":
        from minice.engines.ort_engine import require_onnxruntime

        require_onnxruntime()


def open_engine(
    source: bytes | str | os.PathLike[str],
    *,
    engine: str = "numpy",
    threads: int | None = None,
    max_batch_tokens: int | None = None,
) -> Engine:
    """Load an ONNX cross-encoder into an engine.

    Nothing is verified here: pins and digests are the business of ``minice.artifacts``, which hands over
    verified bytes. A path is read once into memory.

    Args:
        source: The ONNX file, as bytes or as a path.
        engine: ``numpy`` or ``onnxruntime``.
        threads: Worker threads; None takes the processors that this process may use.
        max_batch_tokens: Largest batch, in tokens; None takes the engine's own default.

    Raises:
        ConfigError: An option is out of range.
        InputError: The path cannot be read.
        EngineUnavailableError: The engine's package is not installed.
        GraphError: The bytes are not ONNX, or not a cross-encoder with one logit that the engine can run.
    """
    check_engine_options(engine=engine, threads=threads, max_batch_tokens=max_batch_tokens)
    data = source if isinstance(source, bytes) else _read(source)
    if engine == "onnxruntime":
        from minice.engines.ort_engine import OrtEngine

        return OrtEngine(data, threads=threads, max_batch_tokens=max_batch_tokens)
    from minice.engines.bert import recognize_bert
    from minice.engines.numpy_engine import NumpyEngine
    from minice.engines.onnx_file import read_onnx

    # The few tokens that recognition runs are not worth waking the threads of the BLAS.
    with blas_limit():
        weights = recognize_bert(read_onnx(data))
    return NumpyEngine(weights, threads=threads, max_batch_tokens=max_batch_tokens)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}", where="source") from error
