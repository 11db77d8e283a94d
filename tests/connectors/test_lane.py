"""Staging buffers take turns, and a fill that failed does not harm the next."""

from __future__ import annotations

import pytest
import torch

from lwkv.connectors.lane import Lane
from lwkv.kernels import TorchKernels
from lwkv.platforms import Platform


@pytest.fixture
def lane(platform: Platform, device: torch.device) -> Lane:
    return Lane(platform, device, TorchKernels(), 3, 512, loads=True)


def test_buffers_take_turns(lane: Lane) -> None:
    turns = []
    for _ in range(7):
        buffer = lane.next_to_fill()
        turns.append(buffer.memory.data_ptr())
        lane.mark_filled(buffer)
        lane.pass_on(buffer)
        lane.take_back(buffer)
    assert len(set(turns[:3])) == 3
    assert turns == (turns[:3] * 3)[:7]


def test_one_stream_needs_no_event_of_a_buffer(
    platform: Platform, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Lane(platform, device, TorchKernels(), 1, 512, loads=True, one_stream=True)
    assert lane.copies is lane.kernels
    for call in ("record", "wait_event"):
        monkeypatch.setattr(platform, call, lambda *_: pytest.fail("an event is used"))
    for _ in range(3):
        buffer = lane.next_to_fill()
        lane.mark_filled(buffer)
        lane.pass_on(buffer)
        lane.take_back(buffer)


def test_buffers_are_as_large_as_asked_for(lane: Lane, device: torch.device) -> None:
    memory = lane.next_to_fill().memory
    assert (memory.shape, memory.dtype, memory.device) == ((512,), torch.uint8, device)


def test_a_buffer_that_was_never_emptied_is_not_waited_for(lane: Lane) -> None:
    for _ in range(6):
        lane.next_to_fill()
