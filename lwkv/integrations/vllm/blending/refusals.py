"""What blending cannot be used with in vLLM, by name, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.worker.caches import layer_specs

VERSIONS = (0, 22), (0, 32)
"""Blending relies on what vLLM looks like inside: that was read in the first, and tried in the second."""

BACKENDS = ("CPU_ATTN", "FLASH_ATTN")
"""Backends of attention whose metadata can be made for rows of a prompt."""


def refuse(vllm_config: Any, kv_cache_config: Any, version: str) -> None:
    """Raise ConfigError for an engine that cannot blend, with what to do."""
    for problem in (
        *_of_version(version),
        *_of_parallel(vllm_config.parallel_config),
        *_of_features(vllm_config),
        *_of_caches(vllm_config, kv_cache_config),
    ):
        raise ConfigError(f"enable_blending: {problem}; set enable_blending to false")


def refuse_backend(name: str) -> None:
    """Raise ConfigError for a backend of attention that was not tried."""
    if name not in BACKENDS:
        raise ConfigError(
            f"enable_blending: attention by {name} was not tried; allowed: {' or '.join(BACKENDS)} "
            "(--attention-backend); or set enable_blending to false"
        )


def _of_version(version: str) -> Iterator[str]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) not in VERSIONS:
        known = " and ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        yield f"vLLM {version} was not tried; blending works in {known}"


def _of_parallel(parallel: Any) -> Iterator[str]:
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} is {getattr(parallel, name)}; only tensor parallelism was tried"
    ranks = getattr(parallel, "tensor_parallel_size", 1)
    if ranks > 1 and getattr(parallel, "enable_expert_parallel", False):
        yield "experts are spread over ranks (enable_expert_parallel)"
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        yield "a step's tokens are computed in parts (enable_dbo)"


def _of_features(vllm_config: Any) -> Iterator[str]:
    model = vllm_config.model_config
    if getattr(vllm_config, "speculative_config", None) is not None:
        yield "a draft model or speculative decoding is on"
    if getattr(vllm_config, "lora_config", None) is not None:
        yield "LoRA is on"
    offload = getattr(vllm_config, "offload_config", None)
    prefetch = getattr(offload, "prefetch", None)
    if getattr(offload, "offload_backend", "") == "prefetch" or getattr(prefetch, "offload_group_size", 0):
        # A layer's weights give way to another's when it has been called once.
        yield "weights are fetched layer by layer (offload_group_size)"
    if getattr(model, "runner_type", "generate") != "generate":
        yield f"the model is for {model.runner_type}, not for text that is generated"
    if getattr(model, "is_multimodal_model", False):
        yield "the model takes images or other media"
    if getattr(model, "uses_mrope", False) or getattr(model, "uses_xdrope_dim", 0):
        yield "positions of the model's tokens have several dimensions"


def _of_caches(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    cache = vllm_config.cache_config
    if str(cache.cache_dtype) not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
        yield f"the cache is kept in {cache.cache_dtype}, not in the model's dtype"
    groups = kv_cache_config.kv_cache_groups
    for name, spec in (item for group in groups for item in layer_specs(group).items()):
        kind = type(spec).__name__
        if kind != "FullAttentionSpec":
            yield f"layer {name!r} keeps a {kind}; a FullAttentionSpec is needed"
        elif getattr(spec, "dtype", vllm_config.model_config.dtype) != vllm_config.model_config.dtype:
            yield f"layer {name!r} keeps {spec.dtype}, not the model's dtype"
        elif getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
            yield f"layer {name!r} does not look at all tokens before one"
    if len(groups) > 1:
        yield f"the model has {len(groups)} groups of KV caches, and blending works with one"
