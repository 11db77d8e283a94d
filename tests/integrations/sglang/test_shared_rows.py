"""Ranks of a model with MLA, whose rows are the same, on one host memory of their machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from integrations.sglang.fake_sglang import FakeSGLang
from oracle import Dims, Oracle
from shared_host.owners import LONG_S, owner_at

from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform

PAGE, LAYERS, STRIDE = 4, 3, 4096
A, B = list(range(100, 121)), list(range(300, 317))
PAGES_OF_A, PAGES_OF_B = 5, 4


class RankOracle(Oracle):
    """The caches of one of two ranks."""

    tp_rank = 0

    @property
    def metadata(self) -> CacheMetadata:
        return replace(super().metadata, tp_size=2, tp_rank=self.tp_rank)


@pytest.fixture
def ranks(platform: Platform, device: torch.device, tmp_path: Path) -> Iterator[list[FakeSGLang]]:
    path, made = tmp_path / "host.sock", []
    with owner_at(path, 3 * 64), ExitStack() as closing:
        for rank in range(2):
            oracle = RankOracle(platform, device, "sglang_mla", Dims(LAYERS, 24, PAGE))
            oracle.tp_rank = rank
            engine = oracle.engine(PAGE, host_memory=str(path), host_timeout_s=LONG_S, load_streams=1)
            stream = platform.new_stream(device)
            made.append(FakeSGLang(oracle, engine, stream, num_ranks=2, flush_name="of both"))
            closing.callback(made[-1].link.close)
        yield made
        for each in made:
            each.oracle.check()


def run_together(ranks: list[FakeSGLang], tokens: list[int]) -> list[int]:
    """Run a prompt on all ranks: each loads what the one that has least found. How many pages these were."""
    found = []
    for each in ranks:
        each.others_have = 1 << 30
        found.append(each.match(each.prompt(tokens)))
    loaded = []
    for each in ranks:
        each.others_have = min(found)
        (prompt,) = each.run(tokens)
        loaded.append(prompt.from_host)
    return loaded


def test_rows_are_kept_once_and_every_rank_loads_them(ranks: list[FakeSGLang]) -> None:
    assert run_together(ranks, A) == [0, 0]
    assert [each.results for each in ranks] == [[True], [True]]
    assert ranks[0].engine.stats()["host_used_bytes"] == PAGES_OF_A * LAYERS * STRIDE
    for each in ranks:
        each.evict()
    # FakeSGLang compares what each layer's reading finds.
    assert run_together(ranks, A) == [PAGES_OF_A] * 2


def test_a_rank_that_stores_nothing_leaves_the_answer_to_the_one_that_does(ranks: list[FakeSGLang]) -> None:
    first, other = ranks
    other.run(A)
    assert other.results == [True]
    assert other.engine.stats()["host_used_bytes"] == 0
    assert first.match(first.prompt(A)) == 0


def test_after_a_flush_ranks_find_each_others_rows_and_nothing_from_before(ranks: list[FakeSGLang]) -> None:
    run_together(ranks, A)
    for each in ranks:
        each.flush()
    assert run_together(ranks, A) == [0, 0]
    assert run_together(ranks, B) == [0, 0]
    for each in ranks:
        each.evict()
    assert run_together(ranks, A) == [PAGES_OF_A] * 2
    assert run_together(ranks, B) == [PAGES_OF_B] * 2


def test_a_rank_that_was_not_flushed_yet_finds_nothing_of_one_that_was(ranks: list[FakeSGLang]) -> None:
    run_together(ranks, A)
    ranks[0].flush()
    ranks[1].evict()
    assert run_together(ranks, A) == [0, 0]
