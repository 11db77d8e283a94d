"""What an engine registered with a connector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from lwkv.config.settings import Config
from lwkv.errors import LayoutError
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.layouts.registration import Registration, number_layers, place
from lwkv.platforms import Platform, platform_for

Describe: TypeAlias = "Callable[[Registration], Sequence[PagedLayer]]"


class Caches:
    """The layers of an engine's paged cache. All but `register`, `layers` and `num_layers` is for after it.

    Args:
        config: chunk size and staging.
        platform: of the device the caches are on.
        describe: gives the layers of what is registered, as `describe_layers`.

    Attributes:
        layers: those that are moved, `num_layers` on one `device`; one whose KV another has too is left out.
        num_slots: slots that every layer has.
        page_bytes: bytes of the largest layer's page.
        page_format: what the bytes of the pages are, layer by layer: part of every key.
        tokens_per_row: tokens that can only be moved together: 1, or a block where blocks are opaque.
        layer_of: the index in `layers` of every entry that was registered, by its name and by its position.
    """

    num_layers = 0

    def __init__(self, config: Config, platform: Platform, describe: Describe) -> None:
        self.platform = platform
        self.layers: Sequence[PagedLayer] = ()
        self.layer_of: dict[str | int, int] = {}
        self._config = config
        self._describe = describe
        self._seen: list[Tensor] = []

    @property
    def config(self) -> Config:
        """The settings it was made with."""
        return self._config

    def register(self, kvcaches: Registration) -> None:
        """Describe what the engine registers; the same again is fine, and the very same tensors cost little.

        Raises:
            LayoutError: as `describe`; other memory than before, or the same seen in another way;
                tensors of another device type than the platform's.
            PlatformError (a ValueError): tensors of a device type that no platform serves.
            ConfigError: opaque blocks that do not divide a chunk.
        """
        tensors = _tensors(kvcaches)
        if tensors and [*map(id, tensors)] == [*map(id, self._seen)]:
            return
        layers = self._describe(kvcaches)
        if layers[0].device.type != self.platform.device_type:
            raise LayoutError(
                f"layer {layers[0].name!r} is on {layers[0].device}, the platform is {self.platform.name!r}: "
                f"name the platform {platform_for(layers[0].device).name!r}, or move the caches"
            )
        if not self.layers:
            self._check_layers(layers)
            self.page_bytes = max(map(self.page_bytes_of, layers))
            kinds = groupby(map(self.page_kind, layers))
            self.page_format = ",".join(f"{kind}*{len(list(same))}" for kind, same in kinds)
            self.tokens_per_row = max(layer.tokens_per_row for layer in layers)
            self.layers, self.layer_of = layers, number_layers(kvcaches)
            self.num_layers, self.device = len(layers), layers[0].device
            self.num_slots = min(layer.num_rows * layer.tokens_per_row for layer in layers)
        elif [*map(_places, layers)] != [*map(_places, self.layers)]:
            raise LayoutError("other KV caches were registered before: make an engine for each set of caches")
        # The tensors, not what holds them: that may be filled anew.
        self._seen = tensors

    def page_kind(self, layer: PagedLayer) -> str:
        """What the bytes of a layer's pages are: part of every key."""
        return layer.page_kind

    def page_bytes_of(self, layer: PagedLayer) -> int:
        """Bytes of the page of a full chunk."""
        return layer.page_bytes(self._config.chunk_size)

    def _check_layers(self, layers: Sequence[PagedLayer]) -> None:
        """Look at the layers before any other method does; raise LayoutError or ConfigError for those that
        cannot be moved."""


def device_of(kvcaches: Registration) -> torch.device | None:
    """Where the first tensor of what is to be registered is; None if there is none."""
    return next((t.device for t in _tensors(kvcaches) if isinstance(t, Tensor)), None)


def _places(layer: PagedLayer) -> list[object]:
    return [layer.dtype, place(layer.k), None if layer.v is None else place(layer.v)]


def _tensors(kvcaches: Registration) -> list[Tensor]:
    layers = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
    if not isinstance(layers, list | tuple):
        return []
    return [t for layer in layers for t in (layer if isinstance(layer, list | tuple) else (layer,))]
