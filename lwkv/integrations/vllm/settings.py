"""From `kv_connector_extra_config` to lwkv's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from lwkv.config.messages import shown
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage.registry import tier_urls

log = logging.getLogger(__name__)

FAILURE_KEY = "on_load_failure"
FAILURE_POLICIES = ("recompute", "fail")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user sets for the connector: lwkv's configuration, and what becomes of a failed load."""

    config: Config
    on_load_failure: str


def read_settings(extra: Mapping[str, object]) -> Settings:
    """Merge file, environment and `extra`, the strongest.

    Layer by layer is the default here, other than elsewhere: vLLM has hooks for it.

    Raises:
        ConfigError: as Config, and for what cannot work in vLLM.
    """
    arguments = dict(extra)
    policy = arguments.pop(FAILURE_KEY, FAILURE_POLICIES[0])
    if policy not in FAILURE_POLICIES:
        raise ConfigError(f"{FAILURE_KEY}: got {shown(policy)}; allowed: {' or '.join(FAILURE_POLICIES)}")
    config = Config.load(None, **arguments)
    if "use_layerwise" not in config.model_fields_set:
        config = Config.load(None, **arguments, use_layerwise=True)
    if config.enable_blending:
        raise ConfigError(
            "enable_blending: vLLM's models cannot recompute some tokens of a prompt; leave it out"
        )
    if config.save_unfull_chunk and config.save_decode_cache:
        raise ConfigError(
            "save_unfull_chunk and save_decode_cache: a rest would be stored anew with every token; "
            "set one of them to false"
        )
    return Settings(config, str(policy))


def check_role(kv_role: str | None, config: Config) -> None:
    """Refuse a role that needs a tier which other processes reach, where there is none.

    Raises:
        ConfigError: with what to do.
    """
    useless = {
        "kv_producer": "what it stores is loaded by nobody",
        "kv_consumer": "it stores nothing, and so finds nothing",
    }
    if kv_role in useless and not tier_urls(config):
        raise ConfigError(
            f"kv_role: got {kv_role!r}, and only host memory, which belongs to one process: "
            f"{useless[kv_role]}; set local_disk or remote_url to a tier that the other processes reach, "
            "or kv_role to 'kv_both'"
        )
