"""The keys of the prompts that were asked for last: an engine asks for each several times in a row."""

from __future__ import annotations

from collections import deque

import numpy as np

from lwkv.keys import ChunkKey, chunk_keys
from lwkv.platforms.protocol import Int64s
from lwkv.request import CheckedRequest, Chunking

NUM_PROMPTS = 8


class KeyMemo:
    """The keys of a namespace; those of the last prompts are made once. Thread-safe.

    Comparing 8192 ids costs a tenth of hashing them.
    """

    def __init__(self, namespace: str, chunking: Chunking) -> None:
        self._namespace = namespace
        self._chunking = chunking
        self._recent: deque[tuple[Int64s, tuple[str, ...], list[ChunkKey]]] = deque(maxlen=NUM_PROMPTS)

    def keys(self, ids: Int64s, salts: tuple[str, ...]) -> list[ChunkKey]:
        """The keys of `ids`, int64 (tokens,), and `salts`; the list is not the caller's to change."""
        for known_ids, known_salts, keys in tuple(self._recent):
            if known_salts == salts and np.array_equal(known_ids, ids):
                return keys
        size, partial = self._chunking.chunk_size, self._chunking.partial
        keys = chunk_keys(ids, size, self._namespace, salts, partial)
        self.remember(ids.copy(), salts, keys)
        return keys

    def remember(self, ids: Int64s, salts: tuple[str, ...], keys: list[ChunkKey]) -> None:
        """Take over keys that were made elsewhere, of this namespace; `ids` and `keys` must not change."""
        self._recent.appendleft((ids, salts, keys))

    def of(self, request: CheckedRequest) -> list[ChunkKey]:
        """The key of every chunk of a request."""
        return self.keys(request.ids[: int(request.chunk_tokens.sum())], request.salts)
