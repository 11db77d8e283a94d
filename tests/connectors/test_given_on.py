"""Memory that is given on, and whose last user has not run: shown on whatever device the tests run on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from oracle import MemoryTier, Oracle, WrongBytesError, run_slots

from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.platforms import Platform, Stream
from lwkv.platforms.cpu_stream import WorkerStream

NEW, OLD = list(range(500, 524)), list(range(900, 924))
HERE, THERE = run_slots(2, 24), run_slots(32, 24, backwards=True)
BUSY_SIDE, BUSY_TIMES = 2048, 20

HoldBack = Callable[[Stream], None]


@pytest.fixture
def streams_are_late(request: pytest.FixtureRequest, device: torch.device) -> bool:
    """Whether a stream can be held back until somebody waits for it."""
    return device.type == "cpu" or request.config.getoption("--musa-streams", default=None) == "late"


@pytest.fixture
def hold_back(platform: Platform, device: torch.device, streams_are_late: bool) -> HoldBack:
    """Let what a stream is given from here on be done late."""

    def hold(stream: Stream) -> None:
        if isinstance(stream, WorkerStream):
            stream.late = True
        elif not streams_are_late:
            square, product = (torch.ones(BUSY_SIDE, BUSY_SIDE, device=device) for _ in range(2))
            platform.synchronize_device(device)
            platform.launch(
                stream, lambda: [torch.mm(square, square, out=product) for _ in range(BUSY_TIMES)]
            )

    return hold


@pytest.fixture
def outcome(streams_are_late: bool) -> Callable[[bool], AbstractContextManager[Any]]:
    """What comes of a run: right bytes, or wrong ones where the wait was taken away."""

    def expected(waits: bool) -> AbstractContextManager[Any]:
        if not waits and not streams_are_late:
            pytest.skip("this device cannot be held back for sure: --musa-streams late can, or the CPU")
        return nullcontext() if waits else pytest.raises(WrongBytesError)

    return expected


def made(platform: Platform, device: torch.device) -> Oracle:
    oracle = Oracle(platform, device)
    platform.synchronize_device(device)
    return oracle


@pytest.mark.parametrize("waits", [True, False], ids=["with the wait", "without it"])
def test_pages_of_a_load_are_not_filled_anew_before_the_device_has_read_them(
    platform: Platform,
    device: torch.device,
    hold_back: HoldBack,
    outcome: Callable[[bool], AbstractContextManager[Any]],
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host memory holds one of two prompts; the other comes from a lower tier into the same pages."""
    oracle, tier, compute = made(platform, device), MemoryTier(), platform.new_stream(device)
    with platform.use_stream(compute):
        engine = oracle.engine(8, tiers=[tier], pages=3 * oracle.dims.layers)
        for tokens, slots in ((OLD, HERE), (NEW, THERE)):
            oracle.compute(tokens, slots)
            engine.store(tokens, slot_mapping=slots)
            assert engine.flush()
        oracle.zero(THERE)
        platform.synchronize_device(device)
        connector: Any = engine.connector
        for stream in (compute, connector.loader.lane.copies, connector.loader.lane.kernels):
            hold_back(stream)
        if not waits:
            monkeypatch.setattr(connector.loader, "_synchronize", lambda stream: None)
        tier.asked.clear()
        assert engine.retrieve(NEW, slot_mapping=THERE).all()
        assert engine.flush()
        assert tier.asked == []
        assert engine.retrieve(OLD, slot_mapping=HERE).all()
        assert tier.asked
        oracle.expect(NEW, THERE)
        with outcome(waits):
            oracle.check()
        engine.close()


@pytest.mark.parametrize("waits", [True, False], ids=["with the wait", "without it"])
def test_staging_does_not_take_memory_that_its_last_user_still_writes(
    platform: Platform,
    device: torch.device,
    hold_back: HoldBack,
    outcome: Callable[[bool], AbstractContextManager[Any]],
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An allocator may give a block on before the work of its last user, on the same stream, has run."""
    oracle, compute = made(platform, device), platform.new_stream(device)
    with platform.use_stream(compute):
        engine = oracle.engine(8, lookahead=0)
        oracle.compute(NEW, HERE)
        engine.store(NEW, slot_mapping=HERE)
        assert engine.flush()
        platform.synchronize_device(device)
        if not waits:
            monkeypatch.setattr(Lane, "_wait_for_allocator", lambda lane, device: None)
        hold_back(compute)
        connector: Any = engine.connector
        lane = used_before(platform, device, compute, connector, monkeypatch)
        connector.loader.lane = lane
        hold_back(lane.kernels)
        steps = engine.retrieve_layer(NEW[:16], slot_mapping=THERE[:16])
        next(steps), next(steps)
        platform.synchronize_stream(lane.copies)
        platform.synchronize_stream(compute)
        *_, mask = steps
        assert mask.all()
        oracle.expect(NEW[:16], THERE[:16])
        with outcome(waits):
            oracle.check()
        engine.close()


def used_before(
    platform: Platform, device: torch.device, compute: Stream, connector: Any, patch: pytest.MonkeyPatch
) -> Lane:
    """A lane for loads whose first buffer is filled with sevens by work that `compute` still holds."""
    size = len(connector.loader.lane.buffers[0].memory)
    make = partial(Lane, platform, device, connector.kernels, 2, size, loads=True)
    if device.type == "cpu":
        return lent(platform, compute, make, patch)
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    address = memory.data_ptr()
    platform.launch(compute, partial(memory.fill_, 7))
    del memory
    lane = make()
    assert lane.buffers[0].memory.data_ptr() == address
    return lane


def lent(platform: Platform, compute: Stream, make: Callable[[], Lane], patch: pytest.MonkeyPatch) -> Lane:
    """The same where the allocator waits for nobody: what it hands out is written to afterwards."""
    allocate = Lane._new_buffer

    def lend(lane: Lane, device: torch.device, num_bytes: int) -> StagingBuffer:
        buffer = allocate(lane, device, num_bytes)
        platform.launch(compute, partial(buffer.memory.fill_, 7))
        return buffer

    with patch.context() as patched:
        patched.setattr(Lane, "_new_buffer", lend)
        return make()
