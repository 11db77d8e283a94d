"""One SGLang engine in a process of its own, driven by lines of JSON: the parent is `sglang_ttft`.

Its argument is a JSON object of SGLang's engine arguments. Each line on stdin is a Question or a Load, each
line on stdout an Answer or what was Served; the first says that the engine is ready. What SGLang and lwkv
print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lwkv.benchmarks.sglang.load import Load, Question, Served, Server

REST_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Milliseconds until the first token, what it is, and how many tokens of the prompt were not computed."""

    ms: float
    token: int
    logprob: float
    from_device: int
    from_host: int


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import sglang

    arguments = json.loads(sys.argv[1])
    vocabulary = arguments.pop("vocabulary")
    engine = sglang.Engine(**arguments)
    _send(answers, Answer(0.0, 0, 0.0, 0, 0))
    for line in sys.stdin:
        asked = json.loads(line)
        if "decoders" in asked:
            server = Server(engine, Load(**asked), vocabulary)
            _send(answers, engine.loop.run_until_complete(server.serve()))
        else:
            _send(answers, _answer(engine, Question(**asked), vocabulary))
    engine.shutdown()


def _answer(engine: Any, question: Question, vocabulary: int) -> Answer:
    if question.flush:
        _flush(engine)
    ids = question.tokens(vocabulary)
    parameters = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    begin = time.perf_counter()
    (output,) = engine.generate(input_ids=[ids], sampling_params=parameters, return_logprob=True)
    ms = 1e3 * (time.perf_counter() - begin)
    found: Mapping[str, Any] = output["meta_info"]
    details = found.get("cached_tokens_details") or {}
    logprob, token, *_ = found["output_token_logprobs"][0]
    return Answer(ms, int(token), float(logprob), details.get("device", 0), details.get("host", 0))


def _flush(engine: Any) -> None:
    """Empty SGLang's cache, which it refuses to do while a request is not retired."""
    deadline = time.monotonic() + REST_S
    while not engine.flush_cache().success:
        if time.monotonic() > deadline:
            raise RuntimeError("SGLang does not come to rest")
        time.sleep(0.05)


def _send(answers: Any, answer: Answer | Served) -> None:
    answers.write(json.dumps(asdict(answer)) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
