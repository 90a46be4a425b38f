"""CrossEncoder: a query and passages in, one raw logit a passage out.

The first three rooms in a row: verified bytes, encoded pairs, an engine. What this module adds is their life:
one load whatever arrives at once, many threads and event loops on one encoder, deadlines, cancellation,
close, and the fork of a process that was in the middle of any of these.
"""

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from minice.artifacts.environment import setting
from minice.artifacts.lock import ModelPin, known_lock
from minice.artifacts.store import DEFAULT_MODEL, ModelFiles, open_model
from minice.encoding.pairs import PairEncoding, validate_max_length
from minice.encoding.tokenizer import SPECIAL_TOKENS_MODES, PairTokenizer
from minice.engines import Engine, check_engine_options, open_engine
from minice.errors import ClosedError, ConfigError, GraphError, InputError, ModelNotFoundError, ScorerError
from minice.scores import Scores

Floats = NDArray[np.float32]
_Item = TypeVar("_Item")
Encode = Callable[[PairTokenizer], list[PairEncoding]]

# Calls of ascore that run at once; the engine has its own worker threads, so more would only wait elsewhere.
_ASYNC_CALLS = 4

# Loading imports modules and sets up native libraries, both once in a process. A child that was forked in the
# middle of it would wait for ever for a thread that it does not have, so a fork waits for the load instead.
_loading_or_forking = threading.RLock()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """Checked options of one encoder."""

    engine: str = "numpy"
    threads: int | None = None
    max_length: int | None = None
    max_batch_tokens: int | None = None
    special_tokens: str = "reference"

    def __post_init__(self) -> None:
        check_engine_options(engine=self.engine, threads=self.threads, max_batch_tokens=self.max_batch_tokens)
        mode = self.special_tokens
        if not isinstance(mode, str) or mode not in SPECIAL_TOKENS_MODES:
            expected = " or ".join(SPECIAL_TOKENS_MODES)
            raise ConfigError(f"expected {expected}, got {mode!r}", where="special_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """What is built from the bytes, once."""

    tokenizer: PairTokenizer
    engine: Engine


class _Call:
    """One call in flight: which thread runs it, and when it has to stop."""

    def __init__(self, encoder: "CrossEncoder", deadline: float | None, abandoned: threading.Event | None) -> None:
        self.thread = threading.get_ident()
        self._encoder = encoder
        self._deadline = deadline
        self._abandoned = abandoned
        self._checkpoints = 0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        if self._deadline is None or self._deadline == math.inf:
            return None
        return min(max(0.0, self._deadline - time.monotonic()), threading.TIMEOUT_MAX)

    def checkpoint(self, doing: str = "scoring") -> None:
        """Return if the call may go on.

        Raises:
            ClosedError: The encoder was closed.
            CancelledError: Nobody waits for the result any more.
            ScorerError: The deadline has passed.
        """
        self._encoder._refuse_closed()
        if self._abandoned is not None and self._abandoned.is_set():
            raise CancelledError
        if self.remaining_s == 0.0:
            progress = f" (checkpoint {self._checkpoints} between batches)" if self._checkpoints else ""
            problem = f"the deadline passed while {doing}{progress}; allow more time, or send fewer passages"
            if doing == "starting":  # a number of seconds from now is the usual mistake, and lies in the past
                problem = (
                    "the deadline was past before the work began; it is an instant of time.monotonic(): "
                    "give time.monotonic() + seconds"
                )
            raise ScorerError(problem, where=self._encoder._place)

    def between_batches(self) -> None:
        """The checkpoint that engines call."""
        self._checkpoints += 1
        self.checkpoint()


class CrossEncoder:
    """Scores (query, passage) pairs with one model; made by ``CrossEncoder.open``.

    One encoder may be shared by any number of threads and event loops. Tokenizer and engine are built once,
    at the first call that needs them or by ``warm``. It works on after a fork; unpickling opens the same
    model again.
    """

    def __init__(self, files: ModelFiles, options: _Options) -> None:
        pin = files.pin
        self._pin = pin
        self._options = options
        self._max_length = _checked_max_length(options.max_length, pin)
        self._precision = files.precision
        self._scheme = files.scheme
        self._sha256 = files.model_sha256
        self._paths = dict(files.paths)
        self._reopen: dict[str, object] | None = None  # arguments of open, where open made this one
        self._source: ModelFiles | None = files  # let go once loaded: the engine keeps what it needs
        self._loaded: _Loaded | None = None
        self._closed = False
        self._start_empty_handed()
        _encoders.add(self)

    def _start_empty_handed(self) -> None:
        """Nothing in flight: at the start, and in a forked child, where nobody will finish what was."""
        self._state = threading.Condition()  # guards everything below, and _loaded, _source and _closed
        self._loading: Future[_Loaded | None] | None = None  # None comes of an interrupted load
        self._calls: set[_Call] = set()
        self._executor: ThreadPoolExecutor | None = None

    @classmethod
    def open(
        cls,
        model: str | None = None,
        *,
        model_dir: str | os.PathLike[str] | None = None,
        precision: str | None = None,
        engine: str = "numpy",
        threads: int | None = None,
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
        special_tokens: str = "reference",
    ) -> Self:
        """Open a pinned model: check every option, read and verify every byte.

        Args:
            model: Id, repository or alias of a pin. None takes ``MINICE_MODEL``, else the embedded model.
            model_dir: The only folder that is looked in. None takes ``MINICE_MODEL_DIR``, else the store
                in ``MINICE_HOME``, then the hub's own cache. An empty or blank variable counts as unset;
                arguments win.
            precision: ``fp32`` or ``int8``; None takes the first that is pinned.
            engine: ``numpy``, or ``onnxruntime`` where that is installed: it runs graphs that the first refuses,
                and its logits differ in the last digits, also with the batch (``info()`` says how far).
            threads: Worker threads; None takes the processors that this process may use.
            max_length: Tokens in one pair, special tokens included, 5 to the pin's; None takes the pin's.
            max_batch_tokens: Largest batch in tokens; None takes the engine's own. Changes speed only.
            special_tokens: ``reference`` reads "[SEP]" in a text as the special token, as the reference
                tokenizers do; ``literal`` as the text that it is, for texts that nobody vouches for.

        Raises:
            ConfigError: An option is unknown or out of range.
            ModelNotFoundError: No such pin, or its files are not on disk.
            IntegrityError: A file is not what the pin says.
            LockError: The lock that ``MINICE_LOCK`` names is none, or takes a name of a shipped model.
            EngineUnavailableError: The engine's package is not installed.
        """
        options = _Options(
            engine=engine,
            threads=threads,
            max_length=max_length,
            max_batch_tokens=max_batch_tokens,
            special_tokens=special_tokens,
        )
        if model is not None and not isinstance(model, str):
            raise ConfigError(f"expected text or None, got {type(model).__name__}", where="model")
        pin = _pin_of_environment() if model is None else known_lock().find(model)
        _checked_max_length(max_length, pin)  # before 90 MB are read for nothing
        encoder = cls(open_model(pin, model_dir=model_dir, precision=precision), options)
        # Absolute, and without the environment: in another process this is to be the same model.
        folder = setting("MINICE_MODEL_DIR") if model_dir is None else os.fsdecode(model_dir)
        encoder._reopen = {
            "model": pin.id,
            "model_dir": Path(folder).absolute() if folder else None,
            "precision": encoder._precision,
            **asdict(options),
        }
        return encoder

    @classmethod
    def _from_files(cls, files: ModelFiles, **options: object) -> Self:
        """Open verified bytes that some other lock pins; ``options`` are those of ``open``."""
        return cls(files, _Options(**options))  # type: ignore[arg-type]  # wrong values are refused there

    @property
    def model_id(self) -> str:
        """All that can change a score: pin, weights digest, precision and scheme, options, engine."""
        return (
            f"{self._pin.id}@{self._sha256[:12]};precision={self._precision};scheme={self._scheme};"
            f"max_length={self._max_length};special_tokens={self._options.special_tokens};engine={self._options.engine}"
        )

    @property
    def _place(self) -> str:
        """What a scoring error names."""
        return f"model '{self.model_id}'"

    @property
    def max_length(self) -> int:
        """Tokens in one pair, special tokens included; longer pairs are cut, longest side first."""
        return self._max_length

    def score(self, query: str, passages: Iterable[str]) -> Floats:
        """Score passages against one query.

        Args:
            query: What the user asked.
            passages: [N] texts, from any iterable; "" is a passage too.

        Returns:
            [N] raw logits, float32, in the order of the passages. A logit depends on its pair alone (with the
            onnxruntime engine up to rounding, except where ``info()`` says ``scores_depend_on_batch``).

        Raises:
            InputError: A text is None or not a string; ``where`` names it.
            GraphError: At the first use: the model or its tokenizer is not one that the engine can run.
            ClosedError: The encoder was closed before or meanwhile.
        """
        return self._score(query, _texts(passages))

    def score_pairs(self, pairs: Iterable[tuple[str, str]]) -> Floats:
        """Score (query, passage) pairs: [N] raw logits, float32, in input order.

        Raises:
            InputError, GraphError, ClosedError: As ``score``.
        """
        listed = _listed("pairs", pairs, "an iterable of (query, passage) pairs")
        return self._run(len(listed), lambda tokenizer: tokenizer.encode_pairs(listed, max_length=self._max_length))

    async def ascore(self, query: str, passages: Iterable[str]) -> Floats:
        """Do what ``score`` does, off the event loop.

        Cancelling it frees the caller at once; the work stops between two batches, and a load that it had
        begun goes on for whoever comes next.

        Args:
            query: What the user asked.
            passages: [N] texts, from any iterable, which is read before the first wait.

        Returns:
            [N] raw logits, float32, in the order of the passages.

        Raises:
            InputError, GraphError, ClosedError: As ``score``.
        """
        import asyncio  # whoever awaits has it loaded; a command line need not wait for it

        texts = _texts(passages)
        abandoned = threading.Event()
        loop = asyncio.get_running_loop()
        with self._state:
            # Under the lock, so that no call reaches an executor that close has just shut down.
            self._refuse_closed()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_ASYNC_CALLS, thread_name_prefix="minice-ascore")
            answer = loop.run_in_executor(self._executor, lambda: self._score(query, texts, abandoned=abandoned))
        try:
            return await answer
        finally:
            abandoned.set()

    def answer(self, query: str, passages: Iterable[str], *, deadline: float | None = None) -> Scores:
        """Answer the stage's one question: the logits, and what they are.

        Args:
            query: What the user asked.
            passages: [N] texts.
            deadline: An instant of ``time.monotonic()``, in seconds; looked at before the work and between
                batches.

        Raises:
            ScorerError: The deadline has passed; names the model and how far it came.
            InputError, GraphError, ClosedError: As ``score``.
        """
        values = self._score(query, _texts(passages), deadline=_checked_deadline(deadline))
        return Scores(values=values, scale=self._pin.scale, model_id=self.model_id, member=self._pin.id)

    def warm(self) -> None:
        """Build tokenizer and engine now, if nobody has yet, rather than at the first call.

        Raises:
            GraphError, ClosedError: As ``score``.
        """
        with self._call() as call:
            self._ready(call)

    def info(self) -> dict[str, object]:
        """What this encoder is, ready for JSON; ``engine_info`` is None until the model is loaded."""
        loaded = self._loaded
        return {
            "model": self._pin.id,
            "model_id": self.model_id,
            "sha256": self._sha256,
            "tokenizer_sha256": self._pin.file("tokenizer").sha256,
            "precision": self._precision,
            "scheme": self._scheme,
            "scale": str(self._pin.scale),
            "license": self._pin.license,
            "max_length": self._max_length,
            "special_tokens": self._options.special_tokens,
            "engine": self._options.engine,
            "engine_info": None if loaded is None else loaded.engine.info(),
            "paths": dict(self._paths),
            "loaded": loaded is not None,
            "closed": self._closed,
        }

    def close(self) -> None:
        """Give back threads and memory; any use afterwards is a ClosedError.

        Calls in flight finish or raise ClosedError between two batches, and are waited for. Closing again
        does nothing.
        """
        me = threading.get_ident()
        with self._state:
            self._closed = True
            # A signal handler may close the encoder in the middle of a call of its own thread.
            while any(call.thread != me for call in self._calls):
                self._state.wait()
            loaded, self._loaded, self._source = self._loaded, None, None
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        if loaded is not None:
            loaded.engine.close()

    async def aclose(self) -> None:
        """Do what ``close`` does, off the event loop."""
        import asyncio

        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<CrossEncoder {self.model_id}{' closed' if self._closed else ''}>"

    def __reduce__(self) -> tuple[object, ...]:
        self._refuse_closed()
        if self._reopen is None:
            raise TypeError("only an encoder that CrossEncoder.open made can be pickled: it is opened again")
        return (_open_again, (type(self), self._reopen))

    def _score(
        self,
        query: str,
        passages: list[str],
        *,
        deadline: float | None = None,
        abandoned: threading.Event | None = None,
    ) -> Floats:
        if not isinstance(query, str):  # also where there is nothing to encode it with
            raise InputError(f"expected text, got {type(query).__name__}", where="query")
        return self._run(
            len(passages),
            lambda tokenizer: tokenizer.encode(query, passages, max_length=self._max_length),
            deadline=deadline,
            abandoned=abandoned,
        )

    def _run(
        self,
        count: int,
        encode: Encode,
        *,
        deadline: float | None = None,
        abandoned: threading.Event | None = None,
    ) -> Floats:
        """Load if need be, encode, and run the engine; [count] logits."""
        with self._call(deadline, abandoned) as call:
            if count == 0:
                return np.empty(0, np.float32)
            call.checkpoint("starting")
            loaded = self._ready(call)
            call.checkpoint("loading")
            pairs = encode(loaded.tokenizer)
            call.checkpoint("encoding")
            try:
                return loaded.engine.logits(pairs, checkpoint=call.between_batches)
            except ScorerError as error:  # the engine's own; it knows no model
                if error.where:
                    raise
                raise error.within(self._place) from error

    @contextmanager
    def _call(self, deadline: float | None = None, abandoned: threading.Event | None = None) -> Iterator[_Call]:
        """A call that close waits for."""
        call = _Call(self, deadline, abandoned)
        with self._state:
            self._refuse_closed()
            self._calls.add(call)
        try:
            yield call
        finally:
            with self._state:
                self._calls.discard(call)
                self._state.notify_all()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"the encoder of '{self._pin.id}' is closed; open another one")

    def _ready(self, call: _Call) -> _Loaded:
        """The loaded model: by the first thread that needs it, for all threads that need it meanwhile."""
        while True:
            with self._state:
                if self._loaded is not None:
                    return self._loaded
                source, pending = self._source, self._loading
                if source is None:
                    raise ClosedError(f"the encoder of '{self._pin.id}' is closed; open another one")
                if pending is None:
                    mine = self._loading = Future()
            if pending is None:
                return self._load_for_all(source, mine)
            wait([pending], timeout=call.remaining_s)
            if not pending.done():
                call.checkpoint("loading")
            elif loaded := pending.result():
                return loaded
            # Else the loading thread was interrupted, which is its own business: somebody else loads.

    def _load_for_all(self, source: ModelFiles, promise: "Future[_Loaded | None]") -> _Loaded:
        try:
            with _loading_or_forking:
                loaded = self._load(source)
        except BaseException as error:
            with self._state:
                self._loading = None  # a later call tries again
            if isinstance(error, Exception):
                promise.set_exception(error)
            else:
                promise.set_result(None)
            raise
        with self._state:
            self._loaded, self._loading, self._source = loaded, None, None
        promise.set_result(loaded)
        return loaded

    def _load(self, files: ModelFiles) -> _Loaded:
        """Build tokenizer and engine, and see that they belong together."""
        options, place = self._options, f"model '{self._pin.id}'"
        tokenizer = PairTokenizer.from_bytes(files.tokenizer, special_tokens=options.special_tokens)
        try:
            engine = open_engine(
                files.model,
                engine=options.engine,
                threads=options.threads,
                max_batch_tokens=options.max_batch_tokens,
            )
        except GraphError as error:
            raise error.within(place) from error
        if tokenizer.vocabulary_size > engine.vocabulary:
            ids = tokenizer.vocabulary_size
            problem = f"the tokenizer has {ids} token ids, the embedding table has {engine.vocabulary}"
        elif self._max_length > engine.positions:
            problem = f"pairs may have {self._max_length} tokens, the position table has {engine.positions}"
        else:
            return _Loaded(tokenizer, engine)
        engine.close()
        raise GraphError(f"{problem}; the pin joins files that do not belong together", where=place)


def _open_again(kind: type[CrossEncoder], arguments: dict[str, object]) -> CrossEncoder:
    """What unpickling does."""
    return kind.open(**arguments)  # type: ignore[arg-type]  # they were arguments of open before


def _pin_of_environment() -> ModelPin:
    """The model that ``MINICE_MODEL`` names, else the embedded one."""
    try:
        return known_lock().find(setting("MINICE_MODEL") or DEFAULT_MODEL)
    except ModelNotFoundError as error:  # nobody who reads it would know of an argument
        raise ModelNotFoundError(error.message, where="MINICE_MODEL") from None


def _checked_max_length(value: int | None, pin: ModelPin) -> int:
    """``value``, or the pin's where it is None; 5..the pin's."""
    return pin.max_length if value is None else validate_max_length(value, positions=pin.max_length)


def _checked_deadline(value: float | None) -> float | None:
    if value is None:
        return None
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):  # an integer beyond every float is no instant
            if not math.isnan(instant := float(value)):
                return instant
    raise InputError(f"expected an instant of time.monotonic() or None, got {str(value)[:40]}", where="deadline")


def _texts(passages: Iterable[str]) -> list[str]:
    return _listed("passages", passages, "an iterable of texts")


def _listed(name: str, items: Iterable[_Item], expected: str) -> list[_Item]:
    """The items as a list of our own; one text is not an iterable of texts, though Python says so."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InputError(f"expected {expected}, got {type(items).__name__}", where=name)
    return list(items)


# Encoders of this process, for the one moment in which all of them need something: after a fork.
_encoders: "weakref.WeakSet[CrossEncoder]" = weakref.WeakSet()


def _start_over_in_child() -> None:
    _loading_or_forking.release()
    for encoder in list(_encoders):
        encoder._start_empty_handed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_loading_or_forking.acquire,
        after_in_parent=_loading_or_forking.release,
        after_in_child=_start_over_in_child,
    )
