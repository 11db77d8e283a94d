from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.trace.bare import WAYS, BareSave, Way
from lwkv.platforms import Int64s


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("way", [way for way in WAYS if way.kernels], ids=lambda way: way.name)
def test_every_way_saves_what_the_engine_saves(
    way: Way, codec: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = replace(bench, shape=replace(bench.shape, dtype=torch.bfloat16, head_size=32))
    with bench.new_engine(prompts=3, config={"page_codec": codec}) as bed:
        bed.fill()
        prompt, pool = bed.new_prompt(), bed.engine._pool
        bed.keep(prompt)
        hold = bed.engine.parts().storage.hold(bed.engine.keys(prompt))
        stored = [chunk.pages for chunk in (item.chunk for item in hold.found) if chunk is not None]
        taken: list[Int64s] = []
        monkeypatch.setattr(BareSave, "_pages", keeping(BareSave._pages, taken))
        times = BareSave(bed, way).measure(repeats=1)
        assert len(times) == 1
        assert len(stored) == bed.num_tokens // bed.shape.chunk_size
        for chunk, pages in enumerate(stored):
            for layer, page in enumerate(pages.tolist()):
                assert torch.equal(pool.page(page), pool.page(int(taken[0][layer, chunk])))
        hold.release()


def keeping(pages: Callable[[BareSave], Int64s], taken: list[Int64s]) -> Callable[[BareSave], Int64s]:
    def kept(save: BareSave) -> Int64s:
        taken.append(pages(save))
        return taken[-1]

    return kept


def test_no_two_ways_are_the_same() -> None:
    assert len({replace(way, name="") for way in WAYS}) == len(WAYS)
