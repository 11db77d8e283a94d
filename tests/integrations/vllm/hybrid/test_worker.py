"""Both halves together, on a toy model of several groups."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybrid.rig import Running, Toy, full, window
from integrations.vllm.hybrid.test_scheduler import Request

from lwkv.errors import LwkvError
from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.hybrid.orders import Hashes, HybridOrders, StoreOrder
from lwkv.integrations.vllm.hybrid.scheduler import HybridScheduler
from lwkv.integrations.vllm.hybrid.worker import HybridWorker
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.kinds import ChunkSize
from lwkv.platforms.cpu import CPU

CHUNK = 16


@dataclass
class Model:
    """A toy model with both halves of the connector beside it, one request at a time."""

    toy: Toy
    side: HybridScheduler
    worker: HybridWorker
    drafts: Sequence[str] = ()
    number: int = 0

    def ask(self, tokens: Sequence[int], step: int = 1 << 20, local: int = 0) -> int:
        """Run a prompt to its end: what of it was loaded."""
        self.number += 1
        request = Request(f"request {self.number}", list(tokens))
        found = None
        while found is None:
            found = self.side.num_new_matched_tokens(request, local)
            if found is None:
                self.step({}, [])
        self.side.allocated(request, (), found)
        running = self.toy.start(tokens)
        if found:
            self.toy.load(running, found)
        while running.computed < len(tokens):
            end = min(running.computed + step, len(tokens))
            self.toy.allocate(running, [running.computed] * 3, end)
            self.step({request.request_id: (running, end)}, [])
        self.step({}, [request.request_id])
        self.toy.end(running)
        return found

    def step(self, parts: dict[str, tuple[Running, int]], finished: list[str]) -> None:
        orders = self.side.orders(output(parts, finished))
        for _ in range(2):
            self.worker.begin(orders)
        self.worker.start_load()
        names = [(self.toy.names(group)[layer], layer, group) for layer in range(2) for group in range(3)]
        for name, layer, group in names:
            if name not in self.drafts:
                self.call(orders, parts, name, layer, group)
        if not self.drafts:
            self.worker.end()
        assert self.worker.invalid_blocks() == set()
        for name, layer, group in names:
            if name in self.drafts:
                # vLLM may give out what a step has found wrong only now: all that was loaded is there.
                self.call(orders, parts, name, layer, group)
        self.worker.end()
        self.toy.check()
        for running, end in parts.values():
            running.computed = end
            self.toy.slide(running)
        assert self.worker.engine.flush(20.0)
        reports = self.worker.report()
        if reports is not None:
            self.side.learn(reports)

    def call(
        self,
        orders: HybridOrders,
        parts: dict[str, tuple[Running, int]],
        name: str,
        layer: int,
        group: int,
    ) -> None:
        """A layer and the hooks around it."""
        self.worker.wait_for_layer(name)
        for running, end in parts.values():
            self.toy.look([(running, load) for load in orders.loads], group, layer)
            self.toy.write(running, group, layer, running.computed, end)
        self.worker.save_layer(name)


def output(parts: dict[str, tuple[Running, int]], finished: list[str]) -> Any:
    tables = {name: running.tables for name, (running, _) in parts.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(parts), num_computed_tokens=[running.computed for running, _ in parts.values()]
        ),
        num_scheduled_tokens={name: end - running.computed for name, (running, end) in parts.items()},
        finished_req_ids=set(finished),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


@pytest.fixture(params=[(), ("g2.layer1",)], ids=["", "with a draft model"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    toy = Toy(CPU(), torch.device("cpu"), [window(10), full()], [2, 1], CHUNK)
    groups = CacheGroups(tuple(toy.kinds), (0, 0, 1), ChunkSize(CHUNK, 4, CHUNK))
    side = HybridScheduler(groups, Role(True, True))
    worker = HybridWorker(toy.engine, 0, drafts=request.param, last_layer="g1.layer1")
    side.introduce(worker.introduce())
    yield Model(toy, side, worker, request.param)
    worker.close()


def prompt(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("step", [1000, 16, 7])
def test_what_was_computed_is_loaded_byte_for_byte(model: Model, step: int) -> None:
    for length in (15, 16, 17, 100, 257):
        tokens = prompt(length, length)
        assert model.ask(tokens, step) == 0
        assert model.ask(tokens, step) == (length - 1) // CHUNK * CHUNK
    assert model.worker.engine.stats()["pins"] == 0


def test_prompts_that_part_are_found_there_from_the_second_time_on(model: Model) -> None:
    begin = prompt(1, 100)
    assert [model.ask(begin + prompt(seed, 60)) for seed in (2, 3, 4)] == [0, 80, 96]


def test_the_same_orders_may_come_twice_and_other_ones_end_nothing(model: Model) -> None:
    orders = HybridOrders(1)
    model.worker.begin(orders)
    model.worker.begin(orders)
    model.worker.begin(HybridOrders(2))
    model.worker.end()
    assert model.worker.report() is None


def test_stores_that_do_not_fit_are_left_out_and_the_step_goes_on(model: Model) -> None:
    blocks = [[1, 1], [1, 1], [1, 1]]  # of two tokens each
    hashes = Hashes.of(model.toy.hashes(prompt(1, CHUNK)))
    model.worker.begin(HybridOrders(1, (), [StoreOrder(hashes, 0, CHUNK, frozenset({CHUNK}), blocks * 2)]))
    model.worker.end()
    assert model.worker.invalid_blocks() == set()
    assert model.worker.report() is None


def test_a_load_that_fails_ends_the_engine_and_nothing_of_its_step_is_stored(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1, 100)
    model.ask(tokens)
    before = model.worker.engine.stats()["chunks"]
    loader = model.worker.engine.engines[2].connector.loader

    def fails(*_: object) -> None:
        raise RuntimeError("the device fails")

    monkeypatch.setattr(loader, "load_layer", fails)
    with pytest.raises(LwkvError, match="engine ends"):
        model.ask(tokens + prompt(2, 100))
    monkeypatch.undo()
    assert model.worker.engine.flush(20.0)
    assert model.worker.engine.stats()["chunks"] == before


def test_what_was_counted_is_given_out_once_with_the_gauges_of_the_rank(model: Model) -> None:
    model.ask(prompt(1, 100))
    model.worker.begin(HybridOrders(90, (), [StoreOrder(Hashes.of([]), 0, 0, frozenset(), [[], [], []])]))
    counts = model.worker.new_counts()
    assert counts["tokens_stored"] > 0
    assert counts["host_capacity_bytes/rank0"] >= counts["host_used_bytes/rank0"] > 0
