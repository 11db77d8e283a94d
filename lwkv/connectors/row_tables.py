"""Small tables on their way to the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lwkv.platforms import CopyBatch, Int64s, Platform, Stream


class Table(NamedTuple):
    """Page-locked memory and as much on the device, uint8 (bytes,) each, and the copy between them.

    `words` and `words_there` are the two as int64 (bytes // 8,), made once: somebody waits for the first
    kernel, and each view takes torch a while.
    """

    pinned: torch.Tensor
    on_device: torch.Tensor
    copy: CopyBatch
    words: Int64s
    words_there: torch.Tensor


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

    def send(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Queue the copy of an array and return the device's; of one without elements, the host's."""
        count = values.size
        if count == 0:
            return torch.from_numpy(values)
        table = self.new_table(values.nbytes)
        # By numpy: torch takes twice as long.
        table.words.view(values.dtype)[:count].reshape(values.shape)[...] = values
        self._platform.load_batch(table.on_device, table.copy, self._stream)
        there = table.words_there
        if values.dtype != np.int64:
            there = there.view(torch.from_numpy(values).dtype)
        there = there if count == len(there) else there[:count]
        return there if values.ndim == 1 else there.view(values.shape)

    def keep(self, on_device: torch.Tensor) -> torch.Tensor:
        """Give back a table that the device has, whose memory is not to be used anew before `give_back`."""
        self._kept.append(on_device)
        return on_device

    def new_table(self, nbytes: int) -> Table:
        """A table of at least `nbytes` bytes."""
        size = 1 << max(nbytes - 1, 7).bit_length()
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
        return Table(pinned, on_device, copy, pinned.numpy().view(np.int64), on_device.view(torch.int64))
