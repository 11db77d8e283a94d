"""Calls of a model's layers for some rows of a prompt, and what is between two layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lwkv.platforms.protocol import Int64s


class States(NamedTuple):
    """Rows between two layers, in the dtype of the model: (rows, hidden) each; no residual before layer 0."""

    hidden: Tensor
    residual: Tensor | None


@dataclass(frozen=True, slots=True)
class Call:
    """Neighbouring rows of a pass that are computed in one call, the same ones in every layer.

    Attributes:
        rows: which of the pass.
        positions: int64 (rows,), on the device.
        context: vLLM's forward context; making one costs the host more than a layer's kernel.
        by_rows: whether lwkv's kernel computes the attention.
    """

    rows: slice
    positions: Tensor
    context: Any
    by_rows: bool


class Seen(NamedTuple):
    """A layer that was computed, and its attention: turned q, and what came out, (rows, heads, head size)."""

    states: States
    q: Tensor
    attended: Tensor


class Layers(Protocol):
    """What a pass asks of `ModelLayers`. Rows between two runs that are no more than `most_gap` are better
    computed with them."""

    num_layers: int
    most_gap: int

    def eagerly(self) -> AbstractContextManager[None]: ...

    def embed(self, tokens: Int64s) -> States: ...

    def calls(self, positions: Int64s, slots: Int64s) -> list[Call]: ...

    def run(self, layer: int, calls: Sequence[Call], states: States) -> States: ...

    def keys_and_values(self, layer: int, calls: Sequence[Call], states: States) -> tuple[Tensor, Tensor]: ...

    def run_seen(self, layer: int, calls: Sequence[Call], states: States) -> Seen: ...
