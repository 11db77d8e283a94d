"""Small tables on their way to the device."""

from __future__ import annotations

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

    def send(self, table: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a non-empty host tensor and return the device's."""
        # The platform's allocator keeps freed memory by powers of two; other sizes it page-locks anew.
        memory = self._platform.alloc_pinned(1 << (table.nbytes - 1).bit_length())
        pinned = memory[: table.nbytes].view(table.dtype).view(table.shape)
        pinned.copy_(table)
        self._pinned.append(memory)
        with self._platform.use_stream(self._stream):
            on_device = torch.empty(table.shape, dtype=table.dtype, device=self._device)
        self._platform.copy_async(on_device, pinned, self._stream)
        return on_device
