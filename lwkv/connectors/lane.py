"""One direction of travel: a stream of copies, one of kernels or the same, and the staging between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lwkv.codecs import Coder, Coding, PagedCoder
from lwkv.kernels import Kernels, StagedLayers
from lwkv.platforms import Event, Platform


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """Device memory, uint8 (bytes,), with the events of the two streams that pass it back and forth.

    `holds` is what it was last filled with, as given by whoever filled it.
    """

    memory: torch.Tensor
    filled: Event
    emptied: Event
    used: bool = False
    holds: object = None


class Lane:
    """Staging buffers used in turn. Whoever fills one waits until the stream that empties it is done.

    Loads fill on `copies` and empty on `kernels`, saves the other way round. The host waits for no event of a
    buffer: these are recorded anew while other threads wait.

    Where both are the same stream, its order is all that is needed: a buffer has no events, and the driver is
    called 3 times for a buffer instead of 7. But no copy runs beside a kernel.

    Args:
        kernels: what fills or empties the buffers on the device's side.
        num_buffers, buffer_bytes: how much staging; two buffers let a copy run beside a kernel.
        loads: whether it is for loads.
        raw_bytes: how much memory for raw pages, where those in staging are coded.
        one_stream: whether copies and kernels share a stream.
        most_prefilled: how many buffers a load fills before it queues a layer; None for all. Batches that
            begin one right after the other would fill each other's anew.
        least_bytes: layers of a load are queued together, as far as a buffer holds them, until they have so
            many: for a buffer the host takes a while, however little is in it.

    Attributes:
        one_stream: as given.
        most_prefilled, least_bytes: as given, in buffers and bytes.
        raw_pages: uint8 (raw_bytes,), the kernels stream's own: what it has decoded of one buffer, or is to
            code next.
    """

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        kernels: Kernels,
        num_buffers: int,
        buffer_bytes: int,
        loads: bool,
        raw_bytes: int = 0,
        one_stream: bool = False,
        most_prefilled: int | None = None,
        least_bytes: int = 0,
    ) -> None:
        self._platform, self._loads, self.one_stream = platform, loads, one_stream
        self.most_prefilled = num_buffers if most_prefilled is None else most_prefilled
        self.least_bytes = least_bytes
        self._move, self._takes_handles = partial(kernels.move_layers, loads), kernels.takes_handles
        # The model waits for a load's kernels, which are short: they go before its own. For a save's nobody
        # waits: they fill the gaps that the model's leave.
        self.kernels = platform.new_stream(device, high_priority=loads)
        self.copies = self.kernels if one_stream else platform.new_stream(device)
        streams = (self.copies, self.kernels)
        self._filler, self._emptier = streams if loads else reversed(streams)
        self.buffers = [self._new_buffer(device, buffer_bytes) for _ in range(num_buffers)]
        self.raw_pages = _new_memory(device, raw_bytes)
        # Of loads that have ended, for the next ones.
        self.spare_events: list[Event] = []
        self._turn = 0
        self._wait_for_allocator(device)

    def next_to_fill(self) -> StagingBuffer:
        """The buffer whose turn it is; the filling stream has been made to wait until it is empty.

        One that was filled and not passed on is filled anew: whoever filled it sees that by `holds`.
        """
        buffer = self.buffers[self._turn]
        self._turn = (self._turn + 1) % len(self.buffers)
        if buffer.used and not self.one_stream:
            self._wait_emptied(buffer)
        buffer.holds = None
        return buffer

    def move(self, staged: StagedLayers) -> None:
        """Queue what scatters rows of layers that share their staging, or for saves gathers them."""
        handle = self._platform.launch_handle(self.kernels) if self._takes_handles else None
        if handle is None:
            self._platform.launch(self.kernels, partial(self._move, staged))
        else:
            # To make the stream the current one and back takes longer than the launch.
            self._move(staged, handle)

    def mover(self) -> Callable[[StagedLayers], object]:
        """What does as `move` for a few calls in a row, between which the current device stays the same."""
        handle = self._platform.launch_handle(self.kernels) if self._takes_handles else None
        return self.move if handle is None else partial(self._move, handle=handle)

    def decode(self, staging: torch.Tensor, coding: Coding) -> None:
        """Queue what makes `raw_pages` of those in a staging buffer that has been passed on."""
        self._code(coding.coder, partial(coding.coder.decode, staging, self.raw_pages, coding.num_pages))

    def encode(self, staging: torch.Tensor, coding: Coding) -> None:
        """Queue what makes pages in a staging buffer of `raw_pages`."""
        self._code(coding.coder, partial(coding.coder.encode, self.raw_pages, staging, coding.num_pages))

    def code_in_cache(self, coder: PagedCoder, work: Callable[..., None]) -> None:
        """Queue a call of one of the coder's methods, which lacks the handle."""
        self._code(coder, work)

    def clear(self) -> None:
        """Queue zeros for `raw_pages`: what was there before is not to be coded with what is written next."""
        self._platform.launch(self.kernels, self._clear)

    def mark_filled(self, buffer: StagingBuffer) -> None:
        """Record the event of a full buffer behind all that the filling stream holds now."""
        if not self.one_stream:
            self._platform.record(buffer.filled, self._filler)

    def pass_on(self, buffer: StagingBuffer) -> None:
        """Make the emptying stream wait until the buffer is full; `mark_filled` comes before."""
        if not self.one_stream:
            self._platform.wait_event(self._emptier, buffer.filled)

    def take_back(self, buffer: StagingBuffer) -> None:
        """Record the event of an empty buffer behind all that the emptying stream holds now.

        The filling stream waits for it before it fills the buffer again.
        """
        buffer.holds = None
        if not self.one_stream:
            self._platform.record(buffer.emptied, self._emptier)
            buffer.used = True

    def finish(self) -> None:
        """Block the host until both streams are empty."""
        self._platform.synchronize_stream(self.copies)
        self._platform.synchronize_stream(self.kernels)

    @torch.inference_mode()
    def _clear(self) -> None:
        self.raw_pages.zero_()

    def _code(self, coder: Coder | PagedCoder, work: Callable[..., None]) -> None:
        handle = self._platform.launch_handle(self.kernels) if coder.takes_handles else None
        if handle is None:
            self._platform.launch(self.kernels, work)
        else:
            work(handle=handle)

    def _wait_for_allocator(self, device: torch.device) -> None:
        # Memory is handed out on the current stream, which may still use it for what had it before.
        self._platform.wait_stream(self._filler, self._platform.current_stream(device))

    def _wait_emptied(self, buffer: StagingBuffer) -> None:
        if self._loads:
            self._platform.wait_event(self._filler, buffer.emptied)
        else:
            self._platform.d2h_fence(self.copies, buffer.emptied, self._filler)

    def _new_buffer(self, device: torch.device, num_bytes: int) -> StagingBuffer:
        memory = _new_memory(device, num_bytes)
        return StagingBuffer(memory, self._platform.new_event(), self._platform.new_event())


# Whoever fills it may be in inference mode or not; an inference tensor takes the first only.
@torch.inference_mode(False)
def _new_memory(device: torch.device, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
