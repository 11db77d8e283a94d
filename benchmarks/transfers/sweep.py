"""Loads and saves over chunk sizes, layouts and requests a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import NUM_PARTS_OF_PREFIX, Bench
from lwkv.benchmarks.measuring.measured_engine import LAYOUTS, MLA_LAYOUT, MeasuredEngine
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
    with bench.new_engine(shape=shape, layout=layout, prompts=2) as measured:
        measured.fill()
        kept = measured.new_prompt()
        load_ms = bench.median_ms(lambda: measured.load(kept), before=lambda: measured.keep(kept))
        exact = measured.places_agree()
        save_ms = bench.median_ms(lambda: _save(measured))
    load, save = gb_per_s(num_bytes, load_ms), gb_per_s(num_bytes, save_ms)
    ratios = load / bench.ceilings.load_gb_s, save / bench.ceilings.save_gb_s
    return Variant(name, num_bytes, load, ratios[0], save, ratios[1], exact)


def _save(measured: MeasuredEngine) -> None:
    measured.engine.store(measured.new_prompt(), slot_mapping=measured.source)
    measured.flush()


def _measure_batches(bench: Bench) -> Iterator[Variant]:
    size = bench.prefix // NUM_PARTS_OF_PREFIX
    with bench.new_engine(prompts=1) as measured:
        measured.fill()
        requests = [
            Request(measured.new_prompt()[:size], measured.target[first : first + size])
            for first in range(0, bench.prefix, size)
        ]
        sources = [measured.source[first : first + size] for first in range(0, bench.prefix, size)]
        for request, source in zip(requests, sources, strict=True):
            measured.engine.store(request.tokens, slot_mapping=source)
        measured.flush()
        for count in (1, 2, 4, 8):
            yield _measure_batch(bench, measured, requests[:count])


def _measure_batch(bench: Bench, measured: MeasuredEngine, requests: list[Request]) -> Variant:
    num_tokens = sum(len(request.tokens) for request in requests)
    num_bytes = measured.shape.kv_bytes(num_tokens)

    def load() -> None:
        for _ in measured.engine.retrieve_batch(requests):
            pass

    measured.clear_target()
    speed = gb_per_s(num_bytes, bench.median_ms(load))
    ratio, exact = speed / bench.ceilings.load_gb_s, measured.places_agree(num_tokens)
    name = f"batch of {len(requests)} x {len(requests[0].tokens)} tokens"
    return Variant(name, num_bytes, speed, ratio, None, None, exact)


def _told(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
