"""The disk tier without an engine: chunks put and got as the engine's guard does."""

from __future__ import annotations

import itertools
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lwkv.benchmarks.bench.run import Bench
from lwkv.config.settings import Config
from lwkv.keys import HASH_BYTES, ChunkKey, LayerKey
from lwkv.storage import Status, TierSetup
from lwkv.storage.guard import NUM_READERS, NUM_WRITERS
from lwkv.storage.registry import open_tiers
from lwkv.telemetry.counters import Counters

LONG_S = 60.0
_LIMIT_GIB = 1024.0


class DiskAlone:
    """A tier on `folder` with the chunks of one prompt in memory; new keys for each write."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        shape, num_chunks = bench.shape, bench.prefix // bench.shape.chunk_size
        page_bytes = shape.chunk_size * shape.token_bytes
        stride = -(-page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        slab = torch.frombuffer(mmap.mmap(-1, num_chunks * shape.num_layers * stride), dtype=torch.uint8)
        slab.random_(0, 256)
        self._pages = list(slab.view(num_chunks, shape.num_layers, stride)[:, :, :page_bytes])
        self._num_layers = shape.num_layers
        config = Config(local_disk=str(folder), max_local_disk_size=_LIMIT_GIB)
        [self._tier] = open_tiers(TierSetup(config, shape.num_layers, page_bytes, "bench", Counters()))
        self._numbers = itertools.count()
        self._keys: list[ChunkKey] = []

    def write(self) -> None:
        self._keys = [_key(next(self._numbers)) for _ in self._pages]
        with ThreadPoolExecutor(NUM_WRITERS) as threads:
            list(threads.map(self._put, self._keys, self._pages))

    def read(self) -> None:
        with ThreadPoolExecutor(NUM_READERS) as threads:
            list(threads.map(self._get, range(self._num_layers)))

    def close(self) -> None:
        self._tier.close()

    def _put(self, key: ChunkKey, pages: torch.Tensor) -> None:
        for layers in (range(1, self._num_layers), range(1)):
            asked = [LayerKey(key, layer) for layer in layers]
            _require_ok(self._tier.put(asked, [pages[layer] for layer in layers], LONG_S))

    def _get(self, layer: int) -> None:
        asked = [LayerKey(key, layer) for key in self._keys]
        _require_ok(self._tier.get(asked, [pages[layer] for pages in self._pages], LONG_S))


def _key(number: int) -> ChunkKey:
    return ChunkKey("bench", number.to_bytes(HASH_BYTES, "little"))


def _require_ok(statuses: list[Status]) -> None:
    if set(statuses) - {Status.OK}:
        raise RuntimeError(f"the disk tier moved {statuses.count(Status.OK)} of {len(statuses)} pages")
