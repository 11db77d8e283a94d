"""LMCache on a measured's caches, through its public names only."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots

# What moves the bytes; in LMCache's torch fallback these are Python functions.
_MOVERS = ("single_layer_kv_transfer", "multi_layer_kv_transfer")
_SETTINGS = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


@dataclass(frozen=True)
class Library:
    """An LMCache that could be imported. `native`: its compiled operations really loaded."""

    version: str
    native: bool

    @property
    def label(self) -> str:
        """What its figures may be called."""
        name = f"LMCache {self.version}"
        return name if self.native else f"{name} on its torch fallback"


def import_lmcache() -> Library:
    """Import LMCache. Raises ImportError where it, or anything that it needs, is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    package = importlib.import_module("lmcache")
    operations = importlib.import_module("lmcache.c_ops")
    for module in ("config", "metadata", "cache_engine", "gpu_connector"):
        importlib.import_module(f"lmcache.v1.{module}")
    native = not any(isinstance(getattr(operations, name, _python), FunctionType) for name in _MOVERS)
    return Library(str(getattr(package, "__version__", "of unknown version")), native)


class LMCachePeer:
    """An LMCache engine with host memory for `prompts` prompts, layer by layer or in bulk.

    Tokens are int64 arrays; loads write to the target slots of `measured`, saves read its source slots.
    """

    def __init__(self, measured: MeasuredEngine, layerwise: bool, prompts: int) -> None:
        self._bed, self.layerwise = measured, layerwise
        self._name = f"lwkv-bench-{'layerwise' if layerwise else 'bulk'}"
        # It switches the collector off for the whole process.
        self._collects = gc.isenabled()
        self._engine = _make_engine(self._name, measured, layerwise, prompts)
        self._source, self._target = (
            torch.from_numpy(s).to(measured.device) for s in (measured.source, measured.target)
        )

    def keep(self, tokens: Slots) -> None:
        """See to it that all of `tokens` is cached. Raises RuntimeError where it does not stay."""
        for store in (self.save, None):
            found = self._engine.lookup(torch.from_numpy(tokens))
            if found == len(tokens):
                return
            if store is not None:
                store(tokens)
                self._bed.platform.synchronize_device(self._bed.device)
        raise RuntimeError(f"LMCache has {found} of {len(tokens)} tokens after they were stored")

    def load(self, tokens: Slots) -> None:
        """Load all layers."""
        if self.layerwise:
            for _ in self.load_by_layers(tokens):
                pass
        else:
            self._engine.retrieve(torch.from_numpy(tokens), **self._arguments(self._target))

    def load_by_layers(self, tokens: Slots) -> Iterator[None]:
        """Load in steps: two before the model, one in each layer's wait hook."""
        steps = self._engine.retrieve_layer(
            torch.from_numpy(tokens), sync=True, vllm_cached_tokens=0, **self._arguments(self._target)
        )
        for _ in range(self._bed.shape.num_layers + 2):
            yield next(steps)

    def save(self, tokens: Slots) -> None:
        """Save all layers."""
        ids, arguments = torch.from_numpy(tokens), self._arguments(self._source)
        if self.layerwise:
            steps = self._engine.store_layer(ids, offset=0, sync=True, **arguments)
            for _ in range(self._bed.shape.num_layers + 1):
                next(steps)
        else:
            self._engine.store(ids, offset=0, **arguments)

    def close(self) -> None:
        """Destroy the engine."""
        self._bed.platform.synchronize_device(self._bed.device)
        importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder.destroy(self._name)
        if self._collects:
            gc.enable()

    def __enter__(self) -> LMCachePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arguments(self, slots: torch.Tensor) -> dict[str, Any]:
        return {"kvcaches": self._bed.caches, "slot_mapping": slots, "req_id": "bench"}


def _make_engine(name: str, measured: MeasuredEngine, layerwise: bool, prompts: int) -> Any:
    lmcache = {
        module: importlib.import_module(f"lmcache.{module}")
        for module in ("utils", "v1.config", "v1.metadata", "v1.cache_engine", "v1.gpu_connector")
    }
    shape = measured.shape
    config = lmcache["v1.config"].LMCacheEngineConfig.from_defaults(
        chunk_size=shape.chunk_size,
        local_cpu=True,
        max_local_cpu_size=prompts * shape.kv_bytes(measured.num_tokens) / 2**30,
        use_layerwise=layerwise,
    )
    metadata = lmcache["v1.metadata"].LMCacheMetadata(
        model_name=shape.name,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=shape.dtype,
        kv_shape=(shape.num_layers, 2, shape.chunk_size, shape.num_kv_heads, shape.head_size),
        chunk_size=shape.chunk_size,
    )
    vllm = lmcache["utils"].EngineType.VLLM
    connector = lmcache["v1.gpu_connector"].CreateGPUConnector(config, metadata, vllm)
    engine = lmcache["v1.cache_engine"].LMCacheEngineBuilder.get_or_create(
        name, config, metadata, connector, _one_process, _one_process
    )
    engine.post_init()
    return engine


def _one_process(item: object, source: int) -> object:
    """Broadcast among one."""
    return item


def _python() -> None:
    """Stands for an operation that is not there: no more native than one in Python."""
