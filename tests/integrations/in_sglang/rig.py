"""Engines of SGLang, one at a time, each in processes of its own, and what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_path import python_path

PAGE = 16
REST_S = 120.0
HERE = Path(__file__).parent
STAND_INS = HERE / "stand_ins"
TREE = HERE.parent.parent.parent
ENVIRONMENT = {
    "PYTHONPATH": python_path(STAND_INS, TREE, TREE / "tests"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "LWKV_LOG_LEVEL": "info",
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and how many of the prompt's came from the device and the linker, as SGLang counts.

    Attributes:
        ended: why, in SGLang's word: "length", or "abort".
    """

    tokens: list[int]
    from_device: int
    from_host: int
    ended: str


def with_lwkv(**settings: Any) -> dict[str, Any]:
    """Engine arguments for lwkv with these settings. A flush is to empty the device alone."""
    extra = {"max_local_cpu_size": 0.25, "on_flush": "keep", **settings}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "LWKVLinker",
            "linker_module_path": "lwkv.integrations.sglang",
            "linker_extra_config": extra,
        },
    }


class Engine:
    """One SGLang on the CPU. Raises AssertionError with the end of its log where it has died.

    Every rank has a core of its own, as far as there are enough.

    Args:
        environment: of the process, beside what all have.
        path: what Python finds modules in, beside the tree.
    """

    def __init__(
        self,
        model: Path,
        environment: Mapping[str, str] | None = None,
        path: Sequence[Path] = (),
        **arguments: Any,
    ) -> None:
        defaults = {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "disable_cuda_graph": True,
            "dtype": "float32",
            "page_size": PAGE,
            "mem_fraction_static": 0.05,
            "max_total_tokens": 4096,
            "log_level": "info",
        }
        self._asked = 0
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the engine
        found = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], *map(str, path)])
        own = {"PYTHONPATH": found, **_cores(arguments.get("tp_size", 1)), **(environment or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integrations.in_sglang.child", json.dumps(defaults | arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENVIRONMENT, **own},
            start_new_session=True,  # SGLang kills its whole group where something goes wrong
        )
        try:
            self._receive()
        except AssertionError:
            self.close()
            raise

    def ask(self, prompts: Sequence[list[int]], max_tokens: int = 4) -> list[Answer]:
        """Answer all prompts, which come at the same time."""
        outputs = self._send({"input_ids": list(prompts), "sampling_params": _greedy(max_tokens)})
        return [_answer(output) for output in outputs]

    def ask_each(
        self,
        prompts: Sequence[list[int]],
        priorities: Sequence[int],
        aborts: Mapping[int, float],
        max_tokens: int = 4,
    ) -> list[Answer]:
        """As `ask`, each with its priority; those in `aborts` are aborted so many seconds later."""
        self._asked += 1
        requests = [
            {
                "input_ids": prompt,
                "sampling_params": _greedy(max_tokens),
                "priority": priority,
                "rid": f"{self._asked}-{i}",
            }
            for i, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True))
        ]
        named = {f"{self._asked}-{i}": seconds for i, seconds in aborts.items()}
        return [_answer(output) for output in self._send({"together": requests, "aborts": named})]

    def ask_one(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Answer:
        """Answer one prompt with more of what a request to SGLang's server may have."""
        parameters = _greedy(max_tokens)
        return _answer(self._send({"one": {"input_ids": prompt, "sampling_params": parameters, **fields}}))

    def flush(self) -> None:
        """Empty the device's cache. SGLang refuses as long as a request is not retired."""
        deadline = time.monotonic() + REST_S
        while not self._send("flush"):
            assert time.monotonic() < deadline, "SGLang does not come to rest"
            time.sleep(0.05)

    def metric(self, name: str) -> float:
        """A metric of SGLang's, over all labels; 0 where it has counted nothing. Needs `enable_metrics`."""
        lines = [line for line in self._send("metrics").splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    @property
    def log(self) -> str:
        """What it has printed so far."""
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(REST_S)
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._log.close()

    def _send(self, request: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine has died:\n{self.log[-5000:]}"
        return json.loads(line)


def _cores(num_ranks: int) -> dict[str, str]:
    """What tells SGLang which core each rank computes on. It asks for that where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(chosen)} if num_ranks > 1 else {}


@contextmanager
def started(model: Path, environment: Mapping[str, str] | None = None, **arguments: Any) -> Iterator[Engine]:
    engine = Engine(model, environment, **arguments)
    try:
        yield engine
    finally:
        engine.close()


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _answer(output: dict[str, Any]) -> Answer:
    found = output["meta_info"]
    details = found.get("cached_tokens_details") or {}
    ended = found["finish_reason"]["type"]
    return Answer(output["output_ids"], details.get("device", 0), details.get("host", 0), ended)
