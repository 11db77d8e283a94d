"""A lower tier that is exactly as fast as it is told to be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from lwkv.background.workers import Workers
from lwkv.benchmarks.prefills.prefill import timed
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status


class ThrottledTier:
    """Keeps pages in a dictionary; reading takes `seconds_per_byte`, one read after another, in order.

    `reads` has the seconds that each read really took, call by call.
    """

    name = "throttled"

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self.reads: list[float] = []
        self._pages: dict[LayerKey, torch.Tensor] = {}
        self._link = Workers("throttled", 1)

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        return [LayerKey(key, 0) in self._pages for key in keys]

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return self._link.submit(partial(self._read, keys, pages)).result()

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        self._pages.update((key, page.clone()) for key, page in zip(keys, pages, strict=True))
        return [Status.OK] * len(keys)

    def close(self) -> None:
        self._link.close(0)
        self._pages.clear()

    def _read(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor]) -> list[Status]:
        with timed(self.reads):
            time.sleep(self.seconds_per_byte * sum(page.nbytes for page in pages))
            return [self._fill(key, page) for key, page in zip(keys, pages, strict=True)]

    def _fill(self, key: LayerKey, page: torch.Tensor) -> Status:
        if key not in self._pages:
            return Status.MISS
        page.copy_(self._pages[key])
        return Status.OK
