from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from lwkv.background.completion_thread import CompletionThread
from lwkv.telemetry.counters import Counters

LONG_S = 20.0


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def completions(counters: Counters) -> Iterator[CompletionThread]:
    made = CompletionThread(counters)
    yield made
    made.leave()
    made.join(LONG_S)
    assert not made._thread.is_alive()


def held(completions: CompletionThread) -> threading.Event:
    """Keep the thread busy until the event is set."""
    running, gate = threading.Event(), threading.Event()
    completions.submit(lambda: (running.set(), gate.wait(LONG_S)))
    assert running.wait(LONG_S)
    return gate


def test_jobs_run_in_order_and_idle_is_when_all_have_ended(completions: CompletionThread) -> None:
    seen: list[int] = []
    for number in range(50):
        completions.submit(lambda number=number: seen.append(number))
    assert completions.wait_idle(LONG_S)
    assert seen == list(range(50))


@pytest.mark.parametrize("timeout_s", [0.0, 0.001, -5.0])
def test_waiting_ends_at_its_timeout(completions: CompletionThread, timeout_s: float) -> None:
    gate = held(completions)
    assert not completions.wait_idle(timeout_s)
    gate.set()
    assert completions.wait_idle(float("inf"))


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3)], ids=repr)
def test_a_job_that_raises_is_counted_and_the_next_one_runs(
    completions: CompletionThread, counters: Counters, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    seen: list[int] = []
    completions.submit(fail)
    completions.submit(lambda: seen.append(1))
    assert completions.wait_idle(LONG_S)
    assert (seen, counters.totals()) == ([1], {"transfer_errors": 1})


def test_the_thread_ends_once_closed_and_waiting_still_tells_idle(completions: CompletionThread) -> None:
    completions.close()
    completions.join(LONG_S)
    assert not completions._thread.is_alive()
    assert completions.wait_idle(0)


def test_a_batch_that_is_expected_keeps_the_thread_beyond_close(completions: CompletionThread) -> None:
    batch, seen = object(), list[int]()
    completions.expect(batch)
    completions.close()
    assert completions.wait_idle(LONG_S)
    assert completions._thread.is_alive()
    completions.submit(lambda: seen.append(1), batch)
    completions.join(LONG_S)
    assert seen == [1]


def test_leaving_ends_what_is_queued_and_waits_for_no_batch(completions: CompletionThread) -> None:
    seen: list[int] = []
    gate = held(completions)
    completions.expect(object())
    completions.submit(lambda: seen.append(1))
    completions.leave()
    gate.set()
    completions.join(LONG_S)
    assert seen == [1]


def test_a_child_process_waits_for_no_thread_that_it_does_not_have(completions: CompletionThread) -> None:
    gate = held(completions)
    completions.submit(lambda: None)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not completions.wait_idle(LONG_S) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    gate.set()


def test_a_finalizer_may_submit_from_within_submitting(completions: CompletionThread) -> None:
    """The queue's `put` is left as often as it is entered, and nothing is lost."""
    seen: list[str] = []

    class Dropped:
        def __init__(self, submit: Callable[[], None]) -> None:
            self.cycle, self.submit = self, submit

        def __del__(self) -> None:
            self.submit()

    Dropped(lambda: completions.submit(lambda: seen.append("dropped")))
    inner = completions._jobs

    class Collecting:
        empty, get = inner.empty, inner.get

        def put(self, item: object) -> None:
            gc.collect()
            inner.put(item)  # type: ignore[arg-type]

    completions._jobs = Collecting()  # type: ignore[assignment]
    completions.submit(lambda: seen.append("submitted"))
    completions._jobs = inner
    assert completions.wait_idle(LONG_S)
    assert sorted(seen) == ["dropped", "submitted"]
