"""Which chunks a worker has reported to the scheduler, and changes not yet reported."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

from lwkv.keys import ChunkKey
from lwkv.storage import StorageManager


class Presence:
    """Watches one engine's host tier. A chunk may be reported as stored before its bytes have arrived there.

    `kept` and `dropped` come from any thread, the rest from the one that runs the forward pass.
    """

    def __init__(self, storage: StorageManager) -> None:
        self._storage = storage
        self._changes: deque[tuple[bool, Sequence[ChunkKey]]] = deque()
        self._on_its_way: set[ChunkKey] = set()
        storage.host.watcher = self

    def kept(self, keys: Sequence[ChunkKey]) -> None:
        self._changes.append((True, keys))

    def dropped(self, keys: Sequence[ChunkKey]) -> None:
        self._changes.append((False, keys))

    @property
    def on_its_way(self) -> Set[ChunkKey]:
        """Chunks that were reported as stored and may not have arrived yet."""
        return self._on_its_way

    def changes(self, accepted: Sequence[ChunkKey]) -> tuple[list[bytes], list[bytes]]:
        """Hashes of chunks that came, and of those that went, since the last call.

        Args:
            accepted: chunks of a store that was accepted; those that memory was found for count as kept.
        """
        if not (self._changes or self._on_its_way or accepted):
            return [], []
        state: dict[ChunkKey, bool] = {}
        while self._changes:
            there, keys = self._changes.popleft()
            state.update(dict.fromkeys(keys, there))
        reported, self._on_its_way = self._on_its_way, set()
        doubtful = [key for key in dict.fromkeys([*reported, *accepted]) if key not in state]
        for key, kept in zip(doubtful, self._storage.is_kept(doubtful), strict=True):
            if kept is None:
                self._on_its_way.add(key)
            if kept is False or key not in reported:
                state[key] = kept is not False
        return (
            [key.hash for key, kept in state.items() if kept],
            [key.hash for key, kept in state.items() if not kept],
        )
