"""What the owner of a node's memory knows and decides; it answers the requests of clients."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.shared_host.numa import UNKNOWN
from lwkv.shared_host.owner.chunk_slabs import ChunkSlabs
from lwkv.shared_host.owner.evictions import Evictions
from lwkv.shared_host.owner.holds import Holds
from lwkv.shared_host.owner.pages import NodePages
from lwkv.shared_host.owner.slabs import SlabOwners
from lwkv.shared_host.protocol import (
    MOST_BYTES,
    NO_KEY,
    Message,
    Op,
    ProtocolError,
    State,
    pack_numbers,
    pack_spills,
    read_keys,
    read_numbers,
    read_spills,
)
from lwkv.storage.host_tier import Chunk, HostTier
from lwkv.storage.prefix_order import leading

_NO_PAGES: Int64s = np.zeros(0, np.int64)

MOST_PINNED = MOST_BYTES // 16
"""Numbers that one reply has for pages and what is beside them: half of a message. Chunks beyond these are
not found."""


class Client:
    """One client as its index sees it: what it holds, and of which evictions it knows.

    Attributes:
        near: pages [first, end) that it is to have first; None for any.
        name, number: by which it is promised chunks, and by which it knows that it was this client.
        end: of the pages that it can use, as far as it has said.
        is_gone: whether it holds nothing any more, for good.
    """

    def __init__(
        self, index: NodeIndex, near: tuple[int, int] | None = None, name: str = "", number: int = 0
    ) -> None:
        self.index = index
        self.near = near
        self.name = name
        self.number = number
        self.end = 0
        self.is_gone = False
        self.holds = Holds(index.pages)
        self._evictions = index.evictions
        self._known = index.evictions.total

    def news(self) -> bytes:
        """Packed keys of chunks that were evicted since the last call."""
        news, self._known = self._evictions.since(self._known), self._evictions.total
        return news


class PromiseAnswer(NamedTuple):
    """The pages of each chunk that a client has been promised, and the parts of the reply that say so."""

    chunks: Sequence[Int64s]
    parts: Sequence[bytes]


class NodeIndex:
    """Chunks in the memory of a node with pages of one size, by the rules of the host tier. For one thread.

    A chunk whose pages a client holds is not evicted. Raises ProtocolError for requests that are none.

    Args:
        slabs: that indexes of several sizes share; None where all pages are this one's.
    """

    def __init__(self, num_pages: int, span: int, slabs: SlabOwners | None = None) -> None:
        self.pages = NodePages(num_pages, span, by_slab=slabs is not None)
        self.evictions = Evictions()
        self.tier = HostTier(self.pages)
        self.tier.watcher = self
        self._span = span
        self._slabs = slabs
        self._chunk_slabs = ChunkSlabs()
        self._left: list[Callable[[], object]] = []

    def client(self, node: int = UNKNOWN, name: str = "", number: int = 0) -> Client:
        """Make a new client, which holds nothing; of the NUMA node `node`."""
        slabs = None if self._slabs is None else self._slabs.near(node)
        near = None if slabs is None else (slabs[0] * self._span, slabs[1] * self._span)
        return Client(self, near, name, number)

    def kept(self, keys: Sequence[ChunkKey]) -> None:
        """Do nothing: whoever wants to know what is there asks."""

    def dropped(self, keys: Sequence[ChunkKey]) -> None:
        """Note that chunks were evicted."""
        self.evictions.dropped(keys)
        self._chunk_slabs.remove(keys)

    def give_up(self, slab: int) -> bool:
        """Evict what is in a slab, and have its pages no more; False where a client uses any of them."""
        keys = self._chunk_slabs.chunks_in(slab)
        first, end = self.pages.of_slab(slab)
        pages = _joined([self.tier.pages_of(key) for key in keys])
        pages = _joined([pages, *self.pages.spills_of(pages).values()])
        in_chunks = int(np.count_nonzero((pages >= first) & (pages < end)))
        # Others are reserved: a client writes them.
        if in_chunks != self.pages.num_used_in(slab):
            return False
        # The tier knows who else has a chunk's own pages, not what is beside them.
        if self.pages.shared(pages).any() or not self.tier.remove(keys):
            return False
        self.pages.remove_slab(slab)
        return True

    def handle(self, client: Client | None, request: Message) -> list[bytes] | None:
        """Do what a client asks, all of it; as `answer`."""
        try:
            return self.answer(client, request)
        finally:
            self.settle()

    def settle(self) -> None:
        """Do what `answer` left: before anything else is asked, and before the index is looked at."""
        left, self._left = self._left, []
        for work in left:
            work()

    def answer(self, client: Client | None, request: Message) -> list[bytes] | None:
        """Do what a client asks; None is one that has no pages, and may ask what is there.

        What the reply does not need is left for `settle`, which is called as soon as it is sent: the client
        waits with its first copy.

        Returns the parts of the reply behind the state, or None for a note.
        """
        parts = request.parts
        try:
            if request.op is Op.HAS:
                return [self._has(*parts)]
            if client is None:
                raise ProtocolError(f"got {request.op.name} of a client without pages")
            if request.op is Op.PIN:
                return self._pin(client, *parts)
            if request.op is Op.PIN_PREFIX:
                return self._pin_prefix(client, *parts)
            if request.op is Op.RESERVE:
                return self._reserve(client, *parts)
            self._note(client, request)
        except (TypeError, ValueError) as error:  # parts that are missing, or name what is not there
            raise ProtocolError(f"{request.op.name}: {error}") from error
        return None

    def promise(self, client: Client, keys: bytes, first: int, num_takers: int) -> PromiseAnswer:
        """Have a client hold what is there of a prompt's chunks from number `first` on, as if it had asked.

        Args:
            num_takers: clients of which the same reply says as much.
        """
        names = _keys(keys)
        found = self._below(client.end, self.tier.find(names))
        chunks = self._that_fit(found[first:], num_takers)
        self._left += [partial(self.tier.use, names), partial(self._use_slabs, names)]
        there = bytes(chunk is not None for chunk in found)
        pages = [_NO_PAGES if chunk is None else chunk.pages for chunk in chunks]
        return PromiseAnswer(pages, [there, *self._hold(client, chunks)])

    def state(self) -> State:
        """What every reply says of all."""
        in_use = self.pages.num_there - self.pages.num_free
        return State(len(self.tier), in_use, self.tier.evicted)

    def _note(self, client: Client, note: Message) -> None:
        if note.op is Op.COMMIT:
            self._commit(client, *note.parts)
        elif note.op is Op.FREE:
            pages, counts = map(read_numbers, note.parts)
            client.holds.end(pages, counts)
        elif note.op is Op.USE:
            names = _keys(*note.parts)
            self.tier.use(names)
            self._use_slabs(names)
        elif note.op is Op.USABLE:
            client.end = self._usable(*note.parts)
        else:
            raise ProtocolError(f"got {note.op.name}, which is no request to an owner")

    def _has(self, limit: bytes, keys: bytes) -> bytes:
        if self._usable(limit) >= self.pages.num_pages:
            return bytes(self.tier.contains(_keys(keys)))
        chunks = self._below(self._usable(limit), self.tier.find(_keys(keys)))
        return bytes(chunk is not None for chunk in chunks)

    def _pin(self, client: Client, limit: bytes, keys: bytes) -> list[bytes]:
        names = _keys(keys)
        self._left += [partial(self.tier.use, names), partial(self._use_slabs, names)]
        return self._hold(client, self._that_fit(self._below(self._usable(limit), self.tier.find(names))))

    def _pin_prefix(self, client: Client, limit: bytes, keys: bytes) -> list[bytes]:
        found = self.tier.find(_keys(keys))
        chunks = leading(found)
        below = self._below(self._usable(limit), [*chunks, *[None] * (len(found) - len(chunks))])
        return self._hold(client, self._that_fit(below))

    def _hold(self, client: Client, chunks: Sequence[Chunk | None]) -> list[bytes]:
        """Have a client hold chunks once `settle` is called; what the reply says of them."""
        found = [chunk for chunk in chunks if chunk is not None]
        pages = _joined([chunk.pages for chunk in found])
        self._left.append(partial(_add_holds, client, found, pages))
        lengths = [0 if chunk is None else len(chunk.pages) for chunk in chunks]
        return [pack_numbers(lengths), pack_numbers(pages), pack_spills(self.pages.spills_of(pages))]

    def _that_fit(self, chunks: list[Chunk | None], num_parts: int = 1) -> list[Chunk | None]:
        """The first of `chunks`, None for the others: those whose pages one of a reply's parts can name."""
        count = self._numbers_for if self.pages.has_spills else _num_pages
        ends = list(accumulate(0 if chunk is None else count(chunk) for chunk in chunks))
        most = MOST_PINNED // num_parts
        if not ends or ends[-1] <= most:
            return chunks
        fit = bisect_right(ends, most)
        return [*chunks[:fit], *[None] * (len(chunks) - fit)]

    def _numbers_for(self, chunk: Chunk) -> int:
        """How many numbers a reply has for a chunk; see `pack_spills`."""
        beside = self.pages.spills_of(chunk.pages)
        return len(chunk.pages) + sum(2 + len(spill) for spill in beside.values())

    def _reserve(self, client: Client, limit: bytes, wanted: bytes) -> list[bytes]:
        end, (count,) = self._usable(limit), read_numbers(wanted).tolist()
        if count < 1:
            raise ProtocolError(f"got {count} pages to reserve; allowed: 1 or more")
        evicts = self.pages.num_pages <= end
        pages = self._take(count, end, client.near)
        # Nothing goes where that cannot be of use.
        if pages is None and evicts and count <= self.pages.num_pages and self._make_room(count):
            pages = self.pages.take(count, end, client.near)
        if pages is None:
            room = self.pages.free_below(end) + (self.tier.evictable() if evicts else 0)
            return [b"", pack_numbers([room])]
        client.holds.take_over(pages)
        return [pack_numbers(pages), b""]

    def _take(self, count: int, end: int, near: tuple[int, int] | None) -> Int64s | None:
        """Pages that are free, in slabs that nobody has where those of this index have too few.

        As many as can be are near.
        """
        if near is not None:
            last = min(near[1], end)
            while self.pages.free_below(last) - self.pages.free_below(near[0]) < count:
                if not self._add_slab(last, near[0]):
                    break
        pages = self.pages.take(count, end, near)
        while pages is None and self._add_slab(end):
            pages = self.pages.take(count, end, near)
        return pages

    def _add_slab(self, end: int, first: int = 0) -> bool:
        """Have one more slab, that nobody has, of whole pages [first, end); False where there is none."""
        slabs = self._slabs
        if slabs is None:
            return False
        whole = len(slabs) if end >= self.pages.num_pages else end // self._span
        slab = slabs.take(self, whole, first // self._span)
        if slab is not None:
            self.pages.add_slab(slab)
        return slab is not None

    def _make_room(self, count: int) -> bool:
        """Have `count` pages free: for it go slabs of other sizes that were used longest ago, then chunks."""
        self._take_slabs(count, only_older=True)
        if self.tier.evict(count - self.pages.num_free):
            return True
        self._take_slabs(count, only_older=False)
        return self.tier.evict(count - self.pages.num_free)

    def _take_slabs(self, count: int, only_older: bool) -> None:
        while self._slabs is not None and self.pages.num_free < count:
            slab = self._slabs.take_oldest(self, only_older)
            if slab is None:
                return
            self.pages.add_slab(slab)

    def _use_slabs(self, keys: Sequence[ChunkKey]) -> None:
        if self._slabs is not None:
            self._slabs.use(self._chunk_slabs.of(keys))

    def _usable(self, limit: bytes) -> int:
        """The end of the pages that a client can use."""
        (end,) = read_numbers(limit).tolist()
        if end < 0:
            raise ProtocolError(f"got {end} pages that a client can use; allowed: 0 or more")
        return int(end)

    def _below(self, end: int, chunks: Sequence[Chunk | None]) -> list[Chunk | None]:
        """Those whose pages, and what is beside them, are all below page `end`; the others None."""
        if end >= self.pages.num_pages:
            return list(chunks)
        return [chunk if chunk is not None and self._last_page(chunk) < end else None for chunk in chunks]

    def _last_page(self, chunk: Chunk) -> int:
        beside = self.pages.spills_of(chunk.pages).values()
        return int(_joined([chunk.pages, *beside]).max())

    def _commit(
        self, client: Client, keys: bytes, parents: bytes, lengths: bytes, pages: bytes, spills: bytes
    ) -> None:
        names, before, sizes = _keys(keys), _parents(parents), read_numbers(lengths)
        numbers, beside = read_numbers(pages), read_spills(spills)
        are_sizes = ((sizes >= 1) & (sizes <= len(numbers))).all() and sizes.sum() == len(numbers)
        if not (are_sizes and len(names) == len(before) == len(sizes)):
            raise ProtocolError(f"COMMIT of {len(names)} chunks with {len(numbers)} pages")
        client.holds.require(_joined([numbers, *beside.values()]))
        self._require_new(numbers, beside)
        self.pages.share(numbers)
        self.pages.add_spills(beside)
        ends = np.cumsum(sizes).tolist()
        starts = [0, *ends[:-1]]
        chunks = [Chunk(numbers[start:end]) for start, end in zip(starts, ends, strict=True)]
        known = self.tier.contains(names)
        self.tier.insert(names, chunks, before)
        self._note_slabs([key for key, there in zip(names, known, strict=True) if not there], bool(beside))
        self._use_slabs(names)

    def _note_slabs(self, keys: Sequence[ChunkKey], have_spills: bool) -> None:
        """Note where chunks are that are new; whether pages may be beside theirs."""
        for key in dict.fromkeys(keys) if self._slabs is not None else ():
            pages = self.tier.pages_of(key)
            if have_spills:
                pages = _joined([pages, *self.pages.spills_of(pages).values()])
            self._chunk_slabs.add(key, (pages // self._span).tolist())

    def _require_new(self, pages: Int64s, beside: Mapping[int, Int64s]) -> None:
        """Raise ProtocolError unless nothing has these pages but one hold of the client that commits them.

        Two chunks with the same page could never be evicted.
        """
        if self.pages.shared(_joined([pages, *beside.values()])).any():
            raise ProtocolError("COMMIT of pages that are of a chunk already, or held by others")
        if not set(beside) <= set(pages.tolist()) or self.pages.spills_of(pages):
            raise ProtocolError(
                "COMMIT with pages beside others that are not committed, or have others beside them"
            )


def _num_pages(chunk: Chunk) -> int:
    return len(chunk.pages)


def _add_holds(client: Client, chunks: Sequence[Chunk], pages: Int64s) -> None:
    """Have a client hold `pages`, those of `chunks`."""
    # A key that is named twice is found twice.
    is_once = len(set(map(id, chunks))) == len(chunks)
    for together in [pages] if is_once else [chunk.pages for chunk in chunks]:
        client.holds.add(together)


def _joined(pages: Sequence[Int64s]) -> Int64s:
    return np.concatenate(pages) if pages else np.zeros(0, np.int64)


def _keys(keys: bytes) -> list[ChunkKey]:
    # The whole packed key is the hash: a client's namespace is in its first half.
    return [ChunkKey("", key) for key in read_keys(keys)]


def _parents(keys: bytes) -> list[ChunkKey | None]:
    return [None if key == NO_KEY else ChunkKey("", key) for key in read_keys(keys)]
