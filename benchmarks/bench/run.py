"""What one run of the bench measures, and on what."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine
from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.benchmarks.measuring.timing import Work, alternate_ms
from lwkv.benchmarks.transfers.ceilings import Ceilings, measure_ceilings
from lwkv.errors import ConfigError
from lwkv.platforms import Platform

NUM_PARTS_OF_PREFIX = 8


@dataclass(frozen=True)
class Bench:
    """One run: a shape on a device, a cached prefix, suffixes to compute; sizes in tokens.

    `disk` is a folder of the disk that is measured; None for where the system keeps temporary files. `remote`
    is the URL of the remote tier that is measured; None for none. `page_codec` is the setting of that name.

    Raises:
        ConfigError: the prefix cannot be cut into eight requests of whole chunks; no suffix; no repeat.
    """

    platform: Platform
    device: torch.device
    shape: Shape
    prefix: int
    suffixes: tuple[int, ...]
    repeats: int
    disk: Path | None = None
    page_codec: str = "auto"
    remote: str | None = field(default=None, repr=False)  # it may have a password in it

    def __post_init__(self) -> None:
        unit = NUM_PARTS_OF_PREFIX * self.shape.chunk_size
        if self.prefix < 1 or self.prefix % unit:
            raise ConfigError(f"the prefix is {self.prefix} tokens; give a multiple of {unit}")
        if not self.suffixes or min(self.suffixes) < 1:
            raise ConfigError(f"the suffixes are {list(self.suffixes)}; give one or more, of 1 token or more")
        if self.repeats < 1:
            raise ConfigError(f"the repeats are {self.repeats}; give 1 or more")

    @cached_property
    def ceilings(self) -> Ceilings:
        """Plain copies of as many bytes as the prefix has, measured once a run."""
        return measure_ceilings(
            self.platform, self.device, self.shape.kv_bytes(self.prefix), max(self.repeats, 5)
        )

    def new_engine(
        self, num_tokens: int | None = None, shape: Shape | None = None, **settings: Any
    ) -> MeasuredEngine:
        """A `MeasuredEngine` of the run's shape for the prefix, unless others are given."""
        settings["config"] = {"page_codec": self.page_codec} | dict(settings.get("config") or {})
        return MeasuredEngine(
            self.platform, self.device, shape or self.shape, num_tokens or self.prefix, **settings
        )

    def alternate_ms(self, works: Sequence[Work], before: Work | None = None) -> list[list[float]]:
        """As `timing.alternate_ms`, on the run's device."""
        return alternate_ms(self.platform, self.device, works, self.repeats, before)

    def median_ms(self, work: Work, before: Work | None = None) -> float:
        """As `timing.median_ms`, on the run's device."""
        return statistics.median(self.alternate_ms([work], before)[0])
