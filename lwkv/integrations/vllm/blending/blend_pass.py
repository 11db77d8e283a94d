"""One prompt blended with vLLM's layers: chosen rows are computed while segments are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import Layout
from lwkv.blend.selector import ByChange, top
from lwkv.integrations.vllm.blending.calls import Call, Layers, States
from lwkv.integrations.vllm.blending.runs import closed
from lwkv.kernels import Rows as CacheRows

MOST_GAP = 1
"""Rows between two chosen ones that are computed with them: attention reads the keys anew for each run."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of a pass.

    Attributes:
        num_chosen: reused tokens that were computed in the last layer.
        row_layers: rows computed, summed over the layers.
    """

    num_chosen: int
    row_layers: int


class BlendPass:
    """Computes one prompt up to its last token but for the reused tokens that are not chosen; for one use.

    A layer of the model cannot be cut in two, so what is chosen at a check layer counts from the next layer
    on: that one is computed for one layer more than in lwkv's own blender.

    Args:
        layout: what is known of the prompt, and reused.
        selector: chooses by what has changed at its check layers.
        share: of the reused tokens, the part to compute again in the last layers.
    """

    def __init__(
        self, layers: Layers, cache: PagedRows, layout: Layout, selector: ByChange, share: float
    ) -> None:
        self._layers, self._cache, self._layout = layers, cache, layout
        self._selector, self._share = selector, share
        self._reused = len(layout.candidates)
        self._always = layout.always
        first = layout.candidates if share > 0 else np.zeros(0, np.int64)
        self._positions = layout.with_always(first)

    @torch.inference_mode()
    def run(self, wait: Callable[[int], None]) -> Computed:
        """Queue all of it on the current stream; the chosen rows are read back at each check layer.

        Args:
            wait: returns when work queued from now on finds a layer's loads in the cache; called for every
                layer, in order.
        """
        row_layers = 0
        calls, states = self._begin()
        for layer in range(self._layers.num_layers):
            wait(layer)
            if not len(self._positions):
                continue
            share = self._share_at(layer)
            old = None if share is None else self._cache.read(layer, self._rows())
            states = self._layers.run(layer, calls, states)
            row_layers += len(self._positions)
            if share is not None and old is not None:
                calls, states = self._choose(layer, old, share, states)
        return Computed(len(self._positions) - len(self._always), row_layers)

    def _begin(self) -> tuple[list[Call], States]:
        prompt = self._layout.prompt
        if not len(self._positions):
            return [], States(torch.zeros(0), None)
        states = self._layers.embed(prompt.ids[self._positions])
        return self._layers.calls(self._positions, prompt.slots), states

    def _rows(self) -> CacheRows:
        return self._cache.at(self._cache.send(self._layout.prompt.slots[self._positions]))

    def _share_at(self, layer: int) -> float | None:
        """The share of the reused tokens that goes on behind a check layer; None where all rows do."""
        selector = self._selector
        if not self._reused or self._share <= 0 or layer not in selector.layers:
            return None
        if layer == self._layers.num_layers - 1:
            return None
        mine, last = selector.shares[selector.layers.index(layer)], selector.shares[-1]
        share = mine * self._share / last if last else self._share
        return share if share < 1 else None

    def _choose(
        self, layer: int, old: tuple[Tensor, Tensor], share: float, states: States
    ) -> tuple[list[Call], States]:
        """Go on with the rows that are always computed, and those that have changed most."""
        scores = self._selector.score(*self._cache.read(layer, self._rows()), *old)
        always = np.isin(self._positions, self._always)
        on_device = self._cache.send(always.astype(np.int64)).bool()
        budget = min(max(round(self._reused * share), 1), self._reused)
        if self._selector.threshold is not None:
            budget = min(budget, int(((scores >= self._selector.threshold) & ~on_device).sum()))
        kept = top(scores, on_device, min(len(self._always) + budget, len(always))).cpu().numpy()
        kept = closed(kept, self._positions, MOST_GAP)
        self._positions = self._positions[kept]
        numbers = self._cache.send(kept)
        residual = None if states.residual is None else states.residual[numbers]
        states = States(states.hidden[numbers], residual)
        return self._layers.calls(self._positions, self._layout.prompt.slots), states
