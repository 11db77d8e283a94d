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

    The device tensors belong to `stream`, the originals to this object until `give_back`, for which the
    stream must be past them.

    Args:
        spare: page-locked memory by size, shared with those before and after.
    """

    def __init__(
        self, platform: Platform, device: torch.device, stream: Stream, spare: dict[int, list[torch.Tensor]]
    ) -> None:
        self._platform = platform
        self._device = device
        self._stream = stream
        self._spare = spare
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

    def give_back(self) -> None:
        """Let others use the page-locked memory; the tables made from it are no more."""
        for memory in self._pinned:
            self._spare[memory.nbytes].append(memory)
        self._pinned = []

    def _new(self, nbytes: int) -> torch.Tensor:
        # Few sizes, so that what is spare fits; platforms page-lock powers of two at no loss.
        size = 1 << (nbytes - 1).bit_length()
        spare = self._spare.setdefault(size, [])
        memory = spare.pop() if spare else self._platform.alloc_pinned(size)
        self._pinned.append(memory)
        return memory[:nbytes]

    def _push(self, pinned: torch.Tensor) -> torch.Tensor:
        with self._platform.use_stream(self._stream):
            on_device = torch.empty(pinned.shape, dtype=pinned.dtype, device=self._device)
        self._platform.copy_async(on_device, pinned, self._stream)
        return on_device
