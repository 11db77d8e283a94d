from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import LAYOUTS, MeasuredEngine


@pytest.fixture(params=LAYOUTS)
def measured(request: pytest.FixtureRequest, bench: Bench) -> Iterator[MeasuredEngine]:
    with bench.new_engine(24, layout=request.param, prompts=2) as measured:
        measured.fill()
        yield measured


def test_the_two_places_share_no_slot(measured: MeasuredEngine) -> None:
    assert len(np.unique(np.concatenate([measured.source, measured.target]))) == 2 * measured.num_tokens


def test_prompts_share_no_token(measured: MeasuredEngine) -> None:
    first, second = measured.new_prompt(), measured.new_prompt()
    assert not set(first.tolist()) & set(second.tolist())


def test_places_agree_only_after_a_load(measured: MeasuredEngine) -> None:
    kept = measured.new_prompt()
    measured.keep(kept)
    assert not measured.places_agree()
    measured.load(kept)
    assert measured.places_agree()
    measured.clear_target()
    assert not measured.places_agree()


def test_what_fills_the_caches_is_kept_by_fp8_pages_as_it_is(bench: Bench) -> None:
    with bench.new_engine(24, prompts=2, config={"page_codec": "fp8"}) as measured:
        measured.fill()
        kept = measured.new_prompt()
        measured.keep(kept)
        measured.load(kept)
        assert measured.places_agree()


def test_one_wrong_byte_is_enough_to_disagree(measured: MeasuredEngine) -> None:
    kept = measured.new_prompt()
    measured.keep(kept)
    measured.load(kept)
    last = torch.tensor(measured.target[-1])
    measured.engine.connector.layers[-1].k[last // 4, last % 4, -1, -1] += 1
    assert not measured.places_agree()
    assert measured.places_agree(16)


def test_a_prompt_that_made_room_for_others_is_kept_again(measured: MeasuredEngine) -> None:
    kept = measured.new_prompt()
    for prompt in (kept, measured.new_prompt(), measured.new_prompt()):
        measured.keep(prompt)
    assert measured.engine.lookup(kept) < len(kept)
    measured.keep(kept)
    assert measured.engine.lookup(kept) == len(kept)


def test_no_page_is_added_after_the_start(measured: MeasuredEngine) -> None:
    before = measured.engine.stats()["pages"]
    for _ in range(3):
        measured.keep(measured.new_prompt())
    assert measured.engine.stats()["pages"] == before


def test_what_cannot_be_kept_is_reported(measured: MeasuredEngine) -> None:
    measured.engine.freeze()
    with pytest.raises(RuntimeError, match="24 tokens are not cached"):
        measured.keep(measured.new_prompt())
