"""What the link itself reaches: plain page-locked copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.measuring.timing import gb_per_s, median_ms
from lwkv.platforms import Platform


@dataclass(frozen=True)
class Ceilings(Findings):
    """GB/s of one plain page-locked copy; `both_gb_s` is each way's with both under way."""

    num_bytes: int
    load_gb_s: float
    save_gb_s: float
    both_gb_s: float

    def lines(self, absolute: bool) -> Iterator[str]:
        if not absolute:
            both = self.both_gb_s / min(self.load_gb_s, self.save_gb_s)
            yield f"two copies at once reach {both:.2f} of one's speed each"
            return
        rows = [("load", self.load_gb_s), ("save", self.save_gb_s), ("both at once, each", self.both_gb_s)]
        yield from table(["", "GB/s"], [[name, f"{speed:.1f}"] for name, speed in rows])


def measure_ceilings(platform: Platform, device: torch.device, num_bytes: int, repeats: int) -> Ceilings:
    """Copy `num_bytes` page-locked bytes each way, alone and together."""
    there, back = platform.alloc_pinned(num_bytes), platform.alloc_pinned(num_bytes)
    to = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    source = torch.zeros_like(to)
    down, up = platform.new_stream(device), platform.new_stream(device)

    def load() -> None:
        platform.copy_async(to, there, down)

    def save() -> None:
        platform.copy_async(back, source, up)

    def both() -> None:
        load()
        save()

    times = [median_ms(platform, device, work, repeats) for work in (load, save, both)]
    return Ceilings(num_bytes, *(gb_per_s(num_bytes, ms) for ms in times))
