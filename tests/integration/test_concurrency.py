"""Many threads, event loops, cancellation, close and fork around one encoder, with both engines.

Where a moment matters, a gate holds the encoder there: nothing here depends on how fast the machine is.
"""

import asyncio
import contextlib
import multiprocessing
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import threadpoolctl
from conftest import OPEN_TINY, run_python

import minice.cross_encoder
from minice.cross_encoder import CrossEncoder
from minice.errors import ClosedError, GraphError, ScorerError

WAIT_S = 30  # for what happens at once unless something is broken
QUERY = "the zebra"
PASSAGES = ["a cat", "", "the and the", "sing " * 30]


@pytest.fixture(params=["numpy", "onnxruntime"])
def engine(request):
    return request.param


class Gate:
    """Counts passages through a function, and can hold them there."""

    def __init__(self, function, *, shut=False):
        self.function = function
        self.count = 0
        self.entered = threading.Event()
        self.open = threading.Event()
        self.failures = []  # raised by the next passages, one each
        if not shut:
            self.open.set()

    def __call__(self, *arguments, **options):
        self.count += 1
        self.entered.set()
        assert self.open.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop(0)
        return self.function(*arguments, **options)


@pytest.fixture
def loader(monkeypatch):
    """Around the loading of engines."""
    gate = Gate(minice.cross_encoder.open_engine)
    monkeypatch.setattr(minice.cross_encoder, "open_engine", gate)
    yield gate
    gate.open.set()


@pytest.fixture
def forward(monkeypatch, engine):
    """Around the forward pass of single batches."""
    from minice.engines.numpy_engine import NumpyEngine
    from minice.engines.ort_engine import OrtEngine

    kind = {"numpy": NumpyEngine, "onnxruntime": OrtEngine}[engine]
    gate = Gate(kind._forward)
    monkeypatch.setattr(kind, "_forward", lambda *arguments: gate(*arguments))
    yield gate
    gate.open.set()


def in_threads(*calls):
    """Start each call in a thread; returns a function that waits and gives (result or error) of each."""
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]

    def finish():
        outcomes = [future.exception(WAIT_S) or future.result() for future in futures]
        pool.shutdown()
        return outcomes

    return finish


def eventually(condition):
    """Wait until something that other threads bring about is so."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# --- one load ------------------------------------------------------------------------------------------


def test_a_stampede_of_threads_loads_once(open_tiny, loader):  # FR 110
    loader.open.clear()
    encoder = open_tiny()
    barrier = threading.Barrier(20)

    def call():
        barrier.wait(WAIT_S)
        return encoder.score(QUERY, PASSAGES).tobytes()

    finish = in_threads(*[call] * 20)
    eventually(lambda: len(encoder._calls) == 20)
    loader.open.set()
    assert len(set(finish())) == 1
    assert loader.count == 1


def test_a_stampede_of_coroutines_loads_once(open_tiny, loader):  # FR 110
    encoder = open_tiny()

    async def main():
        return await asyncio.gather(*(encoder.ascore(QUERY, PASSAGES) for _ in range(20)))

    answers = asyncio.run(main())
    assert {answer.tobytes() for answer in answers} == {encoder.score(QUERY, PASSAGES).tobytes()}
    assert loader.count == 1


def test_waiters_share_a_failed_load_and_the_next_call_tries_again(open_tiny, loader):
    loader.open.clear()
    loader.failures.append(GraphError("not today"))
    encoder = open_tiny()
    finish = in_threads(*[lambda: encoder.score(QUERY, PASSAGES)] * 5)
    eventually(lambda: len(encoder._calls) == 5)
    loader.open.set()
    outcomes = finish()
    # A thread that came late enough found no load in flight, and its own load went well.
    assert sum(isinstance(outcome, GraphError) for outcome in outcomes) >= 1
    assert encoder.score(QUERY, PASSAGES).shape == (4,)
    assert loader.count == 2


def test_an_interrupted_load_interrupts_nobody_else(open_tiny, loader):  # FR 106
    loader.open.clear()
    loader.failures.append(KeyboardInterrupt())
    encoder = open_tiny()
    first = in_threads(lambda: encoder.score(QUERY, PASSAGES))
    assert loader.entered.wait(WAIT_S)
    others = in_threads(*[lambda: encoder.score(QUERY, PASSAGES).shape] * 3)
    eventually(lambda: len(encoder._calls) == 4)
    loader.open.set()
    assert isinstance(first()[0], KeyboardInterrupt)
    assert others() == [(4,)] * 3
    assert loader.count == 2


def test_a_deadline_does_not_wait_for_the_load_of_another(open_tiny, loader):  # FR 105
    loader.open.clear()
    encoder = open_tiny()
    finish = in_threads(encoder.warm)
    assert loader.entered.wait(WAIT_S)
    with pytest.raises(ScorerError, match=r"tiny@.*loading"):
        encoder.answer(QUERY, PASSAGES, deadline=time.monotonic() + 0.05)
    loader.open.set()
    assert finish() == [None]
    assert loader.count == 1


# --- many threads --------------------------------------------------------------------------------------


def test_threads_get_what_a_serial_run_gets(open_tiny):  # FR 107, FR 108
    encoder = open_tiny(max_batch_tokens=128, threads=2)
    rng = random.Random(5)
    words = ["the", "and", "cat", "zebra", "q", "1", ",", "[SEP]", "é"]

    def text():
        return " ".join(rng.choices(words, k=rng.randint(0, 50)))

    tasks = [(text(), [text() for _ in range(rng.randint(0, 9))]) for _ in range(160)]
    expected = [encoder.score(*task).tobytes() for task in tasks]

    def work(seed):
        order = random.Random(seed).sample(range(len(tasks)), len(tasks))
        return all(encoder.score(*tasks[index]).tobytes() == expected[index] for index in order)

    assert in_threads(*(lambda seed=seed: work(seed) for seed in range(8)))() == [True] * 8


@pytest.mark.parametrize("engine", ["numpy"])
def test_the_blas_limit_holds_whichever_thread_asks(open_tiny, forward):
    # threadpoolctl 3.8 ignores, in silence, every thread but the first one that set a limit.
    def counts():
        return [entry["num_threads"] for entry in threadpoolctl.threadpool_info() if entry["user_api"] == "blas"]

    encoder = open_tiny()
    encoder.score(QUERY, PASSAGES)  # so that this thread was the first
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        for _ in range(2):
            forward.open.clear()
            forward.entered.clear()
            finish = in_threads(lambda: encoder.score(QUERY, PASSAGES).shape)
            assert forward.entered.wait(WAIT_S)
            assert set(counts()) <= {1}
            forward.open.set()
            assert finish() == [(4,)]
            assert set(counts()) <= {2}  # and the host has its own number back


# --- event loops ---------------------------------------------------------------------------------------


def test_ascore_leaves_the_event_loop_free(open_tiny, loader, forward):  # FR 113
    encoder = open_tiny()
    loader.open.clear()
    forward.open.clear()
    ticks = {"loading": 0, "scoring": 0}

    async def tick(stage, gate):
        for _ in range(20):  # only a free loop gets through these and opens the gate
            await asyncio.sleep(0.001)
            ticks[stage] += 1
        gate.open.set()

    async def main():
        task = asyncio.create_task(encoder.ascore(QUERY, PASSAGES))
        await tick("loading", loader)
        await tick("scoring", forward)
        return await task

    answer = asyncio.run(main())
    assert ticks == {"loading": 20, "scoring": 20}
    assert answer.tobytes() == encoder.score(QUERY, PASSAGES).tobytes()


def test_cancelling_during_the_load_frees_the_caller_and_loads_once(open_tiny, loader):  # FR 112
    loader.open.clear()
    encoder = open_tiny()

    async def main():
        first = asyncio.create_task(encoder.ascore(QUERY, PASSAGES))
        await asyncio.to_thread(loader.entered.wait, WAIT_S)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first  # at once: the load is still held
        assert not loader.open.is_set()
        second = asyncio.create_task(encoder.ascore(QUERY, PASSAGES))
        await asyncio.sleep(0.02)
        loader.open.set()
        return await second

    assert asyncio.run(main()).shape == (4,)
    assert loader.count == 1


def test_cancelled_work_stops_between_batches(open_tiny, forward):  # FR 106
    encoder = open_tiny(threads=1, max_batch_tokens=64)
    encoder.warm()
    forward.open.clear()

    async def main():
        task = asyncio.create_task(encoder.ascore(QUERY, ["the " * 60] * 50))
        await asyncio.to_thread(forward.entered.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    forward.open.set()
    eventually(lambda: not encoder._calls)
    assert forward.count <= 4  # of 50: what was under way, and what was queued behind it
    assert encoder.score(QUERY, PASSAGES).shape == (4,)


def test_wait_for_is_a_cancellation(open_tiny, forward):
    encoder = open_tiny()
    encoder.warm()
    forward.open.clear()

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(encoder.ascore(QUERY, PASSAGES), 0.02)

    asyncio.run(main())
    forward.open.set()
    eventually(lambda: not encoder._calls)


def test_one_encoder_serves_loops_of_several_threads(open_tiny):
    encoder = open_tiny()
    expected = encoder.score(QUERY, PASSAGES).tobytes()

    def loop():
        async def main():
            answers = await asyncio.gather(*(encoder.ascore(QUERY, iter(PASSAGES)) for _ in range(5)))
            return {answer.tobytes() for answer in answers}

        return asyncio.run(main())

    assert in_threads(loop, loop, loop)() == [{expected}] * 3


def test_ascore_takes_its_passages_when_called(open_tiny, loader):
    loader.open.clear()
    encoder = open_tiny()
    passages = list(PASSAGES)

    async def main():
        task = asyncio.create_task(encoder.ascore(QUERY, passages))
        await asyncio.sleep(0.01)
        passages.clear()
        loader.open.set()
        return await task

    assert asyncio.run(main()).shape == (4,)


# --- close ---------------------------------------------------------------------------------------------


def test_close_waits_for_calls_and_they_say_so(open_tiny, forward):  # FR 111
    encoder = open_tiny(threads=1, max_batch_tokens=64)
    encoder.warm()
    forward.open.clear()
    scoring = in_threads(lambda: encoder.score(QUERY, ["the " * 60] * 50))
    assert forward.entered.wait(WAIT_S)
    closing = in_threads(encoder.close, encoder.close)
    eventually(lambda: encoder._closed)
    with pytest.raises(ClosedError):
        encoder.score(QUERY, PASSAGES)
    forward.open.set()
    assert isinstance(scoring()[0], ClosedError)
    assert closing() == [None, None]
    assert forward.count <= 4


def test_a_call_in_its_last_batch_finishes(open_tiny, forward):
    encoder = open_tiny()
    encoder.warm()
    forward.open.clear()
    scoring = in_threads(lambda: encoder.score(QUERY, ["a"]))
    assert forward.entered.wait(WAIT_S)
    closing = in_threads(encoder.close)
    eventually(lambda: encoder._closed)
    forward.open.set()
    outcome = scoring()[0]
    assert isinstance(outcome, ClosedError) or outcome.shape == (1,)
    assert closing() == [None]


def test_close_during_the_load(open_tiny, loader):  # FR 111
    loader.open.clear()
    encoder = open_tiny()
    calls = in_threads(*[lambda: encoder.score(QUERY, PASSAGES)] * 3)
    assert loader.entered.wait(WAIT_S)
    eventually(lambda: len(encoder._calls) == 3)
    closing = in_threads(encoder.close)
    eventually(lambda: encoder._closed)
    loader.open.set()
    assert all(isinstance(outcome, ClosedError) for outcome in calls())
    assert closing() == [None]
    assert encoder._loaded is None  # what was loaded too late was let go


def test_close_under_fire(open_tiny):
    for seed in range(5):
        encoder = open_tiny(max_batch_tokens=64)

        def call(encoder=encoder):
            with contextlib.suppress(ClosedError):
                while True:
                    assert encoder.score(QUERY, PASSAGES).shape == (4,)

        finish = in_threads(*[call] * 4)
        time.sleep(random.Random(seed).uniform(0, 0.05))
        encoder.close()
        assert finish() == [None] * 4


def test_a_signal_handler_may_close(open_tiny, forward):
    encoder = open_tiny(threads=1, max_batch_tokens=64)
    encoder.warm()
    forward.open.clear()

    def handler(*_):
        forward.open.set()
        encoder.close()

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.main_thread().ident

        def interrupt():
            assert forward.entered.wait(WAIT_S)
            # Again and again: a signal right before a thread blocks is noticed at the next one only.
            while not forward.open.wait(0.05):
                signal.pthread_kill(main, signal.SIGUSR1)

        finish = in_threads(interrupt)
        with pytest.raises(ClosedError):
            encoder.score(QUERY, ["the " * 60] * 50)
        finish()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_closing_frees_every_thread(open_tiny):
    before = set(threading.enumerate())
    encoder = open_tiny(threads=3)

    async def main():
        async with encoder:
            await asyncio.gather(*(encoder.ascore(QUERY, PASSAGES * 9) for _ in range(6)))
            assert set(threading.enumerate()) > before

    asyncio.run(main())
    # The default executor, which aclose borrows, ended with the loop.
    assert set(threading.enumerate()) <= before


def test_ascore_around_close_is_a_closed_error_and_no_cancellation(open_tiny, forward):
    encoder = open_tiny(threads=1, max_batch_tokens=64)
    encoder.warm()
    forward.open.clear()

    async def main():
        # More than run at once, so that some are still queued when the encoder closes.
        tasks = [asyncio.create_task(encoder.ascore(QUERY, ["the " * 60] * 50)) for _ in range(9)]
        await asyncio.to_thread(forward.entered.wait, WAIT_S)
        closing = asyncio.create_task(encoder.aclose())
        await asyncio.to_thread(eventually, lambda: encoder._closed)
        forward.open.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
        with pytest.raises(ClosedError):
            await encoder.ascore(QUERY, PASSAGES)
        return outcomes

    assert [type(outcome) for outcome in asyncio.run(main())] == [ClosedError] * 9


# --- fork ----------------------------------------------------------------------------------------------

FORK = (
    OPEN_TINY
    + """
import os, threading, time

QUERY, PASSAGES = "the zebra", ["a cat", "", "the and the", "sing " * 30] * 8

def in_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 3
        finally:
            os._exit(code)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hung"
"""
)


def forked(code, folder, engine):
    """Run a script that forks; returns what it printed, after seeing that it printed nothing else."""
    done = run_python(FORK + code, folder, engine, timeout_s=120)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.split()


def test_a_child_scores_after_its_parent_did(tiny, engine):  # FR 116, FR 117
    code = """
environment = dict(os.environ)
encoder = open_tiny(threads=2, max_batch_tokens=64)
expected = encoder.score(QUERY, PASSAGES).tobytes()

def asynchronously():
    import asyncio
    return asyncio.run(encoder.ascore(QUERY, PASSAGES)).tobytes() == expected

asynchronously()
def work():
    same = encoder.score(QUERY, PASSAGES).tobytes() == expected and asynchronously()
    encoder.close()
    return same
print(in_child(work), in_child(lambda: in_child(work) == 0))
print(encoder.score(QUERY, PASSAGES).tobytes() == expected, dict(os.environ) == environment)
"""
    assert forked(code, tiny.folder, engine) == ["0", "0", "True", "True"]


def test_fork_while_other_threads_score(tiny, engine):  # FR 117
    code = """
encoder = open_tiny(threads=2, max_batch_tokens=64)
expected = encoder.score(QUERY, PASSAGES).tobytes()
stop = threading.Event()

def busy():
    while not stop.is_set():
        assert encoder.score(QUERY, PASSAGES).tobytes() == expected

threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads:
    thread.start()

def work():
    same = encoder.score(QUERY, PASSAGES).tobytes() == expected
    encoder.close()  # waits for nobody: the parent's calls are not running here
    return same

print(*{in_child(work) for _ in range(12)})
stop.set()
for thread in threads:
    thread.join()
"""
    assert forked(code, tiny.folder, engine) == ["0"]


@pytest.mark.parametrize("delay_ms", [0, 5, 20, 50])
def test_fork_while_another_thread_loads(tiny, engine, delay_ms):  # FR 117
    # In the middle of an import, or of what a native library sets up once, the child would wait for ever.
    code = f"""
encoder = open_tiny()
thread = threading.Thread(target=encoder.warm)
thread.start()
time.sleep({delay_ms} / 1000)

def work():
    same = len(encoder.score(QUERY, PASSAGES)) == 32
    encoder.close()
    return same

print(in_child(work), in_child(work))
thread.join()
print(len(encoder.score(QUERY, PASSAGES)))
"""
    assert forked(code, tiny.folder, engine) == ["0", "0", "32"]


def test_a_fork_between_the_claim_of_a_load_and_the_load(tiny, engine):  # FR 117
    code = """
encoder = open_tiny()
load_for_all = encoder._load_for_all
claimed, go = threading.Event(), threading.Event()

def held(*arguments):
    if threading.current_thread() is not threading.main_thread():
        claimed.set()
        go.wait()
    return load_for_all(*arguments)

encoder._load_for_all = held
thread = threading.Thread(target=encoder.warm)
thread.start()
claimed.wait()

def work():
    same = len(encoder.score(QUERY, PASSAGES)) == 32
    encoder.close()
    return same

print(in_child(work))
go.set()
thread.join()
print(len(encoder.score(QUERY, PASSAGES)))
"""
    assert forked(code, tiny.folder, engine) == ["0", "32"]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
def test_a_child_that_a_signal_handler_forks_in_the_middle_of_a_call_ends(tiny, engine):
    code = """
import signal
from minice.errors import ScorerError
encoder = open_tiny(threads=2, max_batch_tokens=64)
encoder.warm()
children = []

def handler(*_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    children.append(os.fork())

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    for _ in range(10_000):
        encoder.score(QUERY, PASSAGES)
        if children:
            break
except ScorerError as error:  # in the child, unless the handler ran between two calls
    assert "forked" in str(error)
if children[0] == 0:
    os._exit(0)
end = time.monotonic() + 20
while time.monotonic() < end and os.waitpid(children[0], os.WNOHANG) == (0, 0):
    time.sleep(0.01)
print("ended" if time.monotonic() < end else "hung")
"""
    assert forked(code, tiny.folder, engine) == ["ended"]


def score_in_process(encoder, passages, connection):
    connection.send_bytes(encoder.score(QUERY, passages).tobytes())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on forks beside threads
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method, monkeypatch, engine):  # FR 117
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this platform has no {method}")
    for name in ("MINICE_MODEL", "MINICE_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    with CrossEncoder.open(threads=1, engine=engine) as encoder:
        expected = encoder.score(QUERY, PASSAGES)
        context = multiprocessing.get_context(method)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=score_in_process, args=(encoder, PASSAGES, sender))
        process.start()
        try:
            assert receiver.poll(60)
            assert np.frombuffer(receiver.recv_bytes(), np.float32).tobytes() == expected.tobytes()
        finally:
            process.join(WAIT_S)
            process.kill()
        assert process.exitcode == 0
