"""Small tables on their way to the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from lwkv.platforms import CopyBatch, Platform, Stream


class Table(NamedTuple):
    """Page-locked memory and as much on the device, uint8 (bytes,) each, and the copy between them."""

    pinned: torch.Tensor
    on_device: torch.Tensor
    copy: CopyBatch


class RowTables:
    """Copies host tables to a device on one stream.

    The tables belong to this object until `give_back`, for which all work on them must have ended.

    Args:
        spare: tables by size, shared with those before and after: new ones take long.
    """

    def __init__(
        self, platform: Platform, device: torch.device, stream: Stream, spare: dict[int, list[Table]]
    ) -> None:
        self._platform = platform
        self._device = device
        self._stream = stream
        self._spare = spare
        self._taken: list[Table] = []
        self._kept: list[torch.Tensor] = []

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a host tensor and return the device's; one without elements is what is given."""
        array, size = values.numpy(), values.nbytes
        if size == 0:
            return values
        table = self.new_table(size)
        # By numpy: torch takes twice as long.
        table.pinned.numpy()[:size].view(array.dtype).reshape(array.shape)[...] = array
        self._platform.load_batch(table.on_device, table.copy, self._stream)
        # Each view takes torch a while, and somebody waits for the first kernel.
        on_device = table.on_device if size == table.on_device.nbytes else table.on_device[:size]
        typed = on_device.view(values.dtype)
        return typed if values.dim() == 1 else typed.view(values.shape)

    def keep(self, on_device: torch.Tensor) -> torch.Tensor:
        """Give back a table that the device has, whose memory is not to be used anew before `give_back`."""
        self._kept.append(on_device)
        return on_device

    def new_table(self, nbytes: int) -> Table:
        """A table of at least `nbytes` bytes."""
        size = 1 << max(nbytes - 1, 1).bit_length()
        spare = self._spare.setdefault(size, [])
        try:  # several threads may take the last one
            table = spare.pop()
        except IndexError:
            table = self._make(size)
        self._taken.append(table)
        return table

    def give_back(self) -> None:
        """Let others use the tables."""
        taken, self._taken = self._taken, []
        self._kept = []
        for table in taken:
            self._spare[table.pinned.nbytes].append(table)

    @torch.inference_mode(False)
    def _make(self, size: int) -> Table:
        pinned = self._platform.alloc_pinned(size)
        with self._platform.use_stream(self._stream):
            on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        zero = np.zeros(1, np.int64)
        copy = CopyBatch([pinned], zero, zero, zero + pinned.data_ptr(), zero, zero + size, stable=True)
        return Table(pinned, on_device, copy)
