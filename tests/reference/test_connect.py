"""The reference engine on a real cache engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.platforms import Platform
from lwkv.platforms.cpu import CPU
from lwkv.platforms.cpu_stream import WorkerStream
from lwkv.reference import LAYOUTS, Answer, Prompt, ReferenceEngine, generate, open_cache_engine
from lwkv.steps import LayerSteps

MakeEngine = Callable[..., ReferenceEngine]
CONFIG = Config(chunk_size=8, use_layerwise=True, max_local_cpu_size=0.01)


class Pair:
    """A reference engine and the cache engine beside it."""

    def __init__(self, make_engine: MakeEngine, platform: Platform, layout: str, **options: Any) -> None:
        plain = make_engine(layout)
        self.cache_engine: CacheEngine = open_cache_engine(
            CONFIG, plain.model, plain.cache, "tiny", platform=platform
        )
        self.engine = make_engine(
            cache=plain.cache, steps=LayerSteps(self.cache_engine), lookup=self.cache_engine.lookup, **options
        )

    def serve(self, *prompts: Prompt) -> list[Answer]:
        answers = generate(self.engine, prompts)
        assert self.cache_engine.flush()
        return answers


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class LateCPU(CPU):
    """Does what it is given as late as the recorded events allow."""

    def new_stream(
        self, device: torch.device, high_priority: bool = False, late: bool = True
    ) -> WorkerStream:
        return super().new_stream(device, high_priority, late)


@pytest.fixture
def late_platform(platform: Platform) -> Iterator[Platform]:
    """The platform under test, with all its streams late where that can be had."""
    if platform.name != "cpu":
        yield platform
        return
    late = LateCPU()
    yield late
    late.close()


def _tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 101 for i in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_from_loaded_kv_equal_those_of_an_engine_without_cache(
    layout: str, make_engine: MakeEngine, platform: Platform, stack: ExitStack
) -> None:
    pair = Pair(make_engine, platform, layout)
    stack.enter_context(pair.cache_engine)
    prompts = [Prompt(_tokens(16), 5), Prompt(_tokens(27), 5), Prompt(_tokens(9, 1), 5)]
    cold = pair.serve(*prompts)
    pair.engine.cache.fill(float("nan"))
    warm = pair.serve(*prompts)
    plain = [answer.tokens for answer in generate(make_engine(), prompts)]
    assert [answer.tokens for answer in cold] == [answer.tokens for answer in warm] == plain
    assert [answer.num_loaded for answer in cold + warm] == [0, 0, 0, 15, 24, 8]
    assert pair.engine.allocator.num_free == 60


def test_blocks_go_from_request_to_request_while_their_kv_is_on_its_way(
    make_engine: MakeEngine, late_platform: Platform, stack: ExitStack
) -> None:
    pair = Pair(make_engine, late_platform, "vllm_bhn2d", step_tokens=11, max_requests=2)
    stack.enter_context(pair.cache_engine)
    choice = random.Random(3)
    heads = [_tokens(8 * length, seed) for seed, length in enumerate((1, 2, 3))]
    prompts = [Prompt(choice.choice(heads) + _tokens(choice.randrange(1, 9), seed), 3) for seed in range(20)]
    answers = generate(pair.engine, prompts)
    plain = generate(make_engine(), prompts)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert sum(answer.num_loaded for answer in answers) > 50
    assert sum(answer.num_failed_loads for answer in answers) == 0
    assert pair.cache_engine.flush()
    stats = pair.cache_engine.stats()
    assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)


def test_a_chunk_that_is_lost_between_look_up_and_load_is_computed(
    make_engine: MakeEngine, platform: Platform, stack: ExitStack
) -> None:
    pair = Pair(make_engine, platform, "vllm_bhn2d")
    stack.enter_context(pair.cache_engine)
    pair.serve(Prompt(_tokens(16), 1))
    forgetful = make_engine(
        cache=pair.engine.cache, steps=LayerSteps(pair.cache_engine), lookup=lambda tokens, salts: 24
    )
    answer = generate(forgetful, [Prompt(_tokens(27), 4)])[0]
    assert answer.tokens == generate(make_engine(), [Prompt(_tokens(27), 4)])[0].tokens
    assert (answer.num_loaded, answer.num_failed_loads) == (16, 1)
