"""Engines of vLLM in this process, one at a time, and what they answer."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHUNK = 64
BLOCK = 32
TOLERANCE = float(os.environ.get("TOLERANCE", "1e-4"))
"""Log-probabilities differ by under 1e-5 where batches are cut otherwise, by far more where KV is wrong.

A device that computes float32 with fewer bits needs a larger one.
"""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, their log-probabilities, and the prompt's tokens that were not computed."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids, the same for the same seed: a longer prompt of it begins with a shorter one."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, 500) for _ in range(length)]


def with_lwkv(role: str = "kv_both", **settings: Any) -> dict[str, Any]:
    """Engine arguments for lwkv with these settings."""
    # These models are so small that computing may be faster.
    always = {"load_when": "always"}
    return {
        "kv_transfer_config": {
            "kv_connector": "LWKVConnector",
            "kv_connector_module_path": "lwkv.integrations.vllm",
            "kv_role": role,
            "kv_connector_extra_config": {"chunk_size": CHUNK, "max_local_cpu_size": 0.25}
            | always
            | settings,
        }
    }


def sampling(max_tokens: int, pattern: str | None = None, n: int = 1) -> Any:
    """Parameters of the most likely answer, in the letters of a pattern, so many times."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    # By the temperature, vLLM gives one answer only.
    most_likely: dict[str, Any] = {"temperature": 0} if n == 1 else {"temperature": 1, "top_k": 1, "n": n}
    letters = None if pattern is None else StructuredOutputsParams(regex=pattern)
    return SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        structured_outputs=letters,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **most_likely,
    )


class Engine:
    """One vLLM, and how its counters were when it was asked last."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        rotate_each_head_by_its_token()
        schedule_ahead()
        defaults = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": BLOCK,
            "max_model_len": 2048,
            "disable_log_stats": False,
            "enforce_eager": True,
            # The class: by its name, vLLM before 0.30 takes another one on the CPU.
            "distributed_executor_backend": UniProcExecutor,
        }
        self.llm = LLM(**defaults | arguments)
        self._hits = 0

    @property
    def core(self) -> Any:
        """vLLM's engine core, where it is in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def worker(self) -> Any:
        """The worker's half of lwkv, where it is in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def scheduler(self) -> Any:
        """The scheduler's half of lwkv."""
        return self.core.scheduler.connector._scheduler

    def ask(
        self, prompts: Sequence[list[int]], max_tokens: int = 8, salt: str | None = None, **extra: Any
    ) -> list[Answer]:
        """Answer all prompts in one batch."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False
        )
        requests = [
            {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt}) for ids in prompts
        ]
        if is_old():
            self._take_results()
        outputs = self.llm.generate(requests, parameters, use_tqdm=False, **extra)
        return [_answer(output) for output in outputs]

    def ask_with(
        self, prompts: Sequence[list[int]], extras: Sequence[dict[str, Any]], max_tokens: int = 8
    ) -> list[Answer]:
        """Answer all prompts in one batch, each with arguments that vLLM passes on to the connector."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                logprobs=1,
                ignore_eos=True,
                detokenize=False,
                extra_args=extra,
            )
            for extra in extras
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [_answer(output) for output in self.llm.generate(requests, parameters, use_tqdm=False)]

    def tokens(self, ids: list[int], max_tokens: int, pattern: str | None = None) -> list[int]:
        """The most likely answer to a prompt, in the letters of a pattern."""
        requests = [{"prompt_token_ids": ids}]
        (output,) = self.llm.generate(requests, sampling(max_tokens, pattern), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with this engine, which may be in a process of its own."""
        return function(self, *arguments)

    def begin(self, name: str, ids: list[int], max_tokens: int = 8) -> None:
        """Add a request, which runs with the next steps."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, parameters)

    def step_until(self, name: str) -> dict[str, Answer]:
        """Go on until a request has ended; the answers of all that have ended meanwhile, by name."""
        answers: dict[str, Answer] = {}
        while name not in answers:
            answers |= self.step()
        return answers

    def step(self) -> dict[str, Answer]:
        """Take one step; the answers of all that have ended with it, by name."""
        ended = [output for output in self.llm.llm_engine.step() if output.finished]
        return {output.request_id: _answer(output) for output in ended}

    def run_out(self) -> None:
        """Take the steps that vLLM's own loop takes when the last request has ended."""
        while self.core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def _take_results(self) -> None:
        """Take the results of steps after the last answer: 0.22 loses the hits that it counts with these."""
        while hasattr(self.llm.llm_engine.engine_core, "engine_core") and self.core.batch_queue:
            self.llm.llm_engine.step()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def metric(self, name: str) -> float:
        """A counter of vLLM's, over all labels."""
        return sum(
            metric.value
            for metric in self.llm.get_metrics()
            if metric.name == name and hasattr(metric, "value")
        )

    def new_hits(self) -> int:
        """Tokens that came from the connector since the last call, by vLLM's own count."""
        before, self._hits = self._hits, int(self.metric("vllm:external_prefix_cache_hits"))
        return self._hits - before

    def abort(self, ids: list[int], after_steps: int, extra: dict[str, Any] | None = None) -> None:
        """Begin a request and abort it after some of the engine's steps."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args=extra
        )
        engine.add_request(f"aborted-{after_steps}", {"prompt_token_ids": ids}, parameters)
        for _ in range(after_steps):
            engine.step()
        assert engine.has_unfinished_requests()
        engine.abort_request([f"aborted-{after_steps}"])
        assert not engine.has_unfinished_requests()

    def on_ranks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Have each worker call a function with itself, in its own process; what it returned, by rank."""
        return list(self.llm.collective_rpc(function, args=arguments))

    def waiting(self) -> dict[str, int]:
        """What the scheduler's half of an engine with several groups keeps for requests: none at rest."""
        scheduler = self.scheduler
        return {
            "promises": len(scheduler._promises._promises),
            "looked up": len(scheduler._lower._asked),
            "fetches": len(scheduler._lower._waiting._loads),
            "loads": len(scheduler._to_load),
        }

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was stored is in every tier."""
        return bool(self.worker.engine.flush(timeout_s))

    def recomputed(self) -> int:
        """Tokens that were promised so far and could not be loaded: vLLM counts them as found."""
        return int(self.worker._counters.totals().get("tokens_recomputed", 0))

    def moved(self) -> tuple[int, int]:
        """Tokens that were loaded so far, and that were stored: each takes as many bytes."""
        stats = self.worker.engine.stats()
        return int(stats.get("tokens_retrieved", 0)), int(stats.get("tokens_stored", 0))

    def evict_all(self) -> None:
        """Empty lwkv's host memory, as others' chunks would push all out."""
        engine = self.worker.engine
        assert engine.flush()
        host = engine.parts().storage.host
        assert host.evict(host.evictable())

    def at_rest(self) -> None:
        """Check that the worker holds nothing: no pin, no store under way, no page but those of chunks."""
        engine = self.worker.engine
        assert engine.flush()
        stats = engine.stats()
        assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)
        assert stats["page_references"] == stats["chunks"] * engine.num_layers

    def groups_at_rest(self) -> None:
        """The same of an engine with several groups: nothing is pinned and no store is under way."""
        self.ask([prompt(1, 3)], 1)  # what is not needed any more is given back with the next step
        engine = self.worker.engine
        assert engine.flush(30)
        stats = engine.stats()
        assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        end_groups()


def rotate_each_head_by_its_token() -> None:
    """Have vLLM's rotary embedding on the CPU take queries and keys of (tokens, heads, head size).

    Its kernel takes row i of what it gets as token i: LFM2 has a row a head, so that a token's keys depend on
    how many tokens a step has, and on its place among them. On a GPU the kernel looks at the number of
    dimensions.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def rotate(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        if query.dim() == 2:
            return by_kernel(self, positions, query, key)
        flat = by_kernel(self, positions, query.flatten(1), None if key is None else key.flatten(1))
        return flat[0].view_as(query), None if key is None else flat[1].view_as(key)

    by_kernel = RotaryEmbedding.forward_cpu
    if by_kernel.__name__ != rotate.__name__:
        RotaryEmbedding.forward_cpu = rotate


def schedule_ahead() -> None:
    """Have vLLM schedule a step before the result of the one before has come, as it does on GPUs.

    On the CPU it does not, whatever is asked for; `async_scheduling=False` has it wait here as well.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__
    if hasattr(check, "schedules_ahead"):
        return

    def keeping(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    keeping.schedules_ahead = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(keeping)
    if is_old():
        do_without_streams()


def is_old() -> bool:
    """Whether this vLLM cannot schedule ahead on the CPU by itself: so 0.20 to 0.22."""
    return find_spec("vllm.v1.worker.cpu") is None


class NoStream:
    """In place of a stream or an event, where a processor does one thing after the other."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


def do_without_streams() -> None:
    """Have vLLM copy the results of a step without CUDA's streams, as 0.32 does on the CPU by itself."""
    import torch
    from vllm.v1.worker import cpu_model_runner

    for name in ("Event", "Stream", "current_stream", "stream"):
        setattr(torch.cuda, name, NoStream)
    torch.Event = NoStream
    cpu_model_runner._torch_cuda_wrapper = nullcontext  # its own placeholders cannot wait


def end_groups() -> None:
    """End what vLLM has in this process beside an engine."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    gc.collect()
    destroy_model_parallel()
    destroy_distributed_environment()


@contextmanager
def started(model: Path, **arguments: Any) -> Iterator[Engine]:
    """An engine that ends with the block."""
    with ExitStack() as undo:
        undo.callback(end_groups)  # of an engine that does not start, too: else no other one can
        engine = Engine(model, **arguments)
        undo.pop_all()
    try:
        yield engine
    finally:
        engine.close()


def assert_same(answers: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    """The same tokens, with the same log-probabilities; how much came from a cache is not compared."""
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
    for answer, other in zip(answers, wanted, strict=True):
        worst = max(abs(a - b) for a, b in zip(answer.logprobs, other.logprobs, strict=True))
        assert worst < TOLERANCE, f"log-probabilities differ by {worst}"


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    logprobs = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
    return Answer(tokens, logprobs, output.num_cached_tokens or 0)
