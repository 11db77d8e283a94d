"""The texts of configuration errors: key, value got, where it came from, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError

from lwkv.options import Allowed


class Origins(dict[str, str]):
    """Where the value of each setting came from; those that are missing came as arguments."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say which known name is nearest to `name`; empty where none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def allowed_of(model: type[BaseModel], key: str) -> Allowed:
    """Look up what `key` of `model` takes."""
    (allowed,) = (item for item in model.model_fields[key].metadata if isinstance(item, Allowed))
    return allowed


def explain(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, object], origins: Origins
) -> str:
    """Tell every problem of `error`, a line each; keys not in `origins` came as arguments."""
    lines = (_explain(item["loc"], model, values, origins) for item in error.errors(include_url=False))
    return "\n".join(dict.fromkeys(lines))


def _explain(
    place: tuple[int | str, ...], model: type[BaseModel], values: Mapping[str, object], origins: Origins
) -> str:
    key = str(place[0])
    value, origin, inner = values.get(key), origins.get(key, "argument"), model.model_fields[key].annotation
    if len(place) == 1 or not (isinstance(inner, type) and issubclass(inner, BaseModel)):
        return f"{key}: got {value!r} ({origin}); allowed: {allowed_of(model, key).values}"
    name, extras = str(place[1]), value if isinstance(value, Mapping) else {}
    got = {str(extra): item for extra, item in extras.items()}.get(name)
    if name not in inner.model_fields:
        return f"{key}.{unknown_key(name, got, origin, inner.model_fields)}"
    return f"{key}.{name}: got {got!r} ({origin}); allowed: {allowed_of(inner, name).values}"


def unknown_key(key: str, value: object, origin: str, known: Iterable[str]) -> str:
    """Tell that nobody knows `key`, which key is near, and which keys there are."""
    names = sorted(known)
    near = did_you_mean(key, names)
    return f"{key}: got {value!r} ({origin}), but there is no such key{near}; allowed: {', '.join(names)}"
