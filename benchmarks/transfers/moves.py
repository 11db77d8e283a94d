"""Loads and saves alone, and both at once, against plain page-locked copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
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
    moves = []
    with bench.new_engine() as measured:
        for name, measure, ceiling in (
            ("load", _measure_load, ceilings.load_gb_s),
            ("save", _measure_save, ceilings.save_gb_s),
            ("both at once, each", _measure_both, ceilings.both_gb_s),
        ):
            ms, exact = measure(bench, measured)
            speed = gb_per_s(num_bytes, ms)
            moves.append(Move(name, speed, ceiling, speed / ceiling, exact))
    return Moves(bench.prefix, num_bytes, moves)


def _measure_load(bench: Bench, measured: MeasuredEngine) -> tuple[float, bool]:
    measured.fill()
    kept = measured.new_prompt()
    ms = bench.median_ms(lambda: measured.load(kept), before=lambda: measured.keep(kept))
    return ms, measured.places_agree()


def _measure_save(bench: Bench, measured: MeasuredEngine) -> tuple[float, bool]:
    measured.fill()
    # New token ids each time: what is stored under a key stays as it was.
    new = [measured.new_prompt()]

    def prepare() -> None:
        new[0] = measured.new_prompt()

    def save() -> None:
        measured.engine.store(new[0], slot_mapping=measured.source)
        measured.flush()

    ms = bench.median_ms(save, prepare)
    return ms, _arrived(measured, new[0])


def _measure_both(bench: Bench, measured: MeasuredEngine) -> tuple[float, bool]:
    measured.fill()
    kept, new = measured.new_prompt(), [measured.new_prompt()]

    def prepare() -> None:
        new[0] = measured.new_prompt()
        measured.keep(kept)

    def both() -> None:
        for _ in alternate(measured, kept, new[0]):
            pass
        measured.flush()

    ms = bench.median_ms(both, prepare)
    return ms, measured.places_agree() and _arrived(measured, new[0])


def alternate(measured: MeasuredEngine, kept: Slots, new: Slots) -> Iterator[None]:
    """Load one prompt and store another, a layer of each in turn."""
    loading = measured.engine.retrieve_layer(kept, slot_mapping=measured.target, sync=False)
    storing = measured.engine.store_layer(new, slot_mapping=measured.source)
    next(loading)
    for _ in range(measured.shape.num_layers + 1):
        next(loading)
        yield next(storing)


def _arrived(measured: MeasuredEngine, stored: Slots) -> bool:
    """Whether what was stored from the source slots comes back as it is."""
    if measured.engine.lookup(stored) == 0:
        return False
    measured.clear_target()
    measured.load(stored)
    return measured.places_agree()


def _table(moves: list[Move], absolute: bool) -> Iterator[str]:
    head = ["", "GB/s", "plain copy", "ratio", "bytes"] if absolute else ["", "ratio", "bytes"]
    rows = []
    for move in moves:
        speeds = [f"{move.gb_s:.1f}", f"{move.ceiling_gb_s:.1f}"] if absolute else []
        rows.append([move.name, *speeds, f"{move.ratio:.3f}", "exact" if move.exact else "WRONG"])
    yield from table(head, rows)
