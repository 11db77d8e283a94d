from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from lwkv.platforms.cpu import CPU
from lwkv.telemetry.timeline import Lane, LoadTimes, Span, Timeline, hidden_and_exposed
from lwkv.telemetry.timeline_picture import draw_timeline
from lwkv.telemetry.timeline_trace import write_trace

HOST = torch.device("cpu")


def load(layer: int, start: float, end: float) -> Span:
    return Span("load", layer, start, end)


def compute(layer: int, start: float, end: float) -> Span:
    return Span("compute", layer, start, end)


def test_without_spans_nothing_is_hidden_or_exposed() -> None:
    assert hidden_and_exposed([]) == LoadTimes(0, 0)


def test_only_the_first_load_is_exposed_when_compute_is_slower() -> None:
    spans = [load(0, 0, 2), load(1, 2, 4), compute(0, 2, 7), compute(1, 7, 12)]
    assert hidden_and_exposed(spans) == LoadTimes(2, 2)


def test_what_a_load_takes_longer_than_compute_is_exposed() -> None:
    spans = [load(0, 0, 4), load(1, 4, 8), compute(0, 4, 5), compute(1, 8, 9)]
    assert hidden_and_exposed(spans) == LoadTimes(1, 4 + 3)


def test_the_order_in_which_spans_are_given_does_not_matter() -> None:
    spans = [compute(1, 8, 9), load(1, 4, 8), compute(0, 4, 5), load(0, 0, 4)]
    assert hidden_and_exposed(spans) == hidden_and_exposed(spans[::-1]) == LoadTimes(1, 7)


def test_waiting_for_a_tier_between_two_layers_is_exposed_although_no_copy_runs() -> None:
    spans = [load(0, 0, 1), compute(0, 1, 2), load(1, 9, 10), compute(1, 10, 11)]
    assert hidden_and_exposed(spans) == LoadTimes(0, 1 + 8)


def test_an_idle_engine_between_two_steps_is_not_exposed_load_time() -> None:
    first = [load(0, 0, 1), compute(0, 1, 2)]
    second = [load(0, 50, 51), compute(0, 51, 52)]
    assert hidden_and_exposed(first + second) == LoadTimes(0, 2)


def test_compute_that_starts_late_for_another_reason_is_not_exposed_load_time() -> None:
    spans = [load(0, 0, 1), compute(0, 5, 6), load(1, 1, 2), compute(1, 8, 9)]
    assert hidden_and_exposed(spans) == LoadTimes(0, 1)


def test_several_loads_of_one_layer_are_waited_for_once() -> None:
    spans = [load(0, 0, 2), load(0, 1, 3), compute(0, 3, 4)]
    assert hidden_and_exposed(spans) == LoadTimes(0, 3)


def test_loads_that_nobody_computes_upon_expose_nothing() -> None:
    assert hidden_and_exposed([load(7, 0, 2), compute(0, 1, 4)]) == LoadTimes(1, 0)


TENTHS = st.integers(0, 99).map(lambda tenths: tenths / 10)


@given(st.lists(st.tuples(TENTHS, TENTHS), max_size=9))
@example([(0.1, 0.3), (0.7, 0.9)])
def test_what_is_hidden_is_never_less_than_nothing(gaps: list[tuple[float, float]]) -> None:
    spans, now = [], 0.0
    for number, (load_time, compute_time) in enumerate(gaps):
        spans += [load(number, now, now + load_time)]
        spans += [compute(number, now + load_time, now + load_time + compute_time)]
        now += load_time + compute_time
    hidden = hidden_and_exposed(spans).hidden_s
    assert 0 <= hidden < 1e-9
    assert math.copysign(1, hidden) == 1


def test_saves_count_as_neither() -> None:
    spans = [Span("save", 0, 0, 9), load(0, 0, 2), compute(0, 2, 7)]
    assert hidden_and_exposed(spans) == LoadTimes(0, 2)


def test_a_load_that_ends_a_rounding_error_after_its_compute_started_still_belongs_to_it() -> None:
    spans = [load(0, 0, 2 + 1e-7), compute(0, 2, 3), load(0, 4, 5), compute(0, 5, 6)]
    assert hidden_and_exposed(spans).exposed_s == pytest.approx(3)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9))
def test_in_a_pipeline_compute_and_exposed_loads_fill_all_the_time(times: list[tuple[int, int]]) -> None:
    spans, loaded, computed = [], 0, 0
    for layer, (load_time, compute_time) in enumerate(times):
        spans.append(load(layer, loaded, loaded + load_time))
        loaded += load_time
        start = max(loaded, computed)
        computed = start + compute_time
        spans.append(compute(layer, start, computed))
    hidden, exposed = hidden_and_exposed(spans)
    assert exposed == computed - sum(compute_time for _, compute_time in times)
    assert 0 <= hidden <= sum(load_time for load_time, _ in times)


def test_a_span_on_a_stream_has_the_time_of_the_stream_and_not_of_the_queueing() -> None:
    platform = CPU()
    stream = platform.new_stream(HOST, late=True)
    timeline = Timeline(platform, HOST)
    with timeline.span("load", 3, stream):
        platform.launch(stream, lambda: None)
    with timeline.span("compute", 2):
        pass
    assert [(span.lane, span.layer) for span in timeline.spans()] == [("compute", 2), ("load", 3)]


def test_spans_of_one_stream_follow_each_other() -> None:
    platform = CPU()
    stream = platform.new_stream(HOST)
    timeline = Timeline(platform, HOST)
    for layer in range(3):
        with timeline.span("save", layer, stream):
            platform.launch(stream, lambda: None)
    spans = timeline.spans()
    times = [time for span in spans for time in (span.start, span.end)]
    assert [span.layer for span in spans] == [0, 1, 2]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_span_can_end_on_another_stream() -> None:
    platform = CPU()
    first, second = platform.new_stream(HOST, late=True), platform.new_stream(HOST, late=True)
    timeline = Timeline(platform, HOST)
    span = timeline.span("load", 0, first)
    platform.wait_stream(second, first)
    span.end(second)
    after = timeline.span("load", 1, second)
    after.end()
    one, two = timeline.spans()
    assert one.start <= one.end <= two.start


def test_a_span_counts_only_once_it_has_ended_and_only_once() -> None:
    timeline = Timeline(CPU(), HOST)
    span = timeline.span("compute", 0)
    assert timeline.spans() == []
    span.end()
    span.end()
    assert len(timeline.spans()) == 1


def test_a_timeline_that_is_off_keeps_nothing_and_makes_nothing() -> None:
    timeline = Timeline(CPU(), HOST, on=False)
    span = timeline.span("compute", 0)
    span.end()
    assert span is timeline.span("load", 1)
    assert timeline.spans() == []


def test_a_full_timeline_keeps_what_it_has_until_it_restarts() -> None:
    timeline = Timeline(CPU(), HOST, max_spans=2)
    for layer in range(3):
        timeline.span("compute", layer).end()
    assert [span.layer for span in timeline.spans()] == [0, 1]
    timeline.restart()
    timeline.span("compute", 4).end()
    assert [span.layer for span in timeline.spans()] == [4]


def read_trace(path: Path) -> tuple[dict[int, str], list[dict[str, object]]]:
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return names, [event for event in events if event["ph"] == "X"]


def test_a_trace_names_lanes_and_layers_and_counts_in_microseconds(tmp_path: Path) -> None:
    write_trace([load(5, 0.5, 0.75), compute(5, 1, 3)], tmp_path / "trace.json")
    names, events = read_trace(tmp_path / "trace.json")
    seen = [(names[e["tid"]], e["name"], e["args"], e["ts"], e["dur"]) for e in events]
    assert seen == [
        ("load", "load 5", {"layer": 5}, 5e5, 2.5e5),
        ("compute", "compute 5", {"layer": 5}, 1e6, 2e6),
    ]


def test_overlapping_spans_of_a_lane_get_rows_of_their_own_in_a_trace(tmp_path: Path) -> None:
    write_trace([load(0, 0, 2), load(1, 1, 3), load(2, 2, 4)], tmp_path / "trace.json")
    names, events = read_trace(tmp_path / "trace.json")
    assert [names[event["tid"]] for event in events] == ["load", "load (2)", "load"]


@pytest.mark.parametrize("num_layers", [1, 32, 80])
def test_a_picture_is_a_png_that_grows_with_the_layers(tmp_path: Path, num_layers: int) -> None:
    lanes: tuple[Lane, ...] = ("load", "compute", "save")
    spans = [
        Span(lane, layer, layer + i, layer + i + 1)
        for layer in range(num_layers)
        for i, lane in enumerate(lanes)
    ]
    draw_timeline(spans, tmp_path / "timeline.png", title="A title")
    header = (tmp_path / "timeline.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:])
    assert header.startswith(b"\x89PNG")
    assert width == 1560
    assert height > 15 * num_layers
    assert height < 1.4 * width, "it fits on a page"


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no spans to draw"):
        draw_timeline([], tmp_path / "timeline.png")


def drawn(spans: list[Span], path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_timeline(spans, path, title="A title")
    (figure,) = figures
    return figure


def test_a_picture_without_loads_says_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn([compute(0, 0, 1), Span("save", 0, 1, 2)], tmp_path / "p.png", monkeypatch)
    assert figure.get_suptitle() == "A title"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["compute", "save"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["compute", "save (device to host)"]


@pytest.mark.parametrize("num_layers", [1, 30, 80])
def test_no_two_names_of_a_picture_are_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    spans = [compute(layer, layer, layer + 1) for layer in range(num_layers)]
    for first in range(0, num_layers, 21):
        layers = range(first, min(first + 21, num_layers))
        spans += [Span("save", layer, layers[-1] + 0.5, layers[-1] + 12) for layer in layers]
    figure = drawn(spans, tmp_path / "p.png", monkeypatch)
    for axes in figure.axes:
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    named = [text.get_text() for text in figure.axes[0].texts]
    saved = {1: "0", 30: "0-20", 80: "63-79"}[num_layers]
    assert saved in named
    assert "A save waits for its layer's KV" in figure.axes[1].get_xlabel()


def test_bars_of_next_to_no_time_are_wide_enough_to_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn([load(0, 0, 1e-9), compute(0, 1, 2)], tmp_path / "p.png", monkeypatch)
    assert "load time hidden" in figure.get_suptitle()
    for axes in figure.axes:
        box = axes.collections[0].get_paths()[0].get_extents(axes.transData)
        assert box.width >= 1.5


def test_the_forward_passes_of_a_picture_are_marked_and_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [compute(layer, layer, layer + 1) for layer in range(9)]
    second = [compute(layer, 9 + layer, 10 + layer) for layer in range(9)]
    figure = drawn([*first, *second], tmp_path / "p.png", monkeypatch)
    named = [text.get_text() for text in figure.axes[0].texts]
    assert named == [*(str(layer) for layer in [*range(9), *range(9)]), "forward pass 1", "forward pass 2"]
    (alone,) = [drawn(first, tmp_path / "p.png", monkeypatch)]
    assert not any("pass" in text.get_text() for text in alone.axes[0].texts)


def test_loads_that_began_together_are_shown_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn([load(0, 0, 1), load(1, 0, 2), load(2, 0, 3)], tmp_path / "p.png", monkeypatch)
    paths = figure.axes[0].collections[0].get_paths()
    assert [round(path.get_extents().x0 / 1000, 2) for path in paths] == [0, 1, 2]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2"]
