"""Both halves together, on a toy model of which some layers keep states."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hybrid.rig import Running, Toy, full, state
from integrations.vllm.hybrid.test_scheduler import Request
from integrations.vllm.hybrid.test_worker import output, prompt

from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.hybrid.scheduler import HybridScheduler
from lwkv.integrations.vllm.hybrid.worker import HybridWorker
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.kinds import ChunkSize
from lwkv.platforms.cpu import CPU

CHUNK = 8


@dataclass
class Model:
    """A toy model with both halves of the connector beside it, one request at a time.

    Attributes:
        received, failed: requests that vLLM heard of in the last step: loaded, or not.
        is_held: whether loads are held up, and with them what is stored.
    """

    toy: Toy
    side: HybridScheduler
    worker: HybridWorker
    number: int = 0
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    is_held: bool = False

    def ask(self, tokens: Sequence[int], step: int = 1 << 20) -> int:
        """Run a prompt to its end: what of it was loaded."""
        self.number += 1
        request = Request(f"request {self.number}", list(tokens))
        while True:
            running = self.toy.start(tokens)
            found = self.look_up(request)
            if not found or self.load(request, running, found):
                break
            self.toy.end(running)
        self.side.allocated(request, running.tables, 0)
        last = len(tokens) // CHUNK * CHUNK
        while running.computed < len(tokens):
            end = min(running.computed + step, last) // CHUNK * CHUNK
            end = end if end > running.computed else len(tokens)
            self.toy.allocate(running, [running.computed] * len(running.tables), end)
            self.step({request.request_id: (running, end)}, [])
        self.step({}, [request.request_id])
        self.toy.end(running)
        return found

    def look_up(self, request: Request) -> int:
        while (found := self.side.num_new_matched_tokens(request, 0)) is None:
            self.step({}, [])
        return found

    def load(self, request: Request, running: Running, found: int) -> bool:
        """Whether that has not failed: then all is there."""
        self.begin_load(request, running, found)
        while not self.received:
            self.step({}, [])
        assert self.received == {request.request_id}
        if self.failed:
            assert self.failed == self.received
            return False
        self.look(running)
        return True

    def begin_load(self, request: Request, running: Running, found: int) -> None:
        """One step, which orders the load and has nothing else to do."""
        self.toy.load(running, found)
        self.side.allocated(request, running.tables, found)
        self.step({}, [])

    def look(self, running: Running) -> None:
        """What a request finds that is computed now, in all layers."""
        for group in range(len(self.toy.group_kinds)):
            for layer in range(2):
                self.toy.look([(running, self.toy.load(running, running.boundary))], group, layer)
        self.toy.check()

    def step(self, parts: dict[str, tuple[Running, int]], finished: list[str]) -> None:
        """As vLLM: where no request is to load in its own step, loads begin behind the layers."""
        orders = self.side.orders(output(parts, finished))
        self.worker.begin(orders)
        for group, number in enumerate(self.toy.group_kinds):
            for layer, name in enumerate(self.toy.names(group)):
                for running, end in parts.values():
                    self.toy.write(running, group, layer, running.computed, end)
                if self.toy.kinds[number].form != "state":
                    self.worker.wait_for_layer(name)
                    self.worker.save_layer(name)
        self.worker.start_load()
        self.worker.end()
        self.received, self.failed = self.worker.received()
        assert self.worker.invalid_blocks() == set()
        for running, end in parts.values():
            running.computed = end
            self.toy.slide(running)
        assert self.is_held or self.worker.engine.flush(20.0)
        reports = self.worker.report()
        if reports is not None:
            self.side.learn(reports)


def make(platform: CPU, **of_worker: Any) -> Model:
    toy = Toy(platform, torch.device("cpu"), [state(CHUNK), full()], [2, 1])
    groups = CacheGroups(tuple(toy.kinds), (0, 0, 1), ChunkSize(CHUNK, CHUNK, CHUNK))
    side = HybridScheduler(groups, Role(True, True))
    worker = HybridWorker(toy.engine, 0, **of_worker)
    side.introduce(worker.introduce())
    return Model(toy, side, worker)


@pytest.fixture(params=["at once", "late"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    """Copies and kernels take no time, or some."""
    chance = random.Random(1)
    made = make(CPU(None if request.param == "at once" else lambda: chance.choice([0, 0, 0.002])))
    yield made
    made.worker.close()


@pytest.mark.parametrize("step", [1000, 40, 8])
def test_what_was_computed_is_loaded_byte_for_byte_before_the_request_is_in_a_step(
    model: Model, step: int
) -> None:
    for length in (7, 9, 100, 257):
        tokens = prompt(length, length)
        assert model.ask(tokens, step) == 0
        assert model.ask(tokens, step) == length // CHUNK * CHUNK
    assert model.worker.engine.stats()["pins"] == 0


def test_a_prompt_goes_on_where_a_shorter_one_ended(model: Model) -> None:
    begin = prompt(1, 96)
    assert [model.ask(begin + prompt(5 + number, 30 * number)) for number in range(4)] == [0, 96, 96, 96]


def test_a_load_that_fails_is_reported_and_the_request_computed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1, 100)
    model.ask(tokens)
    for group in (0, 2):  # of states, and of attention
        loader = model.worker.engine.engines[group].connector.loader
        monkeypatch.setattr(loader, "load_layer", fails)
        assert model.ask(tokens + prompt(2, 3)) == 0
        monkeypatch.undo()
    assert model.ask(tokens + prompt(2, 3)) == 96
    assert model.worker.engine.stats()["pins"] == 0


def fails(*_: object) -> None:
    raise RuntimeError("the device fails")
