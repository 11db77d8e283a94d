from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Dims, Oracle
from storage.disk_rig import open_disk
from storage.faulty_tier import FaultyTier, MemoryPages

from lwkv.errors import ConfigError
from lwkv.platforms import Platform
from lwkv.storage.tier import what_it_lacks


def test_a_tier_that_has_all_lacks_nothing(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, 2)
    for tier in (FaultyTier(), MemoryPages(), disk):
        assert what_it_lacks(tier) == []
    disk.close()


def without(*names: str) -> Any:
    methods = {name: getattr(MemoryPages, name) for name in ("contains", "get", "put", "close")}
    members = {"name": "own", **methods}
    return type("Theirs", (), {name: of for name, of in members.items() if name not in names})()


class OldGet(MemoryPages):
    def get(self, keys: Sequence[Any], pages: Sequence[Any]) -> list[Any]:  # type: ignore[override]
        return []


class Numbered(MemoryPages):
    def __init__(self) -> None:
        super().__init__()
        self.name = 3  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("tier", "lacking"),
    [
        (without("contains"), ["contains(keys, deadline_s)"]),
        (without("get"), ["get(keys, pages, deadline_s)"]),
        (without("put", "close"), ["put(keys, pages, deadline_s)", "close()"]),
        (without("name"), ["a name"]),
        (OldGet(), ["get(keys, pages, deadline_s)"]),
        (Numbered(), ["a name"]),
    ],
)
def test_a_tier_that_would_fail_in_every_call_is_refused(
    tier: Any, lacking: list[str], platform: Platform, device: torch.device
) -> None:
    assert what_it_lacks(tier) == lacking
    with pytest.raises(ConfigError, match=re.escape(f"it lacks {', '.join(lacking)}")):
        Oracle(platform, device, dims=Dims()).engine(tiers=[tier])
