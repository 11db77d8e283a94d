"""One forward pass over a batch of prompts of which segments are being loaded, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.attention import attention_paid
from lwkv.blend.forward.head_start import HeadStart
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import ComputedRows, PromptReuse
from lwkv.blend.model import BlendModel
from lwkv.blend.selector import AtStart, ByAttention, ByChange, Selector, top
from lwkv.kernels import Rows
from lwkv.platforms.protocol import Int64s

# The last tokens of a question ask; where it is longer, its beginning does not.
MOST_ASKING = 64

# Called with a layer's number before it is read, and after it is written.
LayerHook = Callable[[int], None]


def no_hook(layer: int) -> None:
    """For passes that load or store nothing."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of a pass.

    Attributes:
        logits: of each prompt's last token, float32 (prompts, vocab).
        num_chosen: reused tokens of each prompt that were computed in the last layer.
        row_layers: rows computed, summed over the layers.
    """

    logits: Tensor
    num_chosen: list[int]
    row_layers: int


class BlendPass:
    """Computes prompts over reused KV; for one use.

    Rows that are computed replace what was loaded of them, in every layer up to the one where they are left
    out. Each sees the keys up to its own position: those of rows that are left out as they were loaded.

    Its tables are on their way to the device once it is made: make it before the loads begin, whose copies
    are large.

    Args:
        share: of each prompt's reused tokens, the part to compute again.
        head: layer 0 of the same prompts; used where all their rows are to be computed in it.
    """

    _wait: LayerHook
    _written: LayerHook

    def __init__(
        self,
        model: BlendModel,
        cache: PagedRows,
        reuses: Sequence[PromptReuse],
        selector: Selector,
        share: float,
        head: HeadStart | None = None,
    ) -> None:
        self._model, self._cache, self._reuses = model, cache, reuses
        self._selector, self._share = selector, share
        self._device = model.device
        self._num_positions = max(len(reuse.prompt) for reuse in reuses)
        # Asked once: a protocol is slow to tell.
        self._checks = selector if isinstance(selector, ByChange) and share > 0 else None
        self._row_layers = 0
        self._bounds = np.append(0, np.cumsum([len(reuse.prompt) for reuse in reuses])).tolist()
        self._head = head if self._computes_all() else None
        if self._head is None:
            slots = np.concatenate([reuse.prompt.slots for reuse in reuses])
            self._all = cache.at(cache.send(slots))
            self._first = self._first_rows()
        else:
            self._all, self._first = self._head.at, self._head.rows.marked(reuses)
        asks = isinstance(selector, ByAttention) and share > 0
        self._asking = self._rows([np.zeros(0, np.int64)] * len(reuses)) if asks else None

    @torch.no_grad()
    def run(self, wait: LayerHook, written: LayerHook = no_hook) -> Computed:
        """Queue all of it on the current stream; nothing is read back but where a threshold counts rows.

        Args:
            wait: returns when work queued from now on finds a layer's loads in the cache; asked for the
                layers in order, for some of them more than once.
            written: called when a layer's rows are written, once for each layer.
        """
        self._wait, self._written = wait, written
        rows = self._first if self._asking is None else self._needed(self._asking, self._first)
        hidden, at, angles, first = self._begin(rows)
        for layer in range(first, self._model.num_layers):
            q, k, v = self._project(layer, hidden, angles)
            kept = self._check(layer, rows, at, k, v)
            self._cache.write(layer, at, k, v)
            self._written(layer)
            if kept is not None:
                rows, numbers = rows.only(kept)
                q, hidden = q[numbers], hidden[numbers]
                at, angles = self._prepare(rows)
            hidden = self._finish(layer, rows, hidden, q, self._cache.read(layer, self._all))
        counts = zip(rows.parts, self._reuses, strict=True)
        chosen = [part.stop - part.start - len(reuse.always) for part, reuse in counts]
        return Computed(self._model.logits(hidden[rows.last]), chosen, self._row_layers)

    def _begin(self, rows: ComputedRows) -> tuple[Tensor, Rows, Any, int]:
        """The states of `rows`, where they are, their angles, and the layer to go on with."""
        head = self._head
        if head is None:
            return self._model.embed(rows.tokens), *self._prepare(rows), 0
        self._wait(0)
        self._cache.write(0, head.at, head.k, head.v)
        self._written(0)
        return head.hidden, head.at, head.angles, 1

    def _computes_all(self) -> bool:
        """Whether the first layer is computed for every row of every prompt."""
        return all(
            not reuse.known and (self._checks is not None or not reuse.reused.any()) for reuse in self._reuses
        )

    def _first_rows(self) -> ComputedRows:
        selector = self._selector
        if isinstance(selector, AtStart):
            return self._rows(
                [selector.choose(reuse, self._budget(reuse, self._share)) for reuse in self._reuses]
            )
        if self._share == 0:
            return self._rows([np.zeros(0, np.int64)] * len(self._reuses))
        return self._rows([reuse.candidates for reuse in self._reuses])

    def _rows(self, chosen: Sequence[Int64s]) -> ComputedRows:
        return ComputedRows.of(self._reuses, chosen, self._cache.send)

    def _prepare(self, rows: ComputedRows) -> tuple[Rows, Any]:
        return self._cache.at(rows.slots), self._model.angles(rows.positions, self._num_positions)

    def _project(self, layer: int, hidden: Tensor, angles: Any) -> tuple[Tensor, Tensor, Tensor]:
        projected = self._model.project(layer, hidden, angles)
        # Before anything is written: what is computed here replaces a part of what is loaded.
        self._wait(layer)
        return projected

    def _finish(
        self, layer: int, rows: ComputedRows, hidden: Tensor, q: Tensor, kv: tuple[Tensor, Tensor]
    ) -> Tensor:
        k, v = kv
        shares = zip(rows.parts, pairwise(self._bounds), strict=True)
        attended = [
            self._cache.attend(q[part], k[a:b], v[a:b], rows.positions[part]) for part, (a, b) in shares
        ]
        self._row_layers += len(rows)
        return self._model.finish(layer, hidden, torch.cat(attended))

    def _check(self, layer: int, rows: ComputedRows, at: Rows, k: Tensor, v: Tensor) -> list[Tensor] | None:
        """At a check layer: the rows of each prompt that go on; else None."""
        selector = self._checks
        if selector is None or layer not in selector.layers:
            return None
        mine, last = selector.shares[selector.layers.index(layer)], selector.shares[-1]
        share = mine * self._share / last if last else self._share
        scores = selector.score(k, v, *self._cache.read(layer, at))
        return [
            self._keep(reuse, rows.always[part], scores[part], share, selector.threshold)
            for reuse, part in zip(self._reuses, rows.parts, strict=True)
        ]

    def _keep(
        self,
        reuse: PromptReuse,
        always: Tensor,
        scores: Tensor,
        share: float,
        threshold: float | None = None,
    ) -> Tensor:
        budget = self._budget(reuse, share)
        if threshold is not None:
            budget = min(budget, int(((scores >= threshold) & ~always).sum()))
        return top(scores, always, min(len(reuse.always) + budget, len(always)))

    def _needed(self, asking: ComputedRows, rows: ComputedRows) -> ComputedRows:
        """Of `rows`, which have all reused tokens, those that the questions look at."""
        kept = [
            self._keep(reuse, rows.always[part], paid[rows.positions[part]], self._share)
            for reuse, part, paid in zip(self._reuses, rows.parts, self._ask(asking), strict=True)
        ]
        return rows.only(kept)[0]

    def _ask(self, rows: ComputedRows) -> list[Tensor]:
        """What the question of each prompt, in `rows`, pays to each of its tokens: float32 (tokens,)."""
        selector = self._selector
        assert isinstance(selector, ByAttention), "only these ask"
        hidden = self._model.embed(rows.tokens)
        at, angles = self._prepare(rows)
        paid = [torch.zeros(len(reuse.prompt), device=self._device) for reuse in self._reuses]
        for layer in range(selector.layer + 1):
            q, k, v = self._project(layer, hidden, angles)
            self._cache.write(layer, at, k, v)
            kv = self._cache.read(layer, self._all)
            if layer >= selector.first_layer:
                paid = [a + b for a, b in zip(paid, self._paid(rows, q, kv[0]), strict=True)]
            if layer < selector.layer:
                hidden = self._finish(layer, rows, hidden, q, kv)
        return paid

    def _paid(self, rows: ComputedRows, q: Tensor, k: Tensor) -> list[Tensor]:
        found = []
        for reuse, end, (a, b) in zip(self._reuses, rows.bounds[1:], pairwise(self._bounds), strict=True):
            asking = slice(end - min(reuse.question, MOST_ASKING), end)
            found.append(attention_paid(q[asking], k[a:b], rows.positions[asking]))
        return found

    def _budget(self, reuse: PromptReuse, share: float) -> int:
        """How many reused tokens may be computed: one at least, unless the share is 0."""
        num = int(reuse.reused.sum())
        return min(num, max(round(num * min(share, 1.0)), 1 if share > 0 and num else 0))
