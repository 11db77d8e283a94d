"""What a request may be: its tokens, and where the engine keeps them, checked together with its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lwkv.batch_slots import check_batch_slots
from lwkv.errors import RequestError
from lwkv.keys import ChunkKey, as_salts, as_token_ids
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import CheckedRequest, Chunking, lacks_slot


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

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class KeyedChunks:
    """Whole chunks whose keys the caller made, in place of a Request, whose tokens make the keys.

    For an engine that has hashes of its own pages, and their slots on the device: nothing is fetched from
    there, so slots are not checked. No two of a batch may be the same, and no slot out of range.

    Args:
        keys: of the chunks, in order; what they stand for is the caller's to say.
        slots: int64 (chunks * chunk_size,), on the device of the caches. It is read behind what the current
            stream holds when the batch begins, and must not change before the batch has ended.
        parent: the chunk before the first, if it is known: what is stored is not kept longer than that.
    """

    keys: list[ChunkKey]
    slots: torch.Tensor
    parent: ChunkKey | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class KeyedSlots:
    """As KeyedChunks, with slots on the host, which are checked, and which need not be those of all tokens.

    Args:
        keys: of the chunks, in order.
        slots: int64 (chunks * chunk_size,), NO_SLOT for a token without one. It must not change any more.
        first: tokens at the beginning that the engine has itself.
        parent: as KeyedChunks'.
    """

    keys: list[ChunkKey]
    slots: Int64s
    first: int = 0
    parent: ChunkKey | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


AnyRequest: TypeAlias = "Request | KeyedChunks | KeyedSlots"


def check_loads(
    requests: Sequence[AnyRequest],
    num_slots: int,
    chunking: Chunking,
    device: torch.device | None = None,
) -> list[CheckedRequest]:
    """Bring requests into one form that are loaded together.

    Raises:
        RequestError: tokens that are no ids; a slot mapping or mask of another length or kind; slots out of
            range or given twice, or not whole blocks where only these can be moved; a mask that is not False,
            then True; salts that are no list or tuple of texts; two requests that share a slot, unless it is
            for the same token of the same prefix and salts; chunks with keys whose slots are not on
            `device`, that of the caches.
    """
    checked = [_checked(request, chunking, device) for request in as_requests(requests)]
    check_batch_slots(checked, num_slots)
    if chunking.unit > 1:
        for request in checked:
            request.loads(0, len(request.chunk_tokens)).row_slots(chunking.unit)
    return checked


def check_stores(
    requests: Sequence[AnyRequest],
    num_slots: int,
    chunking: Chunking,
    device: torch.device | None = None,
) -> list[CheckedRequest]:
    """Bring requests into one form that are stored together. Raises RequestError as `check_loads`.

    Chunks with keys of several requests may share slots: of two chunks that differ in their last tokens, the
    first tokens may be the same, and so may their slots. Keys do not show that, and slots are only read.
    """
    checked = [_checked(request, chunking, device) for request in as_requests(requests)]
    together = [[request] for request in checked] if _have_keys(requests) else [checked]
    for some in together:
        check_batch_slots(some, num_slots)
    if chunking.unit > 1:
        for request in checked:
            request.saves().only(request.new_chunks()).row_slots(chunking.unit)
    return checked


def as_requests(requests: Sequence[AnyRequest]) -> Sequence[AnyRequest]:
    """Give `requests` back.

    Raises RequestError for anything else than a list or tuple of one kind of request.
    """
    if isinstance(requests, list | tuple):
        for kind in (Request, KeyedChunks, KeyedSlots):
            if all(isinstance(request, kind) for request in requests):
                return requests
    got = f"{requests!r:.200}, of type {type(requests).__name__}"
    raise RequestError(f"got {got}; pass a list of Request(tokens, slot_mapping), or []")


def _have_keys(requests: Sequence[AnyRequest]) -> bool:
    return any(isinstance(request, KeyedSlots) for request in requests)


def _checked(request: AnyRequest, chunking: Chunking, device: torch.device | None) -> CheckedRequest:
    if isinstance(request, KeyedChunks):
        return _keyed(request, chunking, device)
    if isinstance(request, KeyedSlots):
        return _keyed_on_host(request, chunking)
    return _prompt(request, chunking)


def _keyed(request: KeyedChunks, chunking: Chunking, device: torch.device | None) -> CheckedRequest:
    slots = request.slots
    check_device_slots(slots, len(request.keys), chunking, device)
    num_tokens = len(slots)
    none = np.zeros(num_tokens, np.int64)
    counts = chunking.chunk_tokens(num_tokens)
    return CheckedRequest(none, none, 0, (), chunking.chunk_size, counts, request.keys, slots, request.parent)


def _keyed_on_host(request: KeyedSlots, chunking: Chunking) -> CheckedRequest:
    num_tokens = len(request.keys) * chunking.chunk_size
    slots = _as_row("slots", request.slots, num_tokens, "i", "whole numbers").astype(np.int64, copy=False)
    if not 0 <= request.first <= num_tokens:
        raise RequestError(f"first is {request.first}; allowed: 0 to {num_tokens}, the tokens of the chunks")
    # Two requests may share slots where their chunks are the same: as ids of tokens, keys show it.
    ids = np.array([int.from_bytes(key.hash[:8], "little", signed=True) for key in request.keys], np.int64)
    counts = np.full(len(request.keys), chunking.chunk_size, np.int64)
    return CheckedRequest(
        *(np.repeat(ids, chunking.chunk_size), slots, request.first, (), chunking.chunk_size, counts),
        request.keys,
        parent=request.parent,
    )


def check_device_slots(
    slots: torch.Tensor, num_chunks: int, chunking: Chunking, device: torch.device | None
) -> None:
    """Raise RequestError for what cannot be the slots, on `device`, of so many full chunks."""
    num_tokens = num_chunks * chunking.chunk_size
    if chunking.unit > 1:
        raise RequestError(f"chunks with keys cannot be moved as opaque blocks of {chunking.unit} tokens")
    if slots.dtype != torch.int64 or slots.shape != (num_tokens,):
        raise RequestError(
            f"slots is {slots.dtype} {tuple(slots.shape)}; {num_chunks} chunks of "
            f"{chunking.chunk_size} tokens have torch.int64 ({num_tokens},)"
        )
    if slots.device != device:
        # Kernels read it: one of another device would end the process.
        raise RequestError(f"slots is on {slots.device}; it must be on {device}, where the caches are")


def _prompt(request: Request, chunking: Chunking) -> CheckedRequest:
    # Copies: the engine may go on writing to its arrays while the request is under way.
    ids = as_token_ids(request.tokens).copy()
    slots = _as_row("slot_mapping", request.slot_mapping, len(ids), "iu", "whole numbers")
    if slots.dtype == np.uint64:
        slots = np.minimum(slots, np.iinfo(np.int64).max)  # NO_SLOT is a signed number
    first = 0 if request.mask is None else _leading_false(request.mask, len(ids))
    salts, counts = as_salts(request.salts), chunking.chunk_tokens(len(ids))
    slots = slots.astype(np.int64)
    return CheckedRequest(
        *(ids, slots, first, salts, chunking.chunk_size, counts), every_token=not lacks_slot(slots)
    )


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
