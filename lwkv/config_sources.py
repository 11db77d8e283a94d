"""Where settings come from: a YAML file and the environment. Both are read with the same words."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import yaml

from lwkv.config_errors import did_you_mean
from lwkv.errors import ConfigError

PREFIX = "LWKV_"
RESERVED = ("LWKV_CONFIG_FILE", "LWKV_LOG_LEVEL", "LWKV_PLATFORM")
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars: 1e3 is a number, 010 is ten, `no` is text. Keys given twice are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"keys given twice: {twice}", node.start_mark)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,18}", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


def read_file(path: str | PathLike[str], told_by: str) -> dict[str, object]:
    """Read a YAML file of settings; an empty file has none.

    Raises:
        ConfigError: the file cannot be read, is no YAML, is no mapping, or gives a key twice; `told_by` says
            who named the file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, _Loader)  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"configuration file {fspath(path)!r} ({told_by}) cannot be read: {error}"
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"configuration file {fspath(path)!r} ({told_by}): got {values!r}; allowed: lines of `key: value`"
        )
    return {str(key): value for key, value in values.items()}


def read_environment(environ: Mapping[str, str], kinds: Mapping[str, str]) -> dict[str, object]:
    """Take the settings out of `environ`; `kinds` gives the kind of every key.

    Text stays as it is; everything else is read as in a file, and lists may be written 1,2.

    Raises:
        ConfigError: a variable with lwkv's prefix names no setting.
    """
    names = {f"{PREFIX}{key.upper()}": key for key in kinds}
    given = sorted(name for name in environ if name.startswith(PREFIX) and name not in RESERVED)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ConfigError(
            "\n".join(_no_setting(name, environ[name], [*names, *RESERVED]) for name in unknown)
        )
    return {names[name]: _read_text(environ[name], kinds[names[name]]) for name in given}


def _no_setting(name: str, text: str, known: Sequence[str]) -> str:
    near = did_you_mean(name, known)
    return f"environment variable {name}={text!r} names no setting{near}; allowed: {', '.join(sorted(known))}"


def _read_text(text: str, kind: str) -> object:
    if kind == "text" or not text.strip():
        return text
    try:
        return yaml.load(f"[{text}]" if "," in text and text.strip()[0] not in "[{" else text, _Loader)
    except yaml.YAMLError:
        return text
