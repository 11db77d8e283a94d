"""Small tables on their way to the device."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from lwkv.platforms import Platform, Stream

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
"""What it raises when there is no more device memory, or no more page-locked memory."""


class Uploads:
    """Copies host tables to a device on one stream and keeps the page-locked originals.

    The device tensors belong to `stream`, the originals to this object: keep it until the stream is past.
    """

    def __init__(self, platform: Platform, device: torch.device, stream: Stream) -> None:
        self._platform = platform
        self._device = device
        self._stream = stream
        self._pinned: list[torch.Tensor] = []

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a non-empty host tensor and return the device's."""
        pinned = self._new(values.nbytes).view(values.dtype).view(values.shape)
        pinned.copy_(values)
        return self._push(pinned)

    def new_table(self, *shape: int) -> npt.NDArray[np.int64]:
        """Page-locked int64 memory of `shape`, not empty, for `send_table` to take as it is."""
        memory = self._new(8 * math.prod(shape))
        table: npt.NDArray[np.int64] = memory.numpy().view(np.int64).reshape(shape)
        return table

    def send_table(self, table: npt.NDArray[np.int64]) -> torch.Tensor:
        """Queue the copy of what `new_table` made, which may not change any more, and return the device's."""
        return self._push(torch.from_numpy(table))

    def _new(self, nbytes: int) -> torch.Tensor:
        # The platform's allocator keeps freed memory by powers of two; other sizes it page-locks anew.
        memory = self._platform.alloc_pinned(1 << (nbytes - 1).bit_length())
        self._pinned.append(memory)
        return memory[:nbytes]

    def _push(self, pinned: torch.Tensor) -> torch.Tensor:
        with self._platform.use_stream(self._stream):
            on_device = torch.empty(pinned.shape, dtype=pinned.dtype, device=self._device)
        self._platform.copy_async(on_device, pinned, self._stream)
        return on_device
