"""A worker's half: carries the orders of a step out around the model's layers, and reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from lwkv.engine import CacheEngine
from lwkv.errors import LwkvError
from lwkv.integrations.host_memory import wait_for_memory
from lwkv.integrations.vllm.blending.worker.side import BlendWorker
from lwkv.integrations.vllm.orders import Move, StepOrders, unpacked
from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.worker.meter import WorkerMeter
from lwkv.integrations.vllm.worker.reporter import Reporter
from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.request import AnyRequest, KeyedSlots, Request
from lwkv.shared_host.client.tier import NodeTier
from lwkv.steps import LayerSteps
from lwkv.storage import Chunk
from lwkv.storage.prefetch import Prefetches
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle
from lwkv.transfer import NO_SLOT

log = logging.getLogger(__name__)


class WorkerSide:
    """Drives a cache engine from the hooks of one worker. For one thread.

    What cannot be loaded is reported as blocks to be computed again; nothing that was computed in such a step
    is stored, nor in the steps that were under way before the scheduler knew of it. Loads and stores go by
    steps of their own: a step's loads end before it is known whether its stores may be kept, and with a draft
    model the stores end later still.

    Args:
        block_size: tokens of a block of vLLM's block tables.
        draft_layers: names of the layers of a draft model, which computes when the loads have ended.
        fails: whether vLLM fails a request whose load fails, and does not compute its tokens.
        clock: seconds.
        blending: carries out what is to be blended; None where that is off.
    """

    def __init__(
        self,
        engine: CacheEngine,
        rank: int,
        block_size: int,
        draft_layers: Collection[str] = (),
        fails: bool = False,
        clock: Callable[[], float] = time.monotonic,
        blending: BlendWorker | None = None,
    ) -> None:
        self._blending = blending
        self.engine = engine
        connector, host = engine.connector, engine.parts().storage.host
        self._node = host if isinstance(host, NodeTier) else None
        self.info = RankInfo(
            rank,
            engine.namespace,
            connector.tokens_per_row,
            connector.num_layers,
            connector.page_bytes,
            connector.page_format,
            engine.parts().storage.most_chunks,
            "" if self._node is None else self._node.name,
        )
        self._block_size = block_size
        self._draft_layers = draft_layers
        self._last_layer = [layer.name for layer in connector.layers if layer.name not in draft_layers][-1]
        self._is_waited_for = False
        self._prefetches = Prefetches(engine.parts().storage)
        self._reporter = Reporter(engine, self.info, self._prefetches)
        self._load_steps = LayerSteps(engine)
        self._store_steps = LayerSteps(engine)
        self._throttle = LogThrottle(log)
        self._orders = StepOrders(0, 0)
        self._move_keys: dict[int, list[ChunkKey]] = {}
        self._load_slots: list[Int64s] = []
        self._failed_step = 0
        self._invalid: set[int] = set()
        self._fails = fails
        self._counters = Counters()
        self._meter = WorkerMeter(engine, rank, self._counters, clock)
        self._loads_ended = self._ended = True
        self._requests_ended: set[str] = set()

    def introduce(self) -> RankInfo:
        """What the scheduler is to know of this rank. Page-locks host memory first, and waits for that.

        vLLM asks when its graphs are captured, and before it takes requests.
        """
        wait_for_memory(self.engine)
        return self.info

    def begin(self, orders: StepOrders) -> None:
        """Take the orders of a step, the same ones any number of times; the one before has ended."""
        if orders is self._orders:
            return
        has_ended = self._ended
        if not has_ended:  # what it was to store is given up
            self._requests_ended.update(self._orders.ended)
            self._count_dropped()
        self._orders = orders
        self._loads_ended, self._ended = not orders.loads, False
        self._invalid = set()
        self._is_waited_for = False
        if self._blending is not None:
            self._blending.begin_step(orders.blends, orders.encodes, orders.is_empty)
        self._fetch(orders)
        # Without any, too: what a step has begun that never ended is given up.
        if orders.moves_anything or not has_ended:
            self._announce_moves(orders)

    def look_up(self) -> None:
        """Start to copy the first layers of all loads; vLLM may still clear the blocks that they go to."""
        # Not where chunks are still on their way to host memory: that wait is for later. Blends come first.
        if not self._loads_ended and not self._orders.blends and not self._loads_are_on_their_way():
            self._load_steps.look_up()

    @property
    def calls_layers(self) -> bool:
        """Whether the model's layers are being called from here, and hooks around them have nothing to do."""
        return self._blending is not None and self._blending.is_running

    def encode(self) -> None:
        """Compute and store segments alone, before anything else is computed in the step."""
        if self._blending is not None:
            self._blending.encode()

    def start_load(self, hooks_come: bool = True) -> None:
        """Blend what is to be, then queue the first layer of all loads, or all where no hook comes."""
        if self._blending is not None:
            self._blending.blend(self._reporter.presence.on_its_way)
        if self._loads_ended:
            return
        self._wait_for_stores()
        if hooks_come:
            self._load_steps.start_load_kv()
        else:
            self._load_steps.load_all()

    def wait_for_layer(self, name: str) -> None:
        """Make the model wait for the loads of a layer."""
        if not self._loads_ended:
            self._load_steps.wait_for_layer_load(name)
            self._is_waited_for |= name == self._last_layer

    def save_layer(self, name: str) -> None:
        """Queue the stores of a layer; queued work of the model writes it."""
        if not self._loads_ended:
            self._load_steps.save_kv_layer(name)
        if self._orders.stores and not self._ended:
            self._store_steps.save_kv_layer(name)

    def invalid_blocks(self) -> set[int]:
        """The blocks whose loads or blends failed, whose tokens vLLM computes again. Ends the loads."""
        self._end_loads()
        self._end_blends()
        return self._invalid

    def end(self) -> None:
        """End the step: what it stores is on its way, or given up."""
        self._end_loads()
        if self._ended:
            return
        self._end_blends()
        self._ended = True
        self._requests_ended.update(self._orders.ended)
        if self._orders.is_timed or self._orders.blends:
            self._reporter.step_ended(self._orders.step, True)
        if self._orders.moves_anything:
            stored = self._end_stores()
            self._reporter.step_ended(self._orders.step, stored)
            if stored:
                size = self.engine.config.chunk_size
                for move in self._orders.stores:
                    self._reporter.accepted(self._keys(move)[move.first // size :])

    def blends_ended(self, requests: Collection[str]) -> set[str]:
        """Requests that wait no longer for a blend; those of `requests` have ended themselves."""
        return set() if self._blending is None else self._blending.ended(requests)

    def received(self) -> tuple[set[str], set[str]]:
        """Requests that were loaded apart from their step, and those of which that failed: never any."""
        return set(), set()

    def requests_ended(self) -> set[str]:
        """Requests that have ended whose blocks others may write to from now on; each is given out once.

        It ends a step in which nothing is computed: before 0.30 vLLM does not say that such a one ends, and
        what is left of requests that have ended would never be stored.
        """
        if self._orders.is_empty:
            self.end()
        ended, self._requests_ended = self._requests_ended, set()
        return ended

    def report(self) -> RankReport | None:
        """Changes not yet reported; None for none."""
        if self._blending is not None:
            encoded, lost = self._blending.take_keys()
            self._reporter.accepted(encoded)
            self._reporter.failed(lost)
        return self._reporter.report()

    def new_counts(self) -> dict[str, int]:
        """What was counted since the last call, and gauges, as WorkerMeter has them."""
        return self._meter.new_counts(self._orders.moves_anything)

    def close(self) -> None:
        """Give everything back."""
        if self._blending is not None:
            self._blending.close()
        self._prefetches.close()
        self.engine.close()

    def _fetch(self, orders: StepOrders) -> None:
        for number in orders.released:
            self._prefetches.release(number)
        for fetch in orders.fetches:
            namespace, hashes = fetch.keys[self.info.rank]
            self._prefetches.begin(fetch.number, unpacked(namespace, hashes), fetch.first, fetch.pins)
        for number in orders.stopped:
            self._prefetches.stop(number)

    def _announce_moves(self, orders: StepOrders) -> None:
        self._move_keys = {id(move): self._take_over_keys(move) for move in (*orders.loads, *orders.stores)}
        self._load_slots = [move.slots(self._block_size) for move in orders.loads]
        loads = list(zip(orders.loads, self._load_slots, strict=True))
        stores = [(move, move.slots(self._block_size)) for move in orders.stores]
        # Chunks wholly in front of the first token that is loaded are not asked for, nor held.
        firsts = [_num_leading(slots) for slots in self._load_slots]
        pinned = [self._take_over_pins(move, first) for move, first in zip(orders.loads, firsts, strict=True)]
        self._announce(self._load_steps, self._requests(loads, firsts), (), orders.load_within_s, pinned)
        self._announce(self._store_steps, (), self._requests(stores, [0] * len(stores)))

    def _take_over_pins(self, move: Move, first: int) -> list[Chunk | None] | None:
        """The chunks of a load from that of its first token on, where they were pinned for this rank."""
        promised = move.promised[self.info.rank] if self.info.rank < len(move.promised) else None
        chunks = None if promised is None or self._node is None else self._node.take_over(promised)
        if chunks is None:
            return None
        size = self.engine.config.chunk_size
        skipped = first // size - move.first // size  # of these no token has a slot
        self._unpin(chunks[:skipped])
        return chunks[skipped:]

    def _unpin(self, chunks: Sequence[Chunk | None]) -> None:
        self.engine.parts().storage.host.unpin([chunk for chunk in chunks if chunk is not None])

    def _requests(
        self, moves: Sequence[tuple[Move, Int64s]], firsts: Sequence[int]
    ) -> list[Request] | list[KeyedSlots]:
        """The requests for moves with their slots; the first tokens, so many, are not asked for.

        Without the tokens where all keys are known: to check and to copy a long prompt takes a while.
        """
        keys = [self._move_keys[id(move)] for move, _ in moves]
        size = self.engine.config.chunk_size
        if all(len(own) * size == len(slots) for own, (_, slots) in zip(keys, moves, strict=True)):
            rows = zip(keys, moves, firsts, strict=True)
            return [KeyedSlots(own, slots, first) for own, (_, slots), first in rows]
        return [
            Request(move.tokens, slots, np.arange(len(slots)) >= first, move.salts)
            for (move, slots), first in zip(moves, firsts, strict=True)
        ]

    def _announce(
        self,
        steps: LayerSteps,
        loads: Sequence[AnyRequest],
        stores: Sequence[AnyRequest],
        load_within_s: float = float("inf"),
        pinned: Sequence[Sequence[Chunk | None] | None] = (),
    ) -> None:
        try:
            steps.begin(loads, stores, load_within_s, pinned)
        except LwkvError:
            log.exception("a step's orders cannot be carried out: nothing is loaded or stored in it")
            for chunks in pinned:
                self._unpin(chunks or ())
            steps.begin((), ())

    def _wait_for_stores(self) -> None:
        """Wait for chunks that were reported to the scheduler before their bytes arrived."""
        if self._loads_are_on_their_way():
            self.engine.parts().completions.wait_idle(self.engine.config.load_timeout_s)

    def _loads_are_on_their_way(self) -> bool:
        coming = self._reporter.presence.on_its_way
        return bool(coming) and any(not coming.isdisjoint(self._keys(move)) for move in self._orders.loads)

    def _end_loads(self) -> None:
        if self._loads_ended:
            return
        self._loads_ended = True
        # Not where the model's own hooks stayed out: then nothing of the step can be trusted.
        for name in self._draft_layers if self._is_waited_for else ():
            self._load_steps.wait_for_layer_load(name)
        masks = self._load_steps.wait_for_save().loaded
        arrived = masks or [torch.zeros(len(slots), dtype=torch.bool) for slots in self._load_slots]
        for move, slots, mask in zip(self._orders.loads, self._load_slots, arrived, strict=True):
            missing = np.flatnonzero((slots != NO_SLOT) & ~mask.numpy())
            if len(missing):
                self._fail(move, missing)

    def _end_blends(self) -> None:
        if self._blending is None:
            return
        if invalid := self._blending.invalid_blocks():
            self._failed_step = self._orders.step
        self._invalid |= invalid | self._blending.lost_blocks()

    def _fail(self, move: Move, missing: Int64s) -> None:
        """Have the tokens at `missing` computed again, and their chunks forgotten."""
        self._failed_step = self._orders.step
        self._invalid.update(move.blocks[missing // self._block_size].tolist())
        chunks = np.unique(missing // self.engine.config.chunk_size).tolist()
        keys = self._keys(move)
        self._reporter.failed([keys[chunk] for chunk in chunks])
        if self._fails:
            self._counters.add("requests_failed")
            self._throttle.warn(
                "%d tokens could not be loaded; vLLM fails their request, since on_load_failure is 'fail'",
                len(missing),
            )
        else:
            self._counters.add("tokens_recomputed", len(missing))
            self._throttle.warn("%d tokens could not be loaded; vLLM computes them again", len(missing))

    def _end_stores(self) -> bool:
        """Whether the step's stores were accepted, or there were none."""
        if not self._orders.stores:
            return True
        if self._orders.acknowledged < self._failed_step:
            # What was computed may depend on what was not loaded.
            self._announce(self._store_steps, (), ())
            self._count_dropped()
            return False
        return self._store_steps.wait_for_save().stored

    def _count_dropped(self) -> None:
        if self._orders.stores:
            self._counters.add("stores_dropped", len(self._orders.stores))

    def _take_over_keys(self, move: Move) -> list[ChunkKey]:
        """The keys of all chunks of a move, where they came with it and are this rank's; else none."""
        namespace, hashes = move.keys[self.info.rank] if self.info.rank < len(move.keys) else ("", b"")
        if namespace != self.engine.namespace:
            return []
        keys = unpacked(namespace, hashes)
        self.engine.remember(move.tokens, move.salts, keys)
        return keys

    def _keys(self, move: Move) -> list[ChunkKey]:
        # Where they did not come with it, as the engine has them: they are hashed once.
        return self._move_keys[id(move)] or self.engine.keys(move.tokens, move.salts)


def _num_leading(slots: Int64s) -> int:
    """How many tokens come before the first that has a slot."""
    has_slot = slots != NO_SLOT
    return int(has_slot.argmax()) if has_slot.any() else len(slots)
