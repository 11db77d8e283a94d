"""A compiled kernel is started as Triton starts it itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lwkv.kernels import Rows, StagedLayers
from lwkv.layouts.layout import KVSpec, describe_layers

pytest.importorskip("triton")

HANDLE = 0xBEEF


def test_it_is_given_what_triton_itself_gives_but_for_the_hooks_of_profilers() -> None:
    from triton.compiler import CompiledKernel

    from lwkv.kernels.triton import launch

    calls: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(
        run=lambda *arguments: calls.append(arguments),
        function="function",
        packed_metadata="packed",
        launch_metadata=lambda *_: None,
        _init_handles=lambda: None,
    )
    grid, arguments = (3, 2, 1), (11, 12, 13)
    CompiledKernel.__getitem__(kernel, grid)(*arguments, stream=HANDLE)
    launch.start(kernel, grid, HANDLE, arguments)
    itself, here = calls
    assert len(here) == len(itself)
    hooks = slice(7, 9)
    assert (here[: hooks.start], here[hooks.stop :]) == (itself[: hooks.start], itself[hooks.stop :])
    assert here[hooks] == (None, None)


@pytest.mark.parametrize("is_known", [True, False])
def test_both_ways_get_the_same_arguments(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    from lwkv.kernels.triton import launch

    calls: list[tuple[Any, ...]] = []

    class Compiled:
        function, packed_metadata = "function", "packed"

        def run(self, *arguments: Any) -> None:
            grid, (stream, *_), arguments = arguments[:3], arguments[3:9], arguments[9:]
            calls.append((grid, stream, arguments))

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, stream: calls.append((grid, stream, arguments))

    monkeypatch.setattr(launch, "compiled_kernel", lambda *_: Compiled())
    monkeypatch.setattr(launch, "IS_KNOWN", is_known)
    (layer,) = describe_layers([torch.zeros(2, 3, 4, 2, 8)], KVSpec(2, 8, 4))
    staging, numbers = torch.zeros(1024, dtype=torch.uint8), torch.arange(5)
    kernel = launch.Launch("kernel", layer, (layer.k,), 16, ("constant",), (), {})
    kernel(StagedLayers([layer], staging, 0, Rows(numbers, numbers, numbers)), (7,), HANDLE)
    rows, columns = launch.tile(16)
    grid = -(-5 // rows), -(-16 // columns), 1
    addresses = [t.data_ptr() for t in (layer.k, staging, numbers, numbers, numbers)]
    numbers_given = (5, layer.num_rows, 7, "constant", rows, columns, layer.parts)
    assert calls == [(grid, HANDLE, (*addresses, *numbers_given))]
