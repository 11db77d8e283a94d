"""Which settings cannot be used with several groups of caches, by name, before anything is computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from lwkv.config.messages import joined
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.hybrid.refusals import unusable_settings
from lwkv.integrations.vllm.hybrid.groups import ONE_GROUP
from lwkv.integrations.vllm.settings import Settings
from lwkv.integrations.vllm.versions import release_of

log = logging.getLogger(__name__)

OLDEST = (0, 32)
"""Before this, vLLM ends where a load fails, or gives a block away twice, with several groups."""

WITH_LAYERS = ("eagle",)
"""Methods of speculative decoding that were tried whose layers are cached."""
TRIED_DRAFTS = ("ngram", *WITH_LAYERS)


def can_have_groups(version: str) -> bool:
    """Whether lwkv can be used in this vLLM with several groups of caches."""
    release = release_of(version)
    return release is None or release >= OLDEST


def refuse(settings: Settings, vllm_config: Any, has_states: bool = False) -> None:
    """Raise ConfigError for all that cannot be used with several groups, and log what has no effect there.

    Args:
        has_states: whether some layers keep a state: vLLM cannot have these in one group with others.
    """
    problems = [*settings_problems(settings), *_of_vllm(vllm_config, has_states)]
    if problems:
        raise ConfigError(refusal(problems, has_states))
    if settings.load_when == "cheaper":
        log.info("with several groups of KV caches all that is found in host memory is loaded")


def require_drafts(vllm_config: Any, drafts: Sequence[str]) -> None:
    """Raise ConfigError for a draft model none of whose layers is known: its stores would end before it."""
    method = getattr(getattr(vllm_config, "speculative_config", None), "method", None)
    if method in WITH_LAYERS and not drafts:
        raise ConfigError(
            f"speculative decoding by {method!r}: no layer of the draft model has a number behind those of "
            f"the model itself; leave the draft model out, or {ONE_GROUP}"
        )


def settings_problems(config: Config) -> list[str]:
    """The settings that cannot be used with several groups, a line each: the value got, and what to do."""
    return [f"{name}: {what_to_do}" for name, what_to_do in unusable_settings(config)]


def refusal(problems: Sequence[str], has_states: bool) -> str:
    """The text of an error that has all problems, and what to do instead."""
    instead = "leave lwkv out for this model" if has_states else ONE_GROUP
    first = "this model has several groups of KV caches, with which these cannot be used:"
    return joined([first, *problems, f"Change that, or {instead}"])


def _of_vllm(vllm_config: Any, has_states: bool) -> Iterator[str]:
    drafts = getattr(vllm_config, "speculative_config", None)
    method = getattr(drafts, "method", None)
    if drafts is not None and has_states:
        yield (
            f"speculative decoding, here by {method!r}, cannot be used: a step leaves a state for each token "
            "that it tries, and vLLM does not report which of them it keeps"
        )
    elif drafts is not None and method not in TRIED_DRAFTS:
        yield (
            f"speculative decoding, here by {method!r}, was not tried with several groups of caches; "
            f"use {' or '.join(map(repr, TRIED_DRAFTS))}, or none"
        )
    if (stages := getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)) > 1:
        yield f"pipeline_parallel_size: got {stages}, which was not tried; set it to 1"
    events = getattr(vllm_config, "kv_events_config", None)
    if events is not None and events.enable_kv_cache_events:
        yield "enable_kv_cache_events: got true, and lwkv has no events here; set it to false"
