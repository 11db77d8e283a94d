"""A tiny model, and a KV cache that remembers tokens one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from small_llama import small_shape
from torch import Tensor

from lwkv.reference import Limits, Model, ModelShape, PagedCache, ReferenceEngine, random_model
from lwkv.reference.cache import LAYOUTS
from lwkv.reference.hooks import Outcome
from lwkv.request import Request

MakeEngine = Callable[..., ReferenceEngine]
LIMITS = ("step_tokens", "max_requests", "store_decode")


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    return small_shape(3)


@pytest.fixture
def model(shape: ModelShape, device: torch.device) -> Model:
    return random_model(shape, seed=1, device=device)


@pytest.fixture
def make_engine(model: Model, device: torch.device) -> MakeEngine:
    """Builds an engine whose cache is NaN wherever nothing was written."""

    def make(
        layout: str = "vllm_bhn2d", num_blocks: int = 60, cache: PagedCache | None = None, **options: Any
    ) -> ReferenceEngine:
        if cache is None:
            cache = PagedCache(model.shape, num_blocks=num_blocks, block_size=5, layout=layout, device=device)
            cache.fill(float("nan"))
        chosen = {name: options.pop(name) for name in LIMITS if name in options}
        return ReferenceEngine(model, cache, limits=Limits(chunk_size=8, **chosen), **options)

    return make


@dataclass
class Notebook:
    """The calls of an engine, over a dictionary: prefix of tokens -> K and V of its last token, by layer.

    `lost` are positions whose load fails, in layer 1 and later; what fails is overwritten with garbage.
    """

    calls: list[str] = field(default_factory=list)
    known: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    loads: Sequence[Request] = ()
    stores: Sequence[Request] = ()
    load_log: list[Request] = field(default_factory=list)
    store_log: list[Request] = field(default_factory=list)
    cache: PagedCache | None = None

    def attach(self, engine: ReferenceEngine) -> ReferenceEngine:
        self.cache = engine.cache
        return engine

    def lookup(self, tokens: Sequence[int], salts: Sequence[str]) -> int:
        hit = 0
        while hit < len(tokens) and self._key(tokens, hit, salts) in self.known:
            hit += 1
        return hit

    def begin(self, loads: Sequence[Request], stores: Sequence[Request]) -> None:
        self.calls.append(f"begin {len(loads)} {len(stores)}")
        self.loads, self.stores = loads, stores
        self.load_log += loads
        self.store_log += stores

    def start_load_kv(self) -> list[int]:
        self.calls.append("start")
        return [int((load.mask & (load.slot_mapping >= 0)).sum()) for load in self.loads]

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(f"wait {layer}")
        for load in self.loads:
            for position, slot in self._moves(load):
                entry = self.known[self._key(load.tokens.tolist(), position, load.salts)]
                k, v = self._slot(layer, slot)
                failed = position in self.lost and layer > 0
                k[:] = 1e4 if failed else entry[layer][0]
                v[:] = 1e4 if failed else entry[layer][1]

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(f"save {layer}")
        for store in () if self._has_failed() else self.stores:
            for position, slot in self._moves(store):
                k, v = self._slot(layer, slot)
                self.known.setdefault(self._key(store.tokens.tolist(), position, store.salts), []).append(
                    (k.clone(), v.clone())
                )

    def wait_for_save(self) -> Outcome:
        self.calls.append("end")
        return Outcome([self._loaded(load) for load in self.loads], stored=not self._has_failed())

    def _has_failed(self) -> bool:
        return any(position in self.lost for load in self.loads for position, _ in self._moves(load))

    def _loaded(self, load: Request) -> Tensor:
        lost = torch.tensor([position in self.lost for position in range(len(load.tokens))])
        return load.mask & (load.slot_mapping >= 0) & ~lost

    def _slot(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        k, v = LAYOUTS[self.cache.layout].split(list(self.cache.tensors.values())[layer])
        return k[divmod(slot, self.cache.block_size)], v[divmod(slot, self.cache.block_size)]

    @staticmethod
    def _key(tokens: Sequence[int], position: int, salts: Sequence[str]) -> tuple[object, ...]:
        return (*salts, *tokens[: position + 1])

    @staticmethod
    def _moves(request: Request) -> list[tuple[int, int]]:
        slots = request.slot_mapping.tolist()
        return [(p, slots[p]) for p, wanted in enumerate(request.mask.tolist()) if wanted and slots[p] >= 0]


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()
