from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine
from lwkv.benchmarks.trace.losses import link_ms, losses
from lwkv.benchmarks.trace.recorder import Recorder
from lwkv.benchmarks.transfers.moves import alternate


@pytest.fixture(params=["raw", "lossless"])
def bed(request: pytest.FixtureRequest, bench: Bench) -> Iterator[MeasuredEngine]:
    bench = replace(bench, shape=replace(bench.shape, dtype=torch.bfloat16, head_size=32))
    with bench.new_engine(prompts=3, config={"page_codec": request.param}) as bed:
        bed.fill()
        yield bed


def test_a_save_has_all_its_bytes_and_every_millisecond_has_a_cause(bed: MeasuredEngine) -> None:
    stored = bed.new_prompt()
    trace = Recorder(bed).record(lambda: bed.engine.store(stored, slot_mapping=bed.source))
    pages = bed.shape.num_layers * bed.num_tokens // bed.shape.chunk_size
    assert sum(copy.num_bytes for copy in trace.copies("save")) == pages * bed.engine.connector.page_bytes
    assert not trace.copies("load")
    whole = link_ms(trace, "save", 1.0) + sum(loss.ms for loss in losses(trace, "save", 1.0))
    assert whole == pytest.approx(trace.usable)
    assert {"check_stores", "chunk_keys", "begin_write", "commit"} <= {call.name for call in trace.calls}
    bed.load(stored)
    assert bed.places_agree()


def test_both_ways_at_once_have_all_their_copies_and_kernels(bed: MeasuredEngine) -> None:
    kept = bed.new_prompt()
    bed.keep(kept)
    trace = Recorder(bed).record(lambda: list(alternate(bed, kept, bed.new_prompt())))
    for way in ("load", "save"):
        copies = trace.copies(way)
        assert len({sum(copy.num_bytes for copy in trace.copies(each)) for each in ("load", "save")}) == 1
        assert all(copy.asked <= copy.queued and copy.start <= copy.end for copy in copies)
        assert trace.kernels(way)
    assert bed.places_agree()


def test_nothing_is_recorded_afterwards(bed: MeasuredEngine) -> None:
    recorder = Recorder(bed)
    first = recorder.record(lambda: bed.engine.store(bed.new_prompt(), slot_mapping=bed.source))
    bed.engine.store(bed.new_prompt(), slot_mapping=bed.source)
    bed.flush()
    assert len(first.works) == len(recorder._works)
