"""From `linker_extra_config` to lwkv's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lwkv.config.settings import Config
from lwkv.errors import ConfigError

FLUSH_KEY = "on_flush"
FORGET, KEEP = "forget", "keep"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user sets for the linker.

    Attributes:
        config: lwkv's configuration; a chunk is a page of SGLang.
        forgets: whether a flush of SGLang's cache also makes lwkv forget what it has: the weights may be new.
    """

    config: Config
    forgets: bool


def read_settings(extra: Mapping[str, object], page_size: int) -> Settings:
    """Merge file, environment and `extra`, the strongest; `page_size` is SGLang's, in tokens.

    Raises:
        ConfigError: as Config, and for what cannot work in SGLang.
    """
    arguments = dict(extra)
    on_flush = arguments.pop(FLUSH_KEY, FORGET)
    if on_flush not in (FORGET, KEEP):
        raise ConfigError(f"{FLUSH_KEY}: got {on_flush!r}; allowed: {FORGET!r} or {KEEP!r}")
    config = Config.load(None, **arguments)
    for name, value in (("chunk_size", page_size), ("use_layerwise", True)):
        if name not in config.model_fields_set:
            arguments[name] = value
    config = Config.load(None, **arguments)
    _refuse(config, page_size)
    return Settings(config, on_flush == FORGET)


def _refuse(config: Config, page_size: int) -> None:
    """Raise ConfigError for what SGLang leaves no room for."""
    wrong = [
        text
        for holds, text in (
            (
                config.chunk_size == page_size,
                f"chunk_size: got {config.chunk_size}; allowed: {page_size}, SGLang's page: it gives lwkv "
                "pages one by one, from anywhere in a prompt. Leave it out, or change --page-size",
            ),
            (
                config.use_layerwise,
                "use_layerwise: got False; allowed: True. SGLang's pool waits for each layer",
            ),
            (
                config.local_cpu,
                "local_cpu: got False; allowed: True. SGLang loads only what is in host memory",
            ),
            (
                not config.save_unfull_chunk,
                "save_unfull_chunk: got True; allowed: False. SGLang caches whole pages",
            ),
            (
                not config.enable_blending,
                "enable_blending: got True; allowed: False. SGLang's models cannot recompute some tokens",
            ),
        )
        if not holds
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
