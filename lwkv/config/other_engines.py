"""What to say where a serving engine's setting is given to another engine, or beside another engine's."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from lwkv.config.engine_settings import ENGINE_SETTINGS, Engine
from lwkv.config.messages import Origins, shown_under


def refuse_other_engines(
    given: Mapping[str, object], known: Container[str], origins: Origins
) -> Iterator[str]:
    """A line for each setting in `given` that only another engine has; one line for those of two engines.

    Args:
        known: the settings there are here: those of every engine, and of one engine at most.
    """
    elsewhere = {key: ENGINE_SETTINGS[key] for key in given if key in ENGINE_SETTINGS and key not in known}
    here = next((engine for key, engine in ENGINE_SETTINGS.items() if key in known), None)
    told = {
        key: f"{key}: got {shown_under(key, given[key])} ({origins.get(key, 'argument')})"
        for key in elsewhere
    }
    if here is None and len(set(elsewhere.values())) > 1:
        yield _of_two(elsewhere, told)
        return
    for key, engine in elsewhere.items():
        place = f"leave it out here, and write it in {engine.place} of {engine.name}"
        beside = f", and these are {here.name}'s settings" if here else ""
        yield f"{told[key]}, but it is a setting for {engine.name} only{beside}; {place}"


def _of_two(elsewhere: Mapping[str, Engine], told: Mapping[str, str]) -> str:
    owned = "; ".join(f"{told[key]} is for {engine.name} only" for key, engine in elsewhere.items())
    places = " and ".join(
        f"{', '.join(key for key in elsewhere if elsewhere[key] is owner)} in {owner.place} of {owner.name}"
        for owner in dict.fromkeys(elsewhere.values())
    )
    return f"settings of two engines, of which each refuses the other's: {owned}. Write {places}"
