from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import LAYOUTS, Bed


@pytest.fixture(params=LAYOUTS)
def bed(request: pytest.FixtureRequest, bench: Bench) -> Iterator[Bed]:
    with bench.bed(24, layout=request.param, prompts=2) as bed:
        bed.fill()
        yield bed


def test_the_two_places_share_no_slot(bed: Bed) -> None:
    assert len(np.unique(np.concatenate([bed.source, bed.target]))) == 2 * bed.num_tokens


def test_prompts_share_no_token(bed: Bed) -> None:
    first, second = bed.new_prompt(), bed.new_prompt()
    assert not set(first.tolist()) & set(second.tolist())


def test_places_agree_only_after_a_load(bed: Bed) -> None:
    kept = bed.new_prompt()
    bed.keep(kept)
    assert not bed.places_agree()
    bed.load(kept)
    assert bed.places_agree()
    bed.clear_target()
    assert not bed.places_agree()


def test_one_wrong_byte_is_enough_to_disagree(bed: Bed) -> None:
    kept = bed.new_prompt()
    bed.keep(kept)
    bed.load(kept)
    last = torch.tensor(bed.target[-1])
    bed.engine.connector.layers[-1].k[last // 4, last % 4, -1, -1] += 1
    assert not bed.places_agree()
    assert bed.places_agree(16)


def test_a_prompt_that_made_room_for_others_is_kept_again(bed: Bed) -> None:
    kept = bed.new_prompt()
    for prompt in (kept, bed.new_prompt(), bed.new_prompt()):
        bed.keep(prompt)
    assert bed.engine.lookup(kept) < len(kept)
    bed.keep(kept)
    assert bed.engine.lookup(kept) == len(kept)


def test_no_page_is_added_after_the_start(bed: Bed) -> None:
    before = bed.engine.stats()["pages"]
    for _ in range(3):
        bed.keep(bed.new_prompt())
    assert bed.engine.stats()["pages"] == before


def test_what_cannot_be_kept_is_reported(bed: Bed) -> None:
    bed.engine.freeze()
    with pytest.raises(RuntimeError, match="24 tokens are not cached"):
        bed.keep(bed.new_prompt())
