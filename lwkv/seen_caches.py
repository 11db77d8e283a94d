"""The caches that an engine passes with every request: they are looked at once."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

from torch import Tensor

from lwkv.connectors.paged import Registration


class SeenCaches:
    """Remembers the tensors of the last registration, not what holds them: that may be filled anew."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def remember(self, kvcaches: Registration) -> None:
        """Take the tensors of `kvcaches` as seen."""
        self._tensors = _tensors(kvcaches)

    def has(self, kvcaches: Registration) -> bool:
        """Whether these are the very same tensors in the same order; a look at the objects only."""
        tensors = _tensors(kvcaches)
        return len(tensors) == len(self._tensors) > 0 and all(map(is_, tensors, self._tensors))


def _tensors(kvcaches: Registration) -> list[Tensor]:
    layers = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
    if not isinstance(layers, (list, tuple)):
        return []
    return [t for layer in layers for t in (layer if isinstance(layer, (list, tuple)) else (layer,))]
