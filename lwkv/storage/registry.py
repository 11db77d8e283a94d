"""Which kinds of lower tiers there are, and which of them a configuration asks for.

The built-in ones are named here; others come from the entry points `lwkv.tiers` of installed packages, each
the scheme of a URL and a module that is a TierModule.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar
from urllib.parse import unquote

from lwkv.config.messages import did_you_mean
from lwkv.config.settings import Config
from lwkv.errors import ConfigError, ErrorsTo
from lwkv.storage.tier import HOST, Tier, TierSetup, what_it_lacks

T = TypeVar("T")
GROUP = "lwkv.tiers"
_MODULES = {
    "file": "lwkv.storage.disk.tier",
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), "lwkv.storage.remote.valkey.tier"),
    "mooncake": "lwkv.storage.remote.mooncake.tier",
}
"""The module of each scheme."""
_ADDRESSES = {
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), "lwkv.storage.remote.valkey.address"),
    "mooncake": "lwkv.storage.remote.mooncake.client",
}
"""The module that reads a URL of each scheme without a connection, where there is one."""


def tier_urls(config: Config) -> list[str]:
    """The tiers that `config` names, nearest first."""
    disk = [] if config.local_disk is None else [f"file://{os.path.abspath(config.local_disk)}"]
    return [*disk, *([] if config.remote_url is None else [config.remote_url])]


def open_tiers(setup: TierSetup, nearer: Sequence[Tier] = ()) -> list[Tier]:
    """Open the tiers that the configuration names, nearest first; those of `nearer` come before them.

    Raises ConfigError: one cannot be opened, or one of all of them is no tier or has a name that is taken;
    none of those opened here is open then.
    """
    tiers: list[Tier] = []
    with ExitStack() as undo:
        for url in tier_urls(setup.config):
            tiers.append(_open(url, setup))
            undo.callback(tiers[-1].close)
        for tier in nearer:
            _require_tier(tier, f"the tier {tier!r}")
        _require_names_of_their_own([*nearer, *tiers])
        undo.pop_all()
    return tiers


def check_urls(config: Config) -> None:
    """Raise ConfigError for a tier of a kind that there is not, and for options that a built-in one does not
    take. No tier is asked, and no other package is loaded."""
    for url in tier_urls(config):
        entry = _entry(url)
        if entry.value == _MODULES.get(entry.name) and (reader := _ADDRESSES.get(entry.name)):
            import_module(reader).read_address(url)


def examine_tier(url: str, config: Config) -> Mapping[str, str]:
    """As TierModule.examine of the kind that `url` names."""
    entry = _entry(url)
    module = _load(entry, url)
    return _ask(entry, url, "examined", lambda: dict(module.examine(url, config)))


def _open(url: str, setup: TierSetup) -> Tier:
    entry = _entry(url)
    module = _load(entry, url)
    tier: Tier = _ask(entry, url, "opened", lambda: module.open_tier(url, setup))
    _require_tier(tier, f"the tier for {entry.name}:// cannot be opened: what {_home(entry)} made, {tier!r},")
    return tier


def _require_tier(tier: Tier, what: str) -> None:
    if missing := what_it_lacks(tier):
        raise ConfigError(f"{what} is no lwkv.storage.Tier: it lacks {', '.join(missing)}")


def _require_names_of_their_own(tiers: Sequence[Tier]) -> None:
    taken = [HOST]
    for tier in tiers:
        if tier.name in taken:
            raise ConfigError(
                f"two tiers are called {tier.name!r}, and metrics and counters go by that name; "
                f"taken are: {', '.join(taken)} (host memory is {HOST}). Give each tier a name of its own"
            )
        taken.append(tier.name)


def _load(entry: EntryPoint, url: str) -> Any:
    try:
        return _ask(entry, url, "loaded", entry.load)
    except ImportError as error:
        raise ConfigError(f"the tier for {entry.name}:// cannot be loaded: {error}") from error


def _ask(entry: EntryPoint, url: str, what: str, question: Callable[[], T]) -> T:
    """What `question` returns. Whatever the code of another package raises, it is a ConfigError."""
    if _MODULES.get(entry.name) == entry.value:
        return question()
    errors: list[BaseException] = []
    with ErrorsTo(errors.append):
        return question()
    (error,) = errors
    if isinstance(error, ConfigError) or not isinstance(error, Exception):
        raise error
    text = _without_login(str(error), url)
    raise ConfigError(
        f"the tier for {entry.name}:// cannot be {what}: {_home(entry)} raised {type(error).__name__}: "
        f"{text}; repair or remove that package"
    ) from None  # the cause may show the login


def _home(entry: EntryPoint) -> str:
    return entry.value + (f" of package {entry.dist.name!r}" if entry.dist else "")


def _without_login(text: str, url: str) -> str:
    """An error's text without the user and password of `url`."""
    login = url.partition("://")[2].rpartition("@")[0]
    for part in (login, *login.split(":", 1)):
        for secret in filter(None, (part, unquote(part))):
            text = text.replace(secret, "***")
    return text


def _entry(url: str) -> EntryPoint:
    scheme, entries = url.partition("://")[0].lower(), _entries()
    if scheme not in entries:
        known = [f"{name}://" for name in sorted(entries)]
        raise ConfigError(
            f"remote_url: there is no tier for {scheme}://"
            f"{did_you_mean(scheme, entries)}; allowed: {', '.join(known)}; "
            f"others come with packages that have an entry point {GROUP}"
        )
    return entries[scheme]


def _entries() -> dict[str, EntryPoint]:
    """Every kind of tier by its scheme."""
    entries = {scheme: EntryPoint(scheme, module, GROUP) for scheme, module in _MODULES.items()}
    for entry in entry_points(group=GROUP):
        known = entries.setdefault(entry.name, entry)
        if known.value != entry.value:
            raise ConfigError(
                f"two tiers serve {entry.name}://: {known.value} and {entry.value}; "
                "uninstall the package of one of them"
            )
    return entries
