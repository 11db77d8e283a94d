"""What is measured of blends in vLLM, without a vLLM."""

from __future__ import annotations

import pytest

from lwkv.benchmarks.vllm.blend_gates import Found, gates
from lwkv.benchmarks.vllm_blend import Plan, parser, report, selectors

PLAN = Plan(documents=3, tokens=16, question=5, share=0.15, repeats=2, seconds=1.0, every_s=0.5, eager=True)


def test_turns_have_the_same_documents_in_other_orders_and_other_questions() -> None:
    turns = [PLAN.prompt(turn, 1000) for turn in range(8)]
    for ids, segments in turns:
        assert len(ids) == 3 + 3 * 17 + 5
        assert [end - start for start, end in segments] == [16, 16, 16]
    texts = [[tuple(ids[start:end]) for start, end in segments] for ids, segments in turns]
    assert len({frozenset(parts) for parts in texts}) == 1
    assert len({tuple(parts) for parts in texts}) > 2
    assert len({tuple(ids[-5:]) for ids, _ in turns}) == len({tuple(ids[:3]) for ids, _ in turns}) == 8


def test_rows_are_those_that_a_blend_computes() -> None:
    plan, known = Plan(8, 1024, 64, 0.15, 1, 1.0, 1.0, True), selectors(0.15, 32)
    rows = {name: plan.rows(selector, 32) for name, selector in known.items()}
    assert rows["deviation"] == int(8192 * (1 / 32 + 31 / 32 * 0.15)) + 64
    assert rows["gradual"] == int(8192 * (1 / 32 + 1 / 32 * 0.25 + 30 / 32 * 0.15)) + 64
    assert rows["query"] == int(8192 * 0.15 + 64 * 22 / 32) + 64
    assert rows["prefix_k"] == int(8192 * 0.15) + 64
    assert rows["reuse"] == 64


def test_the_summary_has_medians_and_percentiles() -> None:
    found = Found([66.0, 60.0, 70.0], [60.0], [20.0, 22.0], beside_ms={"64": [5.0, 5.0, 20.0]})
    assert found.over_larger == 1.1
    assert found.summary() == {
        "ttft": 66.0,
        "in_place": 60.0,
        "load": 21.0,
        "beside_64_p50": 5.0,
        "beside_64_p99": pytest.approx(19.7),
        "beside_64_p100": 20.0,
    }
    assert Found([3.0]).summary() == {"ttft": 3.0}


def test_every_gate_says_whether_it_holds() -> None:
    plain = Found([100.0], beside_ms={"64": [5.0], "900": [30.0]})
    good = Found([29.0], [10.0], [28.0], beside_ms={"900": [29.0]}, rows=900)
    bad = Found([31.0], [20.0], [10.0], beside_ms={"64": [6.0]}, rows=64)
    found = list(gates({"plain": plain, "deviation": good, "reuse": bad}))
    assert [gate.holds for gate in found] == [True] * 3 + [False] * 3
    assert (
        str(found[1])
        == "holds: deviation: time to first token over that of loading alone: 1.036, at most 1.100"
    )
    assert str(found[4]) == (
        "DOES NOT HOLD: reuse: time to first token over that of computing alone: 1.550, at most 1.100"
    )
    assert "prefills of 64 tokens" in found[5].what


def test_what_was_not_measured_has_no_gate() -> None:
    assert not list(gates({"reuse": Found([3.0])}))
    assert not list(gates({"plain": Found([3.0])}))
    one = Found([31.0], [10.0], [20.0], rows=64, beside_ms={"64": [6.0]})
    assert len(list(gates({"reuse": one}))) == 1


def test_the_report_ends_with_faults() -> None:
    lines = report({"reuse": Found([3.0], faults=["0 of 5 prompts were blended"])}).splitlines()
    assert lines[-1] == "FAULT: reuse: 0 of 5 prompts were blended"


def test_the_command_line_is_the_one_of_the_issue_by_default() -> None:
    args = parser().parse_args([])
    assert (args.shape, args.documents * args.tokens, args.question) == ("llama-8b", 8192, 64)
    assert args.selectors == list(selectors(0.15, 32))


def test_a_selector_that_is_not_known_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--selectors", "reuse,magic"])
    assert "'magic' is none of deviation" in capsys.readouterr().err
