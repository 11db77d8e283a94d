"""What all accelerators share: torch's device modules have the same names for streams, events and devices.

A platform is `getattr(torch, device_type)` plus the few hooks that differ. The module is looked up on every
call: vendors replace it while a process runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from lwkv.platforms.checks import check_buffer, check_copy, check_runs
from lwkv.platforms.host_memory import (
    PAGE_BYTES,
    allocate_aligned,
    call_at_end,
    check_size,
    is_byte_pinned,
    no_memory,
    populate,
)
from lwkv.platforms.protocol import CopyBatch, Event, Features, Stream
from lwkv.platforms.stream_switch import StreamSwitch
from lwkv.platforms.triton_driver import triton_serves

log = logging.getLogger(__name__)

# What a device module without its driver, or built without it, raises.
LEAST_REGISTERED = 1 << 20
"""Bytes; smaller memory comes from torch's allocator, which keeps it for the next one who asks."""
ABSENT = (AssertionError, AttributeError, ImportError, OSError, RuntimeError)


class Accelerator:
    """Base of the platforms over a torch device module. Streams and events are the module's own kinds."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    handle_attribute: ClassVar[str]
    event_options: ClassVar[frozenset[str]] = frozenset({"enable_timing", "blocking"})

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}  # the device that each address was registered by way of
        self._kept: deque[tuple[int, object]] = deque()  # page-locked, and used by nobody

    @property
    def module(self) -> Any:
        return getattr(torch, self.device_type)

    @property
    def streams(self) -> Any:
        """What tells and sets the current stream: the module, or a faster way to the same."""
        return self.module

    @cached_property
    def features(self) -> Features:
        return self.probe_features()

    def probe_features(self) -> Features:
        return Features(
            event_timing=True,
            triton=self.is_available() and triton_serves(self.device_type),
            stream_priority=True,
        )

    def is_available(self) -> bool:
        try:
            return bool(self.module.is_available())
        except ABSENT:
            return False

    def device_count(self) -> int:
        return int(self.module.device_count())

    def current_device(self) -> torch.device:
        return torch.device(self.device_type, self.module.current_device())

    def set_device(self, device: torch.device) -> None:
        self.module.set_device(device)

    def current_stream(self, device: torch.device) -> Stream:
        # An index is taken as it is; a device is looked into by way of the environment, for 4 us.
        if device.index is None:
            return self.module.current_stream(device)
        return self.streams.current_stream(device.index)

    def new_stream(self, device: torch.device, high_priority: bool = False) -> Stream:
        # 0 and -1 are the only priorities that exist everywhere.
        return self.module.Stream(device, priority=-1 if high_priority else 0)

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        return StreamSwitch(self.streams, self._own(stream))

    def as_native(self, stream: Stream, device: torch.device) -> Stream:
        if self._is_own(stream):
            return stream
        if not isinstance(stream, torch.Stream) or stream.device.type != self.device_type:
            raise ValueError(f"got {stream!r} as a stream of {device}; give a torch or {self.name} stream")
        return self.module.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        with self.use_stream(stream):
            work()

    def launch_handle(self, stream: Stream) -> int | None:
        return None

    def new_event(self, timing: bool = False, blocking: bool = False) -> Event:
        options = {"enable_timing": timing, "blocking": blocking}
        return self.module.Event(**{key: on for key, on in options.items() if key in self.event_options})

    def record(self, event: Event, stream: Stream) -> None:
        event.record(self._own(stream))

    def wait_event(self, stream: Stream, event: Event) -> None:
        self._own(stream).wait_event(event)

    def wait_stream(self, waiter: Stream, other: Stream) -> None:
        self._own(waiter).wait_stream(self._own(other))

    def query(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize_stream(self, stream: Stream) -> None:
        self._own(stream).synchronize()

    def synchronize_device(self, device: torch.device) -> None:
        self.module.synchronize(device)

    def elapsed_ms(self, start: Event, end: Event) -> float | None:
        return float(start.elapsed_time(end))

    def stream_handle(self, stream: Stream) -> int:
        return int(getattr(self._own(stream), self.handle_attribute))

    @torch.inference_mode(False)
    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory.

        torch's allocator rounds the bytes it takes up to a power of two, and holds launches up for as long as
        the system takes to give them.
        """
        check_size(nbytes)
        if self.features.host_register and (nbytes & (nbytes - 1) or nbytes >= LEAST_REGISTERED):
            return self._register_new(nbytes)
        memory = self._alloc_with_torch(nbytes)
        if memory.data_ptr() % PAGE_BYTES == 0:
            return memory
        memory = self._alloc_with_torch(nbytes + PAGE_BYTES - 1)
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + nbytes]

    def is_pinned(self, memory: torch.Tensor) -> bool:
        first, nbytes = memory.data_ptr(), memory.nbytes
        return nbytes > 0 and is_byte_pinned(first) and is_byte_pinned(first + nbytes - 1)

    def host_register(self, memory: torch.Tensor) -> bool:
        if not self.features.host_register:
            return False
        address, device = memory.data_ptr(), self.module.current_device()
        if not self.register_range(address, memory.nbytes, device):
            return False
        self._registered[address] = device
        return True

    def host_unregister(self, memory: torch.Tensor) -> None:
        self._unregister(memory.data_ptr())

    def register_range(self, address: int, nbytes: int, device: int) -> bool:
        """Page-lock host memory by way of `device`; called only where `features.host_register` holds."""
        return False

    def unregister_range(self, address: int, device: int) -> None:
        """Undo `register_range`, on whatever thread drops the memory: its current device may be another.

        The collector may come here in the middle of anything that the thread does. Raises RuntimeError.
        """

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        check_copy(dst, src)
        pinned = all(side.device.type != "cpu" or self.is_pinned(side) for side in (dst, src))
        with self.use_stream(stream):
            # From pageable memory a non-blocking copy reads the source after the call returns.
            dst.copy_(src, non_blocking=pinned)
        if not pinned:
            self.synchronize_stream(stream)

    def load_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Stream) -> None:
        check_buffer(buffer)
        check_runs(buffer, batch)
        with self.use_stream(stream):
            for device, host in _runs(buffer, batch):
                device.copy_(host, non_blocking=True)

    def save_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Stream) -> None:
        check_buffer(buffer)
        check_runs(buffer, batch)
        with self.use_stream(stream):
            for device, host in _runs(buffer, batch):
                host.copy_(device, non_blocking=True)

    def d2h_fence(self, stream: Stream, event: Event, waiter: Stream | None = None) -> None:
        if waiter is None:
            self.synchronize_event(event)
        else:
            self.wait_event(waiter, event)

    def mem_info(self, device: torch.device) -> tuple[int, int] | None:
        try:
            free, total = self.module.mem_get_info(device)
        except (AttributeError, RuntimeError):
            return None
        return int(free), int(total)

    def close(self) -> None:
        """Do nothing: device modules keep their streams for the process."""

    @cached_property
    def _own_kinds(self) -> set[type]:
        """The stream classes found to be the module's; to ask it for every stream of every layer is slow."""
        return set()

    def _is_own(self, stream: Stream) -> bool:
        if type(stream) in self._own_kinds:
            return True
        if not isinstance(stream, self.module.Stream):
            return False
        self._own_kinds.add(type(stream))
        return True

    def _own(self, stream: Stream) -> Stream:
        # An object of another family crashes some modules and makes others drop the dependency.
        if not self._is_own(stream):
            raise ValueError(f"got {stream!r}, not a stream of {self.name}; convert it with as_native")
        return stream

    def _alloc_with_torch(self, nbytes: int) -> torch.Tensor:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (MemoryError, RuntimeError) as error:
            raise no_memory(nbytes) from error
        if not self.is_pinned(memory):
            raise no_memory(nbytes)
        return memory

    def _register_new(self, nbytes: int) -> torch.Tensor:
        self._release_kept()
        try:
            memory, array = allocate_aligned(nbytes)
        except MemoryError as error:
            raise no_memory(nbytes) from error
        populate(array)
        if not self.host_register(memory):
            raise no_memory(nbytes)
        call_at_end(array, partial(self._release, memory.data_ptr()))
        return memory

    def _release(self, address: int, memory: object) -> None:
        """Unregister what nobody uses any more. Where that fails the memory is kept, and this tried again:
        the next owner of its address could not register it."""
        try:
            self._unregister(address)
        except RuntimeError as error:
            self._kept.append((address, memory))
            log.warning("host memory at %#x stays page-locked for now: %s", address, error)

    def _release_kept(self) -> None:
        for _ in range(len(self._kept)):
            with suppress(IndexError):  # another thread was faster
                self._release(*self._kept.popleft())

    def _unregister(self, address: int) -> None:
        device = self._registered.get(address)
        if device is not None:
            self.unregister_range(address, device)
            del self._registered[address]


def _runs(buffer: torch.Tensor, batch: CopyBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each run as (device slice, host slice)."""
    places = (batch.slab_of, batch.host_offsets, batch.device_offsets, batch.sizes)
    for slab, host, device, size in zip(*(array.tolist() for array in places), strict=True):
        yield buffer[device : device + size], batch.slabs[slab][host : host + size]
