"""What SGLang's scheduler does on its own thread for a batch with loads: little, for any number of pages."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from integrations.sglang.fake_sglang import PoolTransfer, hashes_of
from oracle import Dims, Oracle
from properties.test_host_work import ROOT, called_within, calls_within

from lwkv.connectors.loader import FIRST_BUFFERS
from lwkv.integrations.sglang.link import CacheLink
from lwkv.platforms.cpu import CPU

LAYERS, PAGE = 32, 2
DRIVER_CALLS = {"load_batch", "save_batch", "launch", "record", "wait_event", "wait_stream", "new_event"}


class Batches:
    """One prompt of so many pages that is in host memory, loaded again and again."""

    def __init__(self, num_pages: int, num_ranks: int = 1) -> None:
        self.platform = CPU()
        dims = Dims(layers=LAYERS, blocks=2 * num_pages + 1, block_size=PAGE, heads=1, head_size=2)
        oracle = Oracle(self.platform, self.platform.current_device(), "sglang_kv", dims)
        # Two layers in a buffer, as of a long prompt of Llama-8B on an H200.
        staging = 3 * 2 * num_pages * oracle.page_bytes(PAGE)
        engine = oracle.engine(
            PAGE, 2 * LAYERS * num_pages, staging_bytes=staging, group_bytes=1 << 20, load_streams=1
        )
        self.link = CacheLink(engine, LAYERS, num_ranks)
        self.hashes = hashes_of(range(num_pages * PAGE), PAGE)
        slots = torch.arange(PAGE, (2 * num_pages + 1) * PAGE)
        self.stored, self.loaded = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        self.count = 0
        for _ in range(2):  # what is made once is made
            self.store()
            self.take_stored()
            self.load()
            self.give_back()

    def store(self) -> None:
        assert self.link.offload([PoolTransfer(self.hashes, self.stored)])
        self.link.num_completed_offloads()

    def give_back(self) -> None:
        """What the scheduler's next two rounds do with a load that is over."""
        for _ in range(2):
            self.link.num_completed_offloads()

    def store_new(self) -> None:
        """Other pages than those that are there; once."""
        hashes = hashes_of(range(1000, 1000 + len(self.stored)), PAGE)
        assert self.link.offload([PoolTransfer(hashes, self.stored)])
        self.link.num_completed_offloads()

    def take_stored(self) -> None:
        assert self.link.wait_idle(10)
        assert self.link.num_completed_offloads() == 1
        assert self.link.pop_completed_offload()

    def load(self) -> None:
        self.count += 1
        rid = str(self.count)
        assert max(self.link.lookup(rid, [PoolTransfer(self.hashes)])) == len(self.hashes)
        assert self.link.load(rid, [PoolTransfer(self.hashes, self.loaded)])
        index = self.link.start_layer_wise_loading()
        self.link.layer_counter.set_consumer(index)
        for layer in range(LAYERS):
            for _ in range(2):
                self.link.layer_counter.wait_until(layer)
        assert self.link.finish_layer_wise_loading(index)

    def close(self) -> None:
        self.link.close()
        self.platform.close()


def lines_within(work: Callable[[], object]) -> int:
    """How many lines of lwkv's own code above the platforms `work` runs on this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if "platforms" in frame.f_code.co_filename or not frame.f_code.co_filename.startswith(ROOT):
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def measured(
    num_pages: int, count: Callable[[Callable[[], object]], int], num_ranks: int = 1
) -> dict[str, int]:
    batches = Batches(num_pages, num_ranks)
    try:
        counts = {
            "load": count(batches.load),
            "give back": count(batches.give_back),
            "store": count(batches.store),
        }
        batches.take_stored()
        return counts
    finally:
        batches.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_call_is_made_for_a_page(num_ranks: int) -> None:
    assert measured(32, calls_within, num_ranks) == measured(128, calls_within, num_ranks)


def test_a_batch_takes_no_more_calls_than_it_used_to() -> None:
    """64 of a load are SGLang's two waits for each of 32 layers."""
    calls = measured(64, calls_within)
    assert calls["load"] <= 290
    assert calls["give back"] <= 8
    assert calls["store"] <= 65


def driver_calls_within(platform: CPU, work: Callable[[], object]) -> Counter[str]:
    """How often `work` calls each of the platform's functions that go to a driver, on this thread."""
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and name in DRIVER_CALLS and frame.f_locals.get("self") is platform:
            counts[name] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts


def calls_of(name: str, work: Callable[[], object]) -> int:
    """How often `work` calls a function of lwkv's of this name, on this thread."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_name == name and code.co_filename.startswith(ROOT)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def batches() -> Iterator[Batches]:
    made = Batches(8)
    yield made
    made.close()


def test_a_load_takes_four_calls_of_the_driver_for_a_staging_buffer(batches: Batches) -> None:
    """A copy, a kernel, an event, and the model's wait for it; 32 layers go through 19 buffers."""
    counts = driver_calls_within(batches.platform, batches.load)
    each = dict.fromkeys(("load_batch", "launch", "record", "wait_event"), 19)
    assert counts == {**each, "wait_stream": 1}


def test_the_link_has_something_to_do_while_sglang_prepares_a_batch(batches: Batches) -> None:
    """Four buffers are queued at the start, with six layers in them; the first wait queues nothing more."""
    link, transfer = batches.link, PoolTransfer(batches.hashes, batches.loaded)
    link.lookup("one", [PoolTransfer(batches.hashes)])
    assert link.load("one", [transfer])
    assert driver_calls_within(batches.platform, link.start_layer_wise_loading)["launch"] == FIRST_BUFFERS
    counter = link.layer_counter
    counter.set_consumer(link._loads._last)
    launches = [driver_calls_within(batches.platform, lambda: counter.wait_until(0))["launch"]]
    for layer in range(1, LAYERS):
        counter.wait_until(layer)
    assert launches == [0]
    assert link.finish_layer_wise_loading(counter.consumer_index)
    batches.give_back()


def test_a_load_asks_for_the_current_stream_once_a_staging_buffer(batches: Batches) -> None:
    """19 of them; twice more when it begins, for the order and for what waits."""
    assert calls_of("current_stream", batches.load) == 19 + 2


def test_a_wait_of_the_model_takes_no_more_calls_than_it_needs(batches: Batches) -> None:
    """Layers that are on their way: one call for SGLang's, which is all where V is asked for behind K, or a
    layer that came with the one before; three more that make a stream wait for an event."""
    transfer = PoolTransfer(batches.hashes, batches.loaded)
    batches.link.lookup("one", [PoolTransfer(batches.hashes)])
    assert batches.link.load("one", [transfer])
    index = batches.link.start_layer_wise_loading()
    counter = batches.link.layer_counter
    counter.set_consumer(index)
    # Layers 2 and 3 share a staging buffer, as 4 and 5 do. 2 and 8 queue what is to be far ahead.
    counts = [[calls_within(partial(counter.wait_until, layer)) for _ in "KV"] for layer in range(8)]
    assert [counts[layer] for layer in (1, 4, 6)] == [[4, 1]] * 3
    assert [counts[layer] for layer in (3, 5, 7)] == [[1, 1]] * 3
    for layer in range(8, LAYERS):
        counter.wait_until(layer)
    assert batches.link.finish_layer_wise_loading(index)
    assert [calls_within(partial(counter.wait_until, layer)) for layer in (0, LAYERS - 1)] == [1, 1]
    batches.give_back()


def test_the_copies_of_a_load_are_worked_out_in_one_go(batches: Batches) -> None:
    assert calls_of("_make_copies", batches.load) == 1


def test_a_store_waits_once_for_the_model(batches: Batches) -> None:
    """The first waits with the pages, the second when they are gathered; 32 layers share 16 buffers."""
    counts = driver_calls_within(batches.platform, batches.store_new)
    assert counts["wait_stream"] == 2
    assert counts["save_batch"] == counts["launch"] == 16
    batches.take_stored()


def test_a_store_of_a_page_takes_one_copy_and_one_kernel_for_all_layers() -> None:
    """The first waits are for SGLang, the others pass the staging buffer on and order what comes next."""
    batches = Batches(32)
    hashes = hashes_of(range(2000, 2000 + PAGE), PAGE)

    def store_one() -> None:
        assert batches.link.offload([PoolTransfer(hashes, batches.stored[:PAGE])])
        batches.link.num_completed_offloads()

    counts = driver_calls_within(batches.platform, store_one)
    assert counts == {"wait_stream": 2, "launch": 1, "save_batch": 1, "record": 2, "wait_event": 3}
    batches.take_stored()
    batches.close()


def test_a_store_wakes_the_thread_that_ends_it_once(batches: Batches) -> None:
    assert calls_of("submit", batches.store_new) == 1
    batches.take_stored()


def test_a_load_wakes_the_thread_that_ends_it_when_its_answer_is_on_its_way(batches: Batches) -> None:
    """With the overlap schedule that is after the next round has asked."""
    assert calls_of("submit", batches.load) == 0
    assert [calls_of("submit", batches.link.num_completed_offloads) for _ in range(3)] == [0, 1, 0]


def test_a_store_is_queued_before_a_load_wakes_the_thread_that_ends_it(batches: Batches) -> None:
    """In the round in which both are due: the thread would take its time from the calls of the store."""
    batches.load()
    batches.link.num_completed_offloads()
    names = called_within(batches.store_new, ("save_batch",))
    last_copy = len(names) - names[::-1].index("save_batch")
    assert "submit" not in names[:last_copy]
    assert names[last_copy:].count("submit") == 2
    batches.take_stored()


def test_asking_for_completed_stores_takes_two_calls_where_there_are_none(batches: Batches) -> None:
    """SGLang's scheduler asks in every round; no event is asked for, and no lock is taken."""
    assert calls_within(batches.link.num_completed_offloads) == 2


def test_few_lines_are_run_for_a_page() -> None:
    few, many = measured(32, lines_within), measured(128, lines_within)
    # A page that is stored gets its place in the order of eviction.
    for name, most in (("load", 5), ("store", 25)):
        assert many[name] - few[name] <= most * (128 - 32), name
