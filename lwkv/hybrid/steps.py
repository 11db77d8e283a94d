"""The steps of a serving engine around one forward pass, for several groups of caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lwkv.errors import LwkvError
from lwkv.hybrid.engine import HybridEngine, is_all_loaded
from lwkv.hybrid.ranges import Load, Store
from lwkv.request import KeyedSlots
from lwkv.steps import LayerSteps


class HybridResult(NamedTuple):
    """How one step ended: whether all of each load was in place, and whether the stores were passed on.

    They are not where any load failed: what was computed in such a step may depend on it.
    """

    loaded: list[bool]
    stored: bool


class HybridSteps:
    """As LayerSteps, for a HybridEngine: the steps of all groups together.

    Attention layers are loaded and saved around their hooks. Layers of state have none: they are loaded in
    `start_load_kv`, before all others, and saved in `wait_for_save`.
    """

    def __init__(self, engine: HybridEngine) -> None:
        self._engine = engine
        self._steps = [LayerSteps(own) for own in engine.engines]
        self._has_hooks = [engine.kinds[group.kind].form != "state" for group in engine.groups]
        self.begin((), ())

    def begin(self, loads: Sequence[Load], stores: Sequence[Store]) -> None:
        """Announce a step. Raises as LayerSteps.begin, and then nothing is announced."""
        self._loads: list[list[KeyedSlots | None]] = self._engine.loads_of(loads)
        self._num_loads = len(loads)
        self._loaded: list[bool] | None = None
        self._result: HybridResult | None = None
        try:
            for steps, wanted, saved in zip(
                self._steps, self._loads, self._engine.stores_of(stores), strict=True
            ):
                steps.begin([keyed for keyed in wanted if keyed is not None], saved)
        except LwkvError:
            for steps in self._steps:
                steps.begin((), ())
            self._loads, self._num_loads = [[] for _ in self._steps], 0
            raise

    def start_load_kv(self) -> None:
        """Queue the first layer of each group, and all layers of state."""
        self._start(layerwise=True)

    def load_all(self) -> None:
        """Queue all layers, for a step around whose layers no hook is called."""
        self._start(layerwise=False)

    def wait_for_layer_load(self, layer: str) -> None:
        """Make the current stream wait for all loads of a layer, by its name."""
        number = self._engine.layer_of.get(layer)
        if number is not None:
            self._steps[number].wait_for_layer_load(layer)

    def save_kv_layer(self, layer: str) -> None:
        """Queue the save of a layer, by its name; the current stream has queued work that writes it."""
        number = self._engine.layer_of.get(layer)
        if number is not None:
            self._steps[number].save_kv_layer(layer)

    def wait_for_loads(self, unwaited: Iterable[str] = ()) -> list[bool]:
        """End the step's loads, as `wait_for_save` does before it stores; returns `HybridResult.loaded`.

        Args:
            unwaited: layers whose hooks come later, which are waited for here.
        """
        if self._loaded is None:
            for layer in unwaited:
                self.wait_for_layer_load(layer)
            self._loaded = self._all_loaded()
        return self._loaded

    def wait_for_save(self) -> HybridResult:
        """End the step: make the current stream wait for all that is in flight."""
        if self._result is None:
            loaded = self.wait_for_loads()
            stored = [steps.wait_for_save(keep=all(loaded)).stored for steps in self._steps]
            self._result = HybridResult(loaded, any(stored))
        return self._result

    def _start(self, layerwise: bool) -> None:
        # States first: the layers before the first hook read them.
        for has_hooks in (False, True):
            for steps, has in zip(self._steps, self._has_hooks, strict=True):
                if has == has_hooks:
                    (steps.start_load_kv if layerwise and has else steps.load_all)()

    def _all_loaded(self) -> list[bool]:
        loaded = [True] * self._num_loads
        for steps, wanted in zip(self._steps, self._loads, strict=True):
            asked = [i for i, keyed in enumerate(wanted) if keyed is not None]
            for i, mask in zip(asked, steps.wait_for_loads(), strict=True):
                keyed = wanted[i]
                loaded[i] &= keyed is None or is_all_loaded(keyed, int(mask.sum()))
        return loaded
