"""Processor counts, worker threads, and one reference-counted BLAS limiter for the process.

How many threads a BLAS uses is process-wide state. Contexts that set and restore it on their own leave a
wrong number behind as soon as two of them overlap, so minice has exactly one: the first in sets the limit,
the last out puts back what the host had chosen.
"""

import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minice.errors import ScorerError

_FORK_CHECK_S = 0.5

_CGROUP_QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def available_cpus() -> int:
    """Count the processors that this process may use: its affinity, capped by a container's quota."""
    count = _affinity() or os.cpu_count() or 1
    quota = _cgroup_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def cpu_limits() -> dict[str, float | None]:
    """What ``available_cpus`` goes by, ready for JSON; None where the platform does not tell or nothing limits."""
    return {"cpu_count": os.cpu_count(), "affinity": _affinity(), "cgroup_quota": _cgroup_quota()}


def _affinity() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _cgroup_quota() -> float | None:
    """Processors that the control group grants (version 2, then 1), or None where nothing limits them."""
    unified, legacy = (Path(path) for path in _CGROUP_QUOTAS)
    try:
        if unified.exists():
            quota, period = unified.read_text().split()[:2]
        else:
            quota = legacy.read_text().strip()
            period = legacy.with_name("cpu.cfs_period_us").read_text().strip()
        granted = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # "max", no control group, or a form that we do not know: no limit
    return granted if granted > 0 else None


class BlasLimiter:
    """Holds the BLAS at one thread while at least one caller is inside.

    Where threadpoolctl finds no BLAS that it can steer, entering changes nothing and ``steerable`` is False.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may fork while its own thread is inside
        self._holders = 0
        self._libraries: list[Any] | None = None
        self._saved: list[tuple[Any, int]] = []

    @property
    def steerable(self) -> bool:
        """Whether the number of BLAS threads can be set at all."""
        with self._lock:
            return bool(self._blas())

    def describe(self) -> list[dict[str, str]]:
        """One entry a BLAS library: its name, version, kernel and threading layer."""
        with self._lock:
            found = [library.info() for library in self._blas()]
        keys = {
            "internal_api": "name",
            "version": "version",
            "architecture": "kernel",
            "threading_layer": "threading",
        }
        return [{ours: str(info.get(theirs)) for theirs, ours in keys.items()} for info in found]

    def _blas(self) -> list[Any]:
        """Loaded BLAS libraries; looked for once, because walking all loaded libraries takes milliseconds."""
        if self._libraries is None:
            from threadpoolctl import ThreadpoolController

            self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        return self._libraries

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the limit; overlapping and nested holds are fine."""
        with self._lock:
            if self._holders == 0:
                self._saved = [(library, library.get_num_threads()) for library in self._blas()]
                for library, _ in self._saved:
                    _set_threads(library, 1)
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._restore()

    def limit_worker(self) -> None:
        """Hold the limit in this worker thread too, while a caller holds it.

        With OpenMP the number belongs to each thread: what the caller set does not reach its workers.
        """
        for library, _ in self._saved:
            if getattr(library, "threading_layer", None) == "openmp":
                library.set_num_threads(1)

    def _restore(self) -> None:
        for library, count in self._saved:
            # A number other than ours was chosen by the host meanwhile: it stays.
            if library.get_num_threads() == 1:
                _set_threads(library, count)
        self._saved = []

    def reset_in_child(self) -> None:
        """After a fork: nobody in this process holds the limit, and nobody will release the lock."""
        self._lock = threading.RLock()
        self._holders = 0
        self._restore()


def _set_threads(library: Any, count: int) -> None:
    """Set the number of threads of a BLAS, from any thread.

    threadpoolctl 3.8 obeys only the first thread that sets a limit, until it gives that up, and ignores others
    in silence; older ones obey all. Our limiter is one decision for all threads, so it takes and returns control.
    """
    let_go = getattr(library, "clear_controlling_thread", lambda force: None)
    let_go(force=True)
    library.set_num_threads(count)
    let_go(force=True)


blas_limit = BlasLimiter()


class Task:
    """A piece of work for a worker thread; its caller may be interrupted anywhere without harm.

    Executors and their futures are not used for it: Ctrl-C in the middle of their Python-level locks can leave
    one held, and then a worker waits for ever. Here every step that two threads share is a single atomic one.

    Attributes:
        failure: What the work raised, if anything.
    """

    def __init__(self, work: Callable[[], None], reports: "queue.SimpleQueue[Task]") -> None:
        self.failure: BaseException | None = None
        self._work = work
        self._reports = reports
        self._pid = os.getpid()
        self._claim = threading.Lock()  # taken once: by the worker that runs it, or by who calls it off
        self._done = False

    def run(self) -> None:
        """Do the work, unless it was called off, and report."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # handed to the caller, who raises it
            self.failure = error
        self._done = True
        self._reports.put(self)

    def settle(self) -> None:
        """Call it off if nobody has begun it, else wait until it has ended."""
        if self._claim.acquire(blocking=False):
            return
        while not self._done and os.getpid() == self._pid:
            time.sleep(0.0005)


class Workers:
    """A fixed number of worker threads, started at first use; a forked child gets new ones."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._start_empty_handed()
        _all_workers.add(self)

    def _start_empty_handed(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, task: Task) -> None:
        """Hand over a task; tasks are begun in the order in which they come."""
        if len(self._threads) < self.count:
            with self._lock:
                while len(self._threads) < self.count:
                    thread = threading.Thread(target=_serve, args=(self._tasks,), name="minice", daemon=True)
                    thread.start()
                    self._threads.append(thread)
        self._tasks.put(task)

    def run_all(self, works: Sequence[Callable[[], None]], checkpoint: Callable[[], None] | None = None) -> None:
        """Do pieces of work, begun in this order, and wait for them.

        Stops at the first failure, its own or the checkpoint's, and leaves no work behind.

        Args:
            works: What to do; each piece in one of the threads.
            checkpoint: Called between pieces in the caller's thread; what it raises ends the call.
        """
        reports: queue.SimpleQueue[Task] = queue.SimpleQueue()
        tasks: list[Task] = []
        ended = 0
        try:
            for work in works:
                # One piece waits behind the running ones; more would make other callers wait for all of ours.
                while len(tasks) - ended > self.count:
                    _raise_failure(_next_report(reports))
                    ended += 1
                if checkpoint is not None:
                    checkpoint()
                tasks.append(Task(work, reports))
                self.submit(tasks[-1])
            while ended < len(tasks):
                _raise_failure(_next_report(reports))
                ended += 1
                if ended < len(tasks) and checkpoint is not None:
                    checkpoint()
        finally:
            for task in tasks:
                task.settle()

    def close(self) -> None:
        """End the threads once they have finished what they were given."""
        with self._lock:
            tasks, threads = self._tasks, self._threads
            self._tasks, self._threads = queue.SimpleQueue(), []
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            thread.join()

    def __del__(self) -> None:
        # Whoever forgot to close: the threads wait for work that can never come, and end.
        for _ in self._threads:
            self._tasks.put(None)

    def reset_in_child(self) -> None:
        """After a fork: the parent's threads do not exist here."""
        self._start_empty_handed()


def _next_report(reports: "queue.SimpleQueue[Task]") -> Task:
    """Wait for the next piece to end; in a child that a signal handler forked in the middle of it, nothing will."""
    pid = os.getpid()
    while True:
        try:
            return reports.get(timeout=_FORK_CHECK_S)
        except queue.Empty:
            if os.getpid() != pid:
                raise ScorerError(
                    "the process was forked in the middle of the call, whose threads are not here"
                ) from None


def _raise_failure(task: Task) -> None:
    if task.failure is not None:
        raise task.failure


def _serve(tasks: "queue.SimpleQueue[Task | None]") -> None:
    """What a worker thread does: it knows only the queue, so that it keeps no engine alive."""
    while (task := tasks.get()) is not None:
        task.run()
        del task  # its arrays are not to wait for the next one


_all_workers: "weakref.WeakSet[Workers]" = weakref.WeakSet()


def _reset_in_child() -> None:
    blas_limit.reset_in_child()
    for workers in list(_all_workers):
        workers.reset_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
