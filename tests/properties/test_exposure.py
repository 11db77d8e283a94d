"""How long the model waits for its loads, on a clock that knows only what waits for what.

Copies of one direction follow each other without a gap, from the start of the step; layer i computes once it
has arrived and layer i - 1 is computed. The model then waits for no more than the first layer's copy and, in
every other layer, what its copy takes longer than the computing of the layer before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import Dims, Oracle, require_rest, run_slots
from virtual_clock import VirtualClock, VirtualStream

from lwkv.config.settings import Config
from lwkv.connectors.loader import Load
from lwkv.connectors.paged_loader import PagedLoader
from lwkv.engine import CacheEngine, Request
from lwkv.platforms import CopyBatch
from lwkv.steps import LayerSteps
from lwkv.telemetry.timeline import LoadTimes, Timeline, hidden_and_exposed

HOST = torch.device("cpu")
CHUNK = 8
CACHED, FRESH = list(range(100, 124)), list(range(300, 324))
CACHED_SLOTS, FRESH_SLOTS = run_slots(32, 24), run_slots(64, 24, backwards=True)
SECONDS = st.integers(0, 12)
PAIRS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6)


class Run:
    """A model with an engine on a virtual clock; layer i's copies take `copies[i]` seconds either way."""

    def __init__(
        self,
        copies: Sequence[int],
        computes: Sequence[int],
        lookahead: int,
        buffered: bool = False,
        together: int = 1,
    ) -> None:
        self.computes = computes
        self.clock = VirtualClock(self._load_cost, self._save_cost)
        self._copies = copies
        self._lanes: dict[str, VirtualStream] = {}
        self._left: dict[str, Iterator[int]] = {}
        self.compute = self.clock.new_stream(HOST)
        self.oracle = Oracle(self.clock, HOST, dims=Dims(layers=len(copies), blocks=32))
        with self.clock.use_stream(self.compute):
            self.timeline = Timeline(self.clock, HOST)
            self.engine = self._engine(lookahead, buffered, together)
            self.oracle.compute(CACHED, run_slots(0, 24))
            self.engine.store(CACHED, slot_mapping=run_slots(0, 24))
            assert self.engine.flush()

    def step(self, layerwise: bool = True, stores: Sequence[Request] = ()) -> tuple[float, LoadTimes]:
        """Load, compute and store all layers from a common start: until the last is computed, in seconds.

        And what the timeline tells of it.
        """
        steps = LayerSteps(self.engine, layerwise)
        self._start_together()
        with self.clock.use_stream(self.compute):
            self.timeline.restart()
            began = self.clock.host_now
            steps.begin([Request(CACHED, CACHED_SLOTS)], stores)
            assert steps.start_load_kv() == [24]
            for layer, seconds in enumerate(self.computes):
                steps.wait_for_layer_load(layer)
                with self.timeline.span("compute", layer, self.compute):
                    self.clock.work(seconds, self.compute)
                    self.oracle.compute(FRESH, FRESH_SLOTS, [layer])
                steps.save_kv_layer(layer)
            assert self.clock.host_now == began, "the host never waits for the device within a step"
            took = self.compute.now - began
            assert steps.wait_for_save().loaded[0].all()
            self.oracle.expect(CACHED, CACHED_SLOTS)
            self.oracle.check()
            assert self.engine.flush()
            require_rest(self.engine)
            return took, hidden_and_exposed(self.timeline.spans())

    def _engine(self, lookahead: int, buffered: bool, together: int) -> CacheEngine:
        """An engine whose staging buffers hold so many layers of three chunks."""
        extra = {"lookahead_layers": lookahead, "staging_bytes": 6 * together * self._layer_bytes}
        config = Config(
            chunk_size=CHUNK,
            use_layerwise=True,
            enable_blending=buffered,
            max_local_cpu_size=0.01,
            extra_config=extra,
        )
        hints = {"block_size": self.oracle.dims.block_size}
        form = self.oracle.form.engine
        return CacheEngine.create(
            config, self.oracle.metadata, self.oracle.kvcaches, form, hints, self.clock, (), self.timeline
        )

    def _start_together(self) -> None:
        """Let every stream come to where the last one is."""
        lanes = (self.engine.connector.loader.lane, self.engine.connector.saver.lane)
        streams = [self.compute, *(lane.copies for lane in lanes), *(lane.kernels for lane in lanes)]
        for stream in streams:
            self.clock.synchronize_stream(stream)
        for stream in streams:
            self.clock.work(0.0, stream)
        self._lanes = {"load": lanes[0].copies, "save": lanes[1].copies}
        self._left = {direction: iter(self._copies) for direction in self._lanes}

    @property
    def _layer_bytes(self) -> int:
        return 3 * self.oracle.page_bytes(CHUNK)

    def _load_cost(self, stream: VirtualStream, batch: CopyBatch) -> float:
        return self._cost("load", stream, batch)

    def _save_cost(self, stream: VirtualStream, batch: CopyBatch) -> float:
        return self._cost("save", stream, batch)

    def _cost(self, direction: str, stream: VirtualStream, batch: CopyBatch) -> float:
        """The next layers', once the step has begun; small tables, on other streams, take no time."""
        if stream is not self._lanes.get(direction):
            return 0.0
        return sum(next(self._left[direction]) for _ in range(int(batch.sizes.sum()) // self._layer_bytes))


@contextmanager
def opened(
    copies: Sequence[int],
    computes: Sequence[int],
    lookahead: int = 1,
    buffered: bool = False,
    together: int = 1,
) -> Iterator[Run]:
    run = Run(copies, computes, lookahead, buffered, together)
    yield run
    run.engine.close()


def bound(copies: Sequence[int], computes: Sequence[int]) -> int:
    """The first layer's copy and, in every other, what is longer than computing the layer before."""
    return copies[0] + sum(
        max(0, copy - compute) for copy, compute in zip(copies[1:], computes[:-1], strict=True)
    )


def waited(copies: Sequence[int], computes: Sequence[int]) -> int:
    """What a model waits for whose layers arrive one after the other, without a gap."""
    arrived, computed = accumulate(copies), [0, *accumulate(computes)]
    return max(there - done for there, done in zip(arrived, computed[:-1], strict=True))


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 8])
@pytest.mark.parametrize(("copy", "compute"), [(1, 1), (1, 2), (2, 1)])
def test_a_model_of_many_layers_waits_for_no_more_than_the_link(
    copy: int, compute: int, lookahead: int, buffered: bool
) -> None:
    copies, computes = [copy] * 24, [compute] * 24
    with opened(copies, computes, lookahead, buffered) as run:
        took, _ = run.step()
    assert took == sum(computes) + waited(copies, computes)


@pytest.mark.parametrize("together", [2, 3, 8])
@pytest.mark.parametrize(
    ("copy", "compute", "more"), [(4, 1, 0), (4, 2, 0), (4, 3, 1), (4, 4, 1), (2, 3, 0), (1, 2, 0)]
)
def test_layers_that_travel_together_are_waited_for_longer_only_where_the_model_is_as_fast_as_the_link(
    copy: int, compute: int, more: int, together: int
) -> None:
    copies, computes = [copy] * 24, [compute] * 24
    with opened(copies, computes, together=together) as run:
        took, _ = run.step()
    one_by_one = sum(computes) + waited(copies, computes)
    assert one_by_one <= took <= one_by_one + more * (together - 1) * copy


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.integers(0, 3), st.booleans())
@example([(3, 5), (3, 5), (3, 5), (3, 5)], 1, True)
@example([(5, 3), (5, 3), (5, 3), (5, 3)], 1, True)
def test_the_model_waits_for_the_first_layer_and_what_copies_take_longer_than_compute(
    times: list[tuple[int, int]], lookahead: int, stores: bool
) -> None:
    copies, computes = [copy for copy, _ in times], [compute for _, compute in times]
    with opened(copies, computes, lookahead) as run:
        took, found = run.step(stores=[Request(FRESH, FRESH_SLOTS)] if stores else [])
    assert took - sum(computes) <= bound(copies, computes)
    assert took - sum(computes) == waited(copies, computes)
    assert found.exposed_s == pytest.approx(waited(copies, computes))
    assert found.hidden_s + found.exposed_s <= sum(copies) + 1e-9


@settings(max_examples=20, deadline=None)
@given(PAIRS)
def test_loaded_in_bulk_the_model_waits_for_all_copies(times: list[tuple[int, int]]) -> None:
    copies, computes = [copy for copy, _ in times], [compute for _, compute in times]
    with opened(copies, computes) as run:
        took, _ = run.step(layerwise=False)
    assert took == sum(copies) + sum(computes)


def test_a_wait_for_more_than_the_layer_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(loader: PagedLoader, load: Load, layer: int) -> None:
        platform = loader._platform
        platform.wait_stream(platform.current_stream(HOST), loader.lane.copies)

    copies, computes = [4, 4, 4, 4], [9, 9, 9, 9]
    monkeypatch.setattr(PagedLoader, "wait_layer", wait)
    with opened(copies, computes) as run:
        took, _ = run.step()
    assert took - sum(computes) > bound(copies, computes)


def test_a_host_that_waits_for_the_device_within_a_step_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(loader: PagedLoader, load: Load, layer: int) -> None:
        loader._platform.synchronize_stream(loader.lane.copies)

    monkeypatch.setattr(PagedLoader, "wait_layer", wait)
    with opened([4, 4], [9, 9]) as run, pytest.raises(AssertionError, match="never waits for the device"):
        run.step()
