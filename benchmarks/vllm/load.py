"""One vLLM engine under a steady load, in a process of its own; the parent is `vllm_serving`.

Its argument is a JSON object of vLLM's engine arguments. Each line on stdin is a Load or Conversations, each
line on stdout what it took; the first line says that the engine is ready. What vLLM and lwkv print goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lwkv.benchmarks.vllm import slow_steps
from lwkv.benchmarks.vllm.child import Prompt
from lwkv.benchmarks.vllm.conversations import Conversations, Conversed, Conversing

DECODED_PROMPT, DECODED_TOKENS = 128, 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that decode all the time, and prompts that arrive at a steady pace beside them.

    Attributes:
        decoders: requests that decode.
        seconds: how long is measured.
        every_s: seconds between two prompts; 0 for none.
        prefix, suffix: tokens of a prompt that were computed before, and new ones. Each document comes once.
        first_document: number of the first document.
        prepare: compute the prefixes first, with other suffixes, and empty the GPU's prefix cache.
    """

    decoders: int
    seconds: float
    every_s: float
    prefix: int
    suffix: int
    first_document: int = 0
    prepare: bool = False

    def documents(self) -> range:
        """The numbers of the documents that arrive."""
        count = int(self.seconds / self.every_s) if self.every_s else 0
        return range(self.first_document, self.first_document + count)

    def prepared(self, document: int) -> Prompt:
        """What is computed before: the document with other new tokens, which nothing is to find again."""
        return Prompt(self.prefix, 7000 + document, self.suffix, 190_000 + document, False)

    def prompt(self, document: int) -> Prompt:
        return Prompt(self.prefix, 7000 + document, self.suffix, 90_000 + document, False)


@dataclass(slots=True)
class Served:
    """What a load took: milliseconds, tokens, and first tokens by document."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    decoded: int = 0
    cached: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)

    def note_first(self, output: Any, ms: float) -> None:
        """Note the first token of a prompt that arrived `ms` before."""
        self.ttft_ms.append(ms)
        self.cached.append(output.num_cached_tokens or 0)
        self.first_tokens.append(int(output.outputs[0].token_ids[0]))


class Server:
    """Steps an engine, and notes when each request's tokens came."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self.vocabulary = self._engine.model_config.get_vocab_size()
        self._seen: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._number = 0
        self._slow_steps = slow_steps.watch()

    def serve(self, load: Load) -> Served:
        """Run a load; what it leaves unfinished is aborted."""
        served = Served()
        if load.prepare:
            served.cold_ms = [self._compute(load.prepared(document)) for document in load.documents()]
            self._empty_gpu()
        # Made before: to draw 8,000 tokens takes more than a millisecond, which is no engine's.
        arriving = [load.prompt(document).tokens(self.vocabulary) for document in load.documents()]
        for number in range(load.decoders):
            prompt = Prompt(DECODED_PROMPT, 50 + number, 1, number, False)
            self.ask(prompt.tokens(self.vocabulary), DECODED_TOKENS, "decode")
        self._settle(load.decoders)
        begin = time.perf_counter()
        self._run(load, arriving, begin, served)
        served.seconds = time.perf_counter() - begin
        self._engine.abort_request(list(self._seen))
        self._seen.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return served

    def ask(self, tokens: list[int], max_tokens: int, what: str) -> str:
        """Add a request, and return its name."""
        from vllm import SamplingParams

        self._number += 1
        name = f"{what}-{self._number}"
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
        return name

    def step(self) -> list[tuple[Any, float]]:
        """Step the engine: its outputs, and when they came."""
        with slow_steps.during(self._slow_steps):
            outputs = self._engine.step()
        now = time.perf_counter()
        return [(output, now) for output in outputs]

    def _run(self, load: Load, arriving: Sequence[list[int]], begin: float, served: Served) -> None:
        coming = deque((tokens, begin + i * load.every_s) for i, tokens in enumerate(arriving))
        asked: dict[str, float] = {}
        while time.perf_counter() < begin + load.seconds or asked or coming:
            while coming and coming[0][1] <= time.perf_counter():
                tokens, due = coming.popleft()
                asked[self.ask(tokens, 1, "prompt")] = due
            for output, now in self.step():
                if output.request_id in asked:
                    served.note_first(output, 1e3 * (now - asked.pop(output.request_id)))
                else:
                    self._note_tokens(output, now, served)

    def _note_tokens(self, output: Any, now: float, served: Served) -> None:
        name, count = output.request_id, len(output.outputs[0].token_ids)
        if count > self._seen.get(name, 0):
            served.decoded += count - self._seen[name]
            self._seen[name] = count
            served.gaps_ms.append(1e3 * (now - self._last[name]))
            self._last[name] = now

    def _settle(self, decoders: int) -> None:
        """Step until every decoding request has some tokens."""
        while sum(count >= 8 for count in self._seen.values()) < decoders:
            for output, now in self.step():
                self._seen[output.request_id] = len(output.outputs[0].token_ids)
                self._last[output.request_id] = now

    def _compute(self, prompt: Prompt) -> float:
        tokens = prompt.tokens(self.vocabulary)
        begin = time.perf_counter()
        name = self.ask(tokens, 1, "cold")
        while all(output.request_id != name for output, _ in self.step()):
            pass
        return 1e3 * (time.perf_counter() - begin)

    def _empty_gpu(self) -> None:
        # Stores end in the steps that follow.
        for _ in range(5):
            self._compute(Prompt(64, 1, 1, 2, False))
            time.sleep(0.1)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache")


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    server = Server(LLM(**json.loads(sys.argv[1])))
    _send(answers, Served())
    for line in sys.stdin:
        asked = json.loads(line)
        if "conversations" in asked:
            _send(answers, Conversing(server, Conversations(**asked)).run())
        else:
            _send(answers, server.serve(Load(**asked)))


def _send(answers: Any, served: Served | Conversed) -> None:
    answers.write(json.dumps(asdict(served)) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
