"""What a layer's attention gets and gives, by hooks on vLLM's module that are there for single calls only.

vLLM's own calls find no hook: they have been compiled, or are in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lwkv.integrations.vllm.blending.model.calls import Seen, States


class _Enough(Exception):
    """Ends the call of a layer at its attention."""


def run_seen(attention: Any, run: Callable[[], States]) -> Seen:
    """What `run` gives, which calls the layer of `attention`, and q and the output of that."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], out: Tensor) -> None:
        seen.append((_argument(given, named, 0), out))

    hook = attention.register_forward_hook(note, with_kwargs=True)
    try:
        states = run()
    finally:
        hook.remove()
    q, attended = (torch.cat(parts) for parts in zip(*seen, strict=True))
    heads = attention.num_heads, attention.head_size
    return Seen(states, q.view(-1, *heads), attended.view(-1, *heads))


def keys_and_values(attention: Any, runs: Iterable[Callable[[], object]]) -> tuple[Tensor, Tensor]:
    """K and V that `runs` would write, each of which calls the layer and is ended at its attention.

    Raises RuntimeError where the layer does not call `attention`.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def stop(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        seen.append((_argument(given, named, 1), _argument(given, named, 2)))
        raise _Enough

    hook = attention.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for run in runs:
            try:
                run()
            except _Enough:
                continue
            raise RuntimeError("a layer does not call its attention")
    finally:
        hook.remove()
    heads = attention.num_kv_heads, attention.head_size
    k, v = (torch.cat(parts).view(-1, *heads) for parts in zip(*seen, strict=True))
    return k, v


def _argument(given: tuple[Tensor, ...], named: dict[str, Tensor], place: int) -> Tensor:
    return given[place] if place < len(given) else named[("query", "key", "value")[place]]
