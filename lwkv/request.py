"""One request's tokens and where the engine keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lwkv.errors import RequestError
from lwkv.keys import as_salts
from lwkv.platforms.protocol import Int64s
from lwkv.slots import check_slots
from lwkv.token_ids import as_token_ids
from lwkv.transfer import NO_SLOT, Transfer


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to retrieve or to store.

    Args:
        tokens: token ids, (tokens,): list, tuple, numpy array or tensor.
        slot_mapping: each token's slot in the engine's cache, (tokens,), NO_SLOT (-1) for a token without
            one. On the host, please: one on the device is fetched, which waits for it.
        mask: bool (tokens,), False for a leading part that the engine has itself; None means all True.
        salts: what else decides the bytes: LoRA name, cache salt, hashes of images; order matters.
    """

    tokens: Any
    slot_mapping: Any
    mask: Any = None
    salts: Sequence[str] = ()


class Chunking(NamedTuple):
    """How tokens are cut into chunks.

    `chunk_size` tokens each; a smaller last one counts if `partial`, cut down to a multiple of `unit` tokens,
    which `chunk_size` is too.
    """

    chunk_size: int
    partial: bool
    unit: int = 1

    def chunk_tokens(self, num_tokens: int) -> Int64s:
        """Tokens of each chunk, int64 (chunks,)."""
        full, rest = divmod(self.covered(num_tokens), self.chunk_size)
        return np.array([self.chunk_size] * full + [rest] * (rest > 0), np.int64)

    def covered(self, num_tokens: int) -> int:
        """Tokens of all chunks together."""
        rest = num_tokens % self.chunk_size
        return num_tokens - (rest % self.unit if self.partial else rest)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that fits the engine's cache.

    Attributes:
        ids, slots: int64 (tokens,).
        first: tokens at the beginning that the engine has itself.
        chunk_tokens: int64 (chunks,), tokens of each chunk.
    """

    ids: Int64s
    slots: Int64s
    first: int
    salts: tuple[str, ...]
    chunk_size: int
    chunk_tokens: Int64s

    def loads(self, first_chunk: int, last_chunk: int) -> Transfer:
        """Move chunks [first_chunk, last_chunk), less the tokens that the engine has itself."""
        counts = self.chunk_tokens[first_chunk:last_chunk]
        start = first_chunk * self.chunk_size
        slots = self.slots[start : start + int(counts.sum())].copy()
        slots[: max(0, self.first - start)] = NO_SLOT
        return Transfer(counts, slots)

    def saves(self) -> Transfer:
        """Move every chunk."""
        return Transfer(self.chunk_tokens, self.slots[: int(self.chunk_tokens.sum())])

    def new_chunks(self) -> npt.NDArray[np.bool_]:
        """Chunks that can be stored: not wholly in the masked part, and with a slot for every token."""
        ends = np.cumsum(self.chunk_tokens)
        without = np.cumsum(np.append(0, self.slots == NO_SLOT))
        with_slots: npt.NDArray[np.bool_] = without[ends] == without[ends - self.chunk_tokens]
        return (ends > self.first) & with_slots


def check_loads(requests: Sequence[Request], num_slots: int, chunking: Chunking) -> list[CheckedRequest]:
    """Bring requests into one form that are loaded together.

    Raises:
        RequestError: tokens that are no ids; a slot mapping or mask of another length or kind; slots out of
            range or given twice, or not whole blocks where only these can be moved; a mask that is not False,
            then True; salts that are no sequence of texts; two requests that share a slot, unless it is for
            the same token of the same prefix and salts.
    """
    checked = [_checked(request, chunking) for request in as_requests(requests)]
    check_slots(checked, num_slots)
    if chunking.unit > 1:
        for request in checked:
            request.loads(0, len(request.chunk_tokens)).row_slots(chunking.unit)
    return checked


def check_stores(requests: Sequence[Request], num_slots: int, chunking: Chunking) -> list[CheckedRequest]:
    """Bring requests into one form that are stored together. Raises RequestError as `check_loads`."""
    checked = [_checked(request, chunking) for request in as_requests(requests)]
    check_slots(checked, num_slots)
    if chunking.unit > 1:
        for request in checked:
            request.saves().only(request.new_chunks()).row_slots(chunking.unit)
    return checked


def as_requests(requests: Sequence[Request]) -> Sequence[Request]:
    """Give `requests` back. Raises RequestError for anything else than a list or tuple of them."""
    if isinstance(requests, list | tuple) and all(isinstance(request, Request) for request in requests):
        return requests
    got = f"{requests!r:.200}, of type {type(requests).__name__}"
    raise RequestError(f"got {got}; pass a list of Request(tokens, slot_mapping), or []")


def _checked(request: Request, chunking: Chunking) -> CheckedRequest:
    # Copies: the engine may go on writing to its arrays while the request is under way.
    ids = as_token_ids(request.tokens).copy()
    slots = _as_row("slot_mapping", request.slot_mapping, len(ids), "iu", "whole numbers")
    if slots.dtype == np.uint64:
        slots = np.minimum(slots, np.iinfo(np.int64).max)  # NO_SLOT is a signed number
    first = 0 if request.mask is None else _leading_false(request.mask, len(ids))
    salts, counts = as_salts(request.salts), chunking.chunk_tokens(len(ids))
    return CheckedRequest(ids, slots.astype(np.int64), first, salts, chunking.chunk_size, counts)


def _leading_false(mask: Any, num_tokens: int) -> int:
    flags = _as_row("mask", mask, num_tokens, "b", "bool")
    first = num_tokens - int(flags.sum())
    if flags[:first].any():
        raise RequestError("mask must be False for a leading part and True from there on")
    return first


def _as_row(name: str, values: Any, num_tokens: int, kinds: str, words: str) -> npt.NDArray[Any]:
    try:
        row = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:  # a dtype that numpy lacks, a list of unequal lists
        raise RequestError(f"{name} is {values!r}, which is no array of numbers: {error}") from error
    if row.shape != (num_tokens,) or (num_tokens and row.dtype.kind not in kinds):
        raise RequestError(
            f"{name} is {row.dtype} {row.shape}; it must be {words}, one for each of the {num_tokens} tokens"
        )
    return row
