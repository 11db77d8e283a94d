"""Loads and saves over chunk sizes, layouts and requests a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import NUM_PARTS_OF_PREFIX, Bench
from lwkv.benchmarks.measuring.measured_engine import LAYOUTS, MLA_LAYOUT, Bed
from lwkv.benchmarks.measuring.shapes import Shape, mla_of
from lwkv.benchmarks.measuring.timing import gb_per_s
from lwkv.engine import Request


@dataclass(frozen=True)
class Variant:
    """One way to move `num_bytes`: GB/s, and ratios to a plain copy; saves of batches are not measured."""

    name: str
    num_bytes: int
    load_gb_s: float
    load_ratio: float
    save_gb_s: float | None
    save_ratio: float | None
    exact: bool


@dataclass(frozen=True)
class Sweep(Findings):
    """The same moves in many variants, each over the plain copies of the run."""

    variants: list[Variant]

    def lines(self, absolute: bool) -> Iterator[str]:
        head = ["", "load, ratio", "save, ratio", "bytes"]
        rows = []
        for item in self.variants:
            ratios = [_told(item.load_ratio, 3), _told(item.save_ratio, 3)]
            speeds = [_told(item.load_gb_s, 1), _told(item.save_gb_s, 1)] if absolute else []
            rows.append([item.name, *ratios, "exact" if item.exact else "WRONG", *speeds])
        yield from table(head + (["load, GB/s", "save, GB/s"] if absolute else []), rows)

    def faults(self) -> Iterator[str]:
        for item in self.variants:
            if not item.exact:
                yield f"{item.name}: the bytes that were loaded differ from those that were stored"


def measure_sweep(bench: Bench) -> Sweep:
    """Chunks of half, one and two times the shape's size; every layout, and MLA; 1 to 8 requests a batch."""
    size = bench.shape.chunk_size
    variants = [
        _measure_variant(bench, f"chunks of {chunk} tokens", replace(bench.shape, chunk_size=chunk))
        for chunk in (size // 2, size, size * 2)
    ]
    if not bench.shape.use_mla:
        variants += [_measure_variant(bench, f"layout {name}", bench.shape, name) for name in LAYOUTS]
    mla = mla_of(bench.shape)
    variants.append(_measure_variant(bench, f"layout {MLA_LAYOUT} ({mla.name})", mla))
    return Sweep([*variants, *_measure_batches(bench)])


def _measure_variant(bench: Bench, name: str, shape: Shape, layout: str = LAYOUTS[-1]) -> Variant:
    num_bytes = shape.kv_bytes(bench.prefix)
    with bench.bed(shape=shape, layout=layout, prompts=2) as bed:
        bed.fill()
        kept = bed.new_prompt()
        load_ms = bench.median_ms(lambda: bed.load(kept), before=lambda: bed.keep(kept))
        exact = bed.places_agree()
        save_ms = bench.median_ms(lambda: _save(bed))
    load, save = gb_per_s(num_bytes, load_ms), gb_per_s(num_bytes, save_ms)
    ratios = load / bench.ceilings.load_gb_s, save / bench.ceilings.save_gb_s
    return Variant(name, num_bytes, load, ratios[0], save, ratios[1], exact)


def _save(bed: Bed) -> None:
    bed.engine.store(bed.new_prompt(), slot_mapping=bed.source)
    bed.flush()


def _measure_batches(bench: Bench) -> Iterator[Variant]:
    size = bench.prefix // NUM_PARTS_OF_PREFIX
    with bench.bed(prompts=1) as bed:
        bed.fill()
        requests = [
            Request(bed.new_prompt()[:size], bed.target[first : first + size])
            for first in range(0, bench.prefix, size)
        ]
        sources = [bed.source[first : first + size] for first in range(0, bench.prefix, size)]
        for request, source in zip(requests, sources, strict=True):
            bed.engine.store(request.tokens, slot_mapping=source)
        bed.flush()
        for count in (1, 2, 4, 8):
            yield _measure_batch(bench, bed, requests[:count])


def _measure_batch(bench: Bench, bed: Bed, requests: list[Request]) -> Variant:
    num_tokens = sum(len(request.tokens) for request in requests)
    num_bytes = bed.shape.kv_bytes(num_tokens)

    def load() -> None:
        for _ in bed.engine.retrieve_batch(requests):
            pass

    bed.clear_target()
    speed = gb_per_s(num_bytes, bench.median_ms(load))
    ratio, exact = speed / bench.ceilings.load_gb_s, bed.places_agree(num_tokens)
    name = f"batch of {len(requests)} x {len(requests[0].tokens)} tokens"
    return Variant(name, num_bytes, speed, ratio, None, None, exact)


def _told(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
