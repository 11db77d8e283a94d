"""What the owner of a node's host memory holds for the loads of requests that are about to be scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex, RankKeys
from lwkv.keys import ChunkKey
from lwkv.shared_host.client.promises import NodePromise, Promised

KEPT_S = 1.0
"""Seconds that a promise is kept for a request that is not scheduled; then it is looked up again."""

SHARE_KEPT = 16
"""What is kept for requests that were not scheduled is no more than one part in so many of the memory."""


class Promiser(Protocol):
    """See OwnerPromises."""

    def promise(self, first: int, takers: Sequence[tuple[str, Sequence[ChunkKey]]]) -> NodePromise | None: ...

    def give(self, promise: NodePromise, first: int, end: int) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class OpenPromise:
    """What is promised to one request.

    Attributes:
        made: what the owner said; None where it did not answer.
        first, end: the chunks that were asked for.
        since: when that was.
        after: changes that the index had learnt by then, or has since without any about these chunks.
        is_asked: whether the request was asked about in this pass of vLLM's scheduler.
        names: hashes of all its chunks; none before they were needed.
    """

    made: NodePromise | None
    first: int
    end: int
    since: float
    after: int
    is_asked: bool = True
    names: frozenset[bytes] = frozenset()

    @property
    def num_chunks(self) -> int:
        """Of all ranks together."""
        ranks = () if self.made is None else self.made.promised
        return sum(sum(map(bool, own.pinned.lengths)) for own in ranks if own is not None)

    def has(self, chunk: int) -> bool:
        """Whether a chunk is held for all ranks that have the owner's memory."""
        ranks = () if self.made is None else self.made.promised
        lengths = [own.pinned.lengths for own in ranks if own is not None]
        at = chunk - self.first
        return self.made is not None and all(at < len(own) and own[at] > 0 for own in lengths)


class NodePromises:
    """Asks the owner when a request is looked up, and has it hold for all ranks what it finds.

    So nothing that is promised to vLLM is gone when it is loaded, and the loads send no message before their
    first copy. A promise is given to the ranks with the orders of the pass in which the request is scheduled.
    If it is not scheduled in that pass, what was promised ends, or stays for KEPT_S if it is little.
    """

    def __init__(self, owner: Promiser, index: ChunkIndex) -> None:
        self._owner = owner
        self._index = index
        self._open: dict[str, OpenPromise] = {}

    def look_up(self, request_id: str, keys: RankKeys, first: int) -> None:
        """Have the chunks of a prompt from number `first` on held, and the index know which there are."""
        before, end = self._open.get(request_id), len(keys[0]) if keys else 0
        if before is not None and self._still_counts(before, keys, first, end):
            before.is_asked = True
            return
        self.leave(request_id)
        takers = self._index.takers(keys)
        if not takers:
            return
        made = self._owner.promise(first, takers)
        self._index.learn_owner(keys, None if made is None else made.there)
        self._open[request_id] = OpenPromise(made, first, end, self._index.clock(), self._index.changes)

    def num_held(self, request_id: str, chunks: range, in_host: Sequence[bool]) -> int:
        """How many leading ones of `chunks` are held, of those that are in host memory.

        Args:
            in_host: for each whether it is in that of every rank, as far as is known.
        """
        promise = self._open.get(request_id)
        if promise is None:
            return len(chunks)
        missing = (i for i, chunk in enumerate(chunks) if in_host[i] and not promise.has(chunk))
        return next(missing, len(chunks))

    def give(self, request_id: str, chunks: range) -> Sequence[Promised | None]:
        """What each rank is to take over of the chunks that a request loads; none where it pins by itself."""
        promise = self._open.pop(request_id, None)
        if promise is None or promise.made is None:
            return ()
        first, end = chunks.start - promise.first, chunks.stop - promise.first
        if first < 0 or not self._owner.give(promise.made, first, end):
            return ()
        return [None if own is None else own.part(first, end) for own in promise.made.promised]

    def end_pass(self) -> None:
        """A pass of vLLM's scheduler has ended: what was not given in it ends, or is little and stays."""
        room = self._index.most_chunks // SHARE_KEPT
        for request_id, promise in list(self._open.items()):
            if promise.is_asked and self._is_young(promise) and promise.num_chunks <= room:
                promise.is_asked = False
                room -= promise.num_chunks
            else:
                self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """End what is promised to a request, if anything is."""
        promise = self._open.pop(request_id, None)
        if promise is not None and promise.made is not None:
            self._owner.give(promise.made, 0, 0)

    def clear(self) -> None:
        """End all promises."""
        for request_id in list(self._open):
            self.leave(request_id)

    def close(self) -> None:
        self.clear()
        self._owner.close()

    def _still_counts(self, promise: OpenPromise, keys: RankKeys, first: int, end: int) -> bool:
        """Whether what was promised to a request is all that can be now, as far as is known."""
        if promise.first > first or promise.end != end or not self._is_young(promise):
            return False
        if promise.made is not None and promise.made.is_over:
            return False
        if promise.after != self._index.changes:
            promise.names = promise.names or frozenset(key.hash for own in keys for key in own)
            if self._index.has_news(promise.names, promise.after):
                return False
            promise.after = self._index.changes
        return True

    def _is_young(self, promise: OpenPromise) -> bool:
        return self._index.clock() - promise.since < KEPT_S
