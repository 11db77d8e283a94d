"""The settings that an engine would have here: every value, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from lwkv.config.messages import shown_under
from lwkv.config.settings import Config


def read_configuration() -> tuple[Config, dict[str, dict[str, str]]]:
    """The configuration of file and environment, and each setting's "value" and "source" without passwords.

    Raises:
        ConfigError: as Config.load.
    """
    config, sources = Config.load(), Config.sources()
    rows = _rows(config, sources)
    return config, {name: {"value": value, "source": source} for name, value, source in rows}


def _rows(config: Config, sources: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in Config.model_fields:
        value, source = getattr(config, name), sources[name]
        if isinstance(value, BaseModel):
            for key in type(value).model_fields:
                given = source if key in value.model_fields_set else "default"
                yield f"{name}.{key}", shown_under(key, getattr(value, key)), given
        else:
            yield name, shown_under(name, value), source
