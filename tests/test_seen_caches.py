"""Caches that are passed again are the very same tensors, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lwkv.seen_caches import SeenCaches


def caches() -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(4)]


HOLDERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "mapping": lambda t: {f"l.{i}": tensor for i, tensor in enumerate(t)},
    "list": list,
    "tuple": tuple,
    "pairs": lambda t: [t[:2], (t[2], t[3])],
    "mapping of pairs": lambda t: {"a": t[:2], "b": t[2:]},
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_the_same_tensors_in_another_container_are_known(hold: Callable[[list[torch.Tensor]], Any]) -> None:
    seen, tensors = SeenCaches(), caches()
    assert not seen.has(hold(tensors))
    seen.remember(hold(tensors))
    assert seen.has(hold(tensors))
    for i in range(4):
        other = [*tensors[:i], tensors[i].clone(), *tensors[i + 1 :]]
        assert not seen.has(hold(other))
    assert not seen.has(hold(tensors[::-1]))


def test_a_container_that_was_filled_anew_is_not_known() -> None:
    seen, (k, v, other, _) = SeenCaches(), caches()
    pair, named = [k, v], {"l": k}
    seen.remember([pair])
    pair[1] = other
    assert not seen.has([pair])
    seen.remember(named)
    named["l"] = other
    assert not seen.has(named)


@pytest.mark.parametrize("given", [[], {}, torch.zeros(0, 2), torch.zeros(3, 2), 7, [7], None])
def test_what_is_no_registration_is_not_known(given: Any) -> None:
    seen = SeenCaches()
    assert not seen.has(given)
    seen.remember(caches())
    assert not seen.has(given)
