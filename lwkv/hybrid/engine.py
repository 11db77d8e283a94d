"""Several groups of caches in one engine: an engine a group, over one pool of pages and one host tier."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from lwkv.config.settings import Config
from lwkv.connectors import PagedConnector
from lwkv.engine import CacheEngine
from lwkv.hybrid.group import Group, chain_name, kind_namespace, namespace_of, open_connector
from lwkv.hybrid.group_tier import GroupTier
from lwkv.hybrid.host_tier import HybridHostTier, KindShape, KindWatcher
from lwkv.hybrid.loads_apart import LoadsApart
from lwkv.hybrid.lower_kinds import KindPages, LowerKinds
from lwkv.hybrid.page_size import choose_pieces
from lwkv.hybrid.ranges import Load, Pieces, Store
from lwkv.hybrid.refusals import group_config, refuse_settings
from lwkv.hybrid.room import Room
from lwkv.hybrid.units import Reach, UnitKey
from lwkv.kinds import ChunkSize, Kind
from lwkv.layouts.registered_caches import device_of
from lwkv.platforms import Platform, detect_platform
from lwkv.platforms.host_limits import read_limits
from lwkv.pool.host_pool import HostPool
from lwkv.pool.memory_limits import check_memory
from lwkv.request import KeyedSlots
from lwkv.storage.host_tier import Chunk
from lwkv.storage.registry import tier_urls
from lwkv.telemetry.timeline import Timeline

log = logging.getLogger(__name__)

STATE_SHARE = 0.25
"""Of host memory, that states take at most."""
START_LOCKING_S = 1.0


@dataclass(eq=False)
class Pin:
    """All that a request needs to go on somewhere, in host memory until `HybridEngine.unpin`."""

    chunks: list[Chunk]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> list[Chunk]:
        """The chunks, once; none after that."""
        with self._lock:
            chunks, self.chunks = self.chunks, []
            return chunks


class HybridEngine:
    """Keeps what several kinds of layers have of prompts, and brings it back.

    Each group of layers has a CacheEngine. All share host memory: one size of pages, one order of eviction.
    And they share the tiers below it, which `config` names.
    Methods come from the thread that runs the forward pass; `pin`, `unpin` and `stats` may come from any.

    Args:
        config: its `chunk_size` does not count.
        kinds: by number. groups: in the order of the block tables, those of all kinds.
        chunk_size: for all kinds, see choose_chunk_size.
        timeline, lock_memory: as CacheEngine's.

    Attributes:
        chain_name: what the hashes of chunks are made with, the same on all ranks: the namespace for
            `chunk_keys`, with `chunk_size`.
        chunk_size: tokens.
        layer_of: the group of each layer, by name.
        chunk_pages: by the number of a kind, pages of `page_stride` bytes that a chunk takes in all layers.
        kind_pages: by the number of a kind, how lower tiers have its chunks.
        page_format: for people.
        lower: the tiers below host memory; None for none.

    Raises:
        ConfigError: settings that do not work with several kinds, too little host memory, or kinds that do
            not describe the caches. LayoutError: as describe_layers.
    """

    def __init__(
        self,
        config: Config,
        kinds: Sequence[Kind],
        groups: Sequence[Group],
        chunk_size: ChunkSize,
        platform: str | Platform | None = None,
        timeline: Timeline | None = None,
        lock_memory: bool = True,
    ) -> None:
        refuse_settings(config)
        self.config, self.kinds, self.groups, self.chunk_size = config, kinds, groups, chunk_size.tokens
        self.chain_name = chain_name(groups[0].metadata, kinds, self.chunk_size)
        self.layer_of = {
            name: group_number for group_number, group in enumerate(groups) for name in group.caches
        }
        if isinstance(platform, str | None):
            platform = detect_platform(platform, device_of(groups[0].caches))
        connectors = self._cut_all(platform)
        self.chunk_pages = self._count_pages(connectors)
        self._reserve(platform)
        self.kind_pages = self._describe_pages(connectors)
        formats = zip(groups, connectors, strict=True)
        texts = dict.fromkeys(f"{kinds[group.kind].name}: {made.page_format}" for group, made in formats)
        self.page_format = "; ".join(texts)
        self.engines: list[CacheEngine] = []
        self.lower: LowerKinds | None = None
        with ExitStack() as undo:
            undo.callback(self.close, 0.0)
            self._room.require_least()
            self._pool.reserve(config.reserve_bytes)
            PagedConnector.share_lanes(connectors)
            if tier_urls(config):
                self.lower = LowerKinds(config, self._pool, self._tier, self.kind_pages, self.page_format)
            for group_number, connector in enumerate(connectors):
                self.engines.append(self._open(group_number, connector, timeline))
            undo.pop_all()
        if lock_memory:
            self.wait_for_memory(START_LOCKING_S)
        log.info("%s; %s", chunk_size.words(), self._describe())

    @property
    def page_stride(self) -> int:
        """Bytes of host memory that a page takes."""
        return self._pool.page_stride

    @property
    def page_bytes(self) -> int:
        """Usable bytes of a page."""
        return self._pool.page_bytes

    @property
    def max_pages(self) -> int:
        """Pages that host memory has room for."""
        return self._pool.max_pages

    @property
    def watcher(self) -> KindWatcher | None:
        """Who is called for chunks of a kind that become whole, or go."""
        return self._tier.watcher

    @watcher.setter
    def watcher(self, watcher: KindWatcher | None) -> None:
        self._tier.watcher = watcher

    def pin(self, hashes: Sequence[bytes], local: int, boundary: int) -> Pin | None:
        """Pin what a request needs to go on at `boundary`, and note the hit; None if some of it is not here.

        Args:
            hashes: of the prompt's chunks. local: tokens that the engine has itself.
        """
        units = [
            UnitKey(hashes[chunk], kind)
            for kind, pieces in self._by_kind().items()
            for chunk in pieces.chunks_needed(boundary, local)
        ]
        chunks = self._tier.pin_hit(units, self._full_units(hashes[: local // self.chunk_size]))
        return None if chunks is None else Pin(chunks)

    def unpin(self, pin: Pin) -> None:
        """End a pin; idempotent."""
        self._tier.unpin(pin.take())

    def loads_of(self, loads: Sequence[Load]) -> list[list[KeyedSlots | None]]:
        """For each group what it loads of each request, or None."""
        return [self._loads_of_group(group_number, loads) for group_number in range(len(self.groups))]

    def stores_of(self, stores: Sequence[Store]) -> list[list[KeyedSlots]]:
        """For each group what it stores: only as much as there is room for, of all kinds."""
        if not stores:
            return [[] for _ in self._pieces]
        fitting = self._room.fit(stores)
        found = [
            [pieces.store(store, store.tables[group_number]) for store in fitting]
            for group_number, pieces in enumerate(self._pieces)
        ]
        return [[keyed for keyed in own if keyed is not None] for own in found]

    def load_now(self, loads: Sequence[Load]) -> list[bool]:
        """Load all layers, in front of the current stream's next work; whether all of each load is queued."""
        apart = self.load_apart(loads)
        apart.wait()
        return apart.loaded

    def load_apart(self, loads: Sequence[Load]) -> LoadsApart:
        """Queue all layers, behind what the current stream holds; nothing is made to wait for them.

        Of the groups those with most chunks first: while they travel, the others are made ready.
        """
        connector = self.engines[0].connector
        apart = LoadsApart(connector.platform, connector.device, [True] * len(loads), [])
        for group_number in self._by_chunks(loads):
            found = self._loads_of_group(group_number, loads)
            asked = {i: keyed for i, keyed in enumerate(found) if keyed is not None}
            if asked:
                retrieval = self.engines[group_number].retrieval([*asked.values()], sync=False)
                retrieval.open()
                masks, arrival = retrieval.finish_apart()
                if arrival is not None:
                    apart.arrivals.append(arrival)
                for i, mask in zip(asked, masks, strict=True):
                    apart.loaded[i] &= is_all_loaded(asked[i], int(mask.sum()))
        return apart

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Block until all stores and loads in flight have ended, and lower tiers have all that was stored.

        False as CacheEngine.flush.
        """
        deadline = time.monotonic() + timeout_s
        ended = [engine.flush(deadline - time.monotonic()) for engine in self.engines]
        if self.lower is not None:
            ended.append(self.lower.flush(deadline - time.monotonic()))
        return all(ended)

    def wait_for_memory(self, timeout_s: float) -> bool:
        """As CacheEngine's, for the memory of all."""
        return self.engines[0].wait_for_memory(timeout_s)

    def counts(self) -> dict[str, int]:
        """Totals since the start, of all groups together."""
        totals: Counter[str] = Counter()
        for engine in self.engines:
            totals.update(engine.counts())
        if self.lower is not None:
            totals.update(self.lower.counts())
        return dict(totals) | {"chunks_evicted": self._tier.evicted}

    def stats(self) -> dict[str, int]:
        """`counts`, and what is held now, as CacheEngine.stats. A chunk counts once for each kind."""
        each = [engine.stats() for engine in self.engines]
        writes = sum(stats["writes_in_flight"] for stats in each)
        lower = {} if self.lower is None else self.lower.gauges()
        return each[0] | lower | self.counts() | {"writes_in_flight": writes}

    def close(self, timeout_s: float = 30.0) -> None:
        """As CacheEngine's."""
        deadline = time.monotonic() + timeout_s
        if self.lower is not None:
            self.flush(timeout_s)  # the first engine that closes closes the pool
            self.lower.close(deadline - time.monotonic())
        for engine in self.engines:
            engine.close(max(0.0, deadline - time.monotonic()))
        self._tier.close()
        self._pool.close()

    def __enter__(self) -> HybridEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loads_of_group(self, group_number: int, loads: Sequence[Load]) -> list[KeyedSlots | None]:
        return [self._pieces[group_number].load(load, load.tables[group_number]) for load in loads]

    def _by_chunks(self, loads: Sequence[Load]) -> list[int]:
        """The groups, those first that need most chunks for these loads."""
        needed = {
            kind: sum(len(pieces.chunks_needed(load.boundary, load.local)) for load in loads)
            for kind, pieces in self._by_kind().items()
        }
        numbers = range(len(self.groups))
        return sorted(numbers, key=lambda group_number: needed[self.groups[group_number].kind], reverse=True)

    def _by_kind(self) -> dict[int, Pieces]:
        """The pieces of one group of each kind that this rank has."""
        return {group.kind: pieces for group, pieces in zip(self.groups, self._pieces, strict=True)}

    def _full_units(self, hashes: Sequence[bytes]) -> list[UnitKey]:
        return [UnitKey(chunk, kind) for kind in self._room.full_kinds for chunk in hashes]

    def _cut_all(self, platform: Platform) -> list[PagedConnector]:
        """Choose a size of pages, and connect each group for pieces that fit it."""
        here = sorted({group.kind for group in self.groups})
        page_bytes, tokens = choose_pieces([self.kinds[kind_number] for kind_number in here], self.chunk_size)
        self._page_bytes, self._piece_tokens = page_bytes, dict(zip(here, tokens, strict=True))
        connectors = [self._connect(group, page_bytes, platform) for group in self.groups]
        self._pieces = [
            self._cut(group_number, connector) for group_number, connector in enumerate(connectors)
        ]
        return connectors

    def _reserve(self, platform: Platform) -> None:
        """Make what all groups share: the pool of pages, what is in it, and what there is room for."""
        config, shapes = self.config, self._shapes()
        check_memory(config, read_limits())
        on_demand = platform.device_type == "cpu"
        self._pool = HostPool(
            platform, self._page_bytes, config.max_host_bytes, config.slab_bytes, on_demand=on_demand
        )
        self._tier = HybridHostTier(self._pool, shapes, int(STATE_SHARE * self._pool.max_pages))
        self._room = Room(self._pool, self._tier, self.chunk_size, self._by_kind(), self.chunk_pages, shapes)

    def _connect(self, group: Group, page_bytes: int, platform: Platform) -> PagedConnector:
        kind = self.kinds[group.kind]
        slots = 1 if kind.form == "state" else self._piece_tokens[group.kind]
        config = group_config(self.config, slots, page_bytes)
        return open_connector(config, group, kind, page_bytes, platform)

    def _cut(self, group_number: int, connector: PagedConnector) -> Pieces:
        group = self.groups[group_number]
        kind = self.kinds[group.kind]
        namespace = namespace_of(group, kind, self.chunk_size, connector.page_format)
        return Pieces(kind, self.chunk_size, self._piece_tokens[group.kind], namespace, group_number)

    def _shapes(self) -> dict[int, KindShape]:
        groups = Counter(group.kind for group in self.groups)
        return {
            kind_number: KindShape(
                groups[kind_number] * len(pieces.namespaces),
                reach_of(self.kinds[kind_number], self.chunk_size),
            )
            for kind_number, pieces in self._by_kind().items()
        }

    def _count_pages(self, connectors: Sequence[PagedConnector]) -> dict[int, int]:
        pages: Counter[int] = Counter()
        for group, pieces, connector in zip(self.groups, self._pieces, connectors, strict=True):
            pages[group.kind] += connector.num_layers * len(pieces.namespaces)
        return dict(pages)

    def _describe_pages(self, connectors: Sequence[PagedConnector]) -> dict[int, KindPages]:
        found = {}
        for kind in sorted({group.kind for group in self.groups}):
            numbers = [group_number for group_number, group in enumerate(self.groups) if group.kind == kind]
            names = [name for group_number in numbers for name in self._pieces[group_number].namespaces]
            pages = [connectors[n].num_layers for n in numbers for _ in self._pieces[n].namespaces]
            of_kind = self.groups[numbers[0]], self.kinds[kind]
            namespace = kind_namespace(*of_kind, self.chunk_size, names, self._page_bytes)
            if pages:
                found[kind] = KindPages(namespace, pages, self.kinds[kind].form == "full")
        return found

    def _open(self, group_number: int, connector: PagedConnector, timeline: Timeline | None) -> CacheEngine:
        group, pieces = self.groups[group_number], self._pieces[group_number]
        earlier = sum(other.kind == group.kind for other in self.groups[:group_number])
        first = earlier * len(pieces.namespaces)
        pass_on = None if self.lower is None else self.lower.keep
        tier = GroupTier(self._tier, group.kind, pieces.namespaces, first, pass_on)
        return CacheEngine(
            connector.config,
            group.metadata,
            connector,
            timeline=timeline,
            lock_memory=False,
            memory=(self._pool, tier),
        )

    def _describe(self) -> str:
        kinds = ", ".join(f"{kind.name} ({kind.num_layers} layers)" for kind in self.kinds)
        return (
            f"{len(self.groups)} groups of {len(self.kinds)} kinds of caches: {kinds}; host memory: at most "
            f"{self._pool.capacity_bytes / 2**30:.2f} GiB in pages of {self._pool.page_stride} bytes for all"
        )


def reach_of(kind: Kind, chunk_size: int) -> Reach:
    """How far before a boundary a request needs a kind."""
    if kind.form == "full":
        return Reach(None)
    return Reach(
        1 if kind.form == "state" else max(1, -(-(kind.span - 1) // chunk_size)), kind.form == "state"
    )


def is_all_loaded(keyed: KeyedSlots, num_tokens: int) -> bool:
    """Whether so many tokens are all that were to be loaded."""
    return num_tokens == int((keyed.slots[keyed.first :] >= 0).sum())
