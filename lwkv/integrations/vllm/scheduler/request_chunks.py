"""The chunks of one request's tokens: their keys, for every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex, RankKeys
from lwkv.integrations.vllm.scheduler.prompt import salts_of, token_ids
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import Chunking


@dataclass(slots=True, eq=False)
class RequestChunks:
    """Tokens are read from vLLM, and chunks hashed, once: a new chunk costs its own tokens.

    Attributes:
        request: vLLM's own, which grows as tokens are generated.
        salts: what keeps its chunks apart from those of other requests with the same tokens.
    """

    request: Any
    salts: tuple[str, ...]
    chunking: Chunking
    _ids: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    _num_read: int = 0
    _keys: RankKeys = field(default_factory=list)
    _keyed: int = 0

    @classmethod
    def of(cls, request: Any, chunking: Chunking, epoch: str) -> RequestChunks:
        return cls(request, salts_of(request, epoch), chunking)

    @property
    def num_tokens(self) -> int:
        """Tokens of the request that are known by now."""
        return int(self.request.num_tokens)

    def keys(self, index: ChunkIndex, num_tokens: int) -> RankKeys:
        """For each rank the keys of all chunks of the first `num_tokens` tokens, and maybe of more.

        The list is not the caller's to keep.
        """
        covered, size = self.chunking.covered(num_tokens), self.chunking.chunk_size
        # The key of a rest stands for just its tokens.
        has_them = self._keyed == covered if self.chunking.partial else self._keyed >= covered
        if not (has_them and self._keys):
            self.ids(covered)
            full = min(self._keyed, covered) // size
            kept = self._keys if full * size == self._keyed else [own[:full] for own in self._keys]
            self._keys = index.more_keys(kept, self._ids[full * size : covered], self.salts)
            self._keyed = covered if self._keys else 0
        return self._keys

    def ids(self, num_tokens: int) -> Int64s:
        """The ids of the first `num_tokens` tokens; what was read before is not read again."""
        known = self._num_read
        if num_tokens > known:
            if num_tokens > len(self._ids):
                # What was given out stays as it is.
                grown = np.zeros(max(num_tokens, 2 * len(self._ids)), np.int64)
                grown[:known] = self._ids[:known]
                self._ids = grown
            self._ids[known:num_tokens] = token_ids(self.request, num_tokens, known)
            self._num_read = num_tokens
        return self._ids[:num_tokens]
