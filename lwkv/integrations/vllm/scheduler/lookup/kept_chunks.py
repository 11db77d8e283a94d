"""Which chunks are in one rank's host memory, as far as the scheduler has heard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class KeptChunks:
    """Hashes of chunks.

    Args:
        most: chunks that the memory has room for; of more than these, those heard of longest ago are
            forgotten. A rank does not report which chunks of others are evicted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: dict[bytes, None] = {}  # heard of longest ago first

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Sequence[bytes]) -> None:
        """Note that chunks are there; where not all have room, the first ones are."""
        for name in reversed(names):
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > self._most:
            del self._names[next(iter(self._names))]

    def remove(self, names: Iterable[bytes]) -> None:
        """Note that chunks are not there."""
        for name in names:
            self._names.pop(name, None)

    def clear(self) -> None:
        self._names.clear()
