from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lwkv.benchmarks.bench.bars import draw_bars
from lwkv.benchmarks.bench.findings import Absent
from lwkv.benchmarks.bench.result import Result
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.peers.lmcache import LMCachePeer, import_lmcache
from lwkv.benchmarks.peers.part import Peers, measure_library, measure_peers
from lwkv.benchmarks.prefills.overlap import measure_overlaps
from lwkv.benchmarks.transfers.moves import measure_moves

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LMCACHE_TRACK_USAGE", "LMCACHE_LOG_LEVEL"):
        monkeypatch.setenv(name, "as before")
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "lmcache" and name not in before]:
        del sys.modules[name]


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STAND_INS))


def test_an_absent_peer_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    found = measure_peers(bench)
    assert isinstance(found, Absent)
    assert "LMCache is not measured, it cannot be imported: " in found.absent
    assert list(found.lines(absolute=True)) == [found.absent]


def test_a_missing_package_of_the_peers_own_is_reported(
    bench: Bench, lmcache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmcache.v1.config", None)
    found = measure_peers(bench)
    assert isinstance(found, Absent)
    assert "lmcache.v1.config" in found.absent


def test_caches_that_it_is_not_measured_on_are_reported(bench: Bench, lmcache: None) -> None:
    found = measure_peers(replace(bench, shape=replace(bench.shape, use_mla=True, num_kv_heads=1)))
    assert isinstance(found, Absent)
    assert "only for caches with K and V" in found.absent


def test_a_fallback_is_never_called_lmcache_alone(lmcache: None) -> None:
    library = import_lmcache()
    assert not library.native
    assert library.label == "LMCache 9.9 on its torch fallback"


def test_compiled_operations_are_told_from_python_ones(
    lmcache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_lmcache()
    operations = sys.modules["lmcache.c_ops"]
    monkeypatch.setattr(operations, "single_layer_kv_transfer", len)
    assert not import_lmcache().native
    monkeypatch.setattr(operations, "multi_layer_kv_transfer", len)
    assert import_lmcache().native
    assert import_lmcache().label == "LMCache 9.9"
    monkeypatch.delattr(operations, "multi_layer_kv_transfer")
    assert not import_lmcache().native


def test_both_modes_are_measured_and_checked(bench: Bench, lmcache: None) -> None:
    found = measure_library(bench, import_lmcache())
    assert [(move.mode, move.name) for move in found.moves] == [
        ("layerwise", "load"),
        ("layerwise", "save"),
        ("bulk", "load"),
        ("bulk", "save"),
    ]
    assert all(move.exact for move in found.moves)
    assert [item.suffix for item in found.overlaps] == [3, 5]
    assert "its compiled operations did not load" in next(found.lines(absolute=True))


def test_a_peers_wrong_bytes_are_reported_and_are_no_fault_of_ours(
    bench: Bench, lmcache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = import_lmcache()
    engine = sys.modules["lmcache.v1.cache_engine"].Engine
    monkeypatch.setattr(engine, "_load", lambda *args, **arguments: None)
    found = measure_library(bench, library)
    assert not any(move.exact for move in found.moves)
    assert "WRONG" in "\n".join(found.lines(absolute=True))
    assert list(found.faults()) == []


def test_a_peer_that_keeps_nothing_is_reported(
    bench: Bench, lmcache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_lmcache()
    monkeypatch.setattr(sys.modules["lmcache.v1.cache_engine"].Engine, "_store", lambda *a, **k: None)
    with (
        bench.new_engine(layout="vllm_2bnhd", prompts=1) as measured,
        LMCachePeer(measured, True, 2) as peer,
        pytest.raises(RuntimeError, match="LMCache has 0 of 64 tokens"),
    ):
        peer.keep(measured.new_prompt())


def test_the_garbage_collector_is_as_before(bench: Bench, lmcache: None) -> None:
    library = import_lmcache()
    assert gc.isenabled()
    assert isinstance(measure_library(bench, library), Peers)
    assert gc.isenabled()


def test_the_peer_is_in_the_picture(bench: Bench, lmcache: None, tmp_path: Path) -> None:
    result = Result.begin(bench, "lwkv bench")
    result.parts = {
        "moves": measure_moves(bench),
        "overlap": measure_overlaps(bench),
        "peers": measure_library(bench, import_lmcache()),
    }
    assert draw_bars(result.to_json(), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_without_moves_and_overlap_there_is_no_picture(bench: Bench, tmp_path: Path) -> None:
    assert not draw_bars(Result.begin(bench, "lwkv bench").to_json(), tmp_path / "bars.png")
    assert list(tmp_path.iterdir()) == []
