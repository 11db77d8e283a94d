"""Models with several groups of caches in a vLLM that has too few blocks for what is to run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Answer, Engine, assert_same, prompt, started, with_lwkv

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has all layers in one group here"
)

PROMPTS = [prompt(3600 + number, 190 + 33 * number) for number in range(3)]
ANSWER = 30
MOST_STEPS = 2000


def write_gemma(folder: Path) -> None:
    models.write_gemma(folder, 64, "wwf" * 2)


class Pool:
    """The blocks of an engine's vLLM."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = engine.core.scheduler.kv_cache_manager.block_pool

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @contextmanager
    def of(self, num_blocks: int) -> Iterator[None]:
        """No more blocks than this are free for what runs."""
        held = self._pool.get_new_blocks(self.num_free - num_blocks)
        try:
            yield
        finally:
            self._pool.free_blocks(held)

    def ask(self, prompts: Sequence[list[int]]) -> tuple[list[Answer], int]:
        """Answer all, in so many steps at most; the blocks that they took at a time."""
        names = [f"{id(self)}-{number}" for number in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            self._engine.begin(name, ids, ANSWER)
        answers: dict[str, Answer] = {}
        before = least = self.num_free
        for _ in range(MOST_STEPS):
            answers |= self._engine.step()
            least = min(least, self.num_free)
            if len(answers) == len(names):
                break
        assert answers.keys() == {*names}, "they wait for blocks for ever"
        self._engine.run_out()
        return [answers[name] for name in names], before - least


@pytest.mark.parametrize("write", [write_gemma, models.write_lfm2], ids=["windows", "states"])
def test_with_any_number_of_blocks_too_few_for_all_nothing_hangs_and_all_is_given_back(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    """From one block less than what runs takes together, down to what the largest takes alone."""
    model = models.written(write, tmp_path)
    computed = Elsewhere(model, enable_prefix_caching=False)
    arguments = {"max_model_len": 320, "max_num_batched_tokens": 100, "max_num_seqs": 4}
    try:
        with started(model, enable_prefix_caching=True, **arguments, **with_lwkv()) as engine:
            wanted, pool = computed.ask(PROMPTS, ANSWER), Pool(engine)
            for _ in range(2):
                answers, together = pool.ask(PROMPTS)
                assert_same(answers, wanted)
                engine.forget()
            alone = max(taken_alone(engine, pool, ids) for ids in PROMPTS)
            free = pool.num_free
            for num_blocks in (*range(together - 1, alone, -2), alone):
                engine.new_hits()
                with pool.of(num_blocks):
                    answers, _ = pool.ask(PROMPTS)
                assert_same(answers, wanted)
                assert engine.new_hits() > 0
                engine.groups_at_rest()
                engine.forget()
                assert pool.num_free == free
            assert together - alone > 8
            assert engine.metric("vllm:num_preemptions") > 0
    finally:
        computed.close()


def taken_alone(engine: Engine, pool: Pool, ids: list[int]) -> int:
    """Blocks that a prompt takes that is alone, and loaded."""
    _, taken = pool.ask([ids])
    engine.forget()
    return taken
