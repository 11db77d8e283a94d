"""Loads of states on their way: what else is computed waits for none of them, and all is given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hybrid.rig import Running
from integrations.vllm.hybrid.test_scheduler import Request
from integrations.vllm.hybrid.test_worker import prompt
from integrations.vllm.hybrid.test_worker_states import Model, make

from lwkv.platforms.cpu import CPU
from lwkv.platforms.cpu_stream import InlineStream

TIMEOUT_S = 7.0


class Watched(CPU):
    """Counts the events that the thread's own stream is made to wait for; those of loads open the gate.

    Attributes:
        arrivals: the events of loads that are under way.
        waited, waited_for_loads: how often the stream was made to wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: Callable[[], list[Any]] = list
        self.waited = self.waited_for_loads = 0
        self.gate = threading.Event()

    def wait_event(self, stream: Any, event: Any) -> None:
        if isinstance(stream, InlineStream):
            self.waited += 1
            if event in self.arrivals():
                self.waited_for_loads += 1
                self.gate.set()
        super().wait_event(stream, event)


class Held:
    """A prompt that is stored, and a request with it whose load is held up on the device.

    Attributes:
        now: seconds, of the worker's clock.
        found: tokens that are being loaded.
    """

    def __init__(self) -> None:
        self.platform = Watched()
        self.now = 0.0
        self.model = make(self.platform, timeout_s=TIMEOUT_S, clock=lambda: self.now)
        self.platform.arrivals = self._arrivals
        self.tokens = prompt(1, 100)
        assert self.model.ask(self.tokens) == 0
        self.request = Request("held", [*self.tokens, *prompt(2, 21)])
        self.running = self.model.toy.start(self.request.all_token_ids)
        self.found = self.model.look_up(self.request)
        self._hold()
        self.model.begin_load(self.request, self.running, self.found)
        assert not self.model.received

    def _arrivals(self) -> list[Any]:
        batches = self.model.worker._under_way._steps
        return [arrival for batch in batches for arrival in batch.apart.arrivals]

    def _hold(self) -> None:
        self.model.is_held = True
        self.platform.gate.clear()
        self.platform.waited = 0
        for own in self.model.worker.engine.engines:
            own.connector.loader.lane.kernels.put(lambda: self.platform.gate.wait(20.0))

    def let_go(self) -> None:
        """What is queued goes on; the steps until the request is received."""
        self.platform.gate.set()
        self.model.is_held = False
        while not self.model.received:
            self.model.step({}, [])

    def at_rest(self) -> None:
        self.model.toy.rest()
        assert len(self.model.worker._under_way) == 0


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.platform.gate.set()
    made.model.worker.close()


def decode(model: Model, running: Running) -> None:
    """One token more of a request."""
    running.tokens.append(7)
    model.toy.allocate(running, [running.computed] * len(running.tables), len(running.tokens))
    model.step({"other": (running, len(running.tokens))}, [])


def test_steps_of_others_wait_for_no_load_and_the_request_is_received_when_it_is_there(held: Held) -> None:
    model, toy = held.model, held.model.toy
    other = toy.start(prompt(3, 20))
    model.side.allocated(Request("other", list(other.tokens)), other.tables, 0)
    before = toy.memory[sorted(held.running.blocks)].clone()
    decode(model, other)  # its prompt, which is stored
    assert held.platform.waited_for_loads == 0
    held.platform.waited = 0
    for _ in range(4):
        decode(model, other)
        assert not model.received
    # Neither the host nor the stream that computes has waited for anything; nothing was written yet.
    assert held.platform.waited == 0
    assert (toy.memory[sorted(held.running.blocks)] == before).all()
    held.let_go()
    assert (model.received, model.failed) == ({"held"}, set())
    model.look(held.running)
    held.at_rest()
    assert model.worker._counters.totals() == {}


def test_what_comes_behind_a_load_that_is_under_way_is_queued_and_received_later(held: Held) -> None:
    model = held.model
    request = Request("second", [*held.tokens, *prompt(4, 9)])
    running = model.toy.start(request.all_token_ids)
    model.begin_load(request, running, model.look_up(request))
    assert not model.received
    held.let_go()
    received = set(model.received)
    while received != {"held", "second"}:
        model.step({}, [])
        received |= model.received
    model.look(held.running)
    model.look(running)
    held.at_rest()


def test_a_load_that_is_overdue_is_waited_for_once_and_received(held: Held) -> None:
    held.now = TIMEOUT_S - 0.1
    held.model.step({}, [])
    assert not held.model.received
    held.now = TIMEOUT_S
    held.model.step({}, [])
    # The stream waits for the event of each group, which is the least there is; then all may be used.
    assert held.platform.waited_for_loads == len(held.model.worker.engine.engines)
    assert (held.model.received, held.model.failed) == ({"held"}, set())
    held.model.look(held.running)
    assert held.model.worker._counters.totals() == {"loads_overdue": 1}
    held.model.step({}, [])
    assert not held.model.received
    held.at_rest()


def test_of_a_request_that_is_aborted_blocks_are_kept_until_nothing_writes_to_them(held: Held) -> None:
    held.model.step({}, ["held"])
    assert not held.model.received
    held.let_go()
    assert held.model.received == {"held"}
    held.model.toy.end(held.running)
    held.at_rest()
    assert held.model.ask(held.tokens) == 96


def test_a_reset_while_a_load_is_under_way_leaves_nothing_and_nothing_of_it_is_stored(held: Held) -> None:
    held.model.side.reset()
    held.let_go()
    assert held.model.received == {"held"}
    held.model.side.allocated(held.request, held.running.tables, 0)
    held.running.computed = held.found
    held.model.toy.allocate(held.running, [held.found] * 3, 121)
    held.model.step({"held": (held.running, 121)}, [])
    held.model.step({}, ["held"])
    held.model.toy.end(held.running)
    held.at_rest()
    assert held.model.ask(held.request.all_token_ids) == 0
    assert held.model.ask(held.request.all_token_ids) == 120


def test_the_end_of_an_engine_waits_for_what_is_under_way_and_gives_all_back(held: Held) -> None:
    threading.Timer(0.05, held.platform.gate.set).start()
    held.model.worker.close()
    stats = held.model.worker.engine.stats()
    assert (stats["pins"], stats["writes_in_flight"], stats["pages_in_use"]) == (0, 0, 0)
    held.model.look(held.running)


def test_a_device_that_fails_on_the_way_is_a_failed_load(held: Held) -> None:
    def fails() -> None:
        raise RuntimeError("the device fails")

    request = Request("second", [*held.tokens, *prompt(4, 9)])
    running = held.model.toy.start(request.all_token_ids)
    found = held.model.look_up(request)
    held.model.worker.engine.engines[0].connector.loader.lane.kernels.put(fails)
    held.model.begin_load(request, running, found)
    held.let_go()
    received, failed = set(held.model.received), set(held.model.failed)
    while received != {"held", "second"}:
        held.model.step({}, [])
        received, failed = received | held.model.received, failed | held.model.failed
    assert failed == {"second"}
    assert held.model.worker._counters.totals() == {"loads_failed": 1}
    held.at_rest()
