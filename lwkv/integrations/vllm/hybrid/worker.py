"""A worker's half for models with several groups of caches: carries out a step's orders, and reports."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from lwkv.errors import LwkvError
from lwkv.hybrid import HybridEngine, HybridSteps, Load, Pin, Store
from lwkv.integrations.host_memory import wait_for_memory
from lwkv.integrations.vllm.hybrid.orders import HybridOrders
from lwkv.integrations.vllm.hybrid.reports import Change, HybridInfo, HybridReport, HybridReports
from lwkv.integrations.vllm.hybrid.under_way import LoadsUnderWay, load_of
from lwkv.integrations.vllm.orders import unpacked
from lwkv.integrations.vllm.worker.meter import WorkerMeter
from lwkv.integrations.vllm.worker.tier_news import TierNews
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)


class Changes:
    """What comes to host memory and goes; `kept` and `dropped` come from any thread."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque()

    def kept(self, kind: int, hashes: Sequence[bytes]) -> None:
        self._changes.append(Change(kind, True, list(hashes)))

    def dropped(self, kind: int, hashes: Sequence[bytes]) -> None:
        self._changes.append(Change(kind, False, list(hashes)))

    def take(self) -> list[Change]:
        """Those since the last call, in their order."""
        return [self._changes.popleft() for _ in range(len(self._changes))]


class HybridWorker:
    """Drives a hybrid engine from the hooks of one worker. For one thread.

    What is loaded is pinned before, and was promised. vLLM cannot compute again what a step was to load where
    a model has several groups of caches: a load that fails all the same ends the engine, and nothing of its
    step is stored. Requests that are loaded apart from a step are computed if that fails.

    Args:
        timeout_s: how long a load apart from a step may take before the model is made to wait for it.
        clock: seconds.
        drafts: names of the layers of a draft model, in the order in which it calls them: it computes when
            a step's loads have ended, and before its stores do.
        last_layer: the name of the last of the model's own layers; of no meaning without drafts.
    """

    def __init__(
        self,
        engine: HybridEngine,
        rank: int,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        drafts: Collection[str] = (),
        last_layer: str = "",
    ) -> None:
        self.engine = engine
        self._drafts, self._last_layer = drafts, last_layer
        self._is_waited_for = False
        self.info = HybridInfo(
            rank,
            engine.chain_name,
            engine.chunk_size,
            engine.kind_pages,
            engine.page_bytes,
            engine.page_format,
            engine.max_pages,
        )
        self._tiers = None if engine.lower is None else TierNews(engine.lower, time.monotonic)
        self._timed_step = 0
        self._changes = Changes()
        engine.watcher = self._changes
        self._steps = HybridSteps(engine)
        self._orders = HybridOrders(0)
        self._pins: dict[int, Pin | None] = {}
        self._pinned: dict[int, bool] = {}
        self._loads_ended = self._ended = True
        self._num_failed = 0
        self._is_loaded_apart = True
        self._failed_to_report: list[str] = []
        self._counters = Counters()
        self._under_way = LoadsUnderWay(engine, timeout_s, self._counters, clock)
        self._meter = WorkerMeter(engine, rank, self._counters, clock)

    def introduce(self) -> HybridInfo:
        """What the scheduler is to know of this rank. Page-locks host memory first, and waits for that.

        vLLM asks when its graphs are captured, and before it takes requests.
        """
        wait_for_memory(self.engine)
        return self.info

    def begin(self, orders: HybridOrders) -> None:
        """Take the orders of a step, the same ones any number of times; the one before has ended."""
        if orders is self._orders:
            return
        self._orders, self._is_loaded_apart = orders, False
        self._loads_ended = self._ended = self._is_waited_for = False
        for number in orders.released:
            self._release(number)
        self._fetch(orders)
        for order in orders.pins:
            pin = self.engine.pin(order.hashes.apart(), order.local, order.boundary)
            self._pins[order.number], self._pinned[order.number] = pin, pin is not None
        loads = [load_of(order) for order in orders.loads]
        stores = [
            Store(store.hashes.apart(), store.start, store.end, store.tables, store.boundaries)
            for store in orders.stores
        ]
        self._announce(loads, stores)

    def look_up(self) -> None:
        """Nothing is begun before `start_load`."""

    @property
    def calls_layers(self) -> bool:
        """Whether the model's layers are being called from here: never."""
        return False

    def encode(self) -> None:
        """Nothing is computed from here."""

    def start_load(self, hooks_come: bool = True) -> None:
        """Queue the first layers of all loads, or all where no hook comes."""
        if self._ended:
            return
        self._load_apart()
        if hooks_come:
            self._steps.start_load_kv()
        else:
            self._steps.load_all()

    def wait_for_layer(self, name: str) -> None:
        """Make the model wait for the loads of a layer."""
        if not self._ended:
            self._is_waited_for |= name == self._last_layer
            self._steps.wait_for_layer_load(name)

    def save_layer(self, name: str) -> None:
        """Queue the stores of a layer; queued work of the model writes it."""
        if not self._ended:
            self._steps.save_kv_layer(name)

    def end(self) -> None:
        """End the step: what it stores is on its way."""
        if not self._ended:
            self._end_loads()
            self._ended = True
            self._steps.wait_for_save()

    def invalid_blocks(self) -> set[int]:
        """None. Ends the step, or, where a draft model is still to compute, its loads.

        Raises LwkvError where a load has failed.
        """
        if self._drafts:
            self._end_loads()
        else:
            self.end()
        if self._num_failed:
            raise LwkvError(
                f"{self._num_failed} loads that lwkv had promised have failed, and vLLM cannot compute again "
                "what was to be loaded where a model has several groups of KV caches: the engine ends, so "
                "that it gives no wrong answer. The log says why they failed"
            )
        return set()

    def blends_ended(self, requests: Collection[str]) -> set[str]:
        """Requests whose blends have ended: never any."""
        return set()

    def requests_ended(self) -> set[str]:
        """Requests that have ended whose blocks vLLM has kept: none."""
        return set()

    def received(self) -> tuple[set[str], set[str]]:
        """Requests that were loaded apart from a step, and those of them whose loads have failed.

        Each is given out once, when its load has ended. What the current stream does from now on finds what
        was loaded.
        """
        received, failed = self._under_way.take_received()
        self._failed_to_report += failed
        return received, failed

    def report(self) -> HybridReports | None:
        """What was not yet reported; None for nothing."""
        lower = self._of_lower_tiers()  # before what is kept: all that fetches have brought is in that
        changes, pinned, failed = self._changes.take(), self._pinned, self._failed_to_report
        self._pinned, self._failed_to_report = {}, []
        if not (changes or pinned or failed) and lower is None:
            return None
        report = HybridReport(self.info, changes, pinned, failed)
        return HybridReports((report if lower is None else replace(report, **lower),))

    def new_counts(self) -> dict[str, int]:
        """What was counted since the last call, and gauges, as WorkerMeter has them."""
        orders = self._orders
        return self._meter.new_counts(orders.moves_anything or bool(orders.loads_apart))

    def close(self) -> None:
        """Give everything back."""
        for number in list(self._pins):
            self._release(number)
        self.engine.close()

    def _fetch(self, orders: HybridOrders) -> None:
        """Begin what lower tiers are to bring, and give back what they have brought."""
        lower = self.engine.lower
        if lower is None:
            return
        for number in orders.given_back:
            lower.prefetches.release(number)
        for fetch in orders.fetches:
            lower.fetch(fetch.number, unpacked(*fetch.keys[self.info.rank]), fetch.first, fetch.pins)
        for number in orders.stopped:
            lower.prefetches.stop(number)

    def _of_lower_tiers(self) -> dict[str, Any] | None:
        """What is new in a report's fields of lower tiers, and of the time of a step; None for nothing."""
        lower, step = self.engine.lower, self._timed_step
        self._timed_step = 0
        if lower is None or self._tiers is None:
            return {"step": step} if step else None
        fetched, unread, read = lower.prefetches.ended(), self._tiers.unread(), self._tiers.reads()
        if not (step or fetched or read) and unread is None:
            return None
        return {"step": step, "fetched": fetched, "unread": unread, "read": read}

    def _announce(self, loads: Sequence[Load], stores: Sequence[Store]) -> None:
        """Begin the step. Raises LwkvError for loads that do not fit: they were promised."""
        try:
            self._steps.begin(loads, stores)
        except LwkvError:
            if not stores:
                raise
            log.exception("a step's stores cannot be carried out: nothing is stored in it")
            self._counters.add("stores_dropped", len(stores))
            self._steps.begin(loads, ())

    def _end_loads(self) -> None:
        """End the step's loads, those of a draft model's layers too."""
        if self._loads_ended:
            return
        self._loads_ended = True
        self._load_apart()
        if self._orders.is_timed:
            self._timed_step = self._orders.step
        # Not where the model's own hooks stayed out: then nothing of the step can be trusted.
        loaded = self._steps.wait_for_loads(self._drafts if self._is_waited_for else ())
        self._num_failed += sum(not is_there for is_there in loaded)

    def _load_apart(self) -> None:
        """Begin to load for requests that are not in the step, behind what it has queued by now."""
        if not self._is_loaded_apart:
            self._is_loaded_apart = True
            self._under_way.begin(self._orders.loads_apart)

    def _release(self, number: int) -> None:
        pin = self._pins.pop(number, None)
        if pin is not None:
            self.engine.unpin(pin)
