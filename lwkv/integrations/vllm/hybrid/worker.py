"""A worker's half for models with several groups of caches: carries out a step's orders, and reports."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from lwkv.errors import LwkvError
from lwkv.hybrid import HybridEngine, HybridSteps, Load, Pin, Store
from lwkv.integrations.host_memory import wait_for_memory
from lwkv.integrations.vllm.hybrid.orders import HybridOrders, LoadOrder
from lwkv.integrations.vllm.hybrid.reports import Change, HybridInfo, HybridReport, HybridReports
from lwkv.integrations.vllm.worker.meter import WorkerMeter
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
        clock: seconds.
    """

    def __init__(self, engine: HybridEngine, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.info = HybridInfo(rank, engine.chain_name, engine.chunk_size)
        self._changes = Changes()
        engine.watcher = self._changes
        self._steps = HybridSteps(engine)
        self._orders = HybridOrders(0)
        self._pins: dict[int, Pin | None] = {}
        self._pinned: dict[int, bool] = {}
        self._ended = True
        self._num_failed = 0
        self._is_loaded_apart = True
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failed_to_report: list[str] = []
        self._counters = Counters()
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
        self._orders, self._ended, self._is_loaded_apart = orders, False, False
        for number in orders.released:
            self._release(number)
        for order in orders.pins:
            pin = self.engine.pin(order.hashes.apart(), order.local, order.boundary)
            self._pins[order.number], self._pinned[order.number] = pin, pin is not None
        loads = [_load(order) for order in orders.loads]
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
            self._steps.wait_for_layer_load(name)

    def save_layer(self, name: str) -> None:
        """Queue the stores of a layer; queued work of the model writes it."""
        if not self._ended:
            self._steps.save_kv_layer(name)

    def end(self) -> None:
        """End the step: what it stores is on its way."""
        if self._ended:
            return
        self._ended = True
        self._load_apart()
        loaded, _ = self._steps.wait_for_save()
        self._num_failed += sum(not is_there for is_there in loaded)

    def invalid_blocks(self) -> set[int]:
        """None. Ends the step.

        Raises LwkvError where a load has failed.
        """
        self.end()
        if self._num_failed:
            raise LwkvError(
                f"{self._num_failed} loads that lwkv had promised have failed, and vLLM cannot compute again "
                "what was to be loaded where a model has several groups of KV caches: the engine ends, so "
                "that it gives no wrong answer. The log says why they failed"
            )
        return set()

    def requests_ended(self) -> set[str]:
        """Requests that have ended whose blocks vLLM has kept: none."""
        return set()

    def received(self) -> tuple[set[str], set[str]]:
        """Requests that were loaded apart from a step, and those of them whose loads have failed.

        Each is given out once. What the current stream does from now on finds what was loaded.
        """
        found = self._received, self._failed
        self._received, self._failed = set(), set()
        return found

    def report(self) -> HybridReports | None:
        """What was not yet reported; None for nothing."""
        changes, pinned, failed = self._changes.take(), self._pinned, self._failed_to_report
        self._pinned, self._failed_to_report = {}, []
        if not (changes or pinned or failed):
            return None
        return HybridReports((HybridReport(self.info, changes, pinned, failed),))

    def new_counts(self) -> dict[str, int]:
        """What was counted since the last call, and gauges, as WorkerMeter has them."""
        orders = self._orders
        return self._meter.new_counts(orders.moves_anything or bool(orders.loads_apart))

    def close(self) -> None:
        """Give everything back."""
        for number in list(self._pins):
            self._release(number)
        self.engine.close()

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

    def _load_apart(self) -> None:
        """Load for requests that are not in the step; the model's next work is queued behind that."""
        orders = () if self._is_loaded_apart else self._orders.loads_apart
        self._is_loaded_apart = True
        if orders:
            done = self.engine.load_now([_load(order) for order in orders])
            failed = [order.request_id for order, is_done in zip(orders, done, strict=True) if not is_done]
            self._received.update(order.request_id for order in orders)
            self._failed.update(failed)
            self._failed_to_report += failed

    def _release(self, number: int) -> None:
        pin = self._pins.pop(number, None)
        if pin is not None:
            self.engine.unpin(pin)


def _load(order: LoadOrder) -> Load:
    return Load(order.hashes.apart(), order.local, order.boundary, order.tables)
