"""Loads straight into the engine's blocks."""

from __future__ import annotations

from lwkv.codecs.page_codec import PagedCoder
from lwkv.connectors.loader import Load, Loader
from lwkv.kernels import StagedLayers
from lwkv.platforms import Int64s
from lwkv.transfer import Transfer


class PagedLoader(Loader[Load]):
    """Loads straight into the engine's blocks, as stored."""

    def begin_load(self, transfer: Transfer, pages: Int64s | None = None) -> Load:
        load = Load(
            self.lane, self._plans.make(transfer, self.lane.kernels, pages), [None] * self._num_layers
        )
        load.is_plain = self.lane.one_stream and load.plan.is_plain and not self._timeline.is_on
        if pages is not None and not load.is_plain:
            self._fill_ahead(load, pages)
        return load

    def load_layers(self, load: Load, layers: range, pages: Int64s) -> None:
        if load.prefilled and layers:
            self.load_layer(load, layers.start, pages[layers.start])
            layers = layers[1:]
        if load.is_plain:
            self._load_plain(load, layers)
        else:
            super().load_layers(load, layers, pages)

    def _load_plain(self, load: Load, layers: range) -> None:
        """As `load_layer`, a dozen calls fewer for a buffer: whoever launches the model waits for these.

        The order of one stream is enough between copies and kernels.
        """
        lane, plan = load.lane, load.plan
        copies, rows = plan.all_copies(self._layers[0]), plan.slices(self._layers[0])[0].rows
        memory, move, cut = lane.buffers[0].memory, lane.mover(), self._cut(load)
        # Another load may have filled it ahead: what it has brought is gone.
        lane.buffers[0].holds = None
        for layer in layers:
            # One that came with a layer before is on its way.
            if load.arrived[layer] is None:
                those = cut[layer]
                batch = copies.batch(those.start, those.stop)
                self._platform.load_batch(memory, batch, lane.copies)
                if not load.is_ordered:
                    load.stream = self._platform.current_stream(self._device)
                    self._order(load)
                targets = self._layers[those.start : those.stop]
                move(StagedLayers(targets, memory, plan.layer_bytes, rows))
                self._mark_arrived(load, those)

    def _coder_in_cache(self, load: Load, layers: range, number: int, pages: Int64s) -> PagedCoder | None:
        plan, coder = load.plan, self._plans.paged_coder
        return None if coder is None or not plan.is_whole or plan.has_spill(layers, number, pages) else coder
