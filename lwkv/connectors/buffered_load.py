"""Loads that stop over in a buffer of a few layers, where what blends can read and mend them.

lwkv's own blender reads the engine's blocks instead, and loads in place (`lwkv.connectors.turned_load`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from lwkv.connectors.lane import Lane
from lwkv.connectors.transfer_plan import Plans, Slice, TransferPlan
from lwkv.connectors.turned_load import TurnedLoad, TurningLoader, rows_of
from lwkv.kernels import Kernels, Rows
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Stream
from lwkv.platforms.protocol import Int64s
from lwkv.telemetry.timeline import Timeline
from lwkv.transfer import NO_SLOT, Transfer

# K fills a multiple of 16 bytes then: V is aligned as K is, and kernels are the same for any number of rows.
ROWS_TOGETHER = 16


@dataclass(slots=True, eq=False)
class BufferedLoad(TurnedLoad):
    """A load into the buffer. Layer i is in `buffers[i % len(buffers)]`.

    Attributes:
        buffers: as `new_buffer` makes them; row r is that of the token whose number in `rows_of` it is.
        num_rows: tokens that are moved.
        places: the buffer rows of the tokens that are left, int64 (rows,), on the device.
        filled: for each layer in the buffer, the plan and the places it was queued with: they are on the
            device by the time the layer is, whatever has been dropped since.
        num_flushed: layers that have been waited for and flushed.
        user: the stream that was last given the buffer to work on, or flushed it.
    """

    buffers: Sequence[PagedLayer] = ()
    num_rows: int = 0
    places: torch.Tensor | None = None
    filled: list[tuple[TransferPlan, torch.Tensor | None]] = field(default_factory=list)
    num_flushed: int = 0
    user: Stream = None

    def buffer(self, layer: int) -> PagedLayer:
        """Where `layer` is, or will be."""
        return self.buffers[layer % len(self.buffers)]

    def send_tables(self) -> None:
        rows = self.rows_left()
        self.places = self.plan.uploads.send(rows) if len(rows) else None
        # By its name: a dataclass with slots is made anew, and super() looks for the one before.
        TurnedLoad.send_tables(self)

    def arrival(self, piece: Slice) -> Rows:
        if self.places is None:
            return piece.rows
        return Rows(self.places[piece.first_row : piece.last_row], piece.rows.k_rows, piece.rows.v_rows)


class BufferedLoader(TurningLoader[BufferedLoad]):
    """Loads into a contiguous buffer, and from there into the engine's blocks.

    A layer that has been waited for is in the blocks, and in the buffer as well until the layer
    `num_buffered` after it is queued: `get_kv` gives it out, `flush` writes it to the blocks again.
    """

    def __init__(
        self, plans: Plans, lane: Lane, timeline: Timeline, lookahead_layers: int, kernels: Kernels
    ) -> None:
        super().__init__(plans, lane, timeline, lookahead_layers)
        self._kernels = kernels

    @property
    def num_buffered(self) -> int:
        """Layers in the buffer: those queued ahead, the one in use and the one arriving."""
        return self._lookahead_layers + 2

    def begin_load(
        self, transfer: Transfer, pages: Int64s | None = None, shift: Int64s | None = None
    ) -> BufferedLoad:
        """As Loader's; `shift`, int64 (tokens,), is each token's new position less its stored one.

        Raises:
            RequestError: `shift` without a rope, or of another length than the transfer's slots.
        """
        plan = self._plans.make(transfer, self.lane.kernels, pages)
        num_rows = int((transfer.slots != NO_SLOT).sum())
        load = BufferedLoad(
            self.lane,
            plan,
            [None] * self._num_layers,
            rows_of=rows_of(transfer),
            turning=self._turning(plan, shift),
            buffers=self.new_buffers(num_rows),
            num_rows=num_rows,
        )
        load.send_tables()
        if pages is not None:
            self._fill_ahead(load, pages)
        return load

    def layers_ahead(self, load: BufferedLoad, layer: int, known: bool) -> int:
        # In the buffer is room for few: what is queued early makes the model wait for the layers before it.
        return super().layers_ahead(load, layer, False)

    def load_layer(self, load: BufferedLoad, layer: int, pages: Int64s) -> None:
        if layer >= len(load.buffers):
            self.wait_layer(load, layer - len(load.buffers))
            self._wait_for_buffer(load)
        super().load_layer(load, layer, pages)
        load.filled.append((load.plan, load.places))

    def wait_layer(self, load: BufferedLoad, layer: int, stream: Stream = None) -> None:
        for arrived in range(load.num_flushed, layer + 1):
            super().wait_layer(load, arrived, stream)
            self.flush(load, arrived)
        load.num_flushed = max(load.num_flushed, layer + 1)

    def get_kv(self, load: BufferedLoad, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer that has been waited for, each (rows, heads, width) in the cache's dtype.

        They are the buffer itself, for the current stream: change them, then `flush`. With MLA, V is K.

        Raises:
            TypeError: a load that another loader has begun: it passes by the buffer.
        """
        if not isinstance(load, BufferedLoad):
            raise TypeError(f"{load!r} was not begun by a BufferedLoader: it passes by the buffer")
        load.user = self._platform.current_stream(self._device)
        buffer = load.buffer(layer)
        k, v = buffer.k, buffer.k if buffer.v is None else buffer.v
        return k[: load.num_rows, 0].view(buffer.dtype), v[: load.num_rows, 0].view(buffer.dtype)

    def flush(self, load: BufferedLoad, layer: int) -> None:
        """Write a layer that has been waited for from the buffer into its blocks, on the current stream."""
        buffer = load.buffer(layer)
        plan, places = load.filled[layer]
        if places is not None:
            work = partial(self._empty, self._layers[layer], buffer, plan, places)
            load.user = self._platform.current_stream(self._device)
            self._platform.launch(load.user, work)

    def leave_load(self, load: BufferedLoad) -> None:
        # What was not waited for is in the buffer only: nothing of it is on its way to blocks.
        load.not_waited_for = None
        super().leave_load(load)

    def end_load(self, load: BufferedLoad) -> None:
        # The buffer's memory goes back to the allocator of the stream that fills it.
        self._wait_for_buffer(load)
        super().end_load(load)

    def new_buffers(self, num_rows: int) -> list[PagedLayer]:
        """Memory for `num_buffered` layers of so many rows, on the stream that fills it."""
        with self._platform.use_stream(self.lane.kernels):
            return [_new_buffer(self._layers[0], num_rows) for _ in range(self.num_buffered)]

    def _layers_from(self, load: BufferedLoad, layer: int) -> range:
        return range(layer, layer + 1)

    def _targets(self, load: BufferedLoad, layers: range) -> Sequence[PagedLayer]:
        return [load.buffer(layers.start)]

    def _empty(self, layer: PagedLayer, buffer: PagedLayer, plan: TransferPlan, places: torch.Tensor) -> None:
        for piece in plan.slices(layer):
            if piece.first_row < piece.last_row:
                place = places[piece.first_row : piece.last_row]
                rows = Rows(piece.rows.slots, place, place + buffer.num_rows)
                self._kernels.scatter(layer, memory_of(buffer), rows)

    def _wait_for_buffer(self, load: BufferedLoad) -> None:
        if load.user is not None:
            self._platform.wait_stream(load.lane.kernels, load.user)


@torch.inference_mode(False)
def _new_buffer(like: PagedLayer, num_rows: int) -> PagedLayer:
    """Allocate a layer's rows on the current stream, in the form of a paged cache with blocks of one row.

    [rows, 1, heads, width] in K and V, `num_rows` rows or a few more.
    """
    rows = -(-num_rows // ROWS_TOGETHER) * ROWS_TOGETHER
    shape = (like.parts, rows, 1, like.heads, like.width)
    memory = torch.empty(shape, dtype=like.k.dtype, device=like.device)
    return PagedLayer("buffer", like.dtype, memory[0], None if like.v is None else memory[1])


def memory_of(buffer: PagedLayer) -> torch.Tensor:
    """All bytes of a buffer, uint8 (bytes,): its K rows and then its V rows."""
    k = buffer.k
    return k.as_strided((buffer.parts * k.numel(),), (1,)).view(torch.uint8)
