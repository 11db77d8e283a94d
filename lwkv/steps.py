"""What a serving engine calls around one forward pass, which is one step of the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lwkv.engine import CacheEngine
from lwkv.errors import DEVICE_FAILURES
from lwkv.pipeline.device_failures import DeviceFailuresTo
from lwkv.pipeline.retrieval import BatchRetrieval
from lwkv.pipeline.store import BatchStoring
from lwkv.request import AnyRequest, as_requests
from lwkv.storage import Chunk
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """How one step ended.

    Attributes:
        loaded: for each load, bool (tokens,) on the host: True where the token's KV was in place in every
            layer before that layer was waited for. A promised token that is False must be computed again, and
            nothing computed from its request in this step may be used.
        stored: whether the step's stores were passed to the engine. They are not if any promised token
            failed: what was computed in such a step may depend on it.
    """

    loaded: list[torch.Tensor]
    stored: bool


class LayerSteps:
    """Moves an engine's layers from hooks that come around each layer.

    The engine calls `begin`, `start_load_kv`, for each layer `wait_for_layer_load` before its attention and
    `save_kv_layer` after it, and `wait_for_save`. A hook may come twice, late, or not at all: hooks are
    idempotent per layer, and `wait_for_save` ends the step in any case. What fails on the device is in
    the step's result, never raised. For one thread, one step at a time.

    The hooks' `layer` is what the engine registered: the name of an entry of its KV caches, or the entry's
    position among all of them, entries that share the KV of another one included. Both mean the layer that
    owns the KV. Any other is passed over, with a line in the log, one a minute at most.

    Args:
        layerwise: load and save layer by layer; False for in bulk, where `start_load_kv` queues all layers
            and makes the current stream wait for them, and `wait_for_save` saves all; None as the engine's
            `use_layerwise` says.
    """

    def __init__(self, engine: CacheEngine, layerwise: bool | None = None) -> None:
        self._engine = engine
        self._layerwise = engine.config.use_layerwise if layerwise is None else layerwise
        self._num_layers = engine.num_layers
        self._layer_of = engine.connector.layer_of
        self._owners = _owners(self._layer_of)
        self._throttle = LogThrottle(log)
        self._load: BatchRetrieval | None = None
        self._store: BatchStoring | None = None
        self.begin((), ())

    def begin(
        self,
        loads: Sequence[AnyRequest],
        stores: Sequence[AnyRequest],
        load_within_s: float = float("inf"),
        pinned: Sequence[Sequence[Chunk | None] | None] = (),
    ) -> None:
        """Announce a step: what is to be loaded before its layers compute, what to be stored after.

        A step that has not ended is given up, and nothing of it is stored. Raises RequestError for requests
        that do not fit or are none, ClosedError for a closed engine, and then changes nothing.

        Args:
            load_within_s: seconds after which lower tiers are not waited for any more; what has not come is
                not loaded.
            pinned: of the loads, as for `CacheEngine.retrieval`; the step's where this does not raise.
        """
        loads, stores = as_requests(loads), as_requests(stores)
        store = self._engine.storing(stores) if stores else None
        load = self._engine.retrieval(loads, self._layerwise, load_within_s, pinned) if loads else None
        for unfinished in (self._load, self._store):
            if unfinished is not None:
                unfinished.close()
        self._load, self._store = load, store
        self._promised: list[int] = [0] * len(loads)
        self._masks = [torch.zeros(load.num_tokens, dtype=torch.bool) for load in loads]
        self._computed: set[int] = set()
        self._missed_wait = False
        self._result: StepResult | None = None

    def look_up(self) -> list[int]:
        """Find out how many tokens of each load will come, and start their copies; nothing is written yet.

        For an engine that has some work to do before `start_load_kv`, such as clearing blocks.
        """
        if self._load is not None and not self._load.is_open:
            with DeviceFailuresTo(self._give_up_load):
                self._promised = self._load.open()
        return self._promised

    def start_load_kv(self) -> list[int]:
        """Queue the first layer of all loads, or in bulk all; return how many tokens of each will come."""
        self._advance_load(0)
        return self._promised

    def load_all(self) -> list[int]:
        """As `start_load_kv`, but queue all layers, and make the current stream wait for them.

        For a step around whose layers no hook is called, such as a graph of the whole model. The hooks may
        come all the same. What the step stores is saved in `wait_for_save`.
        """
        self._advance_load(self._num_layers)
        return self._promised

    def wait_for_layer_load(self, layer: str | int) -> None:
        """Make the current stream wait for all loads of `layer`, or of the layer whose KV it shares.

        The next one is queued.

        Args:
            layer: the registered name or position.
        """
        number = self._number(layer)
        if number is not None and self._load is not None:
            self._advance_load(number + 1)

    def save_kv_layer(self, layer: str | int) -> None:
        """Queue the save of `layer`; the current stream has queued work that writes its KV.

        A layer that shares the KV of another one has been saved with that.

        Args:
            layer: the registered name or position.
        """
        number = self._number(layer)
        if number is None or layer not in self._owners:
            return
        self._missed_wait |= not self._is_waited_for(number)
        self._computed.add(number)
        while self._layerwise and self._store is not None and self._store.next_layer in self._computed:
            try:  # as in `_advance_load`
                self._store.advance(self._store.next_layer)
            except DEVICE_FAILURES as error:
                self._give_up_store(error)

    def wait_for_loads(self) -> list[torch.Tensor]:
        """End the step's loads, as `wait_for_save` does before it stores; returns `StepResult.loaded`."""
        if self._result is None:
            self._missed_wait |= not self._is_waited_for(self._num_layers - 1)
            self._advance_load(self._num_layers)
        return self._masks

    def wait_for_save(self, keep: bool = True) -> StepResult:
        """End the step: queue what is left, and make the current stream wait for all that is in flight.

        Args:
            keep: False to give the stores up.
        """
        if self._result is None:
            self.wait_for_loads()
            self._result = StepResult(self._masks, self._end_store(keep))
        return self._result

    def _number(self, layer: str | int) -> int | None:
        try:
            return self._layer_of[layer]
        except (KeyError, TypeError):  # TypeError: what cannot be a key
            self._throttle.warn(
                "no layer %r is registered: hooks of such layers do nothing; pass a name such as %r, or "
                "a position from 0 to %d, which counts every entry of the registered KV caches",
                *(layer, next(iter(self._layer_of)), len(self._layer_of) // 2 - 1),
            )
            return None

    def _is_waited_for(self, layer: int) -> bool:
        return self._load is None or self._load.reached > layer

    def _advance_load(self, layer: int) -> None:
        """Have `layer` queued and the one before waited for; in bulk all, the last one included."""
        load = self._load
        if load is not None and not load.is_open:
            self.look_up()
            load = self._load
        if load is None:
            return
        try:  # In between a model's layers a context manager would take as long as all the rest here.
            if self._layerwise and layer < self._num_layers:
                load.advance(layer)
            else:
                self._end_load(load)
        except DEVICE_FAILURES as error:
            self._give_up_load(error)

    def _end_load(self, load: BatchRetrieval) -> None:
        masks = load.finish()
        self._load = None
        if not self._missed_wait:
            # Else some layer computed without its load: whatever came of it cannot be trusted.
            self._masks = masks

    def _end_store(self, keep: bool) -> bool:
        """Pass the stores to the engine, if `keep` and all that was promised has been loaded; else give them
        up."""
        store = self._store
        if store is None:
            return False
        pairs = zip(self._masks, self._promised, strict=True)
        loaded = keep and all(int(mask.sum()) == count for mask, count in pairs)
        with DeviceFailuresTo(self._give_up_store):
            (store.commit if loaded else store.close)()
        went_through, self._store = self._store is store, None
        return loaded and went_through

    def _give_up_load(self, error: BaseException) -> None:
        load, self._load = self._load, None
        self._give_up(load, error)

    def _give_up_store(self, error: BaseException) -> None:
        store, self._store = self._store, None
        self._give_up(store, error)

    def _give_up(self, batch: BatchRetrieval | BatchStoring | None, error: BaseException) -> None:
        """Go on without what was to go through in any case; everything of it is given back."""
        log.error(
            "a step's transfers have failed; they end here, and the model goes on without them",
            exc_info=error,
        )
        if batch is not None:
            batch.close()


def _owners(layer_of: dict[str | int, int]) -> set[str | int]:
    """Of all entries with one number the first: among the names, and among the positions."""
    return set({(type(layer), number): layer for layer, number in reversed(layer_of.items())}.values())
