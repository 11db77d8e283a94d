"""The demo over a restart: one process stores a document's KV in a tier, the next one answers from it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TypeVar

import torch

from lwkv.cli.demo.model_file import load_model
from lwkv.cli.demo.play import CHUNK_SIZE, MAX_ANSWER, make_config, make_prompts, num_shared
from lwkv.cli.demo.progress import progress_bar, say
from lwkv.cli.demo.stage import Run, Stage, open_stage
from lwkv.cli.run_setup import core_for_transfers, make_writable
from lwkv.config.settings import Config
from lwkv.platforms import detect_platform
from lwkv.reference import QUESTIONS, Prompt, Tokenizer
from lwkv.storage.registry import tier_urls

T = TypeVar("T")
_DISK = "disk"
_DISK_GIB = 1.0


@dataclass(frozen=True, slots=True)
class Play:
    """What both processes get: the model, where it runs, the settings of the tier, whose cache it is."""

    model: Path
    platform: str | None
    dtype: torch.dtype
    tier: dict[str, object]
    salt: str


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What the first process found: the first answer, the second by full recompute, and chunks stored.

    `hashes` are in the names of the chunks of both prompts, in every tier.
    """

    first: list[int]
    recomputed: list[int]
    first_token_s: float
    num_stored: int
    num_prompt: int
    texts: list[str]
    hashes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Served:
    """What the second process found; `stats` are those of its cache engine, which began with nothing."""

    tokens: list[int]
    first_token_s: float
    num_hit: int
    num_retrieved: int
    tier: str
    num_from_tier: int
    stats: dict[str, int]


@dataclass(frozen=True, slots=True)
class Restart:
    """Both together; `faults` says what differs from what must be."""

    tier: str
    questions: list[str]
    stored: FirstRun
    served: Served
    faults: list[str]


@contextmanager
def tier_settings(text: str, output: Path) -> Iterator[dict[str, object]]:
    """Read what `--tier` gives: "disk" for a folder in `output`, a folder, or the URL of a remote tier.

    The demo has a folder of its own inside, which is removed in the end, as is the folder if it was made.
    Raises ConfigError where it is none of these, or the folder cannot be made.
    """
    if text != _DISK and "://" in text and not text.startswith("file://"):
        settings: dict[str, object] = {"remote_url": text}
        Config(**settings)
        yield settings
        return
    folder = (output / "tier" if text == _DISK else Path(text.removeprefix("file://"))).resolve()
    was_there = folder.exists()
    make_writable(folder)
    own = mkdtemp(prefix="lwkv-demo-", dir=folder)
    try:
        yield {"local_disk": own, "max_local_disk_size": _DISK_GIB}
    finally:
        rmtree(own)
        if not was_there:
            folder.rmdir()


def restart(model: Path, platform: str | None, dtype: torch.dtype, tier: dict[str, object]) -> Restart:
    """Answer one question in a process, end it, and answer the next in another one that has only the tier."""
    play = Play(model, platform, dtype, tier, uuid.uuid4().hex)
    say("Starting the first process: it computes and stores")
    stored = _in_a_process(compute_and_store, play)
    say("Starting the second process: it loads and answers")
    served = _in_a_process(load_and_answer, play)
    [url] = tier_urls(Config(**tier))
    return Restart(url, list(QUESTIONS), stored, served, list(restart_faults(stored, served)))


def compute_and_store(play: Play) -> FirstRun:
    """The first process."""
    with _stage(play) as (stage, tokenizer, first, second):
        total = stage.num_layers * (2 * len(first.tokens) + len(second.tokens))
        with progress_bar("First process", total) as tick:
            plain = [replace(prompt, salts=()) for prompt in (first, second)]
            recomputed = [stage.run(prompt, stage.no_cache, tick) for prompt in plain]
            cold = stage.run(first, stage.by_layers, tick)
        keys = [key for prompt in (first, second) for key in stage.engine.keys(prompt.tokens, prompt.salts)]
        return FirstRun(
            cold.answer.tokens,
            recomputed[1].answer.tokens,
            recomputed[1].answer.first_token_s,
            cold.num_stored * CHUNK_SIZE,
            recomputed[1].answer.num_prompt,
            [tokenizer.decode(run.answer.tokens).strip() for run in (cold, recomputed[1])],
            list(dict.fromkeys(key.hash.hex() for key in keys)),
        )


def load_and_answer(play: Play) -> Served:
    """The second process."""
    with _stage(play) as (stage, _, _, second):
        num_hit = stage.engine.lookup(second.tokens, second.salts)
        with progress_bar("Second process", stage.num_layers * (len(second.tokens) - num_hit)) as tick:
            run: Run = stage.run(second, stage.by_layers, tick)
        stats, tier = stage.engine.stats(), stage.engine.tier_names[-1]
        return Served(
            run.answer.tokens,
            run.answer.first_token_s,
            num_hit,
            run.num_retrieved,
            tier,
            stats.get(f"{tier}_hits", 0) * CHUNK_SIZE,
            stats,
        )


@contextmanager
def _stage(play: Play) -> Iterator[tuple[Stage, Tokenizer, Prompt, Prompt]]:
    platform = detect_platform(play.platform)
    with core_for_transfers(platform):
        named = load_model(play.model, platform.current_device(), play.dtype)
        prompts = make_prompts(named.tokenizer)
        longest = max(len(prompt.tokens) for prompt in prompts)
        config = make_config(named.model, -(-longest // CHUNK_SIZE), **play.tier)
        salted = [replace(prompt, salts=(play.salt,)) for prompt in prompts]
        with open_stage(named, platform, config, num_shared(prompts), longest + MAX_ANSWER) as stage:
            yield stage, named.tokenizer, salted[0], salted[1]


def _in_a_process(work: Callable[[Play], T], play: Play) -> T:
    """Do it in a new interpreter, which has ended when this returns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(work, play).result()


def restart_faults(stored: FirstRun, served: Served) -> Iterator[str]:
    """What of both processes is not as it must be, one sentence each."""
    if served.tokens != stored.recomputed:
        yield f"second question: the tokens are {served.tokens}, by full recompute {stored.recomputed}"
    if not served.num_hit == served.num_retrieved == served.num_from_tier > 0:
        yield (
            f"second question: {served.num_hit} tokens were found, {served.num_retrieved} retrieved, and "
            f"{served.num_from_tier} of them came from the tier"
        )
