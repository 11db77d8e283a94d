"""From `kv_connector_extra_config` to lwkv's configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lwkv.config.conflicts import Conflict
from lwkv.config.engine_settings import VLLM
from lwkv.config.settings import Config
from lwkv.config.values import Allowed, Flag
from lwkv.errors import ConfigError
from lwkv.storage.registry import tier_urls

log = logging.getLogger(__name__)

MEANING = {
    "recompute": "what cannot be loaded is computed",
    "fail": "a request whose KV cannot be loaded fails",
}


class Settings(Config):
    """lwkv's configuration in vLLM, with what becomes of a failed load.

    Layer by layer is the default here, other than elsewhere: vLLM has hooks for it.
    """

    place_of_arguments: ClassVar[str] = VLLM.place

    use_layerwise: Flag = Field(True, description="Load and save layer by layer while the model computes.")
    on_load_failure: Annotated[Literal["recompute", "fail"], Allowed("text", "recompute or fail")] = Field(
        "recompute", description="What happens to a request whose KV cannot be loaded."
    )

    prefetch_waiting: Flag = Field(
        True,
        description="Bring what is in lower tiers to host memory while its request waits to be scheduled.",
    )

    load_when: Annotated[Literal["cheaper", "always"], Allowed("text", "cheaper or always")] = Field(
        "cheaper",
        description="Whether cached tokens are loaded only where that is faster than computing them.",
    )

    blend_more_while_loading: Flag = Field(
        True,
        description="Recompute more tokens than blend_recompute_ratios says, as many as hide behind loads.",
    )

    blend_in_parts: Flag = Field(
        True,
        description="Do a part of a blend in each step where others are running, so that they go on.",
    )

    blend_shared_prefix: Annotated[
        str | tuple[Annotated[int, Field(strict=True, ge=0)], ...] | None,
        Allowed("text or whole numbers", "null, text, or a list of token ids"),
    ] = Field(
        None,
        description="What segments are computed behind when they are cached; null: a text of lwkv's own.",
    )

    def _more_conflicts(self) -> Iterator[Conflict]:
        if self.enable_blending and self.host_memory:
            advice = "blending was not tried with memory that engines share; leave one of them out"
            yield ("enable_blending", "host_memory"), advice
        if self.enable_blending and not self.local_cpu:
            advice = "documents are only found in host memory; set local_cpu to true"
            yield ("enable_blending", "local_cpu"), advice
        if self.save_unfull_chunk and self.save_decode_cache:
            advice = "an unfilled chunk would be stored again with every token; set one of them to false"
            yield ("save_unfull_chunk", "save_decode_cache"), advice


def read_settings(extra: Mapping[str, object]) -> Settings:
    """Merge file, environment and `extra`, the strongest.

    Raises:
        ConfigError: as Config, and for what cannot work in vLLM.
    """
    return Settings.load(None, **extra)


def check_role(kv_role: str | None, config: Config) -> None:
    """Refuse a role that needs a tier which other processes reach, where there is none, and one that either
    loads or stores where both are needed.

    Raises:
        ConfigError: with what to do.
    """
    reasons = {
        "kv_producer": "no other process can load what it stores",
        "kv_consumer": "it stores nothing, so it finds nothing",
    }
    if kv_role in reasons and not tier_urls(config):
        raise ConfigError(
            f"kv_role: got {kv_role!r}, and only host memory, which belongs to one process: "
            f"{reasons[kv_role]}; set local_disk or remote_url to a tier that the other processes reach, "
            "or kv_role to 'kv_both'"
        )
    if kv_role in reasons and config.enable_blending:
        raise ConfigError(
            f"kv_role: got {kv_role!r}, and enable_blending loads only what the same vLLM has stored; set "
            "kv_role to 'kv_both', or enable_blending to false"
        )


def set_policy(transfer_config: Any, settings: Settings) -> None:
    """Have vLLM do with failed loads as `settings` say, and log where it was to do otherwise: its own default
    is to fail the request."""
    if (policy := transfer_config.kv_load_failure_policy) == settings.on_load_failure:
        return
    transfer_config.kv_load_failure_policy = settings.on_load_failure
    log.info(
        "kv_load_failure_policy was %r and is %r now, as on_load_failure says: %s",
        *(policy, settings.on_load_failure, MEANING[settings.on_load_failure]),
    )


def warn_of_outer_policy(outer: Any, own: Any, settings: Settings) -> None:
    """Log where another connector has this one inside, and its policy is not the one that is set here.

    Args:
        outer, own: vLLM's KVTransferConfig of the engine, and the one that this connector was given.
    """
    if outer is None or outer.kv_connector == own.kv_connector:
        return
    if (policy := outer.kv_load_failure_policy) != settings.on_load_failure:
        log.warning(
            "kv_load_failure_policy of %s is %r, and lwkv inside it cannot change that: %s; set "
            '"kv_load_failure_policy": "%s" beside "kv_connector": "%s"',
            *(outer.kv_connector, policy, MEANING[policy], settings.on_load_failure, outer.kv_connector),
        )
