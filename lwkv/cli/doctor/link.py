"""How fast bytes travel between host and device, measured through the platform."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lwkv.platforms import Platform, Stream


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Bytes a second in each direction; `intact`: whether the bytes came back as they were sent."""

    load: float
    save: float
    intact: bool


def measure_link(
    platform: Platform, device: torch.device, nbytes: int = 64 << 20, repeats: int = 9
) -> LinkSpeed:
    """Copy `nbytes` of page-locked memory to `device` and back; the speed is the median of `repeats` copies.

    Needs `nbytes` of device memory and twice that of host memory. Blocks the host.

    Raises:
        ValueError: `nbytes` or `repeats` is below 1.
        MemoryError: the host memory cannot be had.
    """
    if nbytes < 1 or repeats < 1:
        raise ValueError(f"nbytes and repeats must be at least 1, not {nbytes} and {repeats}")
    sent, returned = platform.alloc_pinned(nbytes), platform.alloc_pinned(nbytes)
    sent.copy_(torch.arange(251, dtype=torch.uint8).repeat(nbytes // 251 + 1)[:nbytes])
    returned.zero_()
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    stream = platform.new_stream(device)
    load = _median_seconds(repeats, lambda: _copy(platform, on_device, sent, stream))
    save = _median_seconds(repeats, lambda: _copy(platform, returned, on_device, stream))
    return LinkSpeed(nbytes / load, nbytes / save, torch.equal(sent, returned))


def _copy(platform: Platform, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
    done = platform.new_event()
    platform.copy_async(dst, src, stream)
    platform.record(done, stream)
    platform.d2h_fence(stream, done)


def _median_seconds(repeats: int, work: Callable[[], None]) -> float:
    """Time `work`, after one run that pays for the first use of the memory."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
