"""Processor counts, worker threads, and one reference-counted BLAS limiter for the process.

How many threads a BLAS uses is process-wide state. Contexts that set and restore it on their own leave a
wrong number behind as soon as two of them overlap, so minice has exactly one: the first in sets the limit,
the last out puts back what the host had chosen.
"""

import math
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CGROUP_QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def available_cpus() -> int:
    """Count the processors that this process may use: its affinity, capped by a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


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
        self._held_for_fork = False
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

    def before_fork(self) -> None:
        """Let nobody be in the middle of a change."""
        self._lock.acquire()
        self._held_for_fork = True

    def after_fork_in_parent(self) -> None:
        """Go on."""
        # A fork that was waiting elsewhere while this module was imported comes here without having been before.
        if self._held_for_fork:
            self._held_for_fork = False
            self._lock.release()

    def reset_in_child(self) -> None:
        """After a fork: nobody in this process holds the limit, and nobody will release the lock."""
        self._lock = threading.RLock()
        self._held_for_fork = False
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


class Workers:
    """A fixed number of worker threads, started at first use; a forked child gets new ones."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        _all_workers.add(self)

    def pool(self) -> ThreadPoolExecutor:
        """The executor of this process."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="minice")
            return self._pool

    def close(self) -> None:
        """End the threads once they have finished what they were given."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def reset_in_child(self) -> None:
        """After a fork: the parent's threads do not exist here."""
        self._lock = threading.Lock()
        self._pool = None


_all_workers: "weakref.WeakSet[Workers]" = weakref.WeakSet()


def _reset_in_child() -> None:
    blas_limit.reset_in_child()
    for workers in list(_all_workers):
        workers.reset_in_child()


if hasattr(os, "register_at_fork"):
    # A fork waits until no other thread is setting numbers: threadpoolctl has a lock of its own, which a child
    # would otherwise inherit locked.
    os.register_at_fork(
        before=blas_limit.before_fork, after_in_parent=blas_limit.after_fork_in_parent, after_in_child=_reset_in_child
    )
