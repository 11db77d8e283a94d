"""The pages of a batch on their way from the tiers to host memory, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lwkv.background.exit import waitable
from lwkv.pipeline.context import BatchContext
from lwkv.platforms.protocol import Int64s
from lwkv.storage import Hold, LayerPages

Flags: TypeAlias = "npt.NDArray[np.bool_]"


class TierPages:
    """What the tiers bring of the chunks held, one hold a request.

    Args:
        until: when the time of all layers is over, by the context's clock.

    Attributes:
        known: all pages, int64 (layers, chunks), where no tier has to be asked for any; else None.
    """

    def __init__(self, context: BatchContext, holds: Sequence[Hold], until: float = float("inf")) -> None:
        self._context = context
        self._until = until
        self._holds = holds
        self._futures: list[list[Future[LayerPages]]] = []
        self._deadlines: list[float] = []
        known = [pages for hold in holds if (pages := hold.all_pages()) is not None]
        all_known = 0 < len(known) == len(holds)
        self.known: Int64s | None = np.concatenate(known, axis=1) if all_known else None

    def ask_up_to(self, layer: int) -> None:
        """Ask the tiers for all layers up to this one that they were not asked for yet; never blocks."""
        if self.known is not None:
            return
        context = self._context
        layers = range(len(self._futures), min(layer + 1, context.connector.num_layers))
        asked = [context.storage.layerwise_batched_get(hold, layers) for hold in self._holds]
        self._futures += map(list, zip(*asked, strict=True))
        # Behind the calls: when a layer's time is over, a call for it that hangs is known to be late.
        deadline = min(context.clock() + context.config.load_timeout_s, self._until)
        self._deadlines += [deadline] * len(layers)

    def are_there(self, layer: int) -> bool:
        """Whether `pages` would not block."""
        self.ask_up_to(layer)
        return self.known is not None or all(future.done() for future in self._futures[layer])

    def pages(self, layer: int, alive: Flags) -> Int64s:
        """Every chunk's page of a layer that was asked for, int64 (chunks,), or a Missing.

        Blocks until the deadline of the layer for chunks that are `alive`, bool (chunks,), and for no others.
        """
        futures = self._futures[layer]
        if not all(future.done() for future in futures):
            asked = zip(futures, self._holds, self.split(alive), strict=True)
            needed = [future for future, hold, wanted in asked if (wanted & ~hold.in_host).any()]
            wait(needed, waitable(self._deadlines[layer] - self._context.clock()))
        return np.concatenate(
            [
                future.result().pages if future.done() else hold.host_pages(layer)
                for future, hold in zip(futures, self._holds, strict=True)
            ]
        )

    def split(self, chunks: Flags) -> list[Flags]:
        """Cut an array with a value for every chunk, (chunks,), into each hold's share."""
        return np.split(chunks, np.cumsum([len(hold.found) for hold in self._holds]))[: len(self._holds)]
