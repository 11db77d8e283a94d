"""Loads and saves alone, and both at once, against plain page-locked copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lwkv.benchmarks.bed import Bed, Slots
from lwkv.benchmarks.timing import gb_per_s, median_ms
from lwkv.platforms import Platform

NEW_PROMPTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one plain page-locked copy reaches, in GB/s; `both` is each way with both under way."""

    load: float
    save: float
    both: float


def measure_ceilings(platform: Platform, device: torch.device, num_bytes: int, repeats: int) -> Ceilings:
    """Copy `num_bytes` page-locked bytes each way, alone and together."""
    there, back = platform.alloc_pinned(num_bytes), platform.alloc_pinned(num_bytes)
    to = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    source = torch.empty_like(to)
    down, up = platform.new_stream(device), platform.new_stream(device)

    def load() -> None:
        platform.copy_async(to, there, down)

    def save() -> None:
        platform.copy_async(back, source, up)

    def both() -> None:
        load()
        save()

    times = [median_ms(platform, device, work, repeats) for work in (load, save, both)]
    return Ceilings(*(gb_per_s(num_bytes, ms) for ms in times))


@dataclass(frozen=True, slots=True)
class Moves:
    """GB/s of the engine end to end; `exact` says whether the bytes loaded equal those stored."""

    load: float
    save: float
    both: float
    exact: bool


def measure_moves(bed: Bed, repeats: int) -> Moves:
    """Retrieve and store all layers of one prompt, alone and at once (each way's GB/s)."""
    engine, device = bed.engine, bed.device
    measure = partial(median_ms, bed.platform, device, repeats=repeats)
    num_bytes = bed.shape.kv_bytes(bed.num_tokens)
    # New token ids each time: what is stored under a key stays as it was.
    numbers = itertools.count(NEW_PROMPTS)
    bed.fill()
    kept = bed.prompt(next(numbers))
    bed.store(kept)

    def load() -> None:
        engine.retrieve(kept, slot_mapping=bed.target)

    def save() -> None:
        engine.store(bed.prompt(next(numbers)), slot_mapping=bed.source)
        engine.flush()

    def both() -> None:
        for _ in _alternate(bed, kept, bed.prompt(next(numbers))):
            pass
        engine.flush()

    load_ms = measure(work=load)
    exact = bed.places_agree()
    return Moves(
        load=gb_per_s(num_bytes, load_ms),
        save=gb_per_s(num_bytes, measure(work=save)),
        both=gb_per_s(num_bytes, measure(work=both)),
        exact=exact,
    )


def _alternate(bed: Bed, kept: Slots, new: Slots) -> Iterator[None]:
    """Load one prompt and store another, a layer of each in turn."""
    loading = bed.engine.retrieve_layer(kept, slot_mapping=bed.target, sync=False)
    storing = bed.engine.store_layer(new, slot_mapping=bed.source)
    next(loading)
    for _ in range(bed.shape.num_layers + 1):
        next(loading)
        yield next(storing)
