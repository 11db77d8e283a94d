"""What is tried at the start, on lwkv's own model in place of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from blend.conftest import SHARED, Bench
from small_llama import small_shape
from torch import Tensor

from lwkv.blend.forward.attention import attend
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.segment_cache import SegmentCache
from lwkv.connectors.rope import Rope
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.blending.model.calls import Call, Seen, States
from lwkv.integrations.vllm.blending.model.check import StartCheck, difference, is_near
from lwkv.platforms.protocol import Int64s
from lwkv.reference.blending import ReferenceBlend

BLOCK = 5
FAR = 37


class Layers:
    """The layers of lwkv's own model, with vLLM's contract."""

    def __init__(self, bench: Bench, rows: PagedRows) -> None:
        self.model, self._rows = ReferenceBlend(bench.model), rows
        self.num_layers, self.device = self.model.num_layers, torch.device("cpu")
        self.unturned: int | None = None
        self.row_attentions: object | None = None
        self.num_by_rows, self.kernel_is_off_by = 0, 1.0
        self.scaled = self.other_keys = 1.0
        self.spoils: Callable[[int, Tensor], Tensor] = lambda layer, hidden: hidden
        self.flat: list[Any] = [torch.clone, None, torch.neg][: self.num_layers]

    def eagerly(self) -> Any:
        return nullcontext()

    def embed(self, tokens: Int64s) -> States:
        return States(self.model.embed(torch.from_numpy(tokens)), None)

    def calls(self, positions: Int64s, slots: Int64s, by_rows: bool | None = None) -> list[Call]:
        there = torch.from_numpy(positions)
        return [Call(slice(0, len(positions)), there, (positions, slots), bool(by_rows))]

    def run(self, layer: int, calls: Sequence[Call], states: States) -> States:
        states = self.run_modules(layer, calls, states)
        flat = self.flat[layer]
        return states if flat is None else States(flat(states.hidden), None)

    def run_modules(self, layer: int, calls: Sequence[Call], states: States) -> States:
        (call,) = calls
        at, slots = call.context
        turned = call.positions if layer != self.unturned else torch.zeros_like(call.positions)
        q, k, v = self.model.project(layer, states.hidden, self.model.angles(turned, 100))
        self._rows.write(layer, self._rows.at(self._rows.send(slots[at])), k, v)
        seen = slots[: int(at[-1]) + 1]
        keys, values = self._rows.read(layer, self._rows.at(self._rows.send(seen)))
        self.written = k, v
        attended = attend(q, keys, values, torch.from_numpy(at))
        if call.by_rows:
            self.num_by_rows += 1
            attended = attended * self.kernel_is_off_by
        self.seen = q * self.scaled, attended
        hidden = self.model.finish(layer, states.hidden, attended)
        return States(self.spoils(layer, hidden), None)

    def keys_and_values(self, layer: int, calls: Sequence[Call], states: States) -> tuple[Tensor, Tensor]:
        self.run_modules(layer, calls, states)
        return self.written[0] * self.other_keys, self.written[1]

    def run_seen(self, layer: int, calls: Sequence[Call], states: States) -> Seen:
        return Seen(self.run_modules(layer, calls, states), *self.seen)

    def finish(self, states: States) -> Tensor:
        return states.hidden

    def forward_context(self, call: Call) -> Any:
        self.current = call
        return nullcontext()


class Model:
    """vLLM's forward pass over all layers."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.returns: Callable[[Tensor], Any] = lambda hidden: hidden

    def __call__(self, input_ids: Tensor, positions: Tensor, **rest: Any) -> Any:
        spoils, self._layers.spoils = self._layers.spoils, lambda layer, hidden: hidden
        states = self._layers.embed(input_ids.numpy())
        for layer in range(self._layers.num_layers):
            states = self._layers.run_modules(layer, [self._layers.current], states)
        self._layers.spoils = spoils
        return self.returns(states.hidden)


class Rig:
    """A check and what it looks at."""

    def __init__(self) -> None:
        self.bench = Bench(small_shape(3), torch.device("cpu"))
        self.rows = PagedRows(SegmentCache(self.bench.engine, SHARED).connector)
        self.layers = Layers(self.bench, self.rows)
        self.model = Model(self.layers)
        self.rope = self.layers.model.rope

    def run(self, asks: bool = False) -> None:
        layers: Any = self.layers
        StartCheck(self.model, layers, self.rows, BLOCK, self.rope, FAR, asks).run()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.bench.close()


def test_a_model_whose_layers_give_what_it_gives_is_taken(rig: Rig) -> None:
    rig.run()


def test_keys_that_are_changed_behind_what_is_seen_are_refused(rig: Rig) -> None:
    rig.layers.other_keys = 1.001
    with pytest.raises(ConfigError, match="keys or values of layer 0 that its attention gets are not those"):
        rig.run()


def test_a_model_whose_attention_is_plain_can_be_asked(rig: Rig) -> None:
    rig.run(asks=True)


def test_attention_that_is_scaled_otherwise_is_refused_where_a_question_asks(rig: Rig) -> None:
    rig.layers.scaled = 2.0
    rig.run()
    with pytest.raises(ConfigError, match=r"attention of layer 0 is not plain .* 'query' needs"):
        rig.run(asks=True)


def test_layers_that_give_something_else_are_refused(rig: Rig) -> None:
    rig.layers.spoils = lambda layer, hidden: hidden * (1 + 1e-6 * (layer == 1))
    with pytest.raises(ConfigError, match="Model cannot be blended: layers that are called one by one"):
        rig.run()


def in_bfloat16(rig: Rig, wrong: float) -> None:
    """Both passes end in bfloat16, and one of them is off by a part of each value in its last layer."""
    rig.layers.finish = lambda states: states.hidden.bfloat16()  # type: ignore[method-assign]
    rig.model.returns = lambda hidden: hidden.bfloat16()
    rig.layers.spoils = lambda layer, hidden: hidden * (1 + wrong * (layer == 2))


def test_rounding_in_another_order_is_allowed_and_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """On a device, where kernels need not be deterministic."""
    in_bfloat16(rig, 0.008)
    with caplog.at_level("INFO"):
        rig.run()
    assert "by rounding only: the largest difference is" in caplog.text


def test_more_than_rounding_is_refused_with_what_was_found_and_what_is_allowed(rig: Rig) -> None:
    in_bfloat16(rig, 0.03)
    allowed = 2**-7 * 6**0.5
    with pytest.raises(ConfigError, match=f"the largest difference is .* {allowed:.3g} of the largest value"):
        rig.run()


def test_the_kernel_for_rows_that_stand_apart_is_tried_where_there_is_one(rig: Rig) -> None:
    rig.run()
    assert rig.layers.num_by_rows == 0
    rig.layers.row_attentions = object()
    rig.run()
    assert rig.layers.num_by_rows == rig.layers.num_layers
    rig.layers.kernel_is_off_by = 1.1
    with pytest.raises(ConfigError, match="differ from those of a prompt, by lwkv's kernel: the largest"):
        rig.run()


def test_what_is_no_number_is_not_near() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert not is_near(nan, one, 0.5)
    assert not is_near(one, nan, 0.5)
    assert is_near(one, one, 0.0)
    assert difference(torch.tensor([1.5, 1.0]), one, 0.1) == (
        "the largest difference is 0.5, 0.1 are allowed: 0.1 of the largest value, 1 (float32)"
    )


def test_rows_that_are_read_elsewhere_than_written_are_refused(rig: Rig) -> None:
    read = rig.rows.read

    def elsewhere(layer: int, rows: Any) -> Any:
        k, v = read(layer, rows)
        return (k, v) if layer != 2 else (torch.zeros_like(k), v)

    check: Any = rig.rows
    rig.layers._rows = PagedRows(SegmentCache(rig.bench.engine, SHARED).connector)
    check.read = elsewhere
    with pytest.raises(ConfigError, match="rows of layer 2 are not found"):
        rig.run()


def test_other_frequencies_are_refused(rig: Rig) -> None:
    frequencies = np.array(rig.rope.frequencies)
    frequencies[-1] *= 1.01
    rig.rope = Rope(tuple(frequencies.tolist()))
    with pytest.raises(ConfigError, match="keys of layer 0 do not turn"):
        rig.run()


def test_a_layer_that_does_not_turn_its_keys_is_refused(rig: Rig) -> None:
    """As some models have: every fourth layer knows no positions."""
    rig.layers.unturned = 1
    with pytest.raises(ConfigError, match="keys of layer 1 do not turn"):
        rig.run()


@pytest.mark.parametrize(
    "error",
    [TypeError("forward() takes 3 arguments"), AttributeError("no cos_sin"), RuntimeError("shapes differ")],
    ids=lambda error: type(error).__name__,
)
def test_layers_that_cannot_be_called_in_this_way_are_refused_by_name(rig: Rig, error: Exception) -> None:
    def fail(*_: Any) -> Any:
        raise error

    rig.layers.run = fail  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"Model cannot be blended: .*{type(error).__name__}: ") as refused:
        rig.run()
    assert str(error) in str(refused.value)
    assert refused.value.__cause__ is error


def test_a_forward_pass_that_returns_something_else_is_refused(rig: Rig) -> None:
    rig.model.returns = lambda hidden: (hidden, [])
    with pytest.raises(ConfigError, match="returns tuple"):
        rig.run()


def test_tokens_computed_apart_that_see_other_keys_are_refused(rig: Rig) -> None:
    """As where one sequence of a batch does not see what another one writes."""
    run = rig.layers.run

    def blind(layer: int, calls: Sequence[Call], states: States) -> States:
        (call,) = calls
        if len(call.positions) == 3:
            states = States(states.hidden * 1.01, None)
        return run(layer, calls, states)

    rig.layers.run = blind  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="computed apart over cached keys differ"):
        rig.run()


def test_a_layer_that_differs_without_its_modules_is_called_with_them(rig: Rig) -> None:
    assert [flat is None for flat in rig.layers.flat] == [False, True, False]
    rig.run()
    assert rig.layers.flat == [torch.clone, None, None]
