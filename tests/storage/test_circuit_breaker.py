from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from storage.rig import Clock

from lwkv.storage.circuit_breaker import CircuitBreaker
from lwkv.telemetry.counters import Counters

LONG_S = 20.0


class Peer:
    """Calls with a clock of their own, and a gate that is opened when the test ends."""

    def __init__(self, num_threads: int = 1) -> None:
        self.clock = Clock()
        self.counters = Counters()
        self.gate = threading.Event()
        self.calls = CircuitBreaker("disk", "read", num_threads, 10.0, self.counters, self.clock)

    def fail(self) -> BaseException | None:
        """Make a call that raises; return what came of it, None if it was not made."""
        return self.end(self.calls.submit(self._raise))

    def succeed(self) -> bool:
        """Whether a call is made."""
        call = self.calls.submit(lambda: True)
        self.end(call)
        return not call.cancelled()

    def hang(self) -> Future[bool]:
        """Make a call that waits for the gate, and return once it runs."""
        running = threading.Event()

        def wait_for_gate() -> bool:
            running.set()
            return self.gate.wait(LONG_S)

        call = self.calls.submit(wait_for_gate)
        assert running.wait(LONG_S)
        return call

    def end(self, call: Future[bool]) -> BaseException | None:
        assert self.calls.wait_idle(LONG_S)
        return None if call.cancelled() else call.exception(0)

    def _raise(self) -> bool:
        raise OSError("no route")


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.gate.set()
    assert peer.calls.close(LONG_S)


def test_one_error_is_counted_and_told_and_the_next_call_is_made(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(peer.fail(), OSError)
    assert peer.counters.totals() == {"disk_errors": 1}
    assert caplog.messages == ["tier disk: read failed: OSError: no route"]
    assert peer.succeed()


def test_from_the_second_error_in_a_row_on_a_tier_rests_for_longer_and_longer(peer: Peer) -> None:
    assert peer.fail() is not None
    for rest_s in (1, 2, 4, 8, 16, 32, 64, 64, 64):
        assert peer.fail() is not None
        peer.clock.now += rest_s - 0.25
        assert peer.fail() is None
        peer.clock.now += 0.25
    assert peer.counters.totals() == {"disk_errors": 10, "disk_skipped": 9}


def test_what_is_queued_when_the_tier_begins_to_rest_is_not_begun(peer: Peer) -> None:
    assert peer.fail() is not None

    def fail_late() -> bool:
        peer.gate.wait(LONG_S)
        return peer._raise()

    last = peer.calls.submit(fail_late)
    queued = [peer.calls.submit(lambda: True) for _ in range(3)]
    peer.gate.set()
    assert isinstance(peer.end(last), OSError)
    assert all(call.cancelled() for call in queued)
    assert peer.counters.totals() == {"disk_errors": 2, "disk_skipped": 3}


def test_a_success_ends_the_row(peer: Peer) -> None:
    for _ in range(3):
        assert peer.fail() is not None
        assert peer.succeed()
    assert peer.fail() is not None
    assert peer.fail() is not None
    assert not peer.succeed()
    peer.clock.now += 1
    assert peer.succeed()
    assert peer.fail() is not None
    assert peer.succeed()


def test_failures_of_calls_made_before_the_rest_do_not_lengthen_it() -> None:
    peer, ready = Peer(num_threads=5), threading.Barrier(6)

    def fail_together() -> None:
        ready.wait(LONG_S)
        peer.gate.wait(LONG_S)
        raise OSError("no route")

    for _ in range(5):
        peer.calls.submit(fail_together)
    ready.wait(LONG_S)
    peer.gate.set()
    assert peer.calls.wait_idle(LONG_S)
    assert peer.counters.totals() == {"disk_errors": 5}
    assert not peer.succeed()
    peer.clock.now += 1
    assert peer.succeed()
    assert peer.calls.close(LONG_S)


def test_no_call_is_made_while_one_is_late_and_that_is_reported_once(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    late = peer.hang()
    peer.clock.now += 9.75
    assert peer.calls.is_answering()
    peer.clock.now += 0.25
    for _ in range(3):
        assert peer.calls.submit(lambda: True).cancelled()
    assert caplog.messages == ["tier disk: no answer to a read within 10 s: skipped until it answers"]
    assert peer.counters.totals() == {"disk_timeouts": 1, "disk_skipped": 3}
    peer.gate.set()
    assert peer.end(late) is None
    assert peer.succeed()


def test_what_is_queued_behind_a_late_call_is_not_begun(peer: Peer) -> None:
    peer.hang()
    queued = [peer.calls.submit(lambda: True) for _ in range(4)]
    peer.clock.now += 10
    assert not any(call.done() for call in queued)
    assert not peer.calls.is_answering()
    assert all(call.cancelled() for call in queued)
    assert peer.counters.totals() == {"disk_timeouts": 1, "disk_skipped": 4}


def test_time_in_the_queue_is_no_outage(peer: Peer) -> None:
    first, second = threading.Event(), threading.Event()
    peer.calls.submit(lambda: first.wait(LONG_S))

    def wait_second() -> bool:
        second.set()
        return peer.gate.wait(LONG_S)

    calls = [peer.calls.submit(wait_second), peer.calls.submit(lambda: True)]
    peer.clock.now += 9.75
    first.set()
    assert second.wait(LONG_S)
    peer.clock.now += 9.75
    assert peer.calls.is_answering()
    peer.gate.set()
    assert [call.result(LONG_S) for call in calls] == [True, True]
    assert peer.counters.totals() == {}


def test_to_look_whether_a_tier_rests_changes_nothing(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    peer.hang()
    queued = peer.calls.submit(lambda: True)
    assert not peer.calls.is_resting
    peer.clock.now += 10
    assert peer.calls.is_resting
    assert not queued.cancelled()
    assert (caplog.messages, peer.counters.totals()) == ([], {})
    assert not peer.calls.is_answering()
    assert queued.cancelled()


def test_a_second_outage_is_reported_again(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        late = peer.hang()
        peer.clock.now += 10
        assert not peer.calls.is_answering()
        peer.gate.set()
        assert peer.end(late) is None
        assert peer.calls.is_answering()
        peer.gate.clear()
    assert len(caplog.messages) == peer.counters.totals()["disk_timeouts"] == 2


def test_close_cancels_what_has_not_begun_when_the_time_is_over(peer: Peer) -> None:
    running = peer.hang()
    queued = peer.calls.submit(lambda: True)
    assert not peer.calls.close(0)
    assert queued.cancelled()
    assert not running.done()
    assert peer.calls.submit(lambda: True).cancelled()
