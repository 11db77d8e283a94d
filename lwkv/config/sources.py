"""Where settings come from: a YAML file and the environment. Both are read with the same words."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple

import yaml

from lwkv.config.engine_settings import ENGINE_SETTINGS
from lwkv.config.hints import VARIABLES_ONLY, hint_for_key
from lwkv.config.messages import clipped, did_you_mean, shown, shown_under
from lwkv.config.secrets import HIDDEN, is_secret
from lwkv.errors import ConfigError

PREFIX = "LWKV_"
RESERVED = tuple(f"{PREFIX}{name.upper()}" for name in VARIABLES_ONLY)


class Read(NamedTuple):
    """What a source has, as far as it can be read, and a line for each thing that is wrong with it."""

    values: dict[str, object]
    faults: list[str]


_TAG = "tag:yaml.org,2002:"
_MOST_LEVELS = 8


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars: 1e3 is a number, 010 is ten, `no` is text.

    Refused are keys given twice, and what no setting needs: aliases, tags and deep nesting.
    """

    _level = 0

    def __init__(self, text: Any) -> None:
        super().__init__(text)
        self.twice: list[str] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases (*name) are not taken; write the value out", event.start_mark)
        if event.tag is not None:
            raise _refusal("tags (!name) are not taken; leave the tag out", event.start_mark)
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise _refusal(f"nested deeper than {_MOST_LEVELS} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, list[int]] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault(str(key.value), []).append(key.start_mark.line + 1)
        self.twice += [
            f"gives {clipped(name)} twice: in line {places[0]} and again in line {places[-1]}; keep one"
            for name, places in lines.items()
            if len(places) > 1
        ]
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


_ADVICE = {
    "'\\t'": "; indent with spaces and not with tabs",
    "another document": "; write one document: leave out the line of three dashes",
    "mapping values are not allowed": "; write `key: value`, and text that has a colon in quotes",
    "could not find expected ':'": "; write `key: value`",
    "stream end": "; a bracket or quote is not closed",
}
"""What to do, by a part of the message of YAML's parser."""
_QUOTED = re.compile("'[^']*'|\"[^\"]*\"")


class _RefusedError(yaml.constructor.ConstructorError):
    """What YAML allows and lwkv does not take; its text quotes nothing that may be a secret."""


def _refusal(problem: str, mark: Any) -> _RefusedError:
    return _RefusedError(None, None, problem, mark)


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


def read_file(path: str | PathLike[str], told_by: str) -> Read:
    """Read a YAML file of settings; an empty file has none. `told_by` says who named the file.

    Wrong is a key given twice.

    Raises:
        ConfigError: the file cannot be read, is no YAML, is no mapping, or has aliases, tags or more than 8
            levels.
    """
    name = f"configuration file {shown(fspath(path))} ({told_by})"
    if not fspath(path):
        raise ConfigError(f"{name} has an empty name; write the path of a file, or unset the variable")
    try:
        with open(path, encoding="utf-8") as file:
            values, twice = _load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        # The error's own text, which a traceback shows, may quote the file.
        raise ConfigError(f"{name} {_why(error)}") from None
    if values is None:
        return Read({}, [])
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: got {shown_under('', values)}; allowed: lines of `key: value`")
    return Read({str(key): value for key, value in values.items()}, [f"{name} {text}" for text in twice])


def _load(text: Any) -> tuple[Any, list[str]]:
    """What a text or file has, and what is wrong with its keys."""
    loader = _Loader(text)
    try:
        return loader.get_single_data(), loader.twice
    finally:
        loader.dispose()


def _why(error: OSError | ValueError | yaml.YAMLError) -> str:
    """Say what cannot be read, and where, without what is written there."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        problem, mark = f"{error.problem}", error.problem_mark
        place = f"(line {mark.line + 1}, column {mark.column + 1})"
        if isinstance(error, _RefusedError):
            return f"cannot be read: {problem} {place}"
        advice = next((advice for part, advice in _ADVICE.items() if part in problem), "")
        return f"cannot be read: {_QUOTED.sub(_hide_name, problem)} {place}{advice}"
    if isinstance(error, UnicodeDecodeError):
        return f"cannot be read: byte {error.start + 1} is no UTF-8; save the file as UTF-8"
    return (
        f"cannot be read: {(error.strerror if isinstance(error, OSError) else None) or clipped(f'{error}')}"
    )


def _hide_name(quoted: re.Match[str]) -> str:
    """Names that YAML quotes are part of the text; what it calls <...>, and single characters, are not."""
    name = quoted[0][1:-1]
    return quoted[0] if name.startswith("<") or len(name.removeprefix("\\")) < 2 else f"'{HIDDEN}'"


def read_environment(environ: Mapping[str, str], kinds: Mapping[str, str]) -> Read:
    """Take the settings out of `environ`; `kinds` gives the kind of every key.

    Text stays as it is, and so do settings that only another engine has; everything else is read as in a
    file, and lists may be written 1,2. Wrong is a variable with lwkv's prefix that names no setting of any
    engine, and what is no mapping that can be read.
    """
    allowed = [f"{PREFIX}{key.upper()}" for key in kinds]
    kinds = dict.fromkeys(ENGINE_SETTINGS, "text") | dict(kinds)
    names = {f"{PREFIX}{key.upper()}": key for key in kinds}
    given = sorted(name for name in environ if name.startswith(PREFIX) and name not in RESERVED)
    unknown = [name for name in given if name not in names]
    read = Read({}, [_no_setting(name, environ[name], allowed, names) for name in unknown])
    for name in given:
        if name in names:
            read.values[names[name]] = _read_text(name, environ[name], kinds[names[name]], read.faults)
    return read


def _no_setting(name: str, text: str, allowed: Sequence[str], known: Iterable[str]) -> str:
    near = hint_for_key(name.removeprefix(PREFIX).lower(), text, ()) or did_you_mean(
        name, [*known, *RESERVED]
    )
    names = ", ".join(sorted([*allowed, *RESERVED]))
    value = shown_under(name, text)
    return f"environment variable {clipped(name)}={value} names no setting{near}; allowed: {names}"


def _read_text(name: str, text: str, kind: str, faults: list[str]) -> object:
    if kind == "text" or not text.strip():
        return text
    shown_text = f"environment variable {name}={HIDDEN if is_secret(text) else shown(text)}"
    try:
        value, twice = _load(f"[{text}]" if "," in text and text.strip()[0] not in "[{" else text)
    except yaml.YAMLError as error:
        if kind != "mapping":
            return text
        faults.append(f"{shown_text} {_why(error)}")
        return {}
    faults += [f"{shown_text} {line}" for line in twice]
    return value
