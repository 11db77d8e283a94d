"""What the reference engine calls of a KV cache around its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lwkv.request import Request


class StepOutcome(Protocol):
    """What came of a step's loads and stores."""

    @property
    def loaded(self) -> Sequence[Tensor]:
        """One a load, bool (T,), CPU: which of its tokens have their KV in all layers now."""

    @property
    def stored(self) -> bool:
        """Whether the step's stores were accepted; if not, they are to be offered again."""


class KVSteps(Protocol):
    """A KV cache beside the engine. Each is called once a step, the layer hooks once a layer, in order."""

    def begin(self, loads: Sequence[Request], stores: Sequence[Request]) -> None:
        """Announce what this step loads and stores; either may be empty."""

    def start_load_kv(self) -> list[int]:
        """Begin the loads; returns how many tokens of each will come."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return when work queued from now on finds this layer's loads in the cache."""

    def save_kv_layer(self, layer: int) -> None:
        """Begin the stores of this layer, which the work queued so far has written."""

    def wait_for_save(self) -> StepOutcome:
        """End the step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's outcome; see StepOutcome."""

    loaded: Sequence[Tensor]
    stored: bool


class NoCache:
    """The calls of an engine without a KV cache: all tokens are computed."""

    def __init__(self) -> None:
        self._loads: Sequence[Request] = ()

    def begin(self, loads: Sequence[Request], stores: Sequence[Request]) -> None:
        self._loads = loads

    def start_load_kv(self) -> list[int]:
        return [0 for _ in self._loads]

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> Outcome:
        return Outcome([torch.zeros(len(load.tokens), dtype=torch.bool) for load in self._loads], True)
