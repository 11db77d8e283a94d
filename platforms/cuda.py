"""NVIDIA GPUs through torch.cuda, with the driver's batched copy where it is there."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from lwkv.platforms.accelerator import Accelerator
from lwkv.platforms.checks import check_buffer
from lwkv.platforms.cuda_driver import CudaDriver
from lwkv.platforms.cuda_streams import CudaStreams
from lwkv.platforms.protocol import CopyBatch, Event, Features, Int64s, Stream

# The driver refuses batches on the legacy default stream, which has these handles.
_LEGACY_HANDLES = (0, 1)
# A batch takes the driver about 28 us, a copy of one run about 7.
FEW_RUNS = 2


class CUDA(Accelerator):
    """`features.batch_copy` tells whether the driver has the batched copy (CUDA 12.8 and later)."""

    name = device_type = "cuda"
    handle_attribute = "cuda_stream"

    @property
    def how_to_get(self) -> str:
        if torch.version.cuda is None:
            return (
                f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch, as on "
                "PyPI, and the NVIDIA driver"
            )
        return (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but finds no GPU: nvidia-smi "
            "must show one (else repair the driver, or pass the GPU to the container), and "
            "CUDA_VISIBLE_DEVICES, if set, must name it"
        )

    @cached_property
    def driver(self) -> CudaDriver | None:
        return CudaDriver.load()

    @cached_property
    def _spare_events(self) -> defaultdict[int, deque[Event]]:
        """Events of `wait_stream` that nobody uses, by device: a first record ties them to one."""
        return defaultdict(deque)

    @cached_property
    def streams(self) -> Any:
        return CudaStreams() if CudaStreams.are_there() else self.module

    @cached_property
    def events(self) -> Any:
        """What records events and waits for them: torch's C functions, without the Python ones around."""
        base = getattr(torch._C, "_CudaEventBase", None)
        return base if hasattr(base, "record") else self.module.Event

    def is_available(self) -> bool:
        # Builds for other vendors answer through torch.cuda too, without a CUDA version.
        return torch.version.cuda is not None and super().is_available()

    def probe_features(self) -> Features:
        driver, features = self.driver, super().probe_features()
        return replace(
            features,
            host_register=driver is not None,
            batch_copy=driver is not None and driver.has_batch,
            # Measured on an H200: docs/page-format.md. Nobody has measured them in plain torch.
            lossless_pages=features.triton,
        )

    def launch_handle(self, stream: Stream) -> int | None:
        # A kernel goes to the context of the current device.
        on_current = stream.device_index == self.streams.current_device()
        return self.stream_handle(stream) if on_current else None

    def record(self, event: Event, stream: Stream) -> None:
        self.events.record(event, stream if type(stream) in self._own_kinds else self._own(stream))

    def wait_event(self, stream: Stream, event: Event) -> None:
        self.events.wait(event, stream if type(stream) in self._own_kinds else self._own(stream))

    def wait_stream(self, waiter: Stream, other: Stream) -> None:
        # A wait keeps what it waits for: its event can be recorded again at once. Making one takes longer.
        spare = self._spare_events[self._own(other).device_index]
        event = spare.pop() if spare else self.new_event()
        self.record(event, other)
        self.wait_event(waiter, event)
        spare.append(event)

    def register_range(self, address: int, nbytes: int, device: int) -> bool:
        return self.driver is not None and self.driver.register(address, nbytes, device)

    def unregister_range(self, address: int, device: int) -> None:
        if self.driver is not None:
            self.driver.unregister(address, device)

    def load_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Stream) -> None:
        driver, handle = self._batching(batch), self.stream_handle(stream)
        if driver is None or handle in _LEGACY_HANDLES:
            return super().load_batch(buffer, batch, stream)
        to, source = _device_addresses(buffer, batch), batch.host_addresses
        if batch.sizes.size <= FEW_RUNS:
            return driver.copy_each(to.tolist(), source.tolist(), batch.sizes.tolist(), handle)
        return driver.copy_batch(to, source, batch.sizes, handle, batch.stable)

    def save_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Stream) -> None:
        driver, handle = self._batching(batch), self.stream_handle(stream)
        if driver is None or handle in _LEGACY_HANDLES:
            return super().save_batch(buffer, batch, stream)
        to, source = batch.host_addresses, _device_addresses(buffer, batch)
        if batch.sizes.size <= FEW_RUNS:
            return driver.copy_each(to.tolist(), source.tolist(), batch.sizes.tolist(), handle)
        # The stream's earlier work writes the source, so it must be read in stream order.
        return driver.copy_batch(to, source, batch.sizes, handle, any_order=False)

    def stream_handle(self, stream: Stream) -> int:
        own = stream if type(stream) in self._own_kinds else self._own(stream)
        handle: int = own.cuda_stream
        return handle

    def _batching(self, batch: CopyBatch) -> CudaDriver | None:
        # The driver refuses batches of nothing.
        return self.driver if batch.sizes.size and self.features.batch_copy else None


def _device_addresses(buffer: torch.Tensor, batch: CopyBatch) -> Int64s:
    check_buffer(buffer)
    return batch.device_offsets + buffer.data_ptr()
