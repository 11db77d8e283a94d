"""Asks two questions about one long document through vLLM, and tells how long each first token took.

The second question finds the document's KV in lwkv: vLLM's own prefix cache is emptied in between, as other
requests would do. Needs vLLM and a model: `python examples/vllm_ttft.py --model Qwen/Qwen2.5-7B-Instruct`.
Arguments it does not know go to vLLM: `--max_model_len=16384 --gpu_memory_utilization=0.5`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

DOCUMENT = " ".join(
    f"Rule {number}: station {number * 7 % 97} keeps {number * 13 % 89} lamps and sends its "
    f"report at minute {number * 29 % 60}."
    for number in range(1, 301)
)
QUESTIONS = ("How many lamps does rule 17 name?", "When does rule 42 want the report?")


def main() -> None:
    args, others = arguments()
    engine = start(args.model, args.host_gib, others)
    prompts = [f"{DOCUMENT}\n\n{question}\nAnswer:" for question in QUESTIONS]
    warm_up = "The quick brown fox jumps over the lazy dog. " * 40
    first_token_ms(engine, warm_up)
    for name, prompt in zip(("nothing is cached", "the document is"), prompts, strict=True):
        engine.reset_prefix_cache()
        ms, cached, tokens = first_token_ms(engine, prompt)
        print(f"{name}: first token after {ms:.1f} ms, {cached} of {tokens} tokens came from lwkv")


def arguments() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The script's own arguments, and those for vLLM."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct", help="as vLLM takes it")
    parser.add_argument("--host-gib", type=float, default=8.0, help="GiB of host memory for lwkv (8)")
    args, rest = parser.parse_known_args()
    others = dict(word.removeprefix("--").split("=", 1) for word in rest)
    return args, {name: number(text) for name, text in others.items()}


def number(text: str) -> Any:
    """A number or a flag, if it is one."""
    flags = {"true": True, "false": False}
    if text.lower() in flags:
        return flags[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def start(model: str, host_gib: float, others: dict[str, Any]) -> Any:
    """vLLM with lwkv."""
    from vllm import LLM

    transfer = {
        "kv_connector": "LWKVConnector",
        "kv_connector_module_path": "lwkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"max_local_cpu_size": host_gib},
    }
    return LLM(model=model, kv_transfer_config=transfer, enable_prefix_caching=True, **others)


def first_token_ms(engine: Any, prompt: str) -> tuple[float, int, int]:
    """Milliseconds until the first token, tokens that were cached, tokens of the prompt."""
    from vllm import SamplingParams

    begin = time.perf_counter()
    (output,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    ms = 1e3 * (time.perf_counter() - begin)
    return ms, output.num_cached_tokens or 0, len(output.prompt_token_ids)


if __name__ == "__main__":
    main()
