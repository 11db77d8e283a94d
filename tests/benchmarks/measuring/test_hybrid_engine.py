from __future__ import annotations

from dataclasses import replace

import pytest

from lwkv.benchmarks.bench.findings import Absent
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.hybrid_engine import MeasuredHybrid
from lwkv.benchmarks.measuring.shapes import GEMMA_3_12B, GPT_OSS_20B
from lwkv.benchmarks.transfers.kinds import Kinds, measure_kinds


@pytest.fixture
def windows(bench: Bench) -> Bench:
    """Chunks of 8 tokens in blocks of 4; four layers of six look back 11 tokens."""
    return replace(bench, shape=replace(bench.shape, num_layers=6, window=11, full_every=3))


def test_the_shapes_have_the_kinds_of_their_models() -> None:
    described = {
        shape.name: [(kind.name, kind.num_layers, kind.block_bytes) for kind in shape.kinds()]
        for shape in (GEMMA_3_12B, GPT_OSS_20B)
    }
    assert described == {
        "gemma-3-12b": [("window-1024", 40, 128 << 10), ("full", 8, 128 << 10)],
        "gpt-oss-20b": [("window-128", 12, 32 << 10), ("full", 12, 32 << 10)],
    }


def test_a_prompt_comes_back_with_its_windows_and_takes_the_pages_of_its_kinds(windows: Bench) -> None:
    found = measure_kinds(windows)
    assert isinstance(found, Kinds)
    chunks = windows.prefix // 8
    assert [(kind.name, kind.layers, kind.chunks) for kind in found.kinds] == [
        ("window-11", 4, 2),
        ("full", 2, chunks),
    ]
    assert found.exact
    assert found.pages_in_use == sum(kind.pages for kind in found.kinds)
    assert list(found.faults()) == []
    assert found.loaded_bytes == windows.shape.token_bytes * (4 * 12 + 2 * windows.prefix)
    assert "WRONG" not in "\n".join(found.lines(absolute=True))
    assert "GB/s" not in "\n".join(found.lines(absolute=False))


def test_a_byte_that_does_not_come_back_is_a_fault(windows: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(self: MeasuredHybrid, hashes: list[bytes]) -> bool:
        done = load(self, hashes)
        self.platform.synchronize_device(self.device)
        self._memory[0][self.target[-1][-1]] += 1
        return done

    load = MeasuredHybrid.load
    monkeypatch.setattr(MeasuredHybrid, "load", spoil)
    assert any("differ" in fault for fault in measure_kinds(windows).faults())


def test_a_shape_of_one_kind_has_nothing_to_measure(bench: Bench) -> None:
    assert isinstance(measure_kinds(bench), Absent)
