"""The hashes of a request's full chunks, the same for all ranks and kinds of caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lwkv.integrations.vllm.scheduler.prompt import token_ids
from lwkv.keys import ChunkKey, chunk_keys


@dataclass(slots=True, eq=False)
class PromptHashes:
    """Tokens are read from vLLM, and chunks hashed, once: a new chunk costs its own tokens.

    Attributes:
        request: vLLM's own, which grows as tokens are generated.
        salts: what keeps its chunks apart from those of other requests with the same tokens.
    """

    request: Any
    salts: tuple[str, ...]
    chunk_size: int
    _chain: str = ""
    _last: ChunkKey | None = None
    _hashes: list[bytes] = field(default_factory=list)

    def of(self, chain: str, num_tokens: int) -> list[bytes]:
        """The hashes of all full chunks of the first `num_tokens` tokens, on what `chain` names."""
        if chain != self._chain:
            self._chain, self._last, self._hashes = chain, None, []
        wanted, known = num_tokens // self.chunk_size, len(self._hashes)
        if wanted > known:
            size = self.chunk_size
            ids = token_ids(self.request, wanted * size, known * size)
            keys = chunk_keys(ids, size, chain, self.salts, after=self._last)
            self._hashes += [key.hash for key in keys]
            self._last = keys[-1]
        return self._hashes[:wanted]
