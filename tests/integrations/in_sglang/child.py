"""One SGLang engine, driven by lines of JSON: its argument is a JSON object of `sglang.Engine`'s arguments.

Each line on stdin is a request of `rig.Engine`, each line on stdout the answer. The first says that the
engine is ready. What SGLang and lwkv print goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    _send(answers, "ready")
    for line in sys.stdin:
        _send(answers, _answer(engine, json.loads(line)))
    engine.shutdown()


def _answer(engine: Any, request: Any) -> object:
    if request == "flush":
        return engine.flush_cache().success
    if request == "metrics":
        return _metrics()
    if "together" in request:
        return engine.loop.run_until_complete(_together(engine, **request))
    if "one" in request:
        return engine.loop.run_until_complete(_one(engine, request["one"]))
    return engine.generate(**request)


async def _together(engine: Any, together: list[dict[str, Any]], aborts: dict[str, float]) -> list[Any]:
    """Ask for all at the same time, and abort some of them by name so many seconds later."""

    async def abort(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        engine.tokenizer_manager.abort_request(rid=name)

    asked = [engine.async_generate(**request) for request in together]
    return (await asyncio.gather(*asked, *(abort(*item) for item in aborts.items())))[: len(together)]


async def _one(engine: Any, fields: dict[str, Any]) -> Any:
    """One request, as SGLang's server makes it: it may have what `Engine.generate` does not take."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    answers = engine.tokenizer_manager.generate_request(GenerateReqInput(**fields), None)
    return [answer async for answer in answers][-1]


def _metrics() -> str:
    """What SGLang's server would answer at /metrics."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry).decode()


def _send(answers: Any, answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
