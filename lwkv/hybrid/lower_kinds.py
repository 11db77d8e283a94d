"""The tiers below host memory, which have the chunks of all kinds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from lwkv.config.settings import Config
from lwkv.hybrid.host_tier import HybridHostTier, WholeUnit
from lwkv.hybrid.kind_tier import KindTier
from lwkv.keys import ChunkKey
from lwkv.pool.host_pool import HostPool
from lwkv.storage import StorageManager, TierSetup
from lwkv.storage.guard import Guard
from lwkv.storage.host_tier import Chunk
from lwkv.storage.lower_tiers import LowerTiers
from lwkv.storage.prefetch import Prefetches
from lwkv.storage.prompt_part import PromptRows
from lwkv.storage.registry import open_tiers
from lwkv.telemetry.counters import Counters


@dataclass(frozen=True)
class KindPages:
    """A chunk of a kind as lower tiers have it, whole or not at all: one key, and so many pages.

    Attributes:
        namespace: of its keys.
        pieces: how many pages each piece has, in order.
        is_full: whether it is of full attention.
    """

    namespace: str
    pieces: Sequence[int]
    is_full: bool

    @property
    def num_pages(self) -> int:
        return sum(self.pieces)


class LowerKinds:
    """Lower tiers of a hybrid engine. They get each chunk of a kind when all of it is in host memory.

    A chunk of another kind is of no use without that of full attention: tiers that evict by themselves know
    it as one that comes behind that. All methods but `close` and `flush` return at once.

    Args:
        kinds: those that are kept, by number.

    Raises:
        ConfigError: as open_tiers.
    """

    def __init__(
        self,
        config: Config,
        pool: HostPool,
        tier: HybridHostTier,
        kinds: Mapping[int, KindPages],
        page_format: str,
    ) -> None:
        self._pool = pool
        self._counters = Counters()
        self._namespaces = {number: kind.namespace for number, kind in kinds.items()}
        setup = tier_setup(config, [*kinds.values()], pool.page_bytes, page_format, self._counters)
        tiers = open_tiers(setup)
        clock = time.monotonic
        guards = [Guard(each, pool, config.load_timeout_s, self._counters, clock) for each in tiers]
        write_back = config.write_policy == "write_back"
        self._lower = LowerTiers(guards, pool, write_back, rows_of([*kinds.values()]))
        self._storages = {
            kind.namespace: StorageManager(
                pool,
                kind.num_pages,
                counters=self._counters,
                host=KindTier(tier, number, kind.pieces),
                saves=False,
                lower=self._lower,
            )
            for number, kind in kinds.items()
        }
        (self._any, *_) = self._storages.values()
        self.prefetches = Prefetches(self._any)

    def keep(self, units: Sequence[WholeUnit]) -> None:
        """Have the tiers get chunks; takes over the references to their pages."""
        for unit in units:
            with ExitStack() as ending:
                ending.callback(self._pool.release, unit.pages)
                namespace = self._namespaces[unit.key.kind]
                key = ChunkKey(namespace, unit.key.hash)
                row = [] if unit.before is None else [ChunkKey(namespace, unit.before)]
                part = self._lower.part_of([*row, key])
                self._lower.keep(self._lower.guards, key, Chunk(unit.pages), part)

    def fetch(self, number: int, keys: Sequence[ChunkKey], first: int, pins: bool) -> None:
        """Bring chunks of one kind to host memory, as Prefetches.begin."""
        storage = self._storages.get(keys[0].namespace)
        if storage is not None:
            self.prefetches.begin(number, keys, first, pins, storage)

    def read_back_first(self) -> None:
        """As LowerTiers'."""
        self._lower.read_back_first()

    def unread_tiers(self) -> dict[str, float]:
        """As StorageManager's."""
        return self._any.unread_tiers()

    def read_times(self) -> dict[str, tuple[int, float]]:
        """As StorageManager's."""
        return self._any.read_times()

    def flush(self, timeout_s: float) -> bool:
        """As LowerTiers.flush."""
        return self._lower.flush(timeout_s)

    def counts(self) -> dict[str, int]:
        """As CacheEngine.counts, of these tiers."""
        totals = Counter(self._counters.totals())
        for guard in self._lower.guards:
            totals.update({f"{guard.name}_{name}": count for name, count in guard.meter.totals().items()})
        return dict(totals)

    def gauges(self) -> dict[str, int]:
        """What there is now in these tiers, as far as is known."""
        return {
            f"{guard.name}_{name}": number
            for guard in self._lower.guards
            for name, number in guard.gauges().items()
        }

    def close(self, timeout_s: float) -> bool:
        """Write what is to be written, and close the tiers; False if that takes over `timeout_s`."""
        self.prefetches.close()
        return self._lower.close(timeout_s)


def tier_setup(
    config: Config, kinds: Sequence[KindPages], page_bytes: int, page_format: str, counters: Counters
) -> TierSetup:
    """What tiers below host memory learn of the chunks of several kinds."""
    layers = {kind.namespace: kind.num_pages for kind in kinds}
    return TierSetup(config, kinds[0].num_pages, page_bytes, page_format, counters, layers)


def rows_of(kinds: Sequence[KindPages]) -> PromptRows:
    """How chunks of these kinds depend on others, see HybridHostTier: on full attention, or on nothing."""
    main = next((kind.namespace for kind in kinds if kind.is_full), None)
    return partial(_rows, main)


def _rows(main: str | None, keys: Sequence[ChunkKey]) -> Sequence[Sequence[ChunkKey]]:
    if not keys or keys[0].namespace == main:
        return (keys,)
    if main is None:
        return [[key] for key in keys]
    return [[ChunkKey(main, key.hash), key] for key in keys]
