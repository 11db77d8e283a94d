from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from lwkv.benchmarks.bench.findings import Absent
from lwkv.benchmarks.bench.parts import PARTS, PEERS, choose_parts
from lwkv.benchmarks.bench.result import Result
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import LAYOUTS, MeasuredEngine
from lwkv.benchmarks.prefills.overlap import measure_overlaps
from lwkv.benchmarks.prefills.recorded import record_prefill
from lwkv.benchmarks.throttled.part import LOADS_PER_COMPUTE, measure_throttled
from lwkv.benchmarks.transfers import profile
from lwkv.benchmarks.transfers.moves import measure_moves
from lwkv.benchmarks.transfers.profile import measure_profile
from lwkv.benchmarks.transfers.sweep import measure_sweep
from lwkv.errors import ConfigError
from lwkv.kernels import choose_kernels
from lwkv.platforms import Platform


def numbers(found: Any) -> Iterator[float]:
    if isinstance(found, dict):
        for value in found.values():
            yield from numbers(value)
    elif isinstance(found, list):
        for value in found:
            yield from numbers(value)
    elif isinstance(found, int | float):
        yield float(found)


@pytest.fixture(params=["keys and values", "one row"])
def either(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    is_mla = request.param == "one row"
    return replace(bench, shape=replace(bench.shape, use_mla=True, num_kv_heads=1)) if is_mla else bench


@pytest.mark.parametrize("name", [name for name in PARTS if name != PEERS])
def test_every_part_finds_finite_numbers_and_no_fault(name: str, either: Bench) -> None:
    found = PARTS[name].measure(either)
    figures = list(numbers(asdict(found)))
    assert figures or isinstance(found, Absent)
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
    assert list(found.faults()) == []


@pytest.mark.parametrize("name", [name for name in PARTS if name != PEERS])
def test_every_part_survives_json_and_is_reported_in_words(name: str, bench: Bench) -> None:
    result = Result.begin(bench, "lwkv bench")
    result.parts[name] = PARTS[name].measure(bench)
    document = result.to_json()
    assert json.loads(json.dumps(document)) == document
    for absolute in (True, False):
        assert all(line.strip() for line in result.parts[name].lines(absolute))
    assert PARTS[name].title in "\n".join(result.lines())


@pytest.mark.parametrize("name", ["ceilings", "moves", "kernels", "sweep"])
def test_no_speed_is_reported_where_the_host_is_the_device(name: str, bench: Bench) -> None:
    found = PARTS[name].measure(bench)
    assert "GB/s" in "\n".join(found.lines(absolute=True))
    assert "GB/s" not in "\n".join(found.lines(absolute=False))


def test_moves_are_checked_and_compared_with_the_ceiling_of_the_run(bench: Bench) -> None:
    moves = measure_moves(bench).moves
    assert [move.name for move in moves] == ["load", "save", "both at once, each"]
    ceilings = bench.ceilings
    assert [move.ceiling_gb_s for move in moves] == [
        ceilings.load_gb_s,
        ceilings.save_gb_s,
        ceilings.both_gb_s,
    ]
    assert all(move.exact and move.ratio == move.gb_s / move.ceiling_gb_s for move in moves)


def test_a_wrong_byte_is_found_and_is_a_fault(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = type(choose_kernels(bench.platform))

    def move_all_but_the_first(self: Any, scatter: bool, staged: Any, *rest: Any) -> None:
        if not scatter or staged.layers[0] is not first[0]:
            move_rightly(self, scatter, staged, *rest)

    def prepare(self: Any, layers: Any) -> None:
        first[:] = layers[:1]
        introduce_rightly(self, layers)

    first: list[Any] = []
    move_rightly, introduce_rightly = kernels.move_layers, kernels.prepare
    monkeypatch.setattr(kernels, "move_layers", move_all_but_the_first)
    monkeypatch.setattr(kernels, "prepare", prepare)
    for measure in (measure_moves, measure_sweep, measure_throttled):
        found = measure(bench)
        assert list(found.faults())
        assert '"exact": false' in json.dumps(asdict(found))


def test_the_pipeline_has_a_model_on_a_stream_and_one_on_the_host(bench: Bench) -> None:
    runs = measure_throttled(bench).runs
    assert [(run.model, run.wanted) for run in runs] == [
        (model, load) for model in ("stream", "host") for load in LOADS_PER_COMPUTE
    ]


def test_the_pipeline_has_no_model_on_a_stream_where_that_cannot_be_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = replace(bench.platform.features, event_timing=False)
    monkeypatch.setattr(bench.platform, "features", features)
    found = measure_throttled(bench)
    assert {run.model for run in found.runs} == {"host"}
    assert "no timing events" in "\n".join(found.lines(absolute=True))


def test_the_overlap_has_every_suffix_over_the_prefix_and_some_over_others(bench: Bench) -> None:
    found = measure_overlaps(bench).overlaps
    assert [(item.prefix, item.suffix) for item in found] == [(64, 3), (64, 5), (16, 5), (256, 5)]
    assert all(item.ratio == item.layerwise_ms / max(item.compute_ms, item.load_ms) for item in found)


def test_the_sweep_has_chunk_sizes_layouts_and_batches(bench: Bench) -> None:
    names = [item.name for item in measure_sweep(bench).variants]
    assert names == [
        *(f"chunks of {size} tokens" for size in (4, 8, 16)),
        *(f"layout {name}" for name in LAYOUTS),
        "layout vllm_mla (test)",
        *(f"batch of {count} x 8 tokens" for count in (1, 2, 4, 8)),
    ]


def test_the_recorded_prefill_loads_computes_and_saves_every_layer(bench: Bench) -> None:
    recorded = record_prefill(bench)
    assert sorted((span.lane, span.layer) for span in recorded.timeline()) == sorted(
        (lane, layer) for lane in ("load", "compute", "save") for layer in range(3)
    )


def test_a_prompt_that_had_to_go_is_stored_again_before_it_is_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    load = MeasuredEngine.load

    def checked(measured: MeasuredEngine, tokens: Any) -> None:
        seen.append(measured.engine.lookup(tokens))
        load(measured, tokens)

    monkeypatch.setattr(MeasuredEngine, "load", checked)
    measure_moves(replace(bench, repeats=5))
    assert set(seen) == {bench.prefix}


def test_the_parts_are_those_that_mean_something_or_those_asked_for(platform: Platform) -> None:
    usual = choose_parts(platform, (), peers=False)
    assert "interference" not in usual or platform.device_type != "cpu"
    assert {"moves", "overlap", "pipeline"} <= set(usual) <= set(PARTS) - {PEERS}
    assert choose_parts(platform, ("sweep", "moves"), peers=True) == ["moves", "sweep", PEERS]


def test_an_unknown_part_is_reported_with_those_there_are(platform: Platform) -> None:
    with pytest.raises(ConfigError, match=r"no part 'speed'; there are ceilings, moves, "):
        choose_parts(platform, ("moves", "speed"), peers=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prefix": 65}, "the prefix is 65 tokens; give a multiple of 64"),
        ({"prefix": 0}, "the prefix is 0 tokens"),
        ({"suffixes": ()}, r"the suffixes are \[\]"),
        ({"suffixes": (4, 0)}, r"the suffixes are \[4, 0\]"),
        ({"repeats": 0}, "the repeats are 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(bench: Bench, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(bench, **change)


def test_the_profile_shows_what_the_host_does_before_the_first_page(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of them: which are the longest depends on what else the machine does.
    monkeypatch.setattr(profile, "NUM_FUNCTIONS", 1000)
    load, save = measure_profile(bench).profiles
    assert (load.name, save.name) == ("load", "save")
    for found, step in ((load, "pipeline/retrieval: open"), (save, "pipeline/store: _open")):
        shares = {function.name: function.share for function in found.functions}
        assert 0 < shares[step] <= max(shares.values()) == 1
