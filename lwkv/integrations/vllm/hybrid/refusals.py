"""Which settings cannot be used with several groups of caches, by name, before anything is computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from lwkv.errors import ConfigError
from lwkv.hybrid.refusals import unusable_settings
from lwkv.integrations.vllm.hybrid.groups import ONE_GROUP
from lwkv.integrations.vllm.settings import Settings
from lwkv.integrations.vllm.versions import release_of

log = logging.getLogger(__name__)

OLDEST = (0, 32)
"""Before this, vLLM ends where a load fails, or gives a block away twice, with several groups."""


def can_have_groups(version: str) -> bool:
    """Whether lwkv can be used in this vLLM with several groups of caches."""
    release = release_of(version)
    return release is None or release >= OLDEST


def refuse(settings: Settings, vllm_config: Any, has_states: bool = False) -> None:
    """Raise ConfigError for what cannot be used with several groups, and log what has no effect there.

    Args:
        has_states: whether some layers keep a state: vLLM cannot have these in one group with others.
    """
    of_settings = (f"{name} as it is set cannot be used" for name, _ in unusable_settings(settings))
    for problem in (*of_settings, *_of_vllm(vllm_config, has_states)):
        advice = "change that, or leave lwkv out" if has_states else f"{ONE_GROUP}, or change that"
        raise ConfigError(f"{problem} with the several groups of KV caches that this model has; {advice}")
    if settings.load_when == "cheaper":
        log.info("with several groups of KV caches all that is found in host memory is loaded")


def _of_vllm(vllm_config: Any, has_states: bool) -> Iterator[str]:
    drafts = getattr(vllm_config, "speculative_config", None)
    method = getattr(drafts, "method", None)
    if drafts is not None and has_states:
        yield (
            f"speculative decoding, here by {method!r}, cannot be used: a step leaves a state for each token "
            "that it tries, and vLLM does not report which of them it keeps,"
        )
    elif drafts is not None:
        yield (
            f"speculative decoding, here by {method!r}, cannot be used: a draft model computes when "
            "a step's stores have been queued, and other methods were not tried,"
        )
    if getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1) > 1:
        yield "pipeline_parallel_size above 1 was not tried"
    events = getattr(vllm_config, "kv_events_config", None)
    if events is not None and events.enable_kv_cache_events:
        yield "enable_kv_cache_events has no events of lwkv's"
