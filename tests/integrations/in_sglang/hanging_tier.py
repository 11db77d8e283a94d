"""The tier `hanging://FILE`: it says that it has every chunk, and no read ends as long as FILE exists."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lwkv.config.settings import Config
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status, TierSetup


class HangingTier:
    name = "hanging"

    def __init__(self, file: Path) -> None:
        self._file = file

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        return [True] * len(keys)

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        while self._file.exists():
            time.sleep(0.02)
        return [Status.MISS] * len(keys)

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return [Status.OK] * len(keys)

    def close(self) -> None: ...


def open_tier(url: str, setup: TierSetup) -> HangingTier:
    return HangingTier(Path(url.removeprefix("hanging://")))


def examine(url: str, config: Config) -> Mapping[str, str]:
    return {}


def installed_in(folder: Path) -> Path:
    """Write into `folder` what makes Python find the tier, as an installed package would."""
    about = folder / "lwkv_hanging-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lwkv-hanging\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[lwkv.tiers]\nhanging = {__name__}\n")
    return folder
