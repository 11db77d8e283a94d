"""The Buffer connector: what blending needs, keys that turn and a buffer in which layers can be mended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lwkv.connectors.buffered_load import BufferedLoader
from lwkv.connectors.lane import Lane
from lwkv.connectors.paged import PagedConnector
from lwkv.connectors.rope import Rope
from lwkv.connectors.transfer_plan import Plans
from lwkv.connectors.turned_load import InPlaceLoader
from lwkv.errors import LayoutError
from lwkv.kernels import StagedLayers, Turn
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.telemetry.timeline import Timeline


class BufferConnector(PagedConnector):
    """A PagedConnector with two loaders, which share one lane.

    Attributes:
        loader: its loads stop over in a contiguous buffer of a few layers.
        in_place: its loads go straight to the engine's blocks: for whoever reads these anyway.
    """

    name = "buffer"
    loader: BufferedLoader
    in_place: InPlaceLoader
    _rope: Rope | None = None

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
            self._use_rope(rope)

    def stop(self) -> None:
        super().stop()
        del self.in_place

    def _check_layers(self, layers: Sequence[PagedLayer]) -> None:
        """Raise LayoutError for opaque blocks, and for layers of different shapes; choose the codec."""
        super()._check_layers(layers)
        first = layers[0]
        for layer in layers:
            if layer.tokens_per_row != 1 or _shape(layer) != _shape(first):
                raise LayoutError(
                    f"layer {layer.name!r} ({layer.page_format}, {_shape(layer)}) cannot be blended: that "
                    f"needs addressable tokens, and heads and dtype as in the first layer: {_shape(first)}"
                )

    def _new_loader(self, plans: Plans, lane: Lane, timeline: Timeline) -> BufferedLoader:
        lookahead = self._config.lookahead_layers
        self.in_place = InPlaceLoader(plans, lane, timeline, lookahead)
        return BufferedLoader(plans, lane, timeline, lookahead, self.kernels)

    def _compile(self, plans: Plans) -> None:
        super()._compile(plans)
        lane, (buffer, *_) = self.loader.lane, self.loader.new_buffers(1)
        scatter = partial(self.kernels.scatter, buffer, lane.buffers[0].memory, self._no_rows())
        self.platform.launch(lane.kernels, scatter)
        if self._rope is not None:
            self._use_rope(self._rope)

    def _use_rope(self, rope: Rope) -> None:
        """Have both loaders turn keys by it, with the kernel compiled."""
        self.loader.rope = self.in_place.rope = rope
        lane, (buffer, *_), rows = self.loader.lane, self.loader.new_buffers(1), self._no_rows()
        table = torch.zeros(1, len(rope.frequencies), device=self.device)
        turn = Turn(table, table, rows.slots, rope.interleaved)
        for target in (buffer, *self.layers):
            staged = StagedLayers([target], lane.buffers[0].memory, 0, rows, turn)
            self.platform.launch(lane.kernels, partial(self.kernels.move_layers, True, staged))


def _shape(layer: PagedLayer) -> tuple[object, ...]:
    return layer.dtype, layer.parts, layer.heads, layer.width
