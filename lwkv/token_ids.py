"""Token ids in the one form that is hashed, out of the many that engines pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lwkv.errors import RequestError

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer] | torch.Tensor"
Int64s: TypeAlias = npt.NDArray[np.int64]

_ALLOWED = "a list, tuple, range, 1-D integer array, or 1-D int32 or int64 tensor of ids from 0 to 2**63 - 1"


def as_token_ids(tokens: TokenIds) -> Int64s:
    """Give token ids as int64, (T,), on the host; the same ids give the same array whatever they came in.

    An int64 array, or CPU tensor, is not copied. A tensor on a device blocks the host until it is here.

    Raises:
        RequestError: anything else: floats, bools, text, not one dimension, a negative or too large id.
    """
    ids = _to_array(tokens)
    if ids.ndim != 1:
        raise RequestError(f"token ids: got shape {ids.shape}; allowed: {_ALLOWED}")
    if ids.size and int(ids.min()) < 0:
        raise RequestError(f"token ids: got {int(ids.min())}, or an id above 2**63 - 1; allowed: {_ALLOWED}")
    return ids


def _to_array(tokens: object) -> Int64s:
    if isinstance(tokens, torch.Tensor):
        return _from_tensor(tokens)
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, bytearray, memoryview)):
        return _from_sequence(tokens)
    raise RequestError(f"token ids: got {type(tokens).__name__}; allowed: {_ALLOWED}")


def _from_tensor(tokens: torch.Tensor) -> Int64s:
    if tokens.dtype not in (torch.int32, torch.int64):
        raise RequestError(f"token ids: got a tensor of {tokens.dtype}; allowed: {_ALLOWED}")
    return _from_array(tokens.cpu().numpy())


def _from_array(tokens: npt.NDArray[np.generic]) -> Int64s:
    if tokens.dtype.kind not in "iu":
        raise RequestError(f"token ids: got an array of {tokens.dtype}; allowed: {_ALLOWED}")
    return tokens.astype(np.int64, copy=False)


def _from_sequence(tokens: Sequence[object]) -> Int64s:
    kinds = {
        kind for kind in set(map(type, tokens)) if kind is bool or not issubclass(kind, (int, np.integer))
    }
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise RequestError(
            f"token ids: got a {type(tokens).__name__} that holds {names}; allowed: {_ALLOWED}"
        )
    try:
        return np.array(tokens, dtype=np.int64)
    except OverflowError as error:
        raise RequestError(f"token ids: got an id above 2**63 - 1; allowed: {_ALLOWED}") from error
