"""The BLAS limiter, worker threads and processor counts."""

import os
import queue
import threading

import pytest

from minice.engines import threads
from minice.engines.threads import BlasLimiter, Task, Workers, available_cpus, blas_limit


class Library:
    """Stands in for a BLAS whose thread count can be set."""

    def __init__(self, count=8):
        self.count = count
        self.history = []

    def get_num_threads(self):
        return self.count

    def set_num_threads(self, count):
        self.count = count
        self.history.append(count)


@pytest.fixture
def limiter():
    made = BlasLimiter()
    made._libraries = [Library(8), Library(3)]
    return made


def counts(limiter):
    return [library.count for library in limiter._libraries]


def test_first_in_sets_and_last_out_restores(limiter):
    # Two overlapping contexts, left in the order in which they were entered.
    first, second = limiter(), limiter()
    first.__enter__()
    assert counts(limiter) == [1, 1]
    second.__enter__()
    first.__exit__(None, None, None)
    assert counts(limiter) == [1, 1]
    second.__exit__(None, None, None)
    assert counts(limiter) == [8, 3]
    assert limiter._libraries[0].history == [1, 8]


def test_limit_is_released_when_the_body_fails(limiter):
    with pytest.raises(KeyError), limiter():
        raise KeyError
    assert counts(limiter) == [8, 3]


def test_number_that_the_host_chooses_meanwhile_stays(limiter):
    with limiter():
        limiter._libraries[0].set_num_threads(5)
    assert counts(limiter) == [5, 3]


def test_many_threads_leave_the_hosts_setting(limiter):
    def work():
        for _ in range(200):
            with limiter():
                assert counts(limiter) == [1, 1]

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counts(limiter) == [8, 3]
    assert limiter._holders == 0


def test_openmp_is_limited_in_each_worker_thread(limiter):
    # There the number belongs to the thread that sets it, so the caller's does not reach the workers.
    limiter._libraries[0].threading_layer = "openmp"
    limiter._libraries[1].threading_layer = "pthreads"
    with limiter():
        limiter.limit_worker()
        assert [library.history for library in limiter._libraries] == [[1, 1], [1]]
    limiter.limit_worker()  # nobody holds the limit any more
    assert counts(limiter) == [8, 3]


def test_fork_while_held_restores_in_the_child(limiter):
    with limiter():
        limiter.reset_in_child()  # what the child of a fork in another thread does
        assert counts(limiter) == [8, 3]
        with limiter():
            assert counts(limiter) == [1, 1]
        assert counts(limiter) == [8, 3]
        limiter._holders = 1  # back to what the parent sees, so that the outer exit is its own


def test_without_a_blas_that_can_be_steered_nothing_changes():
    limiter = BlasLimiter()
    limiter._libraries = []
    with limiter():
        pass
    assert not limiter.steerable


def test_real_blas_is_put_back():
    from threadpoolctl import threadpool_info

    def blas():
        return [entry["num_threads"] for entry in threadpool_info() if entry["user_api"] == "blas"]

    before = blas()
    with blas_limit():
        assert set(blas()) <= {1}
    assert blas() == before
    assert blas_limit.steerable
    assert {"name", "version", "kernel", "threading"} <= set(blas_limit.describe()[0])


def test_available_cpus_follows_the_affinity(monkeypatch):  # FR 127
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    monkeypatch.setattr(threads, "_cgroup_quota", lambda: None)
    assert available_cpus() == 2


@pytest.mark.parametrize(("quota", "expected"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 16)])
def test_available_cpus_follows_a_containers_quota(monkeypatch, tmp_path, quota, expected):  # FR 127
    path = tmp_path / "cpu.max"
    path.write_text(quota + "\n")
    monkeypatch.setattr(threads, "_CGROUP_QUOTAS", (str(path), str(tmp_path / "none")))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert available_cpus() == expected


@pytest.mark.parametrize(("quota", "expected"), [("200000", 2), ("-1", 16)])
def test_available_cpus_follows_the_older_quota_files(monkeypatch, tmp_path, quota, expected):
    legacy = tmp_path / "cpu.cfs_quota_us"
    legacy.write_text(quota)
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(threads, "_CGROUP_QUOTAS", (str(tmp_path / "none"), str(legacy)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert available_cpus() == expected


def test_workers_start_lazily_and_again_after_a_fork():
    workers, reports = Workers(2), queue.SimpleQueue()
    assert not workers._threads
    done = []
    for number in range(20):
        workers.submit(Task(lambda number=number: done.append(number), reports))
    for _ in range(20):
        assert reports.get(timeout=60).failure is None
    assert sorted(done) == list(range(20))
    assert len(workers._threads) == 2
    parents = workers._threads
    workers.reset_in_child()
    assert not workers._threads
    workers.submit(Task(lambda: done.append("child"), reports))
    assert reports.get(timeout=60).failure is None
    workers.close()
    workers.close()
    assert not workers._threads
    assert all(thread.daemon for thread in parents)


def test_a_task_reports_its_failure_and_can_be_called_off():
    reports = queue.SimpleQueue()
    failing = Task(lambda: 1 / 0, reports)
    failing.run()
    failing.settle()  # ended: returns at once
    assert isinstance(reports.get().failure, ZeroDivisionError)
    called_off = Task(lambda: pytest.fail("it was called off"), reports)
    called_off.settle()
    called_off.run()
    assert reports.empty()


def test_forgotten_workers_end():
    workers, reports = Workers(2), queue.SimpleQueue()
    workers.submit(Task(lambda: None, reports))
    reports.get(timeout=60)
    threads = workers._threads
    del workers
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
