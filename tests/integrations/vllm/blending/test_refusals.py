"""What blending is refused with, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.blending.refusals import refuse, refuse_backend


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, by its name."""


class MLAAttentionSpec(FullAttentionSpec):
    """As vLLM's, by its name."""


class SlidingWindowSpec(FullAttentionSpec):
    """As vLLM's, by its name."""


PREFETCHED = SimpleNamespace(offload_backend="auto", prefetch=SimpleNamespace(offload_group_size=4))
UNIFIED = SimpleNamespace(offload_backend="uva", prefetch=SimpleNamespace(offload_group_size=0))


def engine(spec: Any = None, **changed: Any) -> tuple[Any, Any]:
    """vLLM's configuration, and that of its caches."""
    parts: dict[str, dict[str, Any]] = {
        "parallel": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_dbo": False},
        "cache": {"cache_dtype": "auto"},
        "model": {"dtype": torch.float32, "runner_type": "generate", "is_multimodal_model": False},
        "": {"speculative_config": None, "lora_config": None},
    }
    for name, value in changed.items():
        part, _, key = name.partition("__")
        parts[part if key else ""][key or name] = value
    rest = parts.pop("")
    config = SimpleNamespace(
        **{f"{name}_config": SimpleNamespace(**values) for name, values in parts.items()}, **rest
    )
    spec = spec or FullAttentionSpec(num_kv_heads=2, sliding_window=None)
    group = SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=spec)
    return config, SimpleNamespace(kv_cache_groups=[group])


def test_a_plain_engine_is_taken() -> None:
    for version in ("0.22.1", "0.32.0"):
        refuse(*engine(), version)
    refuse(*engine(cache__cache_dtype="float32"), "0.32.0")
    refuse(*engine(offload_config=UNIFIED), "0.32.0")
    refuse(*engine(parallel__tensor_parallel_size=2), "0.32.0")
    refuse(*engine(parallel__enable_expert_parallel=True), "0.32.0")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"parallel__tensor_parallel_size": 2, "parallel__enable_expert_parallel": True}, "expert"),
        ({"parallel__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel__data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"parallel__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"parallel__enable_dbo": True}, "enable_dbo"),
        ({"parallel__ubatch_size": 2}, "in parts"),
        ({"cache__cache_dtype": "fp8"}, "kept in fp8"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"model__runner_type": "pooling"}, "pooling"),
        ({"model__is_multimodal_model": True}, "images"),
        ({"model__uses_mrope": True}, "several dimensions"),
        ({"offload_config": PREFETCHED}, "fetched layer by layer"),
        ({"spec": MLAAttentionSpec(num_kv_heads=1)}, "MLAAttentionSpec"),
        ({"spec": SlidingWindowSpec(num_kv_heads=1, sliding_window=8)}, "SlidingWindowSpec"),
        ({"spec": FullAttentionSpec(num_kv_heads=1, dtype=torch.uint8)}, "keeps torch.uint8"),
        ({"spec": FullAttentionSpec(num_kv_heads=1, sliding_window=8)}, "look at all tokens"),
        ({"spec": FullAttentionSpec(num_kv_heads=1, attention_chunk_size=8)}, "look at all tokens"),
    ],
)
def test_what_cannot_work_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        refuse(*engine(**changed), "0.32.0")
    assert "set enable_blending to false" in str(error.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SlidingWindowSpec(num_kv_heads=1, sliding_window=8), "SlidingWindowSpec"),
        (FullAttentionSpec(num_kv_heads=1, sliding_window=None), "2 groups of KV caches"),
    ],
)
def test_several_groups_of_caches_are_refused_by_what_they_keep(spec: Any, words: str) -> None:
    vllm_config, caches = engine()
    caches.kv_cache_groups.append(SimpleNamespace(layer_names=["layers.1"], kv_cache_spec=spec))
    with pytest.raises(ConfigError, match=rf"{words}.*set enable_blending to false"):
        refuse(vllm_config, caches, "0.32.0")


@pytest.mark.parametrize("version", ["0.21.0", "0.27.1", "0.33.0", "1.0.0", "dev"])
def test_versions_whose_inside_was_not_read_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.22 and 0\.32"):
        refuse(*engine(), version)


def test_other_backends_of_attention_are_refused() -> None:
    refuse_backend("FLASH_ATTN")
    with pytest.raises(ConfigError, match="FLASHINFER was not tried"):
        refuse_backend("FLASHINFER")
