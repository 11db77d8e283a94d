"""The kernels alone: a layer's pages between staging and the paged cache, on the device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import LAYOUTS, MLA_LAYOUT, MeasuredEngine
from lwkv.benchmarks.measuring.shapes import mla_of
from lwkv.benchmarks.measuring.timing import Work, gb_per_s, median_ratio
from lwkv.kernels import Rows


@dataclass(frozen=True)
class KernelSpeed:
    """GB/s of a plain copy on the device, of scatter and of gather; ratios of the last two to the first."""

    layout: str
    row_bytes: int
    copy_gb_s: float
    scatter_gb_s: float
    gather_gb_s: float
    scatter_ratio: float
    gather_ratio: float


@dataclass(frozen=True)
class KernelSpeeds(Findings):
    """All layers of `tokens` tokens one after another, in every layout; a byte moved counts once."""

    tokens: int
    kernels: str
    speeds: list[KernelSpeed]

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"{self.kernels} kernels, {self.tokens} tokens, over a plain copy of as much on the device"
        rows = []
        for item in self.speeds:
            speeds = [f"{speed:.0f}" for speed in (item.scatter_gb_s, item.gather_gb_s)] if absolute else []
            ratios = [f"{ratio:.2f}" for ratio in (item.scatter_ratio, item.gather_ratio)]
            rows.append([f"{item.layout}, rows of {item.row_bytes} B", *ratios, *speeds])
        head = ["", "scatter, ratio", "gather, ratio"]
        yield from table(head + (["scatter, GB/s", "gather, GB/s"] if absolute else []), rows)


def measure_kernels(bench: Bench) -> KernelSpeeds:
    """Scatter and gather whole pages in random blocks, and copy as many bytes from staging to staging."""
    mla = mla_of(bench.shape)
    ways = [] if bench.shape.use_mla else [(bench.shape, layout) for layout in LAYOUTS]
    speeds = []
    for shape, layout in [*ways, (mla, MLA_LAYOUT)]:
        with bench.new_engine(shape=shape, layout=layout, prompts=1) as measured:
            speeds.append(_measure_speed(bench, measured, layout))
            name = measured.engine.connector.kernels.name
    return KernelSpeeds(bench.prefix, name, speeds)


def _measure_speed(bench: Bench, measured: MeasuredEngine, layout: str) -> KernelSpeed:
    num_bytes = measured.shape.kv_bytes(measured.num_tokens)
    copied, scattered, gathered = bench.alternate_ms(_works(measured))
    copy, scatter, gather = (
        gb_per_s(num_bytes, statistics.median(times)) for times in (copied, scattered, gathered)
    )
    return KernelSpeed(
        layout=layout,
        row_bytes=measured.engine.connector.layers[0].row_bytes,
        copy_gb_s=copy,
        scatter_gb_s=scatter,
        gather_gb_s=gather,
        scatter_ratio=median_ratio(copied, scattered),
        gather_ratio=median_ratio(copied, gathered),
    )


def _works(measured: MeasuredEngine) -> list[Work]:
    layers, kernels = measured.engine.connector.layers, measured.engine.connector.kernels
    staging = torch.zeros(
        measured.num_tokens * measured.shape.token_bytes, dtype=torch.uint8, device=measured.device
    )
    rows = _rows(measured)
    # As much memory as the layers have: a cache that holds one would flatter the copy.
    others = torch.zeros(len(layers), len(staging), dtype=torch.uint8, device=measured.device)

    def copy() -> None:
        for other in others:
            other.copy_(staging)

    def scatter() -> None:
        for layer in layers:
            kernels.scatter(layer, staging, rows)

    def gather() -> None:
        for layer in layers:
            kernels.gather(layer, staging, rows)

    return [copy, scatter, gather]


def _rows(measured: MeasuredEngine) -> Rows:
    """The target slots' rows in staging: page after page, all K of a page before its V."""
    size, parts = measured.shape.chunk_size, 1 if measured.shape.use_mla else 2
    tokens = torch.arange(measured.num_tokens)
    k_rows = tokens // size * parts * size + tokens % size
    tables = (torch.from_numpy(measured.target), k_rows, k_rows + (parts - 1) * size)
    return Rows(*(table.to(measured.device) for table in tables))
