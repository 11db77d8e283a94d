"""Settings that do not work with several kinds of caches, and those that each group's engine gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lwkv.config.messages import shown
from lwkv.config.settings import Config
from lwkv.errors import ConfigError


def refuse_settings(config: Config) -> None:
    """Raise ConfigError for what does not work with several kinds of caches, all of it in one text."""
    if faults := [f"{name}: {what_to_do}" for name, what_to_do in unusable_settings(config)]:
        raise ConfigError(
            "this model keeps several kinds of caches, which do not work with "
            + "; ".join(faults)
            + ". Or start vLLM with --disable-hybrid-kv-cache-manager, where the model allows that"
        )


def unusable_settings(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that do not work with several kinds of caches as they are set: the name, and what to do."""
    if config.host_memory is not None:
        yield (
            "host_memory",
            f"got {shown(config.host_memory)}; set it to null: chunks are kept in memory of this process",
        )
    if not config.local_cpu:
        yield "local_cpu", "got false; set it to true"
    for name in ("save_unfull_chunk", "enable_blending"):
        if getattr(config, name):
            yield name, "got true; set it to false"
    if config.page_codec not in ("auto", "raw"):
        yield "page_codec", f"got {config.page_codec!r}; set it to 'raw' or 'auto'"


def group_config(config: Config, tokens: int, page_bytes: int) -> Config:
    """The settings of one group's engine, whose chunks have so many tokens. It has no lower tiers of its own.

    Staging, which all groups share, is at least a page for each buffer: how large pages are for all groups is
    not the user's choice.
    """
    changes: dict[str, Any] = {"chunk_size": tokens, "page_codec": "raw"}
    changes |= {"local_disk": None, "remote_url": None}
    staging = config.extra_config.staging_bytes
    if staging is not None:
        least = 3 * config.staging_buffers * page_bytes
        changes["extra_config"] = config.extra_config.model_copy(
            update={"staging_bytes": max(staging, least)}
        )
    return config.model_copy(update=changes)
