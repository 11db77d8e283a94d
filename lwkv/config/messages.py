"""The texts of configuration errors: key, value got, where it came from, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from reprlib import Repr

from pydantic import BaseModel, ValidationError

from lwkv.config.addresses import WrongAddressError
from lwkv.config.engine_settings import ENGINE_SETTINGS
from lwkv.config.hints import hint_for_key, hint_for_value
from lwkv.config.secrets import HIDDEN, cut, cut_inside, cut_under
from lwkv.config.values import Allowed


class Origins(dict[str, str]):
    """Where the value of each setting came from; those that are missing came as arguments.

    Attributes:
        faults: what the sources themselves have wrong, a line each; it is reported together with the rest.
        unread: settings that may have been given where nothing could be read.
    """

    def __init__(self, origins: Mapping[str, str] | None = None) -> None:
        super().__init__(origins or {})
        self.faults: list[str] = []
        self.unread: frozenset[str] = frozenset()


_MOST_CHARS = 200
_MOST_LINES = 30


class _Short(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MOST_CHARS
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python refuses to write out very long numbers
        return super().repr_int(x, level) if bits < _MOST_CHARS else f"a number of {bits} bits"


_short = _Short()


def shown(value: object) -> str:
    """Show a value in an error text: as `repr`, with the middle of what is long left out, and no password."""
    return _short.repr(cut_inside(value))


def shown_under(name: str, value: object) -> str:
    """Show the value of a setting called `name`, nothing of it where that may be a secret's name."""
    cut = cut_under(name, value)
    return HIDDEN if cut == HIDDEN else _short.repr(cut)


def clipped(text: str) -> str:
    """Text as it is, or its beginning where it is long; no password."""
    text = cut(text)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say which known name is nearest to `name`; empty where none is near."""
    return "".join(f" (did you mean {near}?)" for near in nearest(name, known))


def nearest(name: str, known: Iterable[str]) -> frozenset[str]:
    """The known name that is nearest to `name`, if any is near."""
    return frozenset(get_close_matches(name, list(known), n=1))


def joined(lines: Iterable[str]) -> str:
    """Join the lines of an error text; where there are very many, the first of them."""
    distinct = list(dict.fromkeys(lines))
    left_out = [f"... and {len(distinct) - _MOST_LINES} more"] if len(distinct) > _MOST_LINES else []
    text = "\n".join([*distinct[:_MOST_LINES], *left_out])
    return f"{text}\n({HIDDEN} stands for what may be a secret)" if HIDDEN in text else text


def allowed_of(model: type[BaseModel], key: str) -> Allowed:
    """Look up what `key` of `model` takes."""
    (allowed,) = (item for item in model.model_fields[key].metadata if isinstance(item, Allowed))
    return allowed


def explain(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, object], origins: Origins
) -> list[str]:
    """Every problem of `error`, a line each; keys not in `origins` came as arguments."""
    return [
        _explain(item["loc"], item.get("ctx", {}).get("error"), model, values, origins)
        for item in error.errors(include_url=False)
    ]


def keys_of(error: ValidationError) -> set[str]:
    """The settings that `error` is about."""
    return {str(item["loc"][0]) for item in error.errors(include_url=False)}


def _explain(
    place: tuple[int | str, ...],
    reason: object,
    model: type[BaseModel],
    values: Mapping[str, object],
    origins: Origins,
) -> str:
    key = str(place[0])
    value, origin, inner = values.get(key), origins.get(key, "argument"), model.model_fields[key].annotation
    if len(place) == 1 or not (isinstance(inner, type) and issubclass(inner, BaseModel)):
        got = shown_under(key if key == "remote_url" else "", value)
        why = f", but {reason}" if isinstance(reason, WrongAddressError) else ""
        return f"{key}: got {got} ({origin}){why}; allowed: {_allowed(model, key, value)}"
    name, extras = str(place[1]), value if isinstance(value, Mapping) else {}
    item = {str(extra): given for extra, given in extras.items()}.get(name)
    if name not in inner.model_fields:
        outside = f" (it is no key of {key}: write it beside {key})" if name in model.model_fields else ""
        return f"{key}.{unknown_key(name, item, origin, inner.model_fields, outside)}"
    return f"{key}.{name}: got {shown(item)} ({origin}); allowed: {_allowed(inner, name, item)}"


def _allowed(model: type[BaseModel], key: str, value: object) -> str:
    """What `key` takes, and what to do about `value` where that can be guessed."""
    allowed = allowed_of(model, key)
    return f"{allowed.values}{hint_for_value(allowed, value, model.model_fields[key].default)}"


def unknown_key(key: str, value: object, origin: str, known: Iterable[str], hint: str = "") -> str:
    """Say that `key` is unknown, where it belongs or which key is near, and which keys there are.

    Args:
        hint: where it belongs, if the caller knows.
    """
    names = sorted(known)
    near = hint or hint_for_key(key, value, names) or did_you_mean(key, names)
    near = near or did_you_mean(key, ENGINE_SETTINGS)
    got = f"{clipped(key)}: got {shown_under(key, value)} ({origin})"
    return f"{got}, but there is no such key{near}; allowed: {', '.join(names)}"
