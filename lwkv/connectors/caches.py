"""What an engine registered with a connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import torch

from lwkv.errors import LayoutError
from lwkv.layout import KVSpec, describe_layers
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Platform
from lwkv.registered import Registered, number_layers

Registration: TypeAlias = "Mapping[str, Registered] | Sequence[Registered]"


class Caches:
    """The layers of an engine's paged cache. All but `register` is for after it.

    Args:
        platform: of the device the caches are on.
        chunk_size: tokens of a page.
        spec: what the engine keeps of a token in a layer, or that for each layer's name.
        layout, opaque_tag: as in `describe_layers`.

    Attributes:
        layers: those that are moved; one whose KV another has too is left out.
        layer_of: the index in `layers` of every entry that was registered, by its name and by its position.
    """

    def __init__(
        self,
        platform: Platform,
        chunk_size: int,
        spec: KVSpec | Mapping[str, KVSpec],
        layout: str | None = None,
        opaque_tag: str | None = None,
    ) -> None:
        self.platform = platform
        self.layers: Sequence[PagedLayer] = ()
        self.layer_of: Mapping[str | int, int] = {}
        self._chunk_size = chunk_size
        self._spec = spec
        self._layout = layout
        self._opaque_tag = opaque_tag

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_slots(self) -> int:
        """Slots that every layer has."""
        return min(layer.num_slots for layer in self.layers)

    @property
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
        return max(layer.page_bytes(self._chunk_size) for layer in self.layers)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that can only be moved together: 1, or a block where blocks are opaque."""
        return max(layer.tokens_per_row for layer in self.layers)

    def register(self, kvcaches: Registration) -> None:
        """Describe what the engine registers; the same tensors again are fine.

        Raises:
            LayoutError: as `describe_layers`; other memory than before, or the same seen in another way;
                tensors of another device type.
        """
        layers = describe_layers(kvcaches, self._spec, self._layout, self._opaque_tag)
        if layers[0].device.type != self.platform.device_type:
            raise LayoutError(
                f"layer {layers[0].name!r} is on {layers[0].device}, the platform is {self.platform.name!r}: "
                "leave the platform to be detected, or name the one that the caches are on"
            )
        if self.layers and list(map(_memory, layers)) != list(map(_memory, self.layers)):
            raise LayoutError("other KV caches were registered before: make an engine for each set of caches")
        if not self.layers:
            self.layers, self.layer_of = layers, number_layers(kvcaches)


def _page_kind(layer: PagedLayer) -> str:
    dtype = str(layer.dtype).removeprefix("torch.")
    return f"{layer.page_format}:{dtype}:{layer.parts}x{layer.row_bytes}"


def _memory(layer: PagedLayer) -> object:
    """Equal for layers that are the same elements at the same addresses."""
    views = [layer.k] if layer.v is None else [layer.k, layer.v]
    return layer.dtype, [(view.data_ptr(), view.shape, view.stride()) for view in views]
