"""The four steps of a KV cache, as the reference engine calls them around its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVRequest:
    """Tokens of one request whose KV is to be loaded or stored.

    `tokens` and `slot_mapping` are int64 (T,) on the CPU, slot -1 where a token has none. `mask`, bool (T,),
    is False over a prefix that needs no move: for a load it is in the engine, for a store in the cache.
    """

    tokens: Tensor
    slot_mapping: Tensor
    mask: Tensor
    salts: Sequence[str] = ()


class Loads(Protocol):
    """What came of a step's loads."""

    @property
    def loaded(self) -> Sequence[Tensor]:
        """One a load, bool (T,), CPU: which of its tokens have their KV in all layers now."""


class KVSteps(Protocol):
    """A KV cache beside the engine. Each is called once a step, the layer hooks once a layer, in order."""

    def begin(self, loads: Sequence[KVRequest], stores: Sequence[KVRequest]) -> None:
        """Announce what this step loads and stores; either may be empty."""

    def start_load_kv(self) -> list[int]:
        """Begin the loads; returns how many tokens of each will come."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return when work queued from now on finds this layer's loads in the cache."""

    def save_kv_layer(self, layer: int) -> None:
        """Begin the stores of this layer, which the work queued so far has written."""

    def wait_for_save(self) -> Loads:
        """End the step."""


@dataclass(frozen=True, slots=True)
class _NothingLoaded:
    loaded: Sequence[Tensor]


class NoCache:
    """The four steps of an engine without a KV cache: all tokens are computed."""

    def __init__(self) -> None:
        self._loads: Sequence[KVRequest] = ()

    def begin(self, loads: Sequence[KVRequest], stores: Sequence[KVRequest]) -> None:
        self._loads = loads

    def start_load_kv(self) -> list[int]:
        return [0 for _ in self._loads]

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> Loads:
        return _NothingLoaded([load.mask.new_zeros(len(load.mask)) for load in self._loads])
