from __future__ import annotations

from lwkv.telemetry.timeline import Lane, Span
from lwkv.telemetry.timeline_groups import forward_passes, group_spans


def names(*spans: Span) -> list[str]:
    return [f"{group.lane} {group.name}" for group in group_spans(spans)]


def saves(layers: range, start: float, end: float, lane: Lane = "save") -> list[Span]:
    """As a batch of several layers is recorded: one event after the other."""
    return [Span(lane, layer, start + 1e-5 * i, end + 1e-5 * i) for i, layer in enumerate(layers)]


def test_layers_that_were_queued_together_are_one_group() -> None:
    assert names(*saves(range(21), 0, 0.02), *saves(range(21, 30), 0.02, 0.03)) == ["save 0-20", "save 21-29"]
    (group,) = group_spans(saves(range(3), 0, 1))
    assert (group.start, group.end) == (0, 1 + 2e-5)


def test_layers_one_after_the_other_stay_apart_also_where_they_overlap() -> None:
    assert names(Span("load", 0, 0, 1.5), Span("load", 1, 0.9, 1.5)) == ["load 0", "load 1"]
    assert names(Span("save", 0, 0, 1), Span("save", 1, 1, 2)) == ["save 0", "save 1"]


def test_only_neighbours_of_a_lane_are_joined_and_no_compute() -> None:
    assert names(Span("save", 0, 0, 1), Span("save", 2, 0, 1)) == ["save 0", "save 2"]
    assert names(*saves(range(2), 0, 1, "compute")) == ["compute 0", "compute 1"]
    pieces = [Span("compute", 0, 0, 1), Span("compute", 0, 1.01, 2), Span("compute", 0, 3, 4)]
    assert names(*pieces) == ["compute 0", "compute 0"]
    assert names(Span("load", 0, 0, 1), Span("save", 1, 0, 1)) == ["load 0", "save 1"]
    assert names(Span("save", 1, 0, 1), Span("save", 1, 2, 3)) == ["save 1", "save 1"]
    assert names() == []


def test_a_forward_pass_begins_where_an_earlier_layer_is_computed_again() -> None:
    one = [Span("compute", layer, layer, layer + 1) for layer in range(3)]
    pause = [Span("compute", 2, 9, 10)]
    two = [Span("compute", layer, layer + 20, layer + 21) for layer in range(3)]
    assert forward_passes(group_spans([*one, *pause])) == [0]
    assert forward_passes(group_spans([*one, *pause, *two, Span("save", 0, 30, 31)])) == [0, 20]
    assert forward_passes(group_spans([Span("load", 0, 0, 1)])) == []
