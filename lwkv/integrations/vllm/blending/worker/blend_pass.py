"""One prompt blended with vLLM's layers: chosen rows are computed while segments are loaded."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.selector import AtStart, ByAttention, ByChange, Selector, top
from lwkv.integrations.vllm.blending.model.calls import Call, Layers, States
from lwkv.integrations.vllm.blending.model.runs import closed
from lwkv.integrations.vllm.blending.worker.question import Question, ask, asking_rows
from lwkv.kernels import Rows as CacheRows
from lwkv.platforms.protocol import Int64s

T = TypeVar("T")

Wait = Callable[[int], None]
IsComing = Callable[[int], bool]

LAYER_ROWS = 800
"""Rows that the device computes in a layer while the host launches it: few rows take as long as these.

On an H200 with Llama-8B's shape, 0.7 ms a layer and 0.8 us a row.
"""

ASKING_LAYERS = 2
"""Layers that one takes as long as which is computed for a question: what it looks at is computed, too."""

# The part of the whole that was done; None where what comes next waits for the device.
Parts: TypeAlias = "Generator[float | None, None, T]"

# The rows that were computed in a layer; None as above.
LayerRows: TypeAlias = "Generator[int | None, None, T]"


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

    At a check layer K and V of all rows are computed and written; the rest of the layer is computed for those
    that are chosen.

    Args:
        reuse: what is known of the prompt, and reused.
        selector: chooses which of the reused tokens are computed.
        share: of the reused tokens, the part to compute again in the last layers.
        question: what asks; for selectors by attention.
        total: gives scores of rows, float32 (rows,), summed over all ranks that have some of the heads.
    """

    def __init__(
        self,
        layers: Layers,
        cache: PagedRows,
        reuse: PromptReuse,
        selector: Selector,
        share: float,
        question: Question | None = None,
        total: Callable[[Tensor], Tensor] = lambda scores: scores,
    ) -> None:
        self._layers, self._cache, self._reuse = layers, cache, reuse
        self._selector, self._share, self._total = selector, share, total
        self._reused = len(reuse.candidates)
        self._always = reuse.always
        chooses = self._reused > 0 and share > 0
        self._checks = selector if chooses and isinstance(selector, ByChange) else None
        self._positions = reuse.with_always(reuse.candidates if chooses else np.zeros(0, np.int64))
        self._row_layers = 0
        self._asking: tuple[Question, ByAttention] | None = None
        if chooses and share < 1 and isinstance(selector, ByAttention):
            assert question is not None, "a selector by attention needs one"
            self._asking = question, selector

    @torch.inference_mode()
    def parts(self, wait: Wait, is_coming: IsComing = lambda _: False) -> Parts[Computed]:
        """Queue all of it on the current stream; the rows are read back wherever some are chosen by scores.

        It stops between two layers, and gives the part of the whole that the first one was, about. That
        depends on numbers of rows only, so that all ranks stop alike. Where it would wait, it gives None.

        Args:
            wait: returns when work queued from now on finds a layer's loads in the cache; called for every
                layer, in order, and before that for some of them where a question asks.
            is_coming: whether work queued now would be kept waiting by a layer's loads.
        """
        whole, paid = self._planned_rows(), None
        if self._asking is not None:
            asking = ask(self._layers, self._cache, self._reuse, *self._asking, wait, is_coming)
            paid = yield from self._counted(asking, whole, ASKING_LAYERS)
        yield from self._choose_first(paid)
        last = yield from self._counted(self._compute(wait, is_coming), whole)
        self._row_layers += last
        return Computed(len(self._positions) - len(self._always), self._row_layers)

    def _counted(self, layers: LayerRows[T], whole: int, as_layers: int = 1) -> Parts[T]:
        """Run layers that give their rows, and give the part of `whole` that each was."""
        with closing(layers):
            while True:
                try:
                    rows = next(layers)
                except StopIteration as end:
                    result: T = end.value
                    return result
                if rows is not None:
                    self._row_layers += rows
                yield None if rows is None else (rows + as_layers * LAYER_ROWS) / whole

    def _planned_rows(self) -> int:
        """The rows of all layers, about, and LAYER_ROWS for each."""
        share, rows = 1.0 if self._checks is not None else self._share, []
        for layer in range(self._layers.num_layers):
            at = self._share_at(layer)
            share = share if at is None else at
            rows.append(len(self._always) + round(self._reused * share))
        if self._asking is not None:
            question, selector = self._asking
            more = (ASKING_LAYERS - 1) * LAYER_ROWS
            rows += [len(asking_rows(self._reuse, question)) + more] * (selector.layer + 1)
        return sum(rows) + LAYER_ROWS * len(rows)

    def _compute(self, wait: Wait, is_coming: IsComing) -> LayerRows[int]:
        """Gives the rows of every layer but the last one, which are returned."""
        calls, states = self._begin()
        for layer in range(self._layers.num_layers):
            if is_coming(layer):
                yield None
            wait(layer)
            share = self._share_at(layer) if len(self._positions) else None
            if share is not None:
                calls, states = yield from self._choose(layer, share, calls, states)
            if len(self._positions):
                states = self._layers.run(layer, calls, states)
            if layer < self._layers.num_layers - 1:
                yield len(self._positions)
        return len(self._positions)

    def _choose_first(self, paid: Tensor | None) -> Parts[None]:
        """Leave out what a selector knows before the first layer.

        Args:
            paid: what a question looks at, float32 (tokens,); None where none was asked.
        """
        if paid is not None:
            mine = paid[self._cache.send(self._positions)]
            self._keep((yield from self._best(mine, self._budget(self._share))))
        elif self._reused and 0 < self._share < 1 and isinstance(self._selector, AtStart):
            chosen = self._selector.choose(self._reuse, self._budget(self._share))
            self._keep(np.flatnonzero(np.isin(self._positions, self._reuse.with_always(chosen))))

    def _begin(self) -> tuple[list[Call], States]:
        prompt = self._reuse.prompt
        if not len(self._positions):
            return [], States(torch.zeros(0), None)
        states = self._layers.embed(prompt.ids[self._positions])
        return self._layers.calls(self._positions, prompt.slots), states

    def _rows(self) -> CacheRows:
        return self._cache.at(self._cache.send(self._reuse.prompt.slots[self._positions]))

    def _share_at(self, layer: int) -> float | None:
        """The share of the reused tokens that goes on at a check layer; None where all rows do."""
        checks = self._checks
        if checks is None or layer not in checks.layers:
            return None
        mine, last = checks.shares[checks.layers.index(layer)], checks.shares[-1]
        share = mine * self._share / last if last else self._share
        return share if share < 1 else None

    def _choose(
        self, layer: int, share: float, calls: list[Call], states: States
    ) -> Generator[None, None, tuple[list[Call], States]]:
        """Go on with the rows that are always computed, and those that have changed most."""
        assert self._checks is not None, "others choose before the first layer"
        new, rows = self._layers.keys_and_values(layer, calls, states), self._rows()
        scores = self._checks.score(*new, *self._cache.read(layer, rows))
        self._cache.write(layer, rows, *new)
        kept = yield from self._best(scores, self._budget(share), self._checks.threshold)
        self._keep(kept)
        if not len(kept):
            return [], states
        numbers = self._cache.send(kept)
        residual = None if states.residual is None else states.residual[numbers]
        states = States(states.hidden[numbers], residual)
        return self._layers.calls(self._positions, self._reuse.prompt.slots), states

    def _best(
        self, scores: Tensor, budget: int, threshold: float | None = None
    ) -> Generator[None, None, Int64s]:
        """The numbers of the rows that are always computed, and of so many others with the highest scores.

        Gives None once, when all is queued.
        """
        scores = self._total(scores)
        always = np.isin(self._positions, self._always)
        on_device = self._cache.send(always.astype(np.int64)).bool()
        if threshold is not None:
            budget = min(budget, int(((scores >= threshold) & ~on_device).sum()))
        kept = top(scores, on_device, min(int(always.sum()) + budget, len(always)))
        with self._cache.read_back(kept) as read:
            yield None
            numbers = read()
        return closed(numbers, self._positions, self._layers.most_gap)

    def _keep(self, numbers: Int64s) -> None:
        self._positions = self._positions[numbers]

    def _budget(self, share: float) -> int:
        """How many reused tokens may be computed: one at least."""
        return min(max(round(self._reused * share), 1), self._reused)
