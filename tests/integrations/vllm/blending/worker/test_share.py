"""How many of the reused tokens a blend in vLLM computes again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lwkv.blend import BlendRequest
from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.request import check_blend
from lwkv.blend.share.batch_shares import Shares
from lwkv.blend.share.controller import LoadingController
from lwkv.integrations.vllm.blending.worker.share import ControlledShare
from lwkv.platforms.cpu import CPU
from lwkv.telemetry.counters import Counters

LAYERS, FULL, LEAST = 10, 1, 0.15


class Bench:
    """A prompt of 100 tokens of which 80 are reused, and a controller whose speeds are given."""

    def __init__(self, compute_s: float | None, load_s: float | None, most_rows: int = 1000) -> None:
        self.controller = LoadingController(LEAST)
        self.controller.compute_s, self.controller.load_s = compute_s, load_s
        self.counters = Counters()
        shares = Shares(LEAST, self.controller, CPU(), torch.device("cpu"), self.counters)
        self.controlled = ControlledShare(shares, LAYERS, FULL, most_rows)
        reused = np.zeros(100, bool)
        reused[10:90] = True
        checked = check_blend(BlendRequest(list(range(100)), np.arange(100), [(10, 90)]), 100)
        self.reuse = PromptReuse(checked, 0, reused, (10,))

    @property
    def share(self) -> float:
        return self.controlled.choose(self.reuse, LEAST).share


@pytest.mark.parametrize(
    ("compute_s", "load_s", "reason", "share"),
    [
        (None, None, "unmeasured", LEAST),
        (1.0, 0.1, "minimum", LEAST),
        # 800 loads are as long as 100 rows in one layer, and 20 rows and 0.4 of 80 in nine.
        (1.0, (100 + 9 * (20 + 0.4 * 80)) / 800, "hidden", 0.4),
        # Computing all is cheaper, but the scheduler has planned with the blend.
        (1.0, 9.0, "prefill", LEAST),
    ],
)
def test_as_many_are_computed_as_hide_behind_the_loading(
    compute_s: float | None, load_s: float | None, reason: str, share: float
) -> None:
    bench = Bench(compute_s, load_s)
    assert bench.share == pytest.approx(share)
    assert bench.counters.totals() == {f"blend_decisions_{reason}": 1}


def test_never_more_rows_are_computed_than_a_step_may_have_tokens() -> None:
    loads = (100 + 9 * (20 + 0.8 * 80)) / 800
    assert Bench(1.0, loads).share == pytest.approx(0.8)
    # 56 rows in each of ten layers are 100 in the first one, and 20 and 0.39 of 80 in nine.
    assert Bench(1.0, loads, most_rows=56).share == pytest.approx((560 - 100 - 180) / 720)
    assert Bench(1.0, loads, most_rows=1).share == LEAST


def test_the_next_choice_knows_the_speed_of_what_was_timed() -> None:
    bench = Bench(None, None)
    chosen = bench.controlled.choose(bench.reuse, LEAST)
    wait = bench.controlled.timed(chosen, lambda layer: None)
    for layer in range(LAYERS):
        wait(layer)
    chosen.pace.end()
    bench.controlled.note(chosen, 300)
    assert bench.share >= LEAST
    assert bench.controller.compute_s is not None
    assert bench.controller.load_s is not None
