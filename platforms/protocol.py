"""What lwkv asks of a device type: streams, events, page-locked memory and asynchronous copies.

Streams and events belong to their platform. Only a platform may bring the two together: mixing the
families of two device modules crashes or silently drops the dependency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Stream: TypeAlias = Any
Event: TypeAlias = Any
Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Features:
    """What a platform can do, probed once; the rest of lwkv asks this and nothing else."""

    layerwise: bool = True
    blending: bool = True
    host_register: bool = False
    batch_copy: bool = False  # many runs of one CopyBatch cost the host about one call
    event_timing: bool = False
    triton: bool = False
    stream_priority: bool = False
    lossless_pages: bool = False  # coded pages were measured to load and save at least as fast as raw ones


class CopyBatch(NamedTuple):
    """Runs of bytes between host slabs and one device buffer: made once, queued as often as wanted.

    Run i is `sizes[i]` bytes at `host_offsets[i]` of `slabs[slab_of[i]]` and at `device_offsets[i]` of the
    buffer. `host_addresses[i]` is the same place on the host as an address. All arrays are int64, (runs,),
    packed; sizes are positive and runs do not overlap. Slabs are page-locked uint8 CPU tensors, (bytes,),
    of the platform; the batch keeps them alive. `stable` says that no work still queued anywhere writes
    the host bytes, so that a load may read them ahead of its stream. Nothing is checked here: one is made
    for every layer, and drivers take the addresses of its arrays as they are.
    """

    slabs: Sequence[torch.Tensor]
    slab_of: Int64s
    host_offsets: Int64s
    host_addresses: Int64s
    device_offsets: Int64s
    sizes: Int64s
    stable: bool = False


class Platform(Protocol):
    """One device type of this process. Methods never block the host unless they say so, from any thread.

    `Accelerator` in `accelerator.py` has all of it over a torch device module. The conformance suite in
    `tests/platforms/test_conformance.py` asks for what is written here, texts of errors included. `checks.py`
    and `host_memory.py` have the functions that raise them; `docs/platforms.md` says how to run the suite.
    """

    @property
    def name(self) -> str:
        """What users call it, in lower case: the name of its entry point."""

    @property
    def device_type(self) -> str:
        """`torch.device.type` of this platform's tensors."""

    @property
    def features(self) -> Features:
        """The same each time; whoever asks may have no device."""

    @property
    def how_to_get(self) -> str:
        """What a user installs or checks when `is_available()` is False, as a sentence."""

    def is_available(self) -> bool:
        """Whether a device can be used now; never raises and creates no device context."""

    def device_count(self) -> int:
        """How many devices there are; at least 1 where the platform is available."""

    def current_device(self) -> torch.device:
        """The calling thread's device, named as its tensors name it: with its index where they have one."""

    def set_device(self, device: torch.device) -> None:
        """Make `device` the calling thread's; current device and stream are thread-local everywhere."""

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's stream on `device`. Streams are equal (`==`) if they are the same queue."""

    def new_stream(self, device: torch.device, high_priority: bool = False) -> Stream:
        """Make a stream, which keeps its work in order. It is never the calling thread's current one."""

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` and its device current inside the block, for this thread alone. Blocks may be nested,
        and put back what was before them also when they raise."""

    def as_native(self, stream: Stream, device: torch.device) -> Stream:
        """Turn a generic or foreign stream object of the same queue into this platform's own kind.

        Every other method takes only that kind, and gets the very same object back. Raises ValueError for an
        object that names no queue: "got <object> as a stream of ...".
        """

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        """Queue the device work that `work` issues behind all that `stream` holds.

        `work` sees `stream` as the current one. What it raises is raised here, or by a wait for the stream.
        """

    def launch_handle(self, stream: Stream) -> int | None:
        """The handle by which kernels can be queued on `stream` as they are; None where it takes `launch`."""

    def new_event(self, timing: bool = False, blocking: bool = False) -> Event:
        """Make an event. `timing` needs `features.event_timing`; `blocking` lets host waits sleep."""

    def record(self, event: Event, stream: Stream) -> None:
        """Let `event` stand for all that `stream` holds now. It may be recorded again, on any stream: waits
        that were queued before keep what they waited for. The host must not be waiting for it meanwhile."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let later work of `stream` start only after `event`'s latest record is reached."""

    def wait_stream(self, waiter: Stream, other: Stream) -> None:
        """Let later work of `waiter` start only after all that `other` holds now."""

    def query(self, event: Event) -> bool:
        """Whether `event`'s latest record is reached."""

    def synchronize_event(self, event: Event) -> None:
        """Block the host until `event` is reached."""

    def synchronize_stream(self, stream: Stream) -> None:
        """Block the host until `stream` is empty."""

    def synchronize_device(self, device: torch.device) -> None:
        """Block the host until every stream of `device` is empty."""

    def elapsed_ms(self, start: Event, end: Event) -> float | None:
        """Milliseconds between two reached timing events, over 0; None where the platform cannot tell."""

    def stream_handle(self, stream: Stream) -> int:
        """The driver's handle of `stream`, for native calls: one for each stream, 0 only on the CPU."""

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate a page-locked uint8 CPU tensor, (nbytes,), 4096-aligned.

        No inference tensor, whatever mode the caller is in: threads outside of inference mode write to it.

        Raises MemoryError where it cannot, with the size in GiB "of host memory" and the setting to lower,
        max_local_cpu_size (`no_memory`): the device goes on working after it. Raises ValueError for sizes
        below 1, "got <size> bytes" (`check_size`).
        """

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether copies with this host memory, all of it, run without blocking the host: so for any part of
        what `alloc_pinned` made or `host_register` took, and for no ordinary memory."""

    def host_register(self, memory: torch.Tensor) -> bool:
        """Page-lock existing host memory, kept by the caller until unregistered; False where that fails.

        Where `features.host_register` is False it is always so. The memory is page-locked for every device,
        by way of the calling thread's.
        """

    def host_unregister(self, memory: torch.Tensor) -> None:
        """Undo `host_register`, from any thread and by way of the same device; else do nothing."""

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Queue one copy between packed tensors of equal shape and dtype, one on the host, one on the device.

        Every bit is kept. The host side must outlive the copy; where it is not page-locked the call blocks
        until the copy is done. Raises ValueError for tensors that differ ("shape and dtype must be equal") or
        have gaps ("packed"): `check_copy`.
        """

    def load_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Stream) -> None:
        """Queue the host-to-device copy of every run of `batch` into `buffer`, uint8 (bytes,).

        `stream` is any, the current one too. Nothing but the runs is written, and a batch may have none.
        Raises ValueError for another buffer ("packed uint8"): `check_buffer`.
        """

    def save_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Stream) -> None:
        """Queue the device-to-host copy of every run of `batch` out of `buffer`, as `load_batch`.

        It reads the buffer in the order of the stream, and later work of the stream waits until it has.
        """

    def d2h_fence(self, stream: Stream, event: Event, waiter: Stream | None = None) -> None:
        """Let `waiter` go on only once the device-to-host copies before `event` on `stream` are done.

        Without `waiter` that is the host: it blocks, and then sees their bytes. This is the only call that
        says so. Where an event does not cover such copies, the host blocks whoever waits.
        """

    def mem_info(self, device: torch.device) -> tuple[int, int] | None:
        """(free, total) bytes of device memory, 0 < free <= total, or None where it cannot be told."""

    def close(self) -> None:
        """Finish what is queued and end the threads of the platform itself, if it has any. Streams that are
        made after it work."""
