"""Where the tiers that the contract is tested with keep their pages: a kind a name.

A new kind is one entry of PLACES: a function that makes ready what the kind needs, a folder or a server, by
the fixtures of `request`, and returns how to open a tier there, as often as one likes, each as another
process would.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from storage.faulty_tier import MemoryPages

from lwkv.config.settings import Config
from lwkv.storage import Tier, TierSetup
from lwkv.storage.registry import open_tiers
from lwkv.storage.remote.mooncake.tier import MooncakeTier
from lwkv.telemetry.counters import Counters

OpenTier = Callable[[TierSetup], Tier]


def make_setup(page_bytes: int, num_layers: int, **settings: object) -> TierSetup:
    return TierSetup(Config(**settings), num_layers, page_bytes, "canonical", Counters())


def open_only(setup: TierSetup, **settings: object) -> Tier:
    """Open the one tier that these settings name, as the engine does."""
    [tier] = open_tiers(replace(setup, config=Config(**settings)))
    return tier


def _memory(request: pytest.FixtureRequest) -> OpenTier:
    first = MemoryPages()

    def open_another(setup: TierSetup) -> Tier:
        another = MemoryPages()
        another.pages = first.pages
        return another

    return open_another


def _disk(request: pytest.FixtureRequest) -> OpenTier:
    folder = request.getfixturevalue("tmp_path")
    return partial(open_only, local_disk=str(folder), max_local_disk_size=0.1)


def _server(request: pytest.FixtureRequest) -> OpenTier:
    server = request.getfixturevalue("redis")
    return partial(open_only, remote_url=f"redis://127.0.0.1:{server.port}")


class _Kept:
    """A client that outlives the tier it is lent to: to close one takes a second."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        """Go on."""


def _mooncake(request: pytest.FixtureRequest) -> OpenTier:
    request.getfixturevalue("mooncake")
    clients = itertools.cycle(request.getfixturevalue("mooncake_clients"))

    def open_another(setup: TierSetup) -> Tier:
        client: Any = _Kept(next(clients))
        return MooncakeTier(lambda: client, setup.counters)

    return open_another


PLACES: dict[str, Callable[[pytest.FixtureRequest], OpenTier]] = {
    "memory": _memory,
    "redis": _server,
    "mooncake": _mooncake,
    "disk": _disk,
}
