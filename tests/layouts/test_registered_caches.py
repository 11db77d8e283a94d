"""Caches that are registered again are the very same tensors, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lwkv.config.settings import Config
from lwkv.errors import LayoutError
from lwkv.layouts.layout import KVSpec, PagedLayer, describe_layers
from lwkv.layouts.registered_caches import Caches
from lwkv.platforms.cpu import CPU

HOLDERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "mapping": lambda t: {f"l.{i}": tensor for i, tensor in enumerate(t)},
    "list": list,
    "tuple": tuple,
    "pairs": lambda t: [t[:2], (t[2], t[3])],
    "mapping of pairs": lambda t: {"a": t[:2], "b": t[2:]},
}


def tensors_for(hold: Any) -> list[torch.Tensor]:
    """Four, as layers or as K and V of two layers."""
    shape = (3, 2, 1) if "pairs" in hold else (2, 3, 1, 2, 1)
    return [torch.zeros(shape) for _ in range(4)]


@pytest.fixture
def described() -> list[Any]:
    """What was looked at in full."""
    return []


@pytest.fixture
def registered(described: list[Any]) -> Caches:
    def describe(kvcaches: Any) -> list[PagedLayer]:
        described.append(kvcaches)
        return describe_layers(kvcaches, KVSpec(2, 1, 1))

    return Caches(Config(chunk_size=4), CPU(), describe)


@pytest.mark.parametrize("name", HOLDERS)
def test_the_same_tensors_in_another_container_are_known(
    registered: Caches, described: list[Any], name: str
) -> None:
    hold, tensors = HOLDERS[name], tensors_for(name)
    for _ in range(3):
        registered.register(hold(tensors))
    assert len(described) == 1
    for i in range(4):
        with pytest.raises(LayoutError):
            registered.register(hold([*tensors[:i], tensors[i].clone(), *tensors[i + 1 :]]))
    with pytest.raises(LayoutError):
        registered.register(hold(tensors[::-1]))
    assert len(described) == 6


def test_other_tensors_over_the_same_memory_are_looked_at_and_then_known(
    registered: Caches, described: list[Any]
) -> None:
    tensors = tensors_for("list")
    registered.register(tensors)
    for _ in range(2):
        registered.register(again := [t.detach() for t in tensors])
        registered.register(again)
    assert len(described) == 3


def test_a_container_that_was_filled_anew_is_not_known(registered: Caches) -> None:
    pair = tensors_for("pairs")[:2]
    registered.register([pair])
    pair[1] = pair[1].clone()
    with pytest.raises(LayoutError, match="other KV caches were registered"):
        registered.register([pair])


@pytest.mark.parametrize("given", [[], {}, torch.zeros(0, 2), torch.zeros(3, 2), 7, [7], None])
def test_what_is_no_registration_is_refused_before_and_after_one(registered: Caches, given: Any) -> None:
    for tensors in (None, tensors_for("list")):
        if tensors is not None:
            registered.register(tensors)
        with pytest.raises(LayoutError):
            registered.register(given)


@pytest.mark.parametrize(("hints", "blocks"), [((), 7), (("opaque", "tag"), 5)], ids=["canonical", "opaque"])
def test_there_are_as_many_slots_as_tokens_fit_into_every_layer(hints: tuple[str, ...], blocks: int) -> None:
    registered = Caches(Config(chunk_size=4), CPU(), lambda of: describe_layers(of, KVSpec(3, 8, 4), *hints))
    registered.register([torch.zeros(9, 3, 4, 16), torch.zeros(blocks, 3, 4, 16)])
    assert registered.num_slots == 4 * blocks
