"""A model with several kinds of caches: pages of each, loads and saves, and what fits into host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lwkv.benchmarks.bench.findings import Absent, Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.hybrid_engine import MeasuredHybrid
from lwkv.benchmarks.measuring.timing import gb_per_s
from lwkv.benchmarks.transfers.ceilings import measure_ceilings

HOST_GIB = 20
"""Of which it is worked out how many tokens fit."""


@dataclass(frozen=True)
class KindPages:
    """What is kept of one prompt: pages in all layers, and bytes."""

    name: str
    layers: int
    chunks: int
    pages: int
    num_bytes: int


@dataclass(frozen=True)
class Kinds(Findings):
    """One prompt of `tokens` tokens, with its windows kept at its end.

    `fit` and `fit_without` are tokens of such prompts that fit 20 GiB of host memory, with kinds and where
    all layers keep all tokens; `pages_in_use` is what the prompt took of them.
    """

    tokens: int
    page_bytes: int
    kinds: list[KindPages]
    pages_in_use: int
    loaded_bytes: int
    load_gb_s: float
    load_ceiling_gb_s: float
    save_gb_s: float
    save_ceiling_gb_s: float
    exact: bool
    fit: int
    fit_without: int

    def lines(self, absolute: bool) -> Iterator[str]:
        loaded = f"{self.loaded_bytes / 1e9:.3g} GB"
        yield f"{self.tokens} tokens in pages of {self.page_bytes} bytes; {loaded} are loaded"
        rows = [
            [kind.name, f"{kind.layers}", f"{kind.chunks}", f"{kind.pages}", f"{kind.num_bytes / 2**20:.1f}"]
            for kind in self.kinds
        ]
        yield from table(["", "layers", "chunks", "pages", "MiB"], rows)
        ratios = [
            ("load", self.load_gb_s, self.load_ceiling_gb_s),
            ("save", self.save_gb_s, self.save_ceiling_gb_s),
        ]
        for name, speed, ceiling in ratios:
            shown = f"{speed:.1f} GB/s, a plain copy of as much {ceiling:.1f}: " if absolute else ""
            yield f"{name}: {shown}ratio {speed / ceiling:.3f}, bytes {'exact' if self.exact else 'WRONG'}"
        yield (
            f"{HOST_GIB} GiB hold {self.fit} tokens of such prompts, {self.fit_without} where all layers "
            f"keep all tokens: {self.fit / self.fit_without:.2f} times as many"
        )

    def faults(self) -> Iterator[str]:
        if not self.exact:
            yield "the bytes that were loaded differ from those that were stored"
        if self.pages_in_use != sum(kind.pages for kind in self.kinds):
            yield f"the prompt took {self.pages_in_use} pages, not those of its kinds"


def measure_kinds(bench: Bench) -> Findings:
    """Store and load one prompt of all kinds of the shape."""
    if len(bench.shape.kinds()) == 1:
        return Absent("this shape has one kind of caches")
    with MeasuredHybrid(bench.platform, bench.device, bench.shape, bench.prefix) as measured:
        measured.fill()
        prompts = [measured.new_prompt()]
        measured.store(prompts[0])
        kinds, in_use = [*_pages(measured)], measured.engine.stats()["pages_in_use"]
        measured.clear_target()
        exact = measured.load(prompts[0]) and measured.places_agree()
        load_ms = bench.median_ms(lambda: measured.load(prompts[0]))
        save_ms = bench.median_ms(
            lambda: measured.store(prompts[-1]), before=lambda: prompts.append(measured.new_prompt())
        )
        loaded, stored = measured.needed_bytes(), sum(kind.num_bytes for kind in kinds)
        ceilings = measure_ceilings(bench.platform, bench.device, stored, max(bench.repeats, 5))
        tokens, host_bytes = measured.num_tokens, HOST_GIB << 30
        return Kinds(
            tokens=tokens,
            page_bytes=measured.engine.page_stride,
            kinds=kinds,
            pages_in_use=in_use,
            loaded_bytes=loaded,
            load_gb_s=gb_per_s(loaded, load_ms),
            load_ceiling_gb_s=ceilings.load_gb_s,
            save_gb_s=gb_per_s(stored, save_ms),
            save_ceiling_gb_s=ceilings.save_gb_s,
            exact=exact and measured.places_agree(),
            fit=host_bytes * tokens // stored,
            fit_without=host_bytes * tokens // bench.shape.kv_bytes(tokens),
        )


def _pages(measured: MeasuredHybrid) -> Iterator[KindPages]:
    """What is kept of each kind of a prompt: whole chunks, of windows those that its end needs."""
    for number, kind in enumerate(measured.kinds):
        size = measured.shape.chunk_size
        chunks = (measured.num_tokens - kind.first_needed(measured.num_tokens) // size * size) // size
        pages = chunks * measured.engine.chunk_pages[number]
        yield KindPages(kind.name, kind.num_layers, chunks, pages, pages * measured.engine.page_stride)
