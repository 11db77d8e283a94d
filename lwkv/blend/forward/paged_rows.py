"""Rows of the paged cache as K and V tensors, whatever the engine's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lwkv.blend.forward.attention import choose_attend
from lwkv.connectors.buffer import BufferConnector
from lwkv.kernels import Rows
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Event, Int64s


class PagedRows:
    """Reads and writes rows of the registered caches on the current stream, by the connector's kernels.

    K and V are (rows, kv heads, head size) in the cache's dtype. `attend` is the device's best way to do
    what `attention.attend` does.
    """

    def __init__(self, connector: BufferConnector) -> None:
        self._layers = connector.layers
        self._kernels, self._platform, self._device = connector.kernels, connector.platform, connector.device
        # Kept, with the event of the last copy out of each: page-locking takes milliseconds.
        self._pinned: list[tuple[Tensor, Event]] = []
        self.attend = choose_attend(connector.platform)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=connector.device)

    def send(self, numbers: Int64s) -> Tensor:
        """Queue the copy of a table, not empty, to the device on the current stream, without any waiting."""
        pinned, copied = self._take_pinned(numbers.nbytes)
        table = pinned[: numbers.nbytes].view(torch.int64).view(numbers.shape)
        table.copy_(torch.from_numpy(numbers))
        sent = torch.empty(numbers.shape, dtype=torch.int64, device=self._device)
        sent.copy_(table, non_blocking=True)
        self._platform.record(copied, self._platform.current_stream(self._device))
        self._pinned.append((pinned, copied))
        return sent

    @contextmanager
    def read_back(self, numbers: Tensor) -> Iterator[Callable[[], Int64s]]:
        """Queue the copy of int64 numbers, not empty, to the host on the current stream.

        What is given returns them, within the context. It waits for the copy, but not for what is queued
        behind it. Whoever leaves without calling it waits for nothing.
        """
        pinned, copied = self._take_pinned(numbers.nbytes)
        table = pinned[: numbers.nbytes].view(torch.int64).view(numbers.shape)
        table.copy_(numbers, non_blocking=True)
        self._platform.record(copied, self._platform.current_stream(self._device))

        def get() -> Int64s:
            self._platform.synchronize_event(copied)
            found: Int64s = table.numpy().copy()
            return found

        try:
            yield get
        finally:
            self._pinned.append((pinned, copied))  # nobody gets it before the copy is over

    def at(self, slots: Tensor) -> Rows:
        """Prepare to move the rows of `slots`, int64 (rows,), on the device; all different."""
        count = len(slots)
        if len(self._numbers) < 2 * count:
            self._numbers = torch.arange(4 * count, device=slots.device)
        return Rows(slots, self._numbers[:count], self._numbers[count : 2 * count])

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        """Put k and v into the rows; both may be parts of larger tensors."""
        self._kernels.scatter(self._layers[layer], _bytes(torch.stack((k, v))), rows)

    def read(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """Copy the rows out."""
        source = self._layers[layer]
        both = _empty(source, len(rows.slots))
        self._kernels.gather(source, _bytes(both), rows)
        return both[0], both[1]

    def _take_pinned(self, nbytes: int) -> tuple[Tensor, Event]:
        """Page-locked memory that nothing is copied out of any more, and an event for the next copy."""
        for number, (pinned, copied) in enumerate(self._pinned):
            if pinned.nbytes >= nbytes and self._platform.query(copied):
                return self._pinned.pop(number)
        size = 1 << max(nbytes - 1, 1).bit_length()
        return self._platform.alloc_pinned(size), self._platform.new_event()


def _empty(layer: PagedLayer, num_rows: int) -> Tensor:
    return torch.empty(2, num_rows, layer.heads, layer.width, dtype=layer.dtype, device=layer.device)


def _bytes(memory: Tensor) -> Tensor:
    return memory.view(-1).view(torch.uint8)
