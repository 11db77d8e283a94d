"""The keys of the prompts that were asked for last: an engine asks for each several times in a row."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from lwkv.keys import ChunkKey, chunk_keys
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import CheckedRequest, Chunking

NUM_PROMPTS = 32
FEW_CHUNKS = 8
"""To make the keys of so many takes no longer than what could be done meanwhile."""


class PromptKeys:
    """The keys of a namespace; those of the last prompts are made once. Thread-safe.

    Ids are int64 (tokens,); those that are in no chunk do not matter. Comparing 8192 of them costs a tenth of
    hashing them. Prompts of one length with the same ids here and there take each other's place.
    """

    def __init__(self, namespace: str, chunking: Chunking) -> None:
        self._namespace = namespace
        self._chunking = chunking
        self._recent: OrderedDict[tuple[object, ...], tuple[Int64s, list[ChunkKey]]] = OrderedDict()
        self._lock = threading.Lock()

    def keys(self, ids: Int64s, salts: tuple[str, ...]) -> list[ChunkKey]:
        """The key of every chunk of `ids`; the list is not the caller's to change."""
        ids = self._in_chunks(ids)
        known = self._known(ids, salts)
        if known is not None:
            return known
        keys = chunk_keys(ids, self._chunking.chunk_size, self._namespace, salts, True)
        self.remember(ids.copy(), salts, keys)
        return keys

    def remember(self, ids: Int64s, salts: tuple[str, ...], keys: list[ChunkKey]) -> None:
        """Take over keys that were made elsewhere, of this namespace, if there is one for every chunk.

        Neither `ids` nor `keys` may change any more.
        """
        ids = self._in_chunks(ids)
        if len(keys) != -(-len(ids) // self._chunking.chunk_size):
            return
        mark = _mark(ids, salts)
        with self._lock:
            self._recent[mark] = ids, keys
            self._recent.move_to_end(mark)
            if len(self._recent) > NUM_PROMPTS:
                self._recent.popitem(last=False)

    def of(self, request: CheckedRequest) -> list[ChunkKey]:
        """The key of every chunk of a request: those it came with, or those of its ids."""
        if request.keys is not None:
            return request.keys
        return self.keys(request.ids, request.salts)

    def first_of(self, request: CheckedRequest) -> ChunkKey | None:
        """The key of a request's first chunk, where it takes a while to make those of all; else None."""
        size, salts = self._chunking.chunk_size, request.salts
        if request.keys is not None or len(request.chunk_tokens) <= FEW_CHUNKS:
            return None
        if self._known(self._in_chunks(request.ids), salts) is not None:
            return None
        return chunk_keys(request.ids[:size], size, self._namespace, salts)[0]

    def _known(self, ids: Int64s, salts: tuple[str, ...]) -> list[ChunkKey] | None:
        with self._lock:
            known_ids, keys = self._recent.get(_mark(ids, salts), (None, None))
        return keys if known_ids is not None and np.array_equal(known_ids, ids) else None

    def _in_chunks(self, ids: Int64s) -> Int64s:
        return ids[: self._chunking.covered(len(ids))]


def _mark(ids: Int64s, salts: tuple[str, ...]) -> tuple[object, ...]:
    """What prompts rarely have in common that are not the same."""
    return len(ids), salts, ids[:: max(1, len(ids) // 8)].tobytes(), ids[-8:].tobytes()
