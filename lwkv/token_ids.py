"""Token ids in the one form that is hashed, out of the many that engines pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lwkv.errors import RequestError
from lwkv.platforms.protocol import Int64s

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer] | torch.Tensor"

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
    if isinstance(tokens, torch.Tensor) and tokens.dtype in (torch.int32, torch.int64):
        tokens = tokens.cpu().numpy()
    if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu":
        return tokens.astype(np.int64, copy=False)
    got = type(tokens).__name__
    if isinstance(tokens, torch.Tensor | np.ndarray):
        got += f" of {tokens.dtype}"
    if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes | bytearray | memoryview):
        kinds = set(map(type, tokens))
        if all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
            with suppress(OverflowError):
                return np.array(tokens, dtype=np.int64)
        got += f" of {', '.join(sorted(kind.__name__ for kind in kinds))}"
    raise RequestError(f"token ids: got {got}; allowed: {_ALLOWED}")
