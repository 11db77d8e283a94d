"""Random prompts in little memory of both kinds: models with states answer as they do without lwkv.

200 prompts of each model run with the other tests; `--soak MINUTES` asks 400 for each minute, and prints
what was found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.hybrid_soak import Lengths, Prompts, Watched, at_rest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Answer, Engine, assert_same, started, with_lwkv
from integrations.in_vllm.state_oracle import StateOracle

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM cannot load states"
)

PROMPTS_A_MINUTE = 400
LONG_ANSWER = 30
LEAST_SHARE = 0.9


def answers_alike(
    computed: Elsewhere, batch: Sequence[list[int]], answers: Sequence[Answer], resumed: Resumed
) -> None:
    assert_same(answers, computed.ask(batch, len(answers[0].tokens)))


def answers_alike_to_the_last_bit(
    computed: Elsewhere, batch: Sequence[list[int]], answers: Sequence[Answer], resumed: Resumed
) -> None:
    """What a request has generated before it lost its blocks is computed again as if it were of its prompt:
    so it is without lwkv."""
    for ids, answer in zip(batch, answers, strict=True):
        starts = [0, *resumed.take(ids)]
        for start, end in zip(starts, [*starts[1:], len(answer.tokens)], strict=True):
            (wanted,) = computed.ask([ids + answer.tokens[:start]], LONG_ANSWER)
            assert answer.tokens[start:end] == wanted.tokens[: end - start]
            assert answer.logprobs[start:end] == wanted.logprobs[: end - start], (
                f"of {len(ids)} tokens, {answer.cached} of them cached, got {starts} when it began anew"
            )


@dataclass(frozen=True)
class Shape:
    """A model, its engine, and how its answers are compared.

    Attributes:
        pages: of host memory. blocks: of vLLM's, so few that requests wait for them, and lose them.
        steps: how prompts are cut into steps.
        step: tokens that a step computes of one prompt that is alone, at most; 0 for one of vLLM's blocks, of
            any prompt, also without lwkv. Their size depends on the processor.
    """

    write: Callable[[Path], Path]
    arguments: dict[str, Any]
    lengths: Lengths
    page_bytes: int
    pages: int
    blocks: int
    steps: dict[str, int]
    step: int
    compare: Callable[..., None]
    settings: dict[str, Any]


SHAPES = {
    "lfm2": Shape(
        models.write_lfm2,
        {"max_model_len": 704},
        Lengths(),
        page_bytes=16 << 10,
        pages=160,
        blocks=40,
        steps={"max_num_batched_tokens": 200, "max_num_seqs": 4},
        step=192,
        compare=answers_alike,
        settings={"save_decode_cache": True},
    ),
    # A prompt's answer depends, to the last bit, on where it is cut, and on nothing else of a step: here at
    # each multiple of a block, whatever is loaded.
    "qwen3-next": Shape(
        models.write_qwen3_next,
        {"max_model_len": 1728, "dtype": "bfloat16"},
        Lengths(1000, 400, 1600),
        page_bytes=144 << 10,
        pages=48,
        blocks=16,
        steps={"max_num_batched_tokens": 2048, "max_num_seqs": 4},
        step=0,
        compare=answers_alike_to_the_last_bit,
        settings={},
    ),
}


def cut_at_each(engine: Engine, num_tokens: int) -> None:
    """Have vLLM compute no more tokens of a prompt in a step, also of one that nobody waits for."""
    scheduler = engine.core.scheduler
    scheduler.scheduler_config.long_prefill_token_threshold = num_tokens
    counts = scheduler.get_request_counts
    scheduler.get_request_counts = lambda: (counts()[0] + 1, counts()[1])


class Resumed:
    """How many tokens requests had generated each time they got blocks anew, having lost them."""

    def __init__(self, engine: Engine) -> None:
        self._generated: dict[tuple[int, ...], dict[int, int]] = {}
        self._allocated = engine.scheduler.allocated
        engine.scheduler.allocated = self.allocated

    def allocated(self, request: Any, *arguments: Any) -> None:
        self._allocated(request, *arguments)
        if request.num_preemptions:
            times = self._generated.setdefault(tuple(request.prompt_token_ids), {})
            times[request.num_preemptions] = int(request.num_tokens - request.num_prompt_tokens)

    def take(self, ids: list[int]) -> list[int]:
        """Of a request that has ended, by its prompt."""
        return [*self._generated.pop(tuple(ids), {}).values()]


UNEXPLAINED = pytest.mark.xfail(
    strict=False,
    reason="now and then some log-probabilities differ (by 0.00001 to 0.24; once with nothing cached), with "
    "equal tokens: whether this is lwkv's fault is not known",
)


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3-next", marks=UNEXPLAINED)])
def test_random_prompts_in_little_memory_are_answered_as_without_lwkv(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shape = SHAPES[name]
    model = models.written(shape.write, tmp_path)
    most = PROMPTS_A_MINUTE * float(request.config.getoption("--soak"))
    room_gib = shape.pages * shape.page_bytes / 2**30
    small = {"max_local_cpu_size": room_gib, "extra_config": {"slab_bytes": 1 << 20}}
    tight = {"num_gpu_blocks_override": shape.blocks, "enable_prefix_caching": True}
    arguments = shape.arguments | shape.steps | tight | with_lwkv(**small | shape.settings)
    with started(model, **arguments) as engine:
        block = 0 if shape.step else engine.worker.engine.chunk_size
        if block:
            cut_at_each(engine, block)
        steps = {"max_num_batched_tokens": block, "max_num_seqs": 1} if block else {}
        computed = Elsewhere(model, enable_prefix_caching=False, **shape.arguments, **steps)
        try:
            run = Run(engine, computed, shape, block)
            run.alone(most / 4)
            run.together(most)
            at_rest(engine, run.watched)
        finally:
            computed.close()
        print(f"\n{name}: {run.summary()}")
        run.require_hits_of_the_room()
        run.require_least_was_moved()
        run.require_all_was_seen()


class Run:
    """Prompts, their answers compared, and what was found."""

    def __init__(self, engine: Engine, computed: Elsewhere, shape: Shape, block: int) -> None:
        self._engine, self._computed, self._shape = engine, computed, shape
        self._block, self._step = block, shape.step or block
        self._prompts, self._chance = Prompts(1, shape.lengths), random.Random(2)
        self.watched, self._resumed = Watched(engine), Resumed(engine)
        hybrid = engine.worker.engine
        self._chunk = hybrid.chunk_size
        pages = {hybrid.kinds[kind].form: pages for kind, pages in hybrid.chunk_pages.items()}
        size = hybrid.max_pages, self._chunk, pages["full"], pages["state"]
        self._oracles = {name: StateOracle(*size) for name in ("prompts", "steps")}
        self._found, self._wanted = 0, Counter[str]()
        self._asked = self._tokens = self._cached = 0

    def alone(self, most: float) -> None:
        """Ask prompts one by one, of which vLLM has nothing itself."""
        while self._asked < most:
            for ids in self._prompts.next_batch():
                (answer,) = self._ask([ids], 4)
                self._engine.flush()
                self._engine.forget()
                self._found += answer.cached
                self._ask_oracles(ids)

    def together(self, most: float) -> None:
        """Ask prompts in batches; now and then vLLM forgets its own."""
        while self._asked < most:
            self._ask(self._prompts.next_batch(), self._chance.choice([4, LONG_ANSWER]))
            if self._chance.random() < 0.5:
                self._engine.forget()

    def _ask(self, batch: list[list[int]], length: int) -> list[Answer]:
        batch = [ids[: self._end(len(ids))] for ids in batch]
        answers = self._engine.ask(batch, length)
        self._shape.compare(self._computed, batch, answers, self._resumed)
        self._asked, self._tokens = self._asked + len(batch), self._tokens + sum(map(len, batch))
        self._cached += sum(answer.cached for answer in answers)
        return answers

    def _end(self, length: int) -> int:
        """Where a prompt is cut off, so that its answer lies in one of vLLM's blocks where that matters."""
        block = self._block
        return length if not block else length - max(0, length % block + LONG_ANSWER - block)

    def _ask_oracles(self, ids: list[int]) -> None:
        """One keeps the state at the end of each prompt, the other one that at the end of each step too."""
        last = (len(ids) - 1) // self._chunk * self._chunk
        for name, oracle in self._oracles.items():
            found = oracle.find(ids)
            self._wanted[name] += found
            steps = range(found + self._step, last, self._step) if name == "steps" else ()
            oracle.store(ids, found, {*steps, last})

    def summary(self) -> str:
        stats = self._engine.worker.engine.stats()
        return (
            f"{self._asked} prompts of {self._tokens} tokens, {self._cached} not computed; alone "
            f"{self._found} found, {dict(self._wanted)} by oracles; {dict(self.watched.seen)}, "
            f"{self._engine.metric('vllm:num_preemptions'):.0f} preemptions, "
            f"{stats['chunks_evicted']} chunks evicted"
        )

    def require_hits_of_the_room(self) -> None:
        """As many as of a cache of the room that keeps the state at each prompt's end.

        And nearly as many as of one that keeps those of all steps: inside longer prompts they go first here.
        """
        assert self._found >= self._wanted["prompts"] > 0
        assert self._found >= LEAST_SHARE * self._wanted["steps"]

    def require_least_was_moved(self) -> None:
        """Of full attention what vLLM lacks, and for each request one state, which counts as a token."""
        seen, stats = self.watched.seen, self._engine.worker.engine.stats()
        assert stats["tokens_retrieved"] == seen["tokens loaded"] + seen["loaded"]

    def require_all_was_seen(self) -> None:
        seen = self.watched.seen
        assert seen["loaded"] > 0
        assert seen["promised and not allocated at once"] > 0
        assert seen["promised after a preemption"] > 0
        assert self._engine.metric("vllm:num_preemptions") > 0
        assert self._engine.worker.engine.stats()["chunks_evicted"] > 0
