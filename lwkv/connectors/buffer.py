"""The Buffer connector: pages go to a buffer first, where blending reads and mends them before a flush."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.buffered_load import BufferedLoad, Stopover, as_buffered, send_places
from lwkv.connectors.buffers import memory_of, new_buffer
from lwkv.connectors.loader import Load
from lwkv.connectors.paged import PagedConnector
from lwkv.connectors.plan import Plan, Slice
from lwkv.connectors.rope import Rope, Turn
from lwkv.errors import LayoutError, RequestError
from lwkv.paged_layer import PagedLayer
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
        # In the buffer is room for few: what is queued early makes the model wait for the layers before it.
        return super().layers_ahead(load, layer, known and as_buffered(load).in_place)

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
    ) -> BufferedLoad:
        """Start loads; `shift`, int64 (tokens,), is each token's new position less its stored one.

        Args:
            in_place: pass by the buffer: keys turn on their way into the engine's blocks, and `get_kv` has
                nothing to give. For whoever reads the blocks anyway.

        Raises:
            RequestError: `shift` without `set_rope`, or of another length than the transfer's slots.
        """
        load = super().begin_load(transfer, pages)
        moved = transfer.slots != NO_SLOT
        rows_of = np.where(moved, np.cumsum(moved) - 1, NO_SLOT)
        num_rows = int(moved.sum())
        turn = None if shift is None else self._turn(load.plan, shift, moved)
        places = send_places(load.plan, rows_of)
        return BufferedLoad(
            load.lane,
            load.plan,
            load.arrived,
            load.fetched,
            recordings=load.recordings,
            stream=load.stream,
            in_place=in_place,
            buffers=self.layers if in_place else self._new_buffers(num_rows),
            num_rows=num_rows,
            rows_of=rows_of,
            places=places,
            turn=turn,
        )

    def load_layer(self, load: Load, layer: int, pages: Int64s) -> None:
        load = as_buffered(load)
        target = load.buffer(layer)
        if layer >= len(load.buffers):
            self.wait_layer(load, layer - len(load.buffers))
            self._wait_for_buffer(load)
        self._queue_load(load, range(layer, layer + 1), [target], pages)
        load.filled.append((load.plan, load.places))

    def drop_chunks(self, load: Load, kept: npt.NDArray[np.bool_]) -> None:
        load = as_buffered(load)
        load.rows_of = load.rows_of[np.repeat(kept, load.plan.transfer.chunk_tokens)]
        super().drop_chunks(load, kept)
        load.places = send_places(load.plan, load.rows_of)

    def wait_layer(self, load: Load, layer: int) -> None:
        load = as_buffered(load)
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
            work = partial(self._empty, load, self.layers[layer], buffer, plan)
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
        lane, (buffer, *_) = self._load_lane, self._new_buffers(1)
        table = torch.zeros(1, len(rope.frequencies), device=self.device)[:0]
        for target in (buffer, *self.layers):
            turn = partial(self.kernels.scatter_rotated, target, lane.buffers[0].memory, self._no_rows())
            self.platform.launch(lane.kernels, partial(turn, table, table, rope.interleaved))

    def _together(self, load: Load, layer: int) -> range:
        return range(layer, layer + 1)  # one kernel turns the keys of one layer

    def _write(self, load: Load, targets: Sequence[PagedLayer], staging: torch.Tensor, part: Slice) -> None:
        load, (target,) = as_buffered(load), targets
        assert load.places is not None, "a slice has rows, so there are places"
        fill = partial(self._fill, load, load.places, target, staging, part)
        self.platform.launch(load.lane.kernels, fill)

    def _fill(
        self, load: BufferedLoad, places: torch.Tensor, target: PagedLayer, staging: torch.Tensor, part: Slice
    ) -> None:
        stopover = load.stopovers.get(id(part))
        if stopover is None:
            # Made on the stream that fills: whoever empties has waited for what it filled.
            stopover = load.stopovers[id(part)] = Stopover.of(part, places, load)
        if stopover.angles is None or load.turn is None:
            self.kernels.scatter(target, staging, stopover.fill)
        else:
            interleaved = load.turn.interleaved
            self.kernels.scatter_rotated(target, staging, stopover.fill, *stopover.angles, interleaved)

    def _empty(self, load: BufferedLoad, layer: PagedLayer, buffer: PagedLayer, plan: Plan) -> None:
        for part in plan.slices(layer):
            if part.first_row < part.last_row:
                self.kernels.scatter(layer, memory_of(buffer), load.stopovers[id(part)].empty)

    def _wait_for_buffer(self, load: BufferedLoad) -> None:
        if load.user is not None:
            self.platform.wait_stream(load.lane.kernels, load.user)

    def _new_buffers(self, num_rows: int) -> list[PagedLayer]:
        with self.platform.use_stream(self._load_lane.kernels):
            return [new_buffer(self.layers[0], num_rows) for _ in range(self.num_buffered)]

    def _turn(self, plan: Plan, shift: Int64s, moved: npt.NDArray[np.bool_]) -> Turn | None:
        if self._rope is None:
            raise RequestError("keys are to move to other positions: call set_rope first")
        if len(shift) != len(moved):
            raise RequestError(f"shift has {len(shift)} entries, the transfer has {len(moved)} tokens")
        return Turn(self._rope, shift[moved], plan.uploads) if moved.any() else None


def _shape(layer: PagedLayer) -> tuple[object, ...]:
    return layer.dtype, layer.parts, layer.heads, layer.width
