"""The Buffer connector: pages go to a buffer first, where blending reads and mends them before a flush."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.loader import Load
from lwkv.connectors.paged import PagedConnector, Registration
from lwkv.connectors.plan import Plan, Slice
from lwkv.connectors.rope import Rope, Turn
from lwkv.errors import LayoutError, RequestError
from lwkv.kernels import Rows
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Stream
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import NO_SLOT, Transfer


@dataclass(slots=True, eq=False)
class BufferedLoad(Load):
    """A load into the buffer. Layer i is in `buffers[i % len(buffers)]`.

    Attributes:
        buffers: each [1, rows, heads, width] in K and V, one row for every token that is moved.
        rows_of: int64 (tokens,), the buffer row of each token of the plan's transfer, NO_SLOT for none.
        places: the same for the moved tokens only, on the device.
        filled: for each queued layer, the plan and the places it was queued with: they are on the device by
            the time the layer is, whatever has been dropped since.
        num_flushed: layers that have been waited for and flushed.
        user: the stream that was last given the buffer to work on, or flushed it.
    """

    buffers: Sequence[PagedLayer] = ()
    rows_of: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    places: torch.Tensor | None = None
    turn: Turn | None = None
    filled: list[tuple[Plan, torch.Tensor | None]] = field(default_factory=list)
    num_flushed: int = 0
    user: Stream = None


class BufferConnector(PagedConnector):
    """A PagedConnector whose loads stop over in a contiguous buffer of a few layers.

    A layer that has been waited for is in the engine's blocks, and in the buffer as well until the layer
    `num_buffered` after it is queued: `get_kv` gives it out, `flush` writes it to the blocks again.
    """

    name = "buffer"
    _rope: Rope | None = None

    @property
    def num_buffered(self) -> int:
        """Layers in the buffer: those queued ahead, the one in use and the one arriving."""
        return self._config.lookahead_layers + 2

    def register(self, kvcaches: Registration) -> None:
        """Describe what the engine registers.

        Raises:
            LayoutError: as for a PagedConnector; opaque blocks; layers of different shapes.
        """
        super().register(kvcaches)
        first = self.layers[0]
        for layer in self.layers:
            if layer.tokens_per_row != 1 or _shape(layer) != _shape(first):
                raise LayoutError(
                    f"layer {layer.name!r} ({layer.page_format}, {_shape(layer)}) cannot be blended: that "
                    f"needs addressable tokens, and heads and dtype as in the first layer: {_shape(first)}"
                )

    def set_rope(self, rope: Rope) -> None:
        """Say how the model turns its keys; needed before a load that moves keys to other positions."""
        self._rope = rope

    def begin_load(
        self, transfer: Transfer, pages: Int64s | None = None, shift: Int64s | None = None
    ) -> BufferedLoad:
        """Start loads; `shift`, int64 (tokens,), is each token's new position less its stored one.

        Raises:
            RequestError: `shift` without `set_rope`, or of another length than the transfer's slots.
        """
        load = super().begin_load(transfer, pages)
        moved = transfer.slots != NO_SLOT
        rows_of = np.where(moved, np.cumsum(moved) - 1, NO_SLOT)
        num_rows = int(moved.sum())
        turn = None if shift is None else self._turn(load.plan, shift, moved)
        places = _send_places(load.plan, rows_of)
        return BufferedLoad(
            load.plan,
            load.arrived,
            load.fetched,
            load.recordings,
            load.stream,
            buffers=self._new_buffers(num_rows),
            rows_of=rows_of,
            places=places,
            turn=turn,
        )

    def load_layer(self, load: Load, layer: int, pages: Int64s) -> None:
        load = _buffered(load)
        target = load.buffers[layer % len(load.buffers)]
        if layer >= len(load.buffers):
            self.wait_layer(load, layer - len(load.buffers))
            self._wait_for_buffer(load)
        with self._lock:
            self._loader.queue(load, layer, target, pages, partial(self._fill, load.places, load.turn))
        load.filled.append((load.plan, load.places))

    def drop_chunks(self, load: Load, kept: npt.NDArray[np.bool_]) -> None:
        load = _buffered(load)
        load.rows_of = load.rows_of[np.repeat(kept, load.plan.transfer.chunk_tokens)]
        super().drop_chunks(load, kept)
        load.places = _send_places(load.plan, load.rows_of)

    def wait_layer(self, load: Load, layer: int) -> None:
        load = _buffered(load)
        for arrived in range(load.num_flushed, layer + 1):
            super().wait_layer(load, arrived)
            self.flush(load, arrived)
        load.num_flushed = max(load.num_flushed, layer + 1)

    def get_kv(self, load: Load, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer that has been waited for, each (rows, heads, width) in the cache's dtype.

        They are the buffer itself, for the current stream: change them, then `flush`. With MLA, V is K.
        """
        load = _buffered(load)
        load.user = self.platform.current_stream(self.device)
        buffer = load.buffers[layer % len(load.buffers)]
        k = buffer.k[0].view(buffer.dtype)
        return k, k if buffer.v is None else buffer.v[0].view(buffer.dtype)

    def flush(self, load: Load, layer: int) -> None:
        """Write a layer that has been waited for from the buffer into its blocks, on the current stream."""
        load = _buffered(load)
        buffer = load.buffers[layer % len(load.buffers)]
        plan, places = load.filled[layer]
        if places is not None:
            work = partial(self._empty, self.layers[layer], buffer, plan, places)
            load.user = self.platform.current_stream(self.device)
            self.platform.launch(load.user, work)

    def leave_load(self, load: Load) -> None:
        # Layers that were not waited for are in the buffer only: nothing of them is on its way to blocks.
        load.not_waited_for = None
        super().leave_load(load)

    def end_load(self, load: Load) -> None:
        # The buffer's memory goes back to the allocator of the stream that fills it.
        self._wait_for_buffer(_buffered(load))
        super().end_load(load)

    def _fill(
        self,
        places: torch.Tensor | None,
        turn: Turn | None,
        target: PagedLayer,
        staging: torch.Tensor,
        part: Slice,
    ) -> None:
        assert places is not None, "a slice has rows, so there are places"
        place = places[part.first_row : part.last_row]
        rows = Rows(place, part.rows.k_rows, part.rows.v_rows)
        if turn is None:
            self.kernels.scatter(target, staging, rows)
        else:
            self.kernels.scatter_rotated(target, staging, rows, *turn.of(place), turn.interleaved)

    def _empty(self, layer: PagedLayer, buffer: PagedLayer, plan: Plan, places: torch.Tensor) -> None:
        for part in plan.slices(layer):
            place = places[part.first_row : part.last_row]
            rows = Rows(part.rows.slots, place, place + buffer.num_rows)
            self.kernels.scatter(layer, _memory(buffer), rows)

    def _wait_for_buffer(self, load: BufferedLoad) -> None:
        if load.user is not None:
            self.platform.wait_stream(self._load_lane.kernels, load.user)

    def _new_buffers(self, num_rows: int) -> list[PagedLayer]:
        layer = self.layers[0]
        shape = (layer.parts, 1, num_rows, layer.heads, layer.width)
        with self.platform.use_stream(self._load_lane.kernels):
            memory = [
                torch.empty(shape, dtype=layer.k.dtype, device=self.device) for _ in range(self.num_buffered)
            ]
        return [PagedLayer("buffer", layer.dtype, m[0], None if layer.v is None else m[1]) for m in memory]

    def _turn(self, plan: Plan, shift: Int64s, moved: npt.NDArray[np.bool_]) -> Turn | None:
        if self._rope is None:
            raise RequestError("keys are to move to other positions: call set_rope first")
        if len(shift) != len(moved):
            raise RequestError(f"shift has {len(shift)} entries, the transfer has {len(moved)} tokens")
        return Turn(self._rope, shift[moved], plan.uploads) if moved.any() else None


def _buffered(load: Load) -> BufferedLoad:
    if not isinstance(load, BufferedLoad):
        raise TypeError(f"{load!r} was not begun by a BufferConnector")
    return load


def _send_places(plan: Plan, rows_of: Int64s) -> torch.Tensor | None:
    places = rows_of[rows_of != NO_SLOT]
    return plan.uploads.send(torch.from_numpy(places)) if len(places) else None


def _shape(layer: PagedLayer) -> tuple[object, ...]:
    return layer.dtype, layer.parts, layer.heads, layer.width


def _memory(buffer: PagedLayer) -> torch.Tensor:
    """All bytes of a buffer layer, K rows and then V rows."""
    k = buffer.k
    return k.as_strided((buffer.parts * k.numel(),), (1,)).view(torch.uint8)
