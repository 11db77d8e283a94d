"""What page codecs change in a model's answers: divergence from a full prefill, with each codec of the pages.

Run as `python -m lwkv.benchmarks.page_quality --tasks 24`. Prompts are questions over documents: needles, two
hops, and the demo's handbook. Of each, all whole chunks are loaded and the rest is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lwkv.benchmarks.bench.findings import table
from lwkv.benchmarks.blending.tasks import needle, two_hops
from lwkv.cli.demo.arguments import add_model_arguments, load_chosen
from lwkv.cli.demo.blend.trial import CHUNK_SIZE, Task, prompt_of
from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.platforms import Platform, detect_platform
from lwkv.reference import (
    QUESTIONS,
    Model,
    Tokenizer,
    document_prompt,
    open_cache_engine,
)
from lwkv.reference.one_prompt import OnePrompt, divergence

CODECS = ("raw", "lossless", "fp8")
NUM_ANSWER, LONGEST = 8, 2400
KINDS: Mapping[str, Callable[[int], Task]] = {"needles": needle, "two hops": two_hops}


@dataclass(frozen=True)
class Outcome:
    """One codec's figures of one prompt.

    Attributes:
        kl: mean KL divergence of the predictions of the full prefill's answer from that one's own, in nats.
        from_raw: the same from the predictions with raw pages.
        bits_differ: how many of the logits are not bit for bit those with raw pages.
        same_answer: whether the greedy answer, token by token, is the full prefill's.
    """

    kl: float
    from_raw: float
    bits_differ: int
    same_answer: bool


class Trial:
    """A model, and an engine on its cache for each codec. The caller closes it."""

    def __init__(self, model: Model, platform: Platform, codecs: Sequence[str] = CODECS) -> None:
        self._prompt = OnePrompt(model, LONGEST)
        self._engines: dict[str, CacheEngine] = {}
        with ExitStack() as stack:
            for codec in codecs:
                self._engines[codec] = self._open(codec, platform)
                stack.callback(self._engines[codec].close)
            self._exit = stack.pop_all()

    def close(self) -> None:
        self._exit.close()

    def measure(self, tokens: Sequence[int], stop_tokens: Collection[int]) -> dict[str, Outcome]:
        """Compute a prompt and its greedy answer in full, store it, and load it with each codec."""
        logits, answer = self._answer(tokens, stop_tokens)
        slots = self._prompt.slots(len(tokens))
        for engine in self._engines.values():
            engine.store(tokens, slot_mapping=slots)
            if not engine.flush():
                raise RuntimeError("not all was stored within 30 s")
        loaded = {codec: self._load(engine, tokens, answer, slots) for codec, engine in self._engines.items()}
        return {codec: compare(found, loaded["raw"], logits) for codec, found in loaded.items()}

    def _open(self, codec: str, platform: Platform) -> CacheEngine:
        config = Config(page_codec=codec, chunk_size=CHUNK_SIZE, max_local_cpu_size=0.5)
        return open_cache_engine(config, self._prompt.model, self._prompt.cache, "quality", platform=platform)

    def _answer(self, tokens: Sequence[int], stop_tokens: Collection[int]) -> tuple[Tensor, list[int]]:
        """The logits of the greedy answer's tokens, and these, of a prompt that is computed."""
        logits = self._prompt.compute(tokens, 0)[-1:]
        answer, more = self._prompt.decode(len(tokens), int(logits.argmax()), NUM_ANSWER, stop_tokens)
        return torch.cat([logits, more]), answer

    def _load(
        self, engine: CacheEngine, tokens: Sequence[int], answer: Sequence[int], slots: Tensor
    ) -> Tensor:
        """The logits of the answer's tokens, over what is loaded; what is not, is computed first."""
        self._prompt.cache.fill(float("nan"))
        found = int(engine.retrieve(tokens, slot_mapping=slots).sum())
        if found != len(tokens) // CHUNK_SIZE * CHUNK_SIZE:
            raise RuntimeError(f"{found} of {len(tokens)} tokens were loaded: not all whole chunks")
        start = min(found, len(tokens) - 1)
        return self._prompt.compute([*tokens[start:], *answer[:-1]], start)[len(tokens) - start - 1 :]


def compare(found: Tensor, raw: Tensor, wanted: Tensor) -> Outcome:
    """Logits [tokens, vocabulary] with a codec, with raw pages, and of the full prefill."""
    same = torch.equal(found.argmax(-1), wanted.argmax(-1))
    return Outcome(divergence(found, wanted), divergence(found, raw), int((found != raw).sum()), same)


def prompts(tokenizer: Tokenizer, tasks: range) -> dict[str, list[list[int]]]:
    """Of each kind, token by token."""
    made: dict[str, list[list[int]]] = {
        kind: [prompt_of(make(seed), tokenizer)[0] for seed in tasks] for kind, make in KINDS.items()
    }
    return made | {"demo": [tokenizer.encode(document_prompt(question)) for question in QUESTIONS]}


def lines(kind: str, outcomes: Sequence[Mapping[str, Outcome]]) -> Iterator[str]:
    """The table of one kind of prompts, a row for each codec."""
    yield f"{kind}: {len(outcomes)} prompts, KL divergence in nats"
    rows = []
    for codec in outcomes[0]:
        mine = [outcome[codec] for outcome in outcomes]
        rows.append(
            [
                codec,
                f"{np.mean([item.kl for item in mine]):.5f}",
                f"{np.mean([item.from_raw for item in mine]):.5f}",
                f"{max(item.from_raw for item in mine):.5f}",
                str(sum(item.bits_differ for item in mine)),
                f"{sum(item.same_answer for item in mine)} of {len(mine)}",
            ]
        )
    head = ["", "from full prefill", "from raw", "largest", "logits unlike raw's", "full prefill's answer"]
    yield from table(head, rows)
    yield ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print the table, and write every figure to a JSON file."""
    parser = argparse.ArgumentParser(prog="page_quality", description=__doc__)
    add_model_arguments(parser, "page-quality-output")
    parser.add_argument("--tasks", type=int, default=24, metavar="N", help="tasks of each kind (24)")
    args = parser.parse_args(argv)
    # Lossless pages are for this one.
    args.dtype = args.dtype or "bfloat16"
    platform = detect_platform(args.platform)
    named = load_chosen(platform, args)
    trial = Trial(named.model, platform)
    found: dict[str, list[dict[str, Outcome]]] = {}
    for kind, made in prompts(named.tokenizer, range(args.tasks)).items():
        found[kind] = [trial.measure(tokens, named.tokenizer.stop_tokens) for tokens in made]
        print("\n".join(lines(kind, found[kind])), flush=True)
    trial.close()
    _write(args.output, {"model": named.name, "dtype": args.dtype}, found)
    return 0


def _write(
    folder: Path, about: Mapping[str, object], found: Mapping[str, Sequence[Mapping[str, Outcome]]]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        kind: [{codec: asdict(item) for codec, item in outcome.items()} for outcome in outcomes]
        for kind, outcomes in found.items()
    }
    text = json.dumps(dict(about) | figures, indent=1)
    (folder / "page_quality.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
