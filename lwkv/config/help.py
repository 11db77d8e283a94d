"""What `help` shows of a model of settings: the settings, each in one line."""

from __future__ import annotations

import inspect
from textwrap import wrap
from typing import TypeVar

from pydantic import BaseModel

from lwkv.config.messages import allowed_of

Model = TypeVar("Model", bound=BaseModel)


def show_settings(model: type[Model]) -> type[Model]:
    """Append the settings to the class's docstring, and give it a signature of names and defaults alone."""
    rows = [line for key in model.model_fields for line in _row(model, key)]
    model.__doc__ = "\n".join([inspect.cleandoc(model.__doc__ or ""), "", "Settings:", *rows])
    # Its own spells out how every value is checked, a page of it.
    type.__setattr__(
        model, "__signature__", inspect.Signature([_parameter(model, k) for k in model.model_fields])
    )
    return model


def _row(model: type[BaseModel], key: str) -> list[str]:
    field = model.model_fields[key]
    kind, default = allowed_of(model, key).kind, f"{field.default!r}"
    text = f"    {key} ({kind}" + (f", {default}" if len(default) < 20 else "") + f"): {field.description}"
    return wrap(text, 100, subsequent_indent=" " * 8)


def _parameter(model: type[BaseModel], key: str) -> inspect.Parameter:
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=model.model_fields[key].default)
