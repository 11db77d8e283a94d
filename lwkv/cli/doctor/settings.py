"""The settings that an engine would have here: every value, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from pydantic import BaseModel

from lwkv.config.engine_settings import ENGINE_SETTINGS, VLLM
from lwkv.config.messages import shown_under
from lwkv.config.settings import Config


def read_configuration() -> tuple[Config, dict[str, dict[str, str]]]:
    """The configuration of file and environment, and each setting's "value" and "source" without passwords.

    It is vLLM's if it has settings that only vLLM has: those who give them are vLLM's users.

    Raises:
        ConfigError: as Config.load.
    """
    kind = _kind()
    config, sources = kind.load(), kind.sources()
    rows = _rows(config, sources)
    return config, {name: {"value": value, "source": source} for name, value, source in rows}


def _kind() -> type[Config]:
    own = {name for name, engine in ENGINE_SETTINGS.items() if engine is VLLM}
    if not Config.given() & own:
        return Config
    found: type[Config] = import_module("lwkv.integrations.vllm.settings").Settings
    return found


def settings_of_engine(config: Config) -> str:
    """What `config` has that only an engine's settings have; empty where it has none."""
    return ", ".join(name for name in ENGINE_SETTINGS if name in config.model_fields_set)


def _rows(config: Config, sources: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in type(config).model_fields:
        value, source = getattr(config, name), sources[name]
        if isinstance(value, BaseModel):
            for key in type(value).model_fields:
                given = source if key in value.model_fields_set else "default"
                yield f"{name}.{key}", shown_under(key, getattr(value, key)), given
        else:
            yield name, shown_under(name, value), source
