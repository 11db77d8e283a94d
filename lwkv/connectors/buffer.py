"""The Buffer connector: pages go to a buffer first, where blending reads and mends them before a flush."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.buffered_load import BufferedLoad, as_buffered
from lwkv.connectors.buffers import memory_of, new_buffer
from lwkv.connectors.loader import Load
from lwkv.connectors.paged import PagedConnector
from lwkv.connectors.rope import Rope, Turning
from lwkv.connectors.transfer_plan import Plan, Slice
from lwkv.errors import LayoutError, RequestError
from lwkv.kernels import Rows, StagedLayers, Turn
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Event
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import NO_SLOT, Transfer


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

    def layers_ahead(self, load: Load, layer: int, known: bool) -> int:
        load = as_buffered(load)
        # In the buffer is room for few: what is queued early makes the model wait for the layers before it.
        # Where the model computes ahead, it is not kept waiting by what is queued meanwhile.
        return super().layers_ahead(load, layer + load.model_is_ahead, known and load.in_place)

    def _check_layers(self, layers: Sequence[PagedLayer]) -> None:
        """Raise LayoutError for opaque blocks, and for layers of different shapes."""
        first = layers[0]
        for layer in layers:
            if layer.tokens_per_row != 1 or _shape(layer) != _shape(first):
                raise LayoutError(
                    f"layer {layer.name!r} ({layer.page_format}, {_shape(layer)}) cannot be blended: that "
                    f"needs addressable tokens, and heads and dtype as in the first layer: {_shape(first)}"
                )

    def set_rope(self, rope: Rope) -> None:
        """Say how the model turns its keys; needed before a load that moves keys to other positions.

        For after `register`. After `start` it compiles the kernel that turns keys, for about a second.

        Raises:
            LayoutError: caches whose keys cannot be turned: MLA, where what is turned is not at the front of
                the row; a dtype that is no float; heads of fewer elements than the rope turns.
        """
        rope.check(self.layers[0])
        self._rope = rope
        if self._running:
            self._compile_turn(rope)

    def begin_load(
        self,
        transfer: Transfer,
        pages: Int64s | None = None,
        shift: Int64s | None = None,
        in_place: bool = False,
        behind: Event | None = None,
    ) -> BufferedLoad:
        """Start loads; `shift`, int64 (tokens,), is each token's new position less its stored one.

        Args:
            in_place: pass by the buffer: keys turn on their way into the engine's blocks, and `get_kv` has
                nothing to give. For whoever reads the blocks anyway.
            behind: what the load writes comes behind this event, recorded by now, and not behind what the
                current stream holds when the first layer is queued. For a model that computes ahead.

        Raises:
            RequestError: `shift` without `set_rope`, or of another length than the transfer's slots.
        """
        lane, moved = self._load_lane, transfer.slots != NO_SLOT
        num_rows, plan = int(moved.sum()), self._plan(transfer, lane, pages)
        load = BufferedLoad(
            lane,
            plan,
            [None] * self.num_layers,
            in_place=in_place,
            buffers=() if in_place else self._new_buffers(num_rows),
            num_rows=num_rows,
            rows_of=np.where(moved, np.cumsum(moved) - 1, NO_SLOT),
            turning=None if shift is None else self._turning(plan, shift, moved),
        )
        load.send_tables()
        if pages is not None:
            self._fetch_first(load, pages)
        if behind is not None:
            load.is_ordered = load.model_is_ahead = True
            self._wait_behind(load, behind)
        return load

    def load_layer(self, load: Load, layer: int, pages: Int64s) -> None:
        load = as_buffered(load)
        if load.in_place:
            super().load_layer(load, layer, pages)
            return
        if layer >= len(load.buffers):
            self.wait_layer(load, layer - len(load.buffers))
            self._wait_for_buffer(load)
        self._queue_load(load, range(layer, layer + 1), [load.buffer(layer)], pages)
        load.filled.append((load.plan, load.places))

    def drop_chunks(self, load: Load, kept: npt.NDArray[np.bool_]) -> None:
        load = as_buffered(load)
        load.rows_of = load.rows_of[np.repeat(kept, load.plan.transfer.chunk_tokens)]
        super().drop_chunks(load, kept)
        load.send_tables()

    def wait_layer(self, load: Load, layer: int) -> None:
        load = as_buffered(load)
        if load.in_place:
            super().wait_layer(load, layer)
            return
        for arrived in range(load.num_flushed, layer + 1):
            super().wait_layer(load, arrived)
            self.flush(load, arrived)
        load.num_flushed = max(load.num_flushed, layer + 1)

    def get_kv(self, load: Load, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer that has been waited for, each (rows, heads, width) in the cache's dtype.

        They are the buffer itself, for the current stream: change them, then `flush`. With MLA, V is K.

        Raises:
            RequestError: the load is `in_place`.
        """
        load = as_buffered(load)
        if load.in_place:
            raise RequestError("this load passes by the buffer: begin it without in_place")
        load.user = self.platform.current_stream(self.device)
        buffer = load.buffer(layer)
        k, v = buffer.k, buffer.k if buffer.v is None else buffer.v
        return k[: load.num_rows, 0].view(buffer.dtype), v[: load.num_rows, 0].view(buffer.dtype)

    def flush(self, load: Load, layer: int) -> None:
        """Write a layer that has been waited for from the buffer into its blocks, on the current stream."""
        load = as_buffered(load)
        if load.in_place:
            return
        buffer = load.buffer(layer)
        plan, places = load.filled[layer]
        if places is not None:
            work = partial(self._empty, self.layers[layer], buffer, plan, places)
            load.user = self.platform.current_stream(self.device)
            self.platform.launch(load.user, work)

    def leave_load(self, load: Load) -> None:
        if not as_buffered(load).in_place:
            # What was not waited for is in the buffer only: nothing of it is on its way to blocks.
            load.not_waited_for = None
        super().leave_load(load)

    def end_load(self, load: Load) -> None:
        # The buffer's memory goes back to the allocator of the stream that fills it.
        self._wait_for_buffer(as_buffered(load))
        super().end_load(load)

    def _compile(self) -> None:
        super()._compile()
        lane, (buffer, *_) = self._load_lane, self._new_buffers(1)
        scatter = partial(self.kernels.scatter, buffer, lane.buffers[0].memory, self._no_rows())
        self.platform.launch(lane.kernels, scatter)
        if self._rope is not None:
            self._compile_turn(self._rope)

    def _compile_turn(self, rope: Rope) -> None:
        lane, (buffer, *_), rows = self._load_lane, self._new_buffers(1), self._no_rows()
        table = torch.zeros(1, len(rope.frequencies), device=self.device)
        turn = Turn(table, table, rows.slots, rope.interleaved)
        for target in (buffer, *self.layers):
            sharing = StagedLayers([target], lane.buffers[0].memory, 0, rows, turn)
            self.platform.launch(lane.kernels, partial(self.kernels.move_layers, True, sharing))

    def _together(self, load: Load, layer: int) -> range:
        return super()._together(load, layer) if as_buffered(load).in_place else range(layer, layer + 1)

    def _write(self, load: Load, targets: Sequence[PagedLayer], staging: torch.Tensor, part: Slice) -> None:
        load = as_buffered(load)
        sharing = load.plan.sharing(targets, staging, load.arrival(part))
        load.lane.move(sharing._replace(turn=load.turn_of(part)))

    def _empty(self, layer: PagedLayer, buffer: PagedLayer, plan: Plan, places: torch.Tensor) -> None:
        for part in plan.slices(layer):
            if part.first_row < part.last_row:
                place = places[part.first_row : part.last_row]
                rows = Rows(part.rows.slots, place, place + buffer.num_rows)
                self.kernels.scatter(layer, memory_of(buffer), rows)

    def _wait_behind(self, load: BufferedLoad, behind: Event) -> None:
        self.platform.wait_event(load.lane.kernels, behind)

    def _wait_for_buffer(self, load: BufferedLoad) -> None:
        if load.user is not None:
            self.platform.wait_stream(load.lane.kernels, load.user)

    def _new_buffers(self, num_rows: int) -> list[PagedLayer]:
        with self.platform.use_stream(self._load_lane.kernels):
            return [new_buffer(self.layers[0], num_rows) for _ in range(self.num_buffered)]

    def _turning(self, plan: Plan, shift: Int64s, moved: npt.NDArray[np.bool_]) -> Turning | None:
        if self._rope is None:
            raise RequestError("keys are to move to other positions: call set_rope first")
        if len(shift) != len(moved):
            raise RequestError(f"shift has {len(shift)} entries, the transfer has {len(moved)} tokens")
        return Turning(self._rope, shift[moved], plan.uploads) if moved.any() else None


def _shape(layer: PagedLayer) -> tuple[object, ...]:
    return layer.dtype, layer.parts, layer.heads, layer.width
