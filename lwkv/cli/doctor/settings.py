"""The settings that an engine would have here: every value, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from pydantic import BaseModel

from lwkv.config.engine_settings import ENGINE_SETTINGS
from lwkv.config.messages import shown_under
from lwkv.config.settings import Config


def read_configuration() -> tuple[Config, dict[str, dict[str, str]]]:
    """The configuration of file and environment, and each setting's "value" and "source" without passwords.

    It is that of a serving engine if it has settings that only this engine has: those who give them use it.

    Raises:
        ConfigError: as Config.load.
    """
    kind = _kind()
    config, sources = kind.load(), kind.sources()
    rows = _rows(config, sources)
    return config, {name: {"value": value, "source": source} for name, value, source in rows}


def _kind() -> type[Config]:
    engines = {ENGINE_SETTINGS[name] for name in Config.given() & ENGINE_SETTINGS.keys()}
    if len(engines) != 1:
        return Config  # which refuses the settings of two engines, and says whose they are
    found: type[Config] = import_module(engines.pop().module).Settings
    return found


def read_as(config: Config) -> dict[str, str]:
    """A row that says as which engine's `config` was read, and why; empty where it is lwkv's own."""
    names = [name for name in ENGINE_SETTINGS if name in config.model_fields_set]
    engines = {ENGINE_SETTINGS[name].name for name in names}
    return {f"read as in {engine}": f"only {engine} has {', '.join(names)}" for engine in engines}


def _rows(config: Config, sources: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in type(config).model_fields:
        value, source = getattr(config, name), sources[name]
        if isinstance(value, BaseModel):
            for key in type(value).model_fields:
                given = source if key in value.model_fields_set else "default"
                yield f"{name}.{key}", shown_under(key, getattr(value, key)), given
        else:
            yield name, shown_under(name, value), source
