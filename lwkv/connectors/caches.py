"""What an engine registered with a connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import is_

import torch
from torch import Tensor

from lwkv.config import Config
from lwkv.errors import LayoutError
from lwkv.layout import KVSpec, describe_layers
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Platform
from lwkv.registered import Registration, number_layers, place


class Caches:
    """The layers of an engine's paged cache. All but `register` is for after it.

    Args:
        config: chunk size and staging.
        platform: of the device the caches are on.
        spec: what the engine keeps of a token in a layer, or that for each layer's name.
        layout, opaque_tag: as in `describe_layers`.

    Attributes:
        layers: those that are moved; one whose KV another has too is left out.
        layer_of: the index in `layers` of every entry that was registered, by its name and by its position.
    """

    def __init__(
        self,
        config: Config,
        platform: Platform,
        spec: KVSpec | Mapping[str, KVSpec],
        layout: str | None = None,
        opaque_tag: str | None = None,
    ) -> None:
        self.platform = platform
        self.layers: Sequence[PagedLayer] = ()
        self.layer_of: dict[str | int, int] = {}
        self._config = config
        self._spec = spec
        self._layout = layout
        self._opaque_tag = opaque_tag
        self._seen: list[Tensor] = []

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_slots(self) -> int:
        """Slots that every layer has."""
        return min(layer.num_rows * layer.tokens_per_row for layer in self.layers)

    @cached_property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def page_format(self) -> str:
        """What the bytes of the pages are, layer by layer: part of every key."""
        kinds = [_page_kind(layer) for layer in self.layers]
        return ",".join(f"{kind}*{len(list(same))}" for kind, same in groupby(kinds))

    @property
    def page_bytes(self) -> int:
        """Bytes of the largest layer's page."""
        return max(layer.page_bytes(self._config.chunk_size) for layer in self.layers)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that can only be moved together: 1, or a block where blocks are opaque."""
        return max(layer.tokens_per_row for layer in self.layers)

    def register(self, kvcaches: Registration) -> None:
        """Describe what the engine registers; the same again is fine, and the very same tensors cost little.

        Raises:
            LayoutError: as `describe_layers`; other memory than before, or the same seen in another way;
                tensors of another device type.
        """
        tensors = _tensors(kvcaches)
        if self._seen and len(tensors) == len(self._seen) and all(map(is_, tensors, self._seen)):
            return
        layers = describe_layers(kvcaches, self._spec, self._layout, self._opaque_tag)
        if layers[0].device.type != self.platform.device_type:
            raise LayoutError(
                f"layer {layers[0].name!r} is on {layers[0].device}, the platform is {self.platform.name!r}: "
                "leave the platform to be detected, or name the one that the caches are on"
            )
        if self.layers and [*map(_places, layers)] != [*map(_places, self.layers)]:
            raise LayoutError("other KV caches were registered before: make an engine for each set of caches")
        if not self.layers:
            self._check_layers(layers)
            self.layers, self.layer_of = layers, number_layers(kvcaches)
        # The tensors, not what holds them: that may be filled anew.
        self._seen = tensors

    def _check_layers(self, layers: Sequence[PagedLayer]) -> None:
        """For connectors that cannot move any layer: raise LayoutError."""


def _page_kind(layer: PagedLayer) -> str:
    dtype = str(layer.dtype).removeprefix("torch.")
    return f"{layer.page_format}:{dtype}:{layer.parts}x{layer.row_bytes}"


def _places(layer: PagedLayer) -> list[object]:
    return [layer.dtype, place(layer.k), None if layer.v is None else place(layer.v)]


def _tensors(kvcaches: Registration) -> list[Tensor]:
    layers = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
    if not isinstance(layers, list | tuple):
        return []
    return [t for layer in layers for t in (layer if isinstance(layer, list | tuple) else (layer,))]
