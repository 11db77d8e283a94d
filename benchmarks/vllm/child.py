"""One vLLM engine in a process of its own, driven by lines of JSON: the parent is `vllm_ttft`.

Its argument is a JSON object of vLLM's engine arguments. Each line on stdin is a Prompt, each line on stdout
an Answer; the first says that the engine is ready. What vLLM and lwkv print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """Two parts of random tokens, each from its seed; before it the GPU's prefix cache may be emptied."""

    prefix: int
    prefix_seed: int
    suffix: int
    suffix_seed: int
    reset: bool

    def tokens(self, vocabulary: int) -> list[int]:
        """Prefix and suffix, as many ids as they are long."""
        parts = ((self.prefix_seed, self.prefix), (self.suffix_seed, self.suffix))
        drawn = [np.random.default_rng(seed).integers(3, vocabulary, length) for seed, length in parts]
        return [int(token) for token in np.concatenate(drawn)]


@dataclass(frozen=True, slots=True)
class Answer:
    """Milliseconds until the first token, the token, and how many tokens vLLM did not compute."""

    ms: float
    token: int
    cached: int


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = _engine(json.loads(sys.argv[1]))
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    _send(answers, Answer(0.0, 0, 0))
    for line in sys.stdin:
        _send(answers, _answer(engine, Prompt(**json.loads(line)), vocabulary))


def _engine(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**arguments)


def _answer(engine: Any, prompt: Prompt, vocabulary: int) -> Answer:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    request = {"prompt_token_ids": prompt.tokens(vocabulary)}
    if prompt.reset and not engine.reset_prefix_cache():
        raise RuntimeError("vLLM could not empty its prefix cache")
    begin = time.perf_counter()
    (output,) = engine.generate([request], parameters, use_tqdm=False)
    ms = 1e3 * (time.perf_counter() - begin)
    return Answer(ms, int(output.outputs[0].token_ids[0]), int(output.num_cached_tokens or 0))


def _send(answers: Any, answer: Answer) -> None:
    answers.write(json.dumps(asdict(answer)) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
