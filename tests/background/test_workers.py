from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import pytest

from lwkv.background.workers import Workers

LONG_S = 20.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What jobs of a test wait for; opened at its end."""
    event = threading.Event()
    yield event
    event.set()


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"lwkv-{name}-")]


def hang(workers: Workers, gate: threading.Event) -> Future[bool]:
    """Submit a job that waits for `gate`, and return once it runs."""
    running = threading.Event()

    def job() -> bool:
        running.set()
        return gate.wait(LONG_S)

    future = workers.submit(job)
    assert running.wait(LONG_S)
    return future


def test_threads_end_when_nobody_has_the_workers_any_more() -> None:
    workers = Workers("dropped", 3)
    wait([workers.submit(lambda: None) for _ in range(9)], LONG_S)
    threads = threads_named("dropped")
    assert threads
    del workers
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
    assert not threads_named("dropped")


def test_jobs_that_are_queued_are_done_even_if_nobody_has_the_workers_any_more(gate: threading.Event) -> None:
    workers = Workers("dropped-early", 1)
    jobs = [hang(workers, gate), *(workers.submit(lambda: True) for _ in range(3))]
    threads = threads_named("dropped-early")
    del workers
    gc.collect()
    gate.set()
    assert [job.result(LONG_S) for job in jobs] == [True] * 4
    for thread in threads:
        thread.join(LONG_S)
    assert not threads_named("dropped-early")


def test_a_finalizer_that_comes_while_a_lock_of_the_workers_is_held_does_not_wait_for_it() -> None:
    workers = Workers("dropped-inside", 1)
    workers.submit(lambda: None).result(LONG_S)
    (thread,) = threads_named("dropped-inside")
    queue = workers._queue
    with queue._lock:
        del workers
        gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_every_thread_prepares_itself_before_its_first_job(gate: threading.Event) -> None:
    prepared: list[str] = []
    workers = Workers("prepared", 2, lambda: prepared.append(threading.current_thread().name))
    hang(workers, gate)
    assert workers.submit(lambda: list(prepared)).result(LONG_S) == ["lwkv-prepared-0", "lwkv-prepared-1"]
    gate.set()
    assert workers.submit(lambda: len(prepared)).result(LONG_S) == 2
    workers.close(LONG_S)


def test_a_thread_that_cannot_prepare_itself_says_so_with_its_first_job() -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    workers = Workers("unprepared", 1, fail)
    with pytest.raises(RuntimeError, match="no such device"):
        workers.submit(lambda: None).result(LONG_S)
    assert workers.submit(lambda: 3).result(LONG_S) == 3
    workers.close(LONG_S)


def test_a_future_has_what_its_job_returned_or_raised() -> None:
    workers = Workers("results", 2)
    error = KeyError("k")

    def fail() -> None:
        raise error

    good, bad = workers.submit(lambda: 7), workers.submit(fail)
    assert good.result(LONG_S) == 7
    assert bad.exception(LONG_S) is error
    assert workers.close(LONG_S)


def test_a_job_that_exits_the_interpreter_ends_only_itself() -> None:
    workers = Workers("exits", 1)

    def leave() -> None:
        raise SystemExit(3)

    assert isinstance(workers.submit(leave).exception(LONG_S), SystemExit)
    assert workers.submit(lambda: 1).result(LONG_S) == 1
    assert workers.close(LONG_S)


def test_one_thread_runs_jobs_in_order() -> None:
    workers, seen = Workers("order", 1), []
    for number in range(50):
        workers.submit(lambda number=number: seen.append(number))
    assert workers.wait_idle(LONG_S)
    assert seen == list(range(50))
    assert workers.close(LONG_S)


def test_threads_start_with_the_first_jobs_are_daemons_and_end_with_close() -> None:
    workers = Workers("threads", 3)
    assert not threads_named("threads")
    for _ in range(9):
        workers.submit(lambda: None)
    assert workers.wait_idle(LONG_S)
    threads = threads_named("threads")
    assert len(threads) == 3
    assert all(thread.daemon for thread in threads)
    assert workers.close(LONG_S)
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_idle_means_that_the_callbacks_have_returned_too(gate: threading.Event) -> None:
    workers, seen = Workers("callbacks", 1), []
    future = hang(workers, gate)
    future.add_done_callback(lambda _: seen.append("called"))
    assert not workers.wait_idle(0)
    gate.set()
    assert workers.wait_idle(LONG_S)
    assert seen == ["called"]
    assert workers.close(LONG_S)


def test_close_lets_queued_jobs_end(gate: threading.Event) -> None:
    workers = Workers("queued", 1)
    hang(workers, gate)
    later = workers.submit(lambda: 5)
    assert not workers.close(0)
    gate.set()
    assert later.result(LONG_S) == 5
    assert workers.close(LONG_S)


def test_a_job_after_close_is_cancelled_and_counts_as_done() -> None:
    workers = Workers("late", 1)
    assert workers.close(0)
    future = workers.submit(lambda: 5)
    assert future.cancelled()
    assert wait([future], LONG_S).done == {future}
    assert not threads_named("late")


def test_queued_jobs_can_be_cancelled_and_those_running_end(gate: threading.Event) -> None:
    workers = Workers("cancel", 1)
    running = hang(workers, gate)
    queued = [workers.submit(lambda: 5) for _ in range(3)]
    assert workers.cancel_queued() == 3
    assert all(future.cancelled() for future in queued)
    assert not wait(queued, LONG_S).not_done
    gate.set()
    assert running.result(LONG_S)
    assert workers.submit(lambda: 6).result(LONG_S) == 6
    assert workers.close(LONG_S)


def test_a_job_cancelled_by_its_owner_is_passed_over(gate: threading.Event) -> None:
    workers, seen = Workers("owner", 1), []
    hang(workers, gate)
    future = workers.submit(lambda: seen.append("ran"))
    assert future.cancel()
    gate.set()
    assert workers.submit(lambda: 6).result(LONG_S) == 6
    assert seen == []
    assert workers.close(LONG_S)


def test_what_a_job_refers_to_is_gone_when_it_has_ended() -> None:
    class Memory:
        pass

    workers, memory = Workers("memory", 1), Memory()
    gone = weakref.ref(memory)
    future = workers.submit(lambda held=memory: held is not None)
    assert future.result(LONG_S)
    assert workers.wait_idle(LONG_S)
    del memory
    gc.collect()
    # The thread itself may still be on its way out of the job; the next job is behind that.
    assert workers.submit(lambda: 1).result(LONG_S) == 1
    assert gone() is None
    assert workers.close(LONG_S)


def test_every_job_is_done_or_cancelled_when_close_comes_in_between() -> None:
    workers, futures = Workers("close", 2), []

    def submit_many() -> None:
        for number in range(200):
            futures.append(workers.submit(lambda number=number: number))

    threads = [threading.Thread(target=submit_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert workers.close(LONG_S)
    for thread in threads:
        thread.join()
    assert not wait(futures, LONG_S).not_done
    assert workers.wait_idle(0)


@contextmanager
def no_more_threads(number: int) -> Iterator[None]:
    """Inside, `number` threads can be started."""
    start, left = threading.Thread.start, [number]

    def refuse(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        yield


def test_without_a_thread_a_job_is_cancelled_and_a_later_one_runs() -> None:
    workers = Workers("none", 2)
    with no_more_threads(0):
        future = workers.submit(lambda: 5)
    assert future.cancelled()
    assert wait([future], LONG_S).done == {future}
    assert workers.wait_idle(0)
    assert workers.submit(lambda: 6).result(LONG_S) == 6
    assert workers.close(LONG_S)


def test_one_thread_does_the_work_of_those_that_cannot_start() -> None:
    workers = Workers("one", 3)
    with no_more_threads(1):
        futures = [workers.submit(lambda number=number: number) for number in range(5)]
        assert [future.result(LONG_S) for future in futures] == list(range(5))
    assert workers.close(LONG_S)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10])
def test_waiting_may_take_for_ever(timeout_s: float, gate: threading.Event) -> None:
    workers = Workers("ever", 1)
    hang(workers, gate)
    threading.Timer(0, gate.set).start()
    assert workers.wait_idle(timeout_s)
    assert workers.close(timeout_s)


def test_a_child_process_waits_for_no_thread_that_it_does_not_have(gate: threading.Event) -> None:
    workers = Workers("forked", 1)
    hang(workers, gate)
    workers.submit(lambda: 5)
    with workers._queue._lock:
        pid = os.fork()
        if pid == 0:
            waited = workers.wait_idle(LONG_S) or workers.close(LONG_S)
            os._exit(waited or workers.cancel_queued() or not workers.submit(lambda: 6).cancelled())
    assert os.waitpid(pid, 0)[1] == 0
    gate.set()
    assert workers.close(LONG_S)
