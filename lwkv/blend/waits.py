"""A retrieval's steps, taken as layers are waited for."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from lwkv.pipeline.generators import retrieve_steps
from lwkv.pipeline.retrieval import BatchRetrieval


class LayerWaits:
    """Takes a retrieval's N + 2 steps: the first at once, the others when a layer is waited for."""

    def __init__(self, retrieval: BatchRetrieval) -> None:
        self._steps: Generator[Any, None, None] = retrieve_steps(retrieval, True, list)
        self._promised: list[int] = next(self._steps)
        self._taken = 1
        self._masks: list[torch.Tensor] | None = None

    def wait(self, layer: int) -> None:
        """Make the current stream wait for `layer`, with the next one queued behind it."""
        while self._taken < layer + 3:
            self._masks = next(self._steps)
            self._taken += 1

    def arrived(self) -> list[bool]:
        """Whether each load brought all it promised, in every layer; for after the wait for the last one."""
        masks = self._masks or []
        return [int(mask.sum()) == count for mask, count in zip(masks, self._promised, strict=True)]
