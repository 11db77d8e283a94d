"""The hits of a plain cache of full attention and states, by rule 2."""

from __future__ import annotations

from collections.abc import Collection

Prefix = tuple[int, ...]


class StateOracle:
    """A cache with room for so many pages that drops what was used longest ago, of a prompt its end first.

    A prompt goes on at the largest boundary up to which every chunk of full attention is there, and whose
    state is there. States take a quarter of the room at most.

    Args:
        chunk: tokens. full_pages, state_pages: that a chunk, and the states of a boundary, take.
    """

    def __init__(self, room: int, chunk: int, full_pages: int, state_pages: int) -> None:
        self._room, self._chunk = room, chunk
        self._full_pages, self._state_pages = full_pages, state_pages
        self._full: dict[Prefix, int] = {}
        self._states: dict[Prefix, int] = {}
        self._now = 0

    def find(self, ids: list[int]) -> int:
        """With how many of its tokens a prompt can go on, which has at least one to compute."""
        boundary = 0
        for end in range(self._chunk, len(ids), self._chunk):
            if tuple(ids[:end]) not in self._full:
                break
            if tuple(ids[:end]) in self._states:
                boundary = end
        return boundary

    def store(self, ids: list[int], found: int, boundaries: Collection[int]) -> None:
        """Note that a prompt went on at `found`, and keep it, with the states of these boundaries."""
        self._now += 1
        self._full |= dict.fromkeys(
            (tuple(ids[:end]) for end in range(self._chunk, len(ids) + 1, self._chunk)), self._now
        )
        self._states |= dict.fromkeys((tuple(ids[:end]) for end in {found, *boundaries} - {0}), self._now)
        while self._state_pages * len(self._states) > self._room // 4:
            del self._states[min(self._states, key=lambda at: (self._states[at], -len(at)))]
        while self._full_pages * len(self._full) + self._state_pages * len(self._states) > self._room:
            self._evict()

    def _evict(self) -> None:
        """Drop what was used longest ago: a state, or a chunk with nothing behind it, and its state."""
        inside = {prefix[: -self._chunk] for prefix in self._full}
        ends = [(used, -len(end), 1, end) for end, used in self._full.items() if end not in inside]
        states = [(used, -len(at), 0, at) for at, used in self._states.items()]
        *_, is_full, victim = min([*ends, *states])
        self._states.pop(victim, None)
        if is_full:
            del self._full[victim]
