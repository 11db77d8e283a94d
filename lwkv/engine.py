"""The cache engine: what a serving engine calls to look up, retrieve and store."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch

from lwkv.background.completion_thread import CompletionThread
from lwkv.codecs import PageCheck
from lwkv.config.foreign_variables import warn_of_foreign_variables
from lwkv.config.settings import Config
from lwkv.connectors import CreateGPUConnector, LayoutHints, PagedConnector
from lwkv.errors import ClosedError, ConfigError
from lwkv.keys import ChunkKey, as_salts, as_token_ids, make_namespace
from lwkv.layouts.registered_caches import device_of
from lwkv.layouts.registration import Registration
from lwkv.metadata import CacheMetadata
from lwkv.pipeline.context import BatchContext
from lwkv.pipeline.generators import retrieve_steps, store_steps
from lwkv.pipeline.prompt_keys import PromptKeys
from lwkv.pipeline.retrieval import BatchRetrieval
from lwkv.pipeline.store import BatchStoring
from lwkv.platforms import Platform, detect_platform
from lwkv.platforms.host_limits import read_limits
from lwkv.pool.host_pool import HostPool
from lwkv.pool.memory_limits import check_memory
from lwkv.request import AnyRequest, Request, check_loads, check_stores
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.shared_host.numa import node_of
from lwkv.storage import Chunk, StorageManager, Tier, TierSetup
from lwkv.storage.host_tier import HostChunks
from lwkv.storage.registry import open_tiers
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_level import follow_log_level
from lwkv.telemetry.prometheus import prometheus_text
from lwkv.telemetry.timeline import Timeline
from lwkv.transfer import Chunking

__all__ = ["CacheEngine", "Request"]

log = logging.getLogger(__name__)

START_LOCKING_S = 1.0
"""How long the constructor waits for host memory; a few GiB are page-locked by then."""


class CacheEngine:
    """Keeps the KV of what was computed and brings it back, one layer at a time.

    One engine serves the caches of one model on one device. Methods come from the thread that runs the
    forward pass; `lookup` and `stats` may come from any. Everything it takes is given back by `close`.

    Args:
        connector: registered with the engine's KV caches, from CreateGPUConnector.
        tiers: lower tiers, nearest first, before those that `config` names.
        timeline: records loads and saves; None for not at all.
        lock_memory: whether page-locking of host memory begins now; False where graphs of the device's work
            are still to be captured, and `wait_for_memory` is called after that.
        memory: pages, and what knows of the chunks in them, that several engines of a process share; None
            for memory as `config` says.

    Attributes:
        namespace: what all keys begin with: everything that changes the bytes of a page.
        num_layers: those that are moved.
        tier_names: of all tiers, host memory first.

    Raises:
        ConfigError: settings that cannot work for these caches, such as a tier that does not exist or a dtype
            that `metadata` names and no cache has; a connector that has no caches, or serves another engine.
        RuntimeError: the system has no more threads.
    """

    def __init__(
        self,
        config: Config,
        metadata: CacheMetadata,
        connector: PagedConnector,
        tiers: Sequence[Tier] = (),
        timeline: Timeline | None = None,
        lock_memory: bool = True,
        memory: tuple[HostPool, HostChunks] | None = None,
    ) -> None:
        follow_log_level()
        warn_of_foreign_variables()
        _require_caches(connector)
        self.config, self.connector, self.num_layers = config, connector, connector.num_layers
        self._chunking = Chunking(config.chunk_size, config.save_unfull_chunk, connector.tokens_per_row)
        registered = metadata.as_registered([layer.dtype for layer in connector.layers])
        # In the memory of a node ranks find each other's rows: one of them saves what all have.
        self._saves = config.host_memory is None or not registered.is_copy
        self.namespace = self._namespace_of(registered)
        self._prompt_keys = PromptKeys(self.namespace, self._chunking)
        counters = Counters()
        # Where the host is the device nothing is page-locked, and slabs cost nothing.
        self._locks_ahead = connector.platform.device_type != "cpu"
        # A thread that asks for no device is on the first one, and makes a context of hundreds of MiB there.
        use_device = partial(connector.platform.set_device, connector.device)
        self._pool, host = memory or self._open_host_memory(counters, use_device)
        self._storage = self._make_storage(tiers, counters, use_device, host)
        self.tier_names = self._storage.tier_names
        self._closed = self._ended = False
        self._completions = self._start(timeline, counters, use_device)
        self._parts = BatchContext(
            *(config, self._prompt_keys.of, self._storage, connector, self._completions, counters),
            first_key_of=self._prompt_keys.first_of,
        )
        weakref.finalize(self, self._completions.close).atexit = False
        if lock_memory:
            self.wait_for_memory(START_LOCKING_S)
        log.info("%s", self._describe())

    @classmethod
    def create(
        cls,
        config: Config,
        metadata: CacheMetadata,
        kvcaches: Registration,
        engine: str = "vllm",
        layout_hints: LayoutHints | None = None,
        platform: str | Platform | None = None,
        tiers: Sequence[Tier] = (),
        timeline: Timeline | None = None,
        lock_memory: bool = True,
        memory: tuple[HostPool, HostChunks] | None = None,
    ) -> CacheEngine:
        """Make the connector for `kvcaches` and the engine on it; arguments as CreateGPUConnector's.

        Without `platform` and LWKV_PLATFORM, the platform is that of the caches' device.
        """
        if isinstance(platform, str | None):
            platform = detect_platform(platform, device_of(kvcaches))
        connector = CreateGPUConnector(config, metadata, engine, layout_hints, platform)
        connector.register(kvcaches)
        return cls(config, metadata, connector, tiers, timeline, lock_memory, memory)

    def keys(self, tokens: Any, salts: Sequence[str] = ()) -> list[ChunkKey]:
        """The key of every chunk of `tokens`, which is not the caller's to change. Raises as `lookup`."""
        return self._prompt_keys.keys(as_token_ids(tokens), as_salts(salts))

    def remember(self, tokens: Any, salts: tuple[str, ...], keys: list[ChunkKey]) -> None:
        """Take over the keys of all chunks of `tokens`, made for this namespace: they are not made again.

        Args:
            tokens: int64 array, (tokens,); neither it nor the list may change any more.
        """
        self._prompt_keys.remember(tokens, salts, keys)

    def lookup(self, tokens: Any, salts: Sequence[str] = ()) -> int:
        """Count the leading tokens that are cached, in any tier; no slot or pin is taken.

        Raises:
            RequestError: tokens that are no ids, salts that are no list or tuple of texts. ClosedError.
        """
        self._require_open()
        found = self._storage.lookup(self.keys(tokens, salts))
        return min(found * self.config.chunk_size, self._chunking.covered(len(tokens)))

    def retrieve_layer(
        self,
        tokens: Any,
        mask: Any = None,
        *,
        slot_mapping: Any,
        kvcaches: Registration | None = None,
        sync: bool = True,
        salts: Sequence[str] = (),
    ) -> Generator[int | torch.Tensor | None, None, None]:
        """Load what is cached of one request, in num_layers + 2 steps on every path.

        Step 1 yields the number of tokens that will be loaded. Slots are written to behind what the current
        stream holds at step 2. Step i + 2 queues layer i, if it is there, and makes the current stream wait
        for layer i - 1, if `sync`; only there, and in the last step, the host blocks for slow tiers. The last
        yields bool (tokens,) on the host, True for the tokens really retrieved; the current stream waits for
        the last layer by then, and nothing is held any more. Closing
        the generator early is safe. What fails is a miss, never an exception.

        Layers are counted as they are moved: entries that share their KV are one, and `connector.layer_of`
        has the number of each entry. LayerSteps takes the engine's own names and positions.

        Args:
            tokens, mask, slot_mapping, salts: see Request.
            kvcaches: the registered caches, for callers that pass them each time.

        Raises (at the call):
            RequestError: arguments that do not fit. LayoutError: other caches than were registered.
            ClosedError: the engine is closed.
        """
        self._storage.host.announce()
        requests = check_loads([Request(tokens, slot_mapping, mask, salts)], *self._limits(kvcaches))
        return retrieve_steps(BatchRetrieval(requests, self._parts, sync), itemgetter(0))

    def store_layer(
        self,
        tokens: Any,
        mask: Any = None,
        *,
        slot_mapping: Any,
        kvcaches: Registration | None = None,
        sync: bool = True,
        salts: Sequence[str] = (),
    ) -> Generator[None, None, None]:
        """Store what is new of one request, in num_layers + 1 steps on every path.

        Take step i + 1 when the current stream has queued work that computes layer i, counted as in
        `retrieve_layer`. The last step lets the chunks become visible once their bytes have arrived, and
        makes the current stream wait until the blocks have been read. Chunks wholly in the masked part, known
        ones and those that lack a slot are left out; where host memory cannot be freed for all, the first
        that fit are stored. Where the device fails nothing is stored, and nothing raised. Closing the
        generator early is safe and stores nothing.

        Args and Raises: as for `retrieve_layer`.
        """
        requests = check_stores([Request(tokens, slot_mapping, mask, salts)], *self._limits(kvcaches))
        return store_steps(BatchStoring(requests, self._parts, sync))

    def retrieve_batch(
        self, requests: Sequence[AnyRequest], sync: bool = True
    ) -> Generator[list[int] | list[torch.Tensor] | None, None, None]:
        """As `retrieve_layer`, for several requests merged into one transfer a layer; yields a list.

        Two of them may share the slots of a prefix that is the same in both, and no others.
        """
        return retrieve_steps(self.retrieval(requests, sync), list)

    @property
    def saves(self) -> bool:
        """Whether this engine stores: not where another rank does that for all, whose rows are the same."""
        return self._saves

    def store_batch(self, requests: Sequence[AnyRequest], sync: bool = True) -> Generator[None, None, None]:
        """As `store_layer`, for several requests merged into one transfer a layer."""
        return store_steps(self.storing(requests, sync))

    def retrieval(
        self,
        requests: Sequence[AnyRequest],
        sync: bool = True,
        within_s: float = float("inf"),
        pinned: Sequence[Sequence[Chunk | None] | None] = (),
    ) -> BatchRetrieval:
        """What `retrieve_batch` goes through step by step, for callers that go from layer to layer.

        Args:
            within_s: seconds after which lower tiers are not waited for any more.
            pinned: for each request its chunks in host memory, from that of its first token that is asked for
                on, if the caller has pinned them, and noted that the prompt is used; None for one of which it
                has not. They are the batch's where this does not raise.
        """
        if not pinned or None in pinned:
            self._storage.host.announce()
        checked = check_loads(requests, *self._limits())
        return BatchRetrieval(checked, self._parts, sync, within_s=within_s, pinned=pinned)

    def storing(self, requests: Sequence[AnyRequest], sync: bool = True) -> BatchStoring:
        """What `store_batch` goes through step by step, for callers that go from layer to layer."""
        return BatchStoring(check_stores(requests, *self._limits()), self._parts, sync)

    def retrieve(self, tokens: Any, mask: Any = None, **arguments: Any) -> torch.Tensor:
        """Load all layers at once, in front of the current stream's next work; arguments as above."""
        *_, loaded = self.retrieve_layer(tokens, mask, **arguments)
        return cast(torch.Tensor, loaded)

    def store(self, tokens: Any, mask: Any = None, **arguments: Any) -> None:
        """Store all layers at once, behind the current stream's work; `flush` waits until they are there."""
        for _ in self.store_layer(tokens, mask, **arguments):
            pass

    def freeze(self, frozen: bool = True) -> None:
        """Store nothing from now on, or store again; what is cached goes on being retrieved.

        Raises ClosedError if the engine is closed.
        """
        self._require_open()
        self._storage.frozen = frozen

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Block until all stores and loads in flight have ended, and lower tiers have all that was stored.

        False if that takes over `timeout_s`, or a tier did not take all since the last call: it failed, or is
        skipped for now. With `write_back` the next call tries again what the latter was to get.

        On a closed engine that is what `close` did not wait for.

        A child process has none of the threads that end them, and does not wait for what was in flight.
        """
        deadline = time.monotonic() + timeout_s
        return self._completions.wait_idle(timeout_s) and self._storage.wait_idle(deadline - time.monotonic())

    def stats(self) -> dict[str, int]:
        """Totals since the start, and what is held now; when idle, pins and writes_in_flight are 0.

        Never waits for a lower tier, and returns the tier's last values. Names that begin with a tier's name,
        "host" first, are that tier's: see lwkv.telemetry.tier_meter.
        """
        return self._gauges() | self.counts()

    def counts(self) -> dict[str, int]:
        """Those of `stats` that only grow; all others are values as they are now."""
        return self._parts.counters.totals() | self._storage.counts()

    def metrics(self, **labels: str) -> str:
        """`stats` as text for Prometheus, with `labels` on every metric; the caller serves it."""
        return prometheus_text(self.counts(), self._gauges(), self.tier_names, **labels)

    def wait_for_memory(self, timeout_s: float) -> bool:
        """Have host memory page-locked in the background, and block until all of it is, as far as it can be.

        False if that takes over `timeout_s` seconds: the rest follows, and what finds no page until then is
        not stored. Not while a graph of the device's work is captured: page-locking ends the capture.
        """
        if self._locks_ahead:
            self._storage.lock_memory()
        return self._storage.wait_locked(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Wait for what is in flight and give everything back; idempotent.

        What takes over `timeout_s` is given back when it ends, which another call waits for; what generators
        that are still open hold, when they end. A forked child waits for nothing: all of it is its parent's.
        """
        if not self._closed:
            self._completions.submit(self.connector.stop)
        self._closed = True
        if self._ended:
            return
        deadline = time.monotonic() + timeout_s
        idle = self._completions.wait_idle(timeout_s)
        if not idle:
            self._log_not_idle(timeout_s)
        self._ended = self._storage.close(deadline - time.monotonic()) and idle
        self._pool.close()
        self._completions.close()

    def __enter__(self) -> CacheEngine:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _namespace_of(self, registered: CacheMetadata) -> str:
        """What all keys begin with; the same for all ranks that find each other's rows."""
        config, connector = self.config, self.connector
        shared = registered if config.host_memory is None else registered.without_copies()
        names = [layer.name for layer in connector.layers]
        return make_namespace(shared, config.chunk_size, connector.page_format, names)

    def _start(
        self, timeline: Timeline | None, counters: Counters, use_device: Callable[[], None]
    ) -> CompletionThread:
        """Start what moves layers, and the thread that ends transfers; where that fails, give all back."""
        with ExitStack() as undo:
            undo.callback(self._storage.close, 0)
            self.connector.start(self._pool, timeline)
            undo.callback(self.connector.stop)
            completions = CompletionThread(counters, use_device)
            undo.pop_all()
        return completions

    def _open_host_memory(
        self, counters: Counters, use_device: Callable[[], None]
    ) -> tuple[HostPool, HostChunks | None]:
        """The pages, in this process or of a node, and in the latter case what knows of their chunks."""
        config, platform, page_bytes = self.config, self.connector.platform, self.connector.page_bytes
        host: HostChunks | None = None
        if config.host_memory is None:
            check_memory(config, read_limits())
            on_demand = not self._locks_ahead
            pool = HostPool(
                platform, page_bytes, config.max_host_bytes, config.slab_bytes, counters, on_demand=on_demand
            )
        else:
            timeout_s = config.extra_config.host_memory_timeout_s
            pool, host = open_node_memory(
                config.host_memory,
                platform,
                page_bytes,
                timeout_s,
                counters,
                self._locks_ahead,
                use_device,
                start_gib=config.extra_config.host_memory_gib,
                node=node_of(self.connector.device),
            )
        with ExitStack() as undo:
            undo.callback(pool.close)
            pool.require_chunk(self.num_layers)
            pool.reserve(config.reserve_bytes)
            undo.pop_all()
        return pool, host

    def _make_storage(
        self,
        tiers: Sequence[Tier],
        counters: Counters,
        use_device: Callable[[], None],
        host: HostChunks | None,
    ) -> StorageManager:
        config, connector = self.config, self.connector
        setup = TierSetup(config, self.num_layers, connector.page_bytes, connector.page_format, counters)
        return StorageManager(
            self._pool,
            self.num_layers,
            [*tiers, *open_tiers(setup, tiers)],
            config.load_timeout_s,
            counters,
            use_device=use_device,
            keep_in_host=config.local_cpu,
            write_back=config.write_policy == "write_back",
            check=PageCheck(connector.codec, connector.layers, self._pool).whole,
            host=host,
            saves=self._saves,
        )

    def _gauges(self) -> dict[str, int]:
        return self._storage.gauges() | self._pool.totals()

    def parts(self) -> BatchContext:
        """What a batch works with, for whoever makes batches of other keys. Raises ClosedError."""
        self._require_open()
        return self._parts

    def _limits(self, kvcaches: Registration | None = None) -> tuple[int, Chunking, torch.device]:
        """What requests must fit, of an engine that is open and has these caches."""
        self._require_open()
        if kvcaches is not None:
            self.connector.register(kvcaches)
        return self.connector.num_slots, self._chunking, self.connector.device

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache engine is closed; make a new one")

    def _log_not_idle(self, waited_s: float) -> None:
        if self._completions.is_here():
            log.warning("transfers were still in flight %.1f s after close", waited_s)
        else:
            log.info("an engine was closed in a forked child process: its transfers end in the parent")

    def _describe(self) -> str:
        mode = "layer by layer" if self.config.use_layerwise else "in bulk (use_layerwise is off)"
        return (
            f"moves KV {mode}: platform {self.connector.platform.name}, "
            f"{self.connector.name} connector, {self.connector.kernels.name} kernels, "
            f"{self.connector.codec.name} pages ({self.connector.why_codec}), "
            f"{self.num_layers} layers; tiers: {', '.join(self.tier_names)}; host memory: at most "
            f"{self._pool.capacity_bytes / 2**30:.2f} GiB for {self._storage.most_chunks} chunks of "
            f"{self.config.chunk_size} tokens"
        )


def _require_caches(connector: PagedConnector) -> None:
    if not connector.layers:
        raise ConfigError("the connector has no KV caches: call its register before it is given to an engine")
