"""Loads and saves alone, and both at once, against plain page-locked copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import Bed, Slots
from lwkv.benchmarks.measuring.timing import gb_per_s


@dataclass(frozen=True)
class Move:
    """GB/s of the engine end to end, of plain copies of the same kind, and their ratio."""

    name: str
    gb_s: float
    ceiling_gb_s: float
    ratio: float
    exact: bool


@dataclass(frozen=True)
class Moves(Findings):
    """Retrieves and stores of one prompt of `tokens` tokens, all layers; bytes checked after each kind."""

    tokens: int
    num_bytes: int
    moves: list[Move]

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"{self.tokens} tokens, {self.num_bytes / 1e9:.3g} GB, over a plain copy of as much"
        yield from _table(self.moves, absolute)

    def faults(self) -> Iterator[str]:
        for move in self.moves:
            if not move.exact:
                yield f"{move.name}: the bytes that were loaded differ from those that were stored"


def measure_moves(bench: Bench) -> Moves:
    """Retrieve and store all layers of one prompt, alone and at once (each way's GB/s)."""
    num_bytes = bench.shape.kv_bytes(bench.prefix)
    ceilings = bench.ceilings
    measured = []
    with bench.bed() as bed:
        for name, measure, ceiling in (
            ("load", _measure_load, ceilings.load_gb_s),
            ("save", _measure_save, ceilings.save_gb_s),
            ("both at once, each", _measure_both, ceilings.both_gb_s),
        ):
            ms, exact = measure(bench, bed)
            speed = gb_per_s(num_bytes, ms)
            measured.append(Move(name, speed, ceiling, speed / ceiling, exact))
    return Moves(bench.prefix, num_bytes, measured)


def _measure_load(bench: Bench, bed: Bed) -> tuple[float, bool]:
    bed.fill()
    kept = bed.new_prompt()
    ms = bench.median_ms(lambda: bed.load(kept), before=lambda: bed.keep(kept))
    return ms, bed.places_agree()


def _measure_save(bench: Bench, bed: Bed) -> tuple[float, bool]:
    bed.fill()
    stored: list[Slots] = []

    def save() -> None:
        # New token ids each time: what is stored under a key stays as it was.
        stored.append(bed.new_prompt())
        bed.engine.store(stored[-1], slot_mapping=bed.source)
        bed.flush()

    ms = bench.median_ms(save)
    return ms, _arrived(bed, stored[-1])


def _measure_both(bench: Bench, bed: Bed) -> tuple[float, bool]:
    bed.fill()
    kept, stored = bed.new_prompt(), [bed.new_prompt()]

    def both() -> None:
        stored[0] = bed.new_prompt()
        for _ in _alternate(bed, kept, stored[0]):
            pass
        bed.flush()

    ms = bench.median_ms(both, before=lambda: bed.keep(kept))
    return ms, bed.places_agree() and _arrived(bed, stored[0])


def _alternate(bed: Bed, kept: Slots, new: Slots) -> Iterator[None]:
    """Load one prompt and store another, a layer of each in turn."""
    loading = bed.engine.retrieve_layer(kept, slot_mapping=bed.target, sync=False)
    storing = bed.engine.store_layer(new, slot_mapping=bed.source)
    next(loading)
    for _ in range(bed.shape.num_layers + 1):
        next(loading)
        yield next(storing)


def _arrived(bed: Bed, stored: Slots) -> bool:
    """Whether what was stored from the source slots comes back as it is."""
    if bed.engine.lookup(stored) == 0:
        return False
    bed.clear_target()
    bed.load(stored)
    return bed.places_agree()


def _table(moves: list[Move], absolute: bool) -> Iterator[str]:
    head = ["", "GB/s", "plain copy", "ratio", "bytes"] if absolute else ["", "ratio", "bytes"]
    rows = []
    for move in moves:
        speeds = [f"{move.gb_s:.1f}", f"{move.ceiling_gb_s:.1f}"] if absolute else []
        rows.append([move.name, *speeds, f"{move.ratio:.3f}", "exact" if move.exact else "WRONG"])
    yield from table(head, rows)
