"""Loads straight into the engine's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lwkv.connectors.loader import Load, Loader
from lwkv.connectors.transfer_plan import Slice
from lwkv.kernels import StagedLayers
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Int64s
from lwkv.transfer import Transfer


class PagedLoader(Loader[Load]):
    """Loads straight into the engine's blocks, as stored."""

    def begin_load(self, transfer: Transfer, pages: Int64s | None = None) -> Load:
        load = Load(
            self.lane, self._plans.make(transfer, self.lane.kernels, pages), [None] * self._num_layers
        )
        if pages is not None:
            self._fill_ahead(load, pages)
        return load

    def load_layers(self, load: Load, layers: range, pages: Int64s) -> None:
        if load.prefilled and layers:
            self.load_layer(load, layers.start, pages[layers.start])
            layers = layers[1:]
        if self._is_plain(load):
            self._load_plain(load, layers)
        else:
            super().load_layers(load, layers, pages)

    def _is_plain(self, load: Load) -> bool:
        """Whether each staging buffer takes a copy and a kernel, and the order of one stream is enough."""
        is_ready = load.is_ordered and not load.prefilled and not self._timeline.is_on
        return is_ready and load.lane.one_stream and load.plan.is_plain

    def _load_plain(self, load: Load, layers: range) -> None:
        """As `load_layer`, a dozen calls fewer for a buffer: whoever launches the model waits for these."""
        lane, plan = load.lane, load.plan
        copies, rows = plan.all_copies(self._layers[0]), plan.slices(self._layers[0])[0].rows
        memory, move = lane.buffers[0].memory, lane.mover()
        for layer in layers:
            # One that came with a layer before is on its way.
            if load.arrived[layer] is None:
                those = self._layers_from(load, layer)
                batch = copies.batch(those.start, those.stop)
                self._platform.load_batch(memory, batch, lane.copies)
                targets = self._layers[those.start : those.stop]
                move(StagedLayers(targets, memory, plan.layer_bytes, rows))
                self._mark_arrived(load, those)

    def _unload_coded(
        self,
        load: Load,
        layers: range,
        targets: Sequence[PagedLayer],
        staging: torch.Tensor,
        number: int,
        piece: Slice,
        pages: Int64s,
    ) -> None:
        plan, coder = load.plan, self._plans.paged_coder
        if coder is None or not plan.is_whole or plan.has_spill(layers, number, pages):
            super()._unload_coded(load, layers, targets, staging, number, piece, pages)
        else:
            work = partial(coder.decode, targets, piece.rows.slots, staging, plan.num_pages(number))
            load.lane.code_in_cache(coder, work)
