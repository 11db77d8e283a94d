"""What the demo does: two questions about one document, each in all the ways that are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from lwkv.cli.demo.model_file import NamedModel
from lwkv.cli.demo.progress import progress_bar
from lwkv.cli.demo.stage import Run, Stage, open_stage
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.platforms import Platform
from lwkv.reference import QUESTIONS, KVSteps, Model, Prompt, Tokenizer, document_prompt

CHUNK_SIZE = 256
MAX_ANSWER = 24
MOST_COLD_RUNS = 3
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Results:
    """All runs. `recomputed` has both questions; the first of `cold` is a whole answer, and so are those
    named after a question; the others end with their first token. `num_hit` is what the look-up found.
    """

    recomputed: list[Run]
    cold: list[Run]
    by_layers_answer: Run
    in_bulk_answer: Run
    by_layers: list[Run]
    in_bulk: list[Run]
    spoiled: Run
    num_hit: int


class Job(NamedTuple):
    """A prompt, the KV cache it runs with, and the prompt tokens that will have to be computed."""

    prompt: Prompt
    steps: KVSteps
    num_computed: int


def make_prompts(tokenizer: Tokenizer) -> list[Prompt]:
    """Write the questions as prompts. Raises ConfigError if they share less than a chunk."""
    prompts = [
        Prompt(tokenizer.encode(document_prompt(question)), MAX_ANSWER, tokenizer.stop_tokens)
        for question in QUESTIONS
    ]
    if num_shared(prompts) == 0:
        raise ConfigError(
            f"this model's tokenizer makes fewer than {CHUNK_SIZE} tokens of the document: there is no "
            "chunk to load; choose another model with --model"
        )
    return prompts


def num_shared(prompts: Sequence[Prompt]) -> int:
    """Count the leading tokens that all prompts share, in whole chunks."""
    together = zip(*(prompt.tokens for prompt in prompts), strict=False)
    same = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, together))
    return same // CHUNK_SIZE * CHUNK_SIZE


def play(named: NamedModel, platform: Platform, prompts: Sequence[Prompt], repeats: int) -> Results:
    """Run everything, with progress bars; `repeats` times where a time is measured (cold at most 3)."""
    shared = num_shared(prompts)
    num_cold = min(repeats, MOST_COLD_RUNS)
    num_chunks = 1 + num_cold * (len(prompts[0].tokens) // CHUNK_SIZE)
    longest = max(len(prompt.tokens) for prompt in prompts) + MAX_ANSWER
    with open_stage(named, platform, make_config(named.model, num_chunks), shared, longest) as stage:
        return _play(stage, *prompts, shared=shared, num_cold=num_cold, repeats=repeats)


def make_config(model: Model, num_chunks: int, **settings: object) -> Config:
    """Give settings with page-locked host memory for so many chunks of the model's KV, and others."""
    chunk_bytes = model.shape.num_layers * (
        2 * CHUNK_SIZE * model.shape.kv_size * model.dtype.itemsize + 4096
    )
    size = math.ceil(num_chunks * chunk_bytes / 1e6) * 1e6 / _GIB
    return Config(
        use_layerwise=True,
        chunk_size=CHUNK_SIZE,
        max_local_cpu_size=size,
        extra_config={"reserve_gib": size},
        **settings,
    )


def _play(
    stage: Stage, first: Prompt, second: Prompt, *, shared: int, num_cold: int, repeats: int
) -> Results:
    firsts = [first, *(_once(first, f"cold {i}") for i in range(1, num_cold))]
    plain = [_computed(prompt, stage.no_cache) for prompt in (first, second)]
    recomputed = _run(stage, "Both questions, no cache", plain)
    _warm_up(stage, first)
    cold = _run(stage, "Question 1, cold", [_computed(prompt, stage.by_layers) for prompt in firsts])
    # Every warm run is to find what the cold ones left.
    stage.engine.freeze()
    num_hit = stage.engine.lookup(second.tokens)
    ways = (stage.by_layers, stage.in_bulk)
    left = len(second.tokens) - shared
    by_layers, in_bulk, spoiled = _run(
        stage, "Question 2, warm", [Job(second, steps, left) for steps in (*ways, stage.spoiled)]
    )
    # In turns, so that a machine that slows down or speeds up does so for both.
    timed = _run(stage, "Question 2, timed", [Job(_once(second), steps, left) for steps in ways] * repeats)
    return Results(recomputed, cold, by_layers, in_bulk, timed[::2], timed[1::2], spoiled, num_hit)


def _run(stage: Stage, title: str, jobs: Sequence[Job]) -> list[Run]:
    total = stage.num_layers * sum(job.num_computed for job in jobs)
    with progress_bar(title, total) as tick:
        return [stage.run(job.prompt, job.steps, tick) for job in jobs]


def _computed(prompt: Prompt, steps: KVSteps) -> Job:
    return Job(prompt, steps, len(prompt.tokens))


def _once(prompt: Prompt, *salts: str) -> Prompt:
    """The same up to the first token; with salts, apart from what is cached."""
    return replace(prompt, max_new_tokens=1, salts=salts)


def _warm_up(stage: Stage, prompt: Prompt) -> None:
    """Store and load one chunk: kernels are compiled at their first use."""
    short = replace(_once(prompt, "warm-up"), tokens=prompt.tokens[: CHUNK_SIZE + 1])
    _run(stage, "Warming up", [_computed(short, stage.by_layers)] * 2)
