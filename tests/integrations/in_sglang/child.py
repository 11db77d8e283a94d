"""One SGLang engine, driven by lines of JSON: its argument is a JSON object of `sglang.Engine`'s arguments.

Each line on stdin is a request of `rig.Engine`, each line on stdout the answer. The first says that the
engine is ready. What SGLang and lwkv print goes to stderr.
"""

from __future__ import annotations

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
    return _metrics() if request == "metrics" else engine.generate(**request)


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
