"""Which kinds of lower tiers there are, and which of them a configuration asks for.

The built-in ones are named here; others come from the entry points `lwkv.tiers` of installed packages, each
the scheme of a URL and a module that is a TierModule.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage.tier import Tier, TierModule, TierSetup

GROUP = "lwkv.tiers"
_MODULES = {
    "file": "lwkv.storage.disk.tier",
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), "lwkv.storage.remote.valkey.tier"),
    "mooncake": "lwkv.storage.remote.mooncake.tier",
}
"""The module of each scheme."""


def tier_urls(config: Config) -> list[str]:
    """The tiers that `config` names, nearest first."""
    disk = [] if config.local_disk is None else [f"file://{config.local_disk}"]
    return [*disk, *([] if config.remote_url is None else [config.remote_url])]


def open_tiers(setup: TierSetup) -> list[Tier]:
    """Open the tiers that the configuration names, nearest first. Raises ConfigError; none is open then."""
    tiers: list[Tier] = []
    with ExitStack() as undo:
        for url in tier_urls(setup.config):
            tiers.append(_module(url).open_tier(url, setup))
            undo.callback(tiers[-1].close)
        undo.pop_all()
    return tiers


def examine_tier(url: str, config: Config) -> Mapping[str, str]:
    """As TierModule.examine of the kind that `url` names."""
    return _module(url).examine(url, config)


def _module(url: str) -> TierModule:
    scheme, modules = url.partition("://")[0].lower(), _modules()
    if scheme not in modules:
        raise ConfigError(
            f"no tier for {scheme}://...; known are {', '.join(f'{name}://' for name in sorted(modules))}; "
            f"others come with packages that have an entry point {GROUP}"
        )
    try:
        return cast(TierModule, import_module(modules[scheme]))
    except ImportError as error:
        raise ConfigError(f"the tier for {scheme}:// cannot be loaded: {error}") from error


def _modules() -> dict[str, str]:
    modules = dict(_MODULES)
    for entry in entry_points(group=GROUP):
        if modules.get(entry.name, entry.value) != entry.value:
            raise ConfigError(
                f"two tiers serve {entry.name}://: {modules[entry.name]} and {entry.value}; "
                "uninstall the package of one of them"
            )
        modules[entry.name] = entry.value
    return modules
