"""What was evicted lately, for clients that have not heard of it yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from lwkv.keys import ChunkKey

MOST_NOTED = 1 << 16


class Evictions:
    """The last chunks that were evicted, in order."""

    def __init__(self) -> None:
        self._noted: deque[bytes] = deque(maxlen=MOST_NOTED)
        self.total = 0

    def dropped(self, keys: Sequence[ChunkKey]) -> None:
        self._noted.extend(key.hash for key in keys)
        self.total += len(keys)

    def since(self, number: int) -> bytes:
        """Packed keys of those after the first `number`; the last MOST_NOTED of them."""
        fresh = min(self.total - number, len(self._noted))
        return b"".join(islice(self._noted, len(self._noted) - fresh, None)) if fresh else b""
