"""The KV tensors an engine registers: named, each memory once, and fit to be viewed in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lwkv.errors import LayoutError

logger = logging.getLogger(__name__)

Tensors: TypeAlias = "tuple[Tensor, ...]"
Registered: TypeAlias = "Tensor | tuple[Tensor, ...] | list[Tensor]"
Registration: TypeAlias = "Mapping[str, Registered] | Sequence[Registered]"
Named: TypeAlias = "dict[str, tuple[Tensor, ...]]"

# Signed numbers of one element, of which keys can be turned, and bytes of any kind.
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


def read_registered(kvcaches: Registration) -> Named:
    """Give each layer's tensors, one or K and V, by name in the caller's order; a sequence's are layer_0, ...

    Layers that share their KV under a second name are left out, with a log line.

    Raises:
        LayoutError: nothing registered, or memory that cannot be viewed as described in `describe_layers`.
    """
    named = _name(kvcaches)
    device = next(iter(named.values()))[0].device
    for name, tensors in named.items():
        _check_memory(name, tensors, device)
    return _without_repeats(named)


def number_layers(kvcaches: Registration) -> dict[str | int, int]:
    """Give the number among the layers that are moved of every entry, by name and by position.

    Positions count all entries in the caller's order; an entry that shares its KV has its owner's number.
    For what `read_registered` has accepted.
    """
    numbers: dict[int, int] = {}
    named = _name(kvcaches)
    found = [numbers.setdefault(tensors[0].data_ptr(), len(numbers)) for tensors in named.values()]
    return dict(zip(named, found, strict=True)) | dict(enumerate(found))


def place(t: Tensor) -> tuple[object, ...]:
    """Equal for tensors whose equal indices are the same elements at the same addresses."""
    return (t.data_ptr(), *_form(t))


def picture(name: str, tensors: Sequence[Tensor]) -> str:
    """Show a layer in an error text."""
    shapes = (f"shape {tuple(t.shape)} strides {t.stride()} {t.dtype}" for t in tensors)
    return f"layer {name!r}: {' and '.join(shapes)}"


def _name(kvcaches: Registration) -> Named:
    if not isinstance(kvcaches, Mapping | list | tuple):
        raise LayoutError(
            f"kvcaches is of type {type(kvcaches).__name__}; register a mapping from layer names to tensors, "
            "or a list of tensors"
        )
    named = kvcaches if isinstance(kvcaches, Mapping) else {f"layer_{i}": t for i, t in enumerate(kvcaches)}
    tensors = {name: tuple(t) if isinstance(t, tuple | list) else (t,) for name, t in named.items()}
    for name, group in tensors.items():
        if not isinstance(name, str):
            raise LayoutError(f"layer {name!r}: the name is {type(name).__name__}; name layers by text")
        strided = (isinstance(t, Tensor) and t.layout == torch.strided for t in group)
        if len(group) not in (1, 2) or not all(strided):
            got = [type(t).__name__ for t in group]
            raise LayoutError(f"layer {name!r}: expected a strided tensor, or a pair of K and V, got {got}")
    if not tensors:
        raise LayoutError("no layers: the engine registered no KV tensor")
    return tensors


def _check_memory(name: str, tensors: Tensors, device: torch.device) -> None:
    problems = [problem for t in tensors if (problem := _memory_problem(t, device))]
    if any(_form(t) != _form(tensors[0]) for t in tensors):
        problems.append("K and V differ in shape, strides or dtype")
    if problems:
        raise LayoutError(f"{picture(name, tensors)}: {'; '.join(problems)}")


def _form(t: Tensor) -> tuple[object, ...]:
    """Strides of axes with one element do not matter."""
    steps = tuple(stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1)
    return t.dtype, t.shape, steps


def _memory_problem(t: Tensor, device: torch.device) -> str | None:
    if t.device != device or t.is_meta:
        return f"on {t.device}, but all layers must be on one real device (the first is on {device})"
    if t.dtype not in DTYPES:
        return f"unsupported dtype; there are {', '.join(map(str, DTYPES))}"
    if t.dim() == 0 or t.numel() == 0:
        return "holds no block"
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        return "elements of a row must be neighbours (stride 1 in the last dimension)"
    return "overlaps itself (expanded, or strides smaller than what they step over)" if _overlaps(t) else None


def _overlaps(t: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _without_repeats(named: Named) -> Named:
    kept: Named = {}
    owners: dict[int, str] = {}
    for name, tensors in named.items():
        pointers = [t.data_ptr() for t in tensors]
        owner = next((owners[pointer] for pointer in pointers if pointer in owners), None)
        if owner is None and len(set(pointers)) == len(pointers):
            kept[name] = tensors
            owners |= dict.fromkeys(pointers, name)
        elif owner is not None and [*map(place, tensors)] == [*map(place, kept[owner])]:
            logger.info("layer %r shares the KV memory of %r and is moved with it", name, owner)
        else:
            other = owner or "its own other part"
            raise LayoutError(f"{picture(name, tensors)}: starts at the same address as {other}")
    return kept
