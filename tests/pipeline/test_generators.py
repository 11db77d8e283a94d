"""The shared generators: a fixed number of steps on every path, and everything closed in the end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lwkv.pipeline.generators import retrieve_steps, store_steps

LAYERS = st.integers(1, 5)


class BrokenLayerError(Exception):
    pass


class Recorder:
    """A retrieval or a storing that writes down what it is asked; `broken` is a call that raises."""

    def __init__(self, num_layers: int, broken: tuple[Any, ...] = ()) -> None:
        self.num_layers = num_layers
        self.calls: list[tuple[Any, ...]] = []
        self._broken = broken
        self._closed = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if self.calls[-1] == self._broken:
                raise BrokenLayerError
            return {"open": [7, 5], "finish": [torch.ones(3), torch.zeros(2)]}.get(name)

        return call

    def finish(self) -> list[torch.Tensor]:
        masks: list[torch.Tensor] = self.__getattr__("finish")()
        self.close()
        return masks

    def close(self) -> None:
        if not self._closed:
            self.calls.append(("close",))
        self._closed = True


def calls_of_step(recorder: Recorder, steps: Generator[Any, None, None]) -> list[tuple[Any, ...]]:
    before = len(recorder.calls)
    next(steps)
    return recorder.calls[before:]


@given(LAYERS)
def test_retrieving_takes_two_steps_more_than_there_are_layers(num_layers: int) -> None:
    steps = list(retrieve_steps(Recorder(num_layers), itemgetter(0)))
    assert len(steps) == num_layers + 2
    assert steps[0] == 7
    assert steps[1:-1] == [None] * num_layers
    assert torch.equal(steps[-1], torch.ones(3))


def test_a_batch_gets_a_list_in_the_first_step_and_in_the_last() -> None:
    steps = list(retrieve_steps(Recorder(2), list))
    assert steps[0] == [7, 5]
    assert [len(mask) for mask in steps[-1]] == [3, 2]


@given(LAYERS)
def test_storing_takes_one_step_more_than_there_are_layers(num_layers: int) -> None:
    assert list(store_steps(Recorder(num_layers))) == [None] * (num_layers + 1)


def test_each_step_of_a_retrieval_advances_by_a_layer() -> None:
    recorder = Recorder(3)
    steps = retrieve_steps(recorder, list)
    assert [calls_of_step(recorder, steps) for _ in range(5)] == [
        [("open",)],
        [("advance", 0)],
        [("advance", 1)],
        [("advance", 2)],
        [("finish",), ("close",)],
    ]


def test_the_last_step_has_released_everything_when_it_yields() -> None:
    recorder = Recorder(1)
    steps = retrieve_steps(recorder, list)
    for _ in range(3):
        next(steps)
    assert recorder.calls[-1] == ("close",)


def test_a_layer_is_saved_in_the_step_after_it_was_computed_and_all_are_committed_last() -> None:
    recorder = Recorder(2)
    steps = store_steps(recorder)
    assert [calls_of_step(recorder, steps) for _ in range(3)] == [
        [("advance", 0)],
        [("advance", 1)],
        [("commit",)],
    ]
    assert next(steps, "ended") == "ended"
    assert recorder.calls[-1] == ("close",)


@given(LAYERS, st.booleans(), st.data())
def test_closing_early_at_any_step_closes_and_commits_nothing(
    num_layers: int, storing: bool, data: st.DataObject
) -> None:
    recorder = Recorder(num_layers)
    steps: Generator[Any, None, None]
    steps = store_steps(recorder) if storing else retrieve_steps(recorder, list)
    taken = data.draw(st.integers(1, num_layers))
    for _ in range(taken):
        next(steps)
    steps.close()
    assert recorder.calls.count(("close",)) == 1
    assert ("commit",) not in recorder.calls


def test_closing_before_the_first_step_opens_nothing() -> None:
    recorder = Recorder(2)
    retrieve_steps(recorder, list).close()
    store_steps(recorder).close()
    assert recorder.calls == []


@pytest.mark.parametrize("broken", [("advance", 0), ("advance", 2), ("commit",)], ids=str)
def test_an_error_while_storing_closes_and_is_passed_on(broken: tuple[Any, ...]) -> None:
    recorder = Recorder(3, broken)
    with pytest.raises(BrokenLayerError):
        list(store_steps(recorder))
    assert recorder.calls[-1] == ("close",)


@pytest.mark.parametrize("broken", [("open",), ("advance", 0), ("advance", 2), ("finish",)], ids=str)
def test_an_error_while_retrieving_closes_and_is_passed_on(broken: tuple[Any, ...]) -> None:
    recorder = Recorder(3, broken)
    with pytest.raises(BrokenLayerError):
        list(retrieve_steps(recorder, list))
    assert recorder.calls[-1] == ("close",)
