from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lwkv.benchmarks import sglang_ttft
from lwkv.benchmarks.measuring.shapes import TINY
from lwkv.benchmarks.sglang.child import Answer
from lwkv.benchmarks.sglang.findings import Case, call_table, served_table, table
from lwkv.benchmarks.sglang.load import Load, Question, Served
from lwkv.benchmarks.sglang_ttft import PAGE, Plan, engine_arguments


class Cache:
    """An engine whose device holds two prefixes, and whose host memory holds all, if it has any."""

    def __init__(self, has_host: bool = True, wrong: bool = False) -> None:
        self.device: list[int] = []
        self.host: set[int] = set()
        self.has_host, self.wrong = has_host, wrong

    def ask(self, question: Question) -> Answer:
        if question.flush:
            self.device, self.host = [], set()
        seed, cached = question.prefix_seed, question.prefix // PAGE * PAGE
        on_device = cached if seed in self.device else 0
        on_host = cached if not on_device and seed in self.host else 0
        if question.prefix:
            self.device = [*(other for other in self.device if other != seed), seed][-2:]
            self.host |= {seed} if self.has_host else set()
        token = question.suffix_seed + (self.wrong and on_host > 0)
        return Answer(1.0 if on_device else 2.0 if on_host else 9.0, token, -1.5, on_device, on_host)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)


def measured(mode: str, cache: Cache) -> Case:
    case = Case(mode)
    Plan(8192, 256, 3).measure(cache, case)  # type: ignore[arg-type]
    return case


def test_every_kind_of_prompt_comes_from_where_it_should() -> None:
    case = measured("lwkv", Cache())
    assert case.faults == []
    assert {kind: (len(ms), set(ms)) for kind, ms in case.ms.items()} == {
        "suffix": (3, {9.0}),
        "computed": (3, {9.0}),
        "device": (3, {1.0}),
        "host": (6, {2.0}),
    }


def test_without_host_memory_there_are_no_host_hits() -> None:
    case = measured("plain", Cache(has_host=False))
    assert case.faults == []
    assert "host" not in case.ms


def test_prompts_that_come_from_elsewhere_are_faults() -> None:
    case = measured("lwkv", Cache(has_host=False))
    assert case.faults[0] == "host: 0 tokens from the device and 0 from the host, not 0 and 8192"


def test_another_answer_to_a_loaded_prompt_is_a_fault() -> None:
    case = measured("lwkv", Cache(wrong=True))
    assert "a loaded prompt is answered" in case.faults[0]


def test_the_table_has_medians() -> None:
    case = Case("lwkv", {"host": [3.0, 1.0, 2.0]})
    assert table([case]).splitlines()[-1] == "| lwkv |  |  |  | 2.0 |"


def test_the_calls_and_what_was_served_have_tables_of_their_own() -> None:
    served = Served([20.0, 10.0, 30.0], [1.0, 9.0], decoded=100, seconds=4.0)
    batches = [{"lookup": 0.25}, {"lookup": 0.75, "load": 0.5}]
    case = Case("lwkv", served=served, host_ms=batches[:1], host_ms_beside=batches)
    assert call_table([case]).splitlines() == [
        "lwkv, alone: lookup 0.250",
        "lwkv, beside requests: load 0.250, lookup 0.500",
    ]
    assert served_table([case]).splitlines()[-1] == "| lwkv | 20.0 | 30.0 | 9.0 | 9.0 | 9.0 | 25 |"
    assert served_table([Case("lwkv")]) == call_table([Case("plain")]) == ""


class Serving:
    """An engine that loads all prompts but the first few."""

    def __init__(self, misses: int) -> None:
        self.misses = misses

    def serve(self, load: Load) -> Served:
        tokens = [load.prefix] * len(load.arriving())
        return Served(from_host=[0] * self.misses + tokens[self.misses :])


@pytest.mark.parametrize(("misses", "faults"), [(0, []), (3, ["3 of 20 prompts were not loaded"])])
def test_prompts_beside_requests_that_were_not_loaded_are_a_fault(misses: int, faults: list[str]) -> None:
    case, plan = Case("lwkv"), Plan(8192, 256, 3, decoders=16)
    plan.serve(Serving(misses), case)  # type: ignore[arg-type]
    assert [fault.split(", ")[1] for fault in case.faults] == faults


@pytest.mark.parametrize("decoders", [0, 16])
def test_more_prefixes_are_visited_than_the_device_holds(decoders: int) -> None:
    plan = Plan(8192, 256, 3, decoders)
    assert plan.num_prefixes * plan.prefix > plan.device_tokens
    seeds = [question.prefix_seed for question in plan.load().arriving()]
    assert seeds[: plan.num_prefixes] == sorted(set(seeds))[: plan.num_prefixes]


@pytest.mark.parametrize("mode", sorted({*sglang_ttft.MODES, *sglang_ttft.VARIANTS}))
def test_only_what_a_mode_is_about_differs_in_the_engines_arguments(mode: str, tmp_path: Path) -> None:
    def arguments(mode: str) -> dict[str, Any]:
        return engine_arguments(mode, tmp_path, TINY, Plan(8192, 256, 3), 2.0, tmp_path / "times")

    plain, other = arguments("plain"), arguments(mode)
    assert plain.items() <= other.items()
    assert plain["max_total_tokens"] >= 2 * (8192 + 256)
