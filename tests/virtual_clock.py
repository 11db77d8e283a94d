"""A CPU platform on a clock of its own: whatever is queued is done at once, and takes the time it is said to.

Every stream is at some time. An operation starts when its stream has come that far, and so has the thread
that queued it; a wait moves a stream on. Queueing takes no time; a thread that blocks moves on to what it
waits for. So times depend on nothing but the order that streams, events and waits define.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lwkv.platforms import CopyBatch
from lwkv.platforms.cpu import CPU
from lwkv.platforms.cpu_stream import InlineStream

Cost = Callable[["VirtualStream", CopyBatch], float]


@dataclass(eq=False)
class VirtualStream:
    """The time, in seconds, at which all that was queued so far is done."""

    device: torch.device
    now: float = 0.0


@dataclass(eq=False)
class VirtualEvent:
    at: float | None = None


class HostTime(threading.local):
    """How far a thread is: each has waited for other things."""

    def __init__(self) -> None:
        self.now = 0.0


class VirtualClock(CPU):
    """See above. `load_cost` and `save_cost` tell how long a stream's next batch takes; kernels none."""

    def __init__(self, load_cost: Cost, save_cost: Cost) -> None:
        super().__init__()
        self._load_cost, self._save_cost = load_cost, save_cost
        self._host = HostTime()
        self._at_once = InlineStream(torch.device("cpu"))
        self._inline = self.new_stream(torch.device("cpu"))

    @property
    def host_now(self) -> float:
        """How far the calling thread is, in seconds."""
        return self._host.now

    def work(self, seconds: float, stream: VirtualStream) -> None:
        """Queue something that takes `seconds`."""
        stream.now = max(stream.now, self._host.now) + seconds

    def new_stream(
        self, device: torch.device, high_priority: bool = False, late: bool = False
    ) -> VirtualStream:
        return VirtualStream(device)

    def launch(self, stream: VirtualStream, work: Callable[[], object]) -> None:
        self.work(0.0, stream)
        with self.use_stream(stream):
            work()

    def new_event(self, timing: bool = False, blocking: bool = False) -> VirtualEvent:
        return VirtualEvent()

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        self.work(0.0, stream)
        event.at = stream.now

    def wait_event(self, stream: VirtualStream, event: VirtualEvent) -> None:
        stream.now = max(stream.now, self._time(event))

    def wait_stream(self, waiter: VirtualStream, other: VirtualStream) -> None:
        waiter.now = max(waiter.now, other.now)

    def query(self, event: VirtualEvent) -> bool:
        return self._time(event) <= self._host.now

    def synchronize_event(self, event: VirtualEvent) -> None:
        self._host.now = max(self._host.now, self._time(event))

    def synchronize_stream(self, stream: VirtualStream) -> None:
        self._host.now = max(self._host.now, stream.now)

    def synchronize_device(self, device: torch.device) -> None:
        """Nothing to wait for: all is done. No thread moves on, so that tests may look at bytes."""

    def elapsed_ms(self, start: VirtualEvent, end: VirtualEvent) -> float:
        return (self._time(end) - self._time(start)) * 1e3

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: VirtualStream) -> None:
        self.work(0.0, stream)
        super().copy_async(dst, src, self._at_once)

    def load_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: VirtualStream) -> None:
        self.work(self._load_cost(stream, batch), stream)
        super().load_batch(buffer, batch, self._at_once)

    def save_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: VirtualStream) -> None:
        self.work(self._save_cost(stream, batch), stream)
        super().save_batch(buffer, batch, self._at_once)

    @staticmethod
    def _time(event: VirtualEvent) -> float:
        assert event.at is not None, "this event was never recorded"
        return event.at
