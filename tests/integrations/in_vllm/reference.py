"""An engine in a process of its own, such as one without lwkv that answers beside the one under test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from integrations.in_vllm.rig import Answer, Engine, assert_same

# Importing vLLM takes longer than all that an engine here does: children are forked from a process that has.
IMPORTED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
# What is read from the environment then.
AT_IMPORT = {"TORCHDYNAMO_DISABLE"}


class Elsewhere:
    """An engine in a child process. Its first answer takes as long as its start."""

    def __init__(self, model: Path, environment: Mapping[str, str] | None = None, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn" if AT_IMPORT & set(environment or ()) else "forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, model, environment or {}, arguments))
        self._process.start()
        child.close()
        self._known: dict[tuple[object, ...], Answer] = {}

    def ask(self, prompts: Sequence[list[int]], max_tokens: int = 8) -> list[Answer]:
        """Answer each prompt; what was asked before is not asked again."""
        keys = [(*ids, max_tokens) for ids in prompts]
        new = [ids for key, ids in zip(keys, prompts, strict=True) if key not in self._known]
        if new:
            answers = self.call("ask", new, max_tokens)
            self._known.update(zip([(*ids, max_tokens) for ids in new], answers, strict=True))
        return [self._known[key] for key in keys]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the Engine there. Raises what it raises, EOFError where the process has ended."""
        self._pipe.send((method, arguments))
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        if self._process.is_alive():
            self.call("close")
        self.kill()


def assert_forgotten_by_a_reset(engine: Engine, plain: Elsewhere, ids: list[int]) -> None:
    """A stored prompt of 300 tokens is not found after a reset of the connector; the next time it is."""
    engine.ask([ids])
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    engine.new_hits()
    for hits in (0, 256):
        assert_same(engine.ask([ids]), plain.ask([ids]))
        assert engine.new_hits() == hits
        engine.forget()


def _serve(pipe: Connection, model: Path, environment: Mapping[str, str], arguments: dict[str, Any]) -> None:
    os.environ.update(environment)
    engine = Engine(model, **arguments)
    while True:
        method, values = pipe.recv()
        try:
            pipe.send(getattr(engine, method)(*values))
        except (AssertionError, RuntimeError) as error:
            pipe.send(error)
