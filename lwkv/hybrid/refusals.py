"""Settings that do not work with several kinds of caches, and those that each group's engine gets."""

from __future__ import annotations

from collections.abc import Iterator

from lwkv.config.settings import Config
from lwkv.connectors.paged import MOST_STAGING
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
    for name in ("local_disk", "remote_url", "host_memory"):
        if getattr(config, name) is not None:
            yield name, "set it to null, chunks are kept in this process's host memory only"
    if not config.local_cpu:
        yield "local_cpu", "got false; set it to true"
    for name in ("save_unfull_chunk", "enable_blending"):
        if getattr(config, name):
            yield name, "got true; set it to false"
    if config.page_codec not in ("auto", "raw"):
        yield "page_codec", f"got {config.page_codec!r}; set it to 'raw' or 'auto'"


def group_config(config: Config, tokens: int, num_groups: int, page_bytes: int) -> Config:
    """The settings of one group's engine, whose chunks have so many tokens.

    Staging of all groups together takes no more than that of one engine, unless that is less than a page for
    each buffer.
    """
    staging = config.extra_config.staging_bytes
    share = (MOST_STAGING if staging is None else staging) // num_groups
    least = 3 * config.staging_buffers * page_bytes
    extra = config.extra_config.model_copy(update={"staging_bytes": max(share, least)})
    return config.model_copy(update={"chunk_size": tokens, "page_codec": "raw", "extra_config": extra})
