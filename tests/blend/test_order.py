"""What orders a blend's computing and its loads, found by a checker of what happens before what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blend.conftest import DOCUMENTS, prompt, with_documents_in
from oracle import MemoryTier, held_completions
from races import Races, WatchedKernels, row_spans
from small_llama import small_shape
from torch import Tensor

from lwkv.blend import Blender, Deviation, FirstTokens, QueryAttention, blender
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.connectors import paged
from lwkv.kernels import Rows
from lwkv.keys import LayerKey
from lwkv.storage import Status

HOST = torch.device("cpu")


class WatchedRows(PagedRows):
    """The model's reading and writing, which happens at once, as operations of the current stream."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        self._begin("write", layer).writes.extend(self._spans(layer, rows))
        super().write(layer, rows, k, v)

    def read(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        self._begin("read", layer).reads.extend(self._spans(layer, rows))
        return super().read(layer, rows)

    def _begin(self, name: str, layer: int) -> Any:
        races: Any = self._platform
        return races._begin(races.current_stream(HOST), f"the model's {name} of layer {layer}")

    def _spans(self, layer: int, rows: Rows) -> list[Any]:
        return [row_spans(view, rows.slots.numpy()) for view in self._layers[layer].words]


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[Races]:
    races = Races()
    monkeypatch.setattr(paged, "choose_kernels", WatchedKernels)
    monkeypatch.setattr(blender, "PagedRows", WatchedRows)
    yield races
    races.close()


def blend(races: Races, selector: Any, change: Callable[[Blender], None]) -> str:
    """Blend twice into the same blocks; what is not ordered, if anything."""
    tier = MemoryTier()
    bench = with_documents_in(tier, small_shape(4), HOST, platform=races)
    blender = bench.blender(selector, share=0.3)
    change(blender)
    lost = {LayerKey(key, 2) for key in blender.segments.keys(DOCUMENTS[2])}
    tier.fails = lambda key: Status.ERROR if key in lost else Status.OK
    with held_completions(bench.engine):
        for _ in range(2):
            (found,) = blender.prefill([prompt([2, 0, 1])[1]])
            assert found.num_reused == 21
    assert bench.engine.stats()["blend_retries"] == 2
    assert torch.isfinite(found.logits).all()
    bench.close()
    races.synchronize_device(HOST)
    return str(races.find())


def as_it_is(blender: Blender) -> None:
    pass


SELECTORS = [Deviation(), Deviation("k", (2,), (0.3,)), FirstTokens(), QueryAttention(1, 2)]


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_blends_that_are_begun_again_are_in_order(selector: Any, races: Races) -> None:
    assert blend(races, selector, as_it_is) == "None"


def without_the_first_wait(blender: Blender) -> None:
    blender._connector.in_place._wait_behind = lambda *_: None  # type: ignore[method-assign]


def with_the_head_kept(blender: Blender) -> None:
    """Loads of the pass that is begun again come behind what the one before came behind."""
    attempt, first = blender._try, []

    def again(prompts: Any, loads: Any, head: Any) -> Any:
        first.append(head)
        return attempt(prompts, loads, head or first[0])

    blender._try = again  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [without_the_first_wait, with_the_head_kept])
def test_what_would_not_be_is_found(change: Callable[[Blender], None], races: Races) -> None:
    assert "nothing orders" in blend(races, Deviation(), change)
