from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.benchmarks import vllm_starts
from lwkv.benchmarks.measuring.shapes import TINY
from lwkv.benchmarks.vllm.load import Load, Served
from lwkv.benchmarks.vllm_starts import measure


@pytest.mark.parametrize(("limit_s", "begun"), [(100.0, 4), (-1.0, 0)])
def test_each_engine_starts_alone_with_each_amount_unless_the_time_is_over(
    limit_s: float, begun: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []

    def serve(load: Load) -> Served:
        return Served(cold_ms=[1.0] * len(load.documents()))

    @contextmanager
    def started(modes: list[str], shape: Any, plan: Any) -> Iterator[list[Any]]:
        plans.append((*modes, plan.host_gib))
        yield [SimpleNamespace(start_s=2.0, serve=serve)]

    monkeypatch.setattr(vllm_starts, "started", started)
    starts = measure(["native", "lwkv"], [20, 100], TINY, True, limit_s)
    assert plans == [("native", 20), ("lwkv", 20), ("native", 100), ("lwkv", 100)][:begun]
    assert [start.start_s for start in starts] == [2.0] * begun + [None] * (4 - begun)
    assert [len(start.cold_ms) for start in starts] == [2] * begun + [0] * (4 - begun)
    assert capsys.readouterr().out.count("not begun") == 4 - begun


def test_after_an_engine_that_did_not_start_the_others_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def started(modes: list[str], shape: Any, plan: Any) -> Iterator[list[Any]]:
        if modes == ["native"]:
            raise RuntimeError("the engine 'native' has ended")
        yield [SimpleNamespace(start_s=2.0, serve=lambda _: Served())]

    monkeypatch.setattr(vllm_starts, "started", started)
    native, lwkv = measure(["native", "lwkv"], [100], TINY, True, 100.0)
    assert (native.start_s, native.failed, lwkv.start_s) == (None, "the engine 'native' has ended", 2.0)
    assert "native, 100 GiB: the engine 'native' has ended" in capsys.readouterr().out
