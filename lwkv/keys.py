"""The names of what is cached: a key a chunk, and under it a key a layer.

The hash of a chunk covers all tokens before it too: hash(parent's hash, token ids), from the namespace and
the request's salts at the root. It is BLAKE2b, which gives 128 bits by itself, takes a purpose that keeps
roots and chunks apart, is fast without special instructions, and is in every Python's hashlib. Token ids go
in as 8 bytes each, little-endian, so that any id and any input dtype fits, and machines agree on the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lwkv.errors import RequestError
from lwkv.metadata import CacheMetadata
from lwkv.platforms.protocol import Int64s

FORMAT_VERSION = 1
"""Goes up when the bytes of a page, or what a key is made of, change: older pages are never found then."""

_SLUG_CHARS = 48
MOST_ROOTS = 256
"""Of prompts that were asked for last, kept: a store waits for the first key."""
HASH_BYTES = 16
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ANY_IDS = "a list, tuple, range, 1-D integer array, or 1-D int32 or int64 tensor of ids from 0 to 2**63 - 1"

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer] | torch.Tensor"


class ChunkKey(NamedTuple):
    """A chunk of one namespace; `hash` is 16 bytes and stands for the chunk and all before it."""

    namespace: str
    hash: bytes

    def split_layers(self, num_layers: int) -> list[LayerKey]:
        """Give the keys of the chunk's layers, in order."""
        return [LayerKey(self, layer) for layer in range(num_layers)]

    def to_string(self) -> str:
        """Write the key in at most 161 characters that file systems and remote stores take as they are.

        Raises:
            ValueError: the namespace has other characters than letters, digits, '.', '_' and '-', begins with
                one of the last three or is longer than 128; or the hash is not 16 bytes.
        """
        if not _NAMESPACE.fullmatch(self.namespace) or len(self.hash) != HASH_BYTES:
            raise ValueError(f"{self!r} is no key of a chunk; make_namespace and chunk_keys make them")
        return f"{self.namespace}.{self.hash.hex()}"


class LayerKey(NamedTuple):
    """One layer of a chunk; `layer` counts in the order the engine registered them."""

    chunk: ChunkKey
    layer: int

    def to_string(self) -> str:
        """Write the chunk's key, '.', and the layer. Raises ValueError as the chunk's, or for the layer."""
        if not 0 <= self.layer <= 999_999:
            raise ValueError(f"layer {self.layer} of a key; allowed: 0 to 999999")
        return f"{self.chunk.to_string()}.{self.layer}"


def make_namespace(
    metadata: CacheMetadata, chunk_size: int, page_format: str, layer_names: Sequence[str] = ()
) -> str:
    """Name what pages of this model, rank, chunk size, page format and these layers have in common.

    Args:
        layer_names: of the layers in the order in which keys number them.

    Returns:
        Some of the model's name, to be read by people, then 128 bits over all fields in hexadecimal: at most
        81 characters out of a-z, 0-9, '.', '_' and '-'. Whatever changes no byte of a page has no part in it.
    """
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    values |= {"kv_dtype": metadata.stored_dtype, "chunk_size": chunk_size, "page_format": page_format}
    parts = [text for name, value in values.items() for text in (name, str(value))]
    parts += [text for name in layer_names for text in ("layer", name)]
    digest = blake2b(_encode([str(FORMAT_VERSION), *parts]), digest_size=HASH_BYTES, person=b"lwkv namespace")
    return f"{_slug(metadata.model)}-{digest.hexdigest()}"


def chunk_keys(
    tokens: TokenIds,
    chunk_size: int,
    namespace: str,
    salts: Sequence[str] = (),
    partial: bool = False,
    after: ChunkKey | None = None,
) -> list[ChunkKey]:
    """Give the key of every full chunk of `tokens`, and with `partial` one for the rest that fills none.

    Args:
        tokens: see `as_token_ids`.
        salts: what else changes the bytes of this request, in an order that never varies: LoRA, cache salt,
            hashes and offsets of multimodal parts.
        after: the key of the full chunk in front of `tokens`, with the same salts; None for none.

    Raises:
        RequestError: wrong tokens, `chunk_size` not above 0, or salts that are no list or tuple of texts.
    """
    if chunk_size < 1:
        raise RequestError(f"chunk_size: got {chunk_size}; allowed: 1 or more")
    ids = as_token_ids(tokens).astype("<i8", copy=False)
    stop = len(ids) if partial else len(ids) - len(ids) % chunk_size
    data = memoryview(ids.tobytes())
    parent = _root(namespace, chunk_size, as_salts(salts)) if after is None else after.hash
    keys = []
    for start in range(0, 8 * stop, 8 * chunk_size):
        both = b"".join((parent, data[start : start + 8 * chunk_size]))
        parent = blake2b(both, digest_size=HASH_BYTES, person=b"lwkv chunk").digest()
        keys.append(ChunkKey(namespace, parent))
    return keys


def as_token_ids(tokens: TokenIds) -> Int64s:
    """Give token ids as int64, (T,), on the host; the same ids give the same array whatever they came in.

    An int64 array, or CPU tensor, is not copied. A tensor on a device blocks the host until it is here.

    Raises:
        RequestError: anything else: floats, bools, text, not one dimension, a negative or too large id.
    """
    ids = _to_array(tokens)
    if ids.ndim != 1:
        raise RequestError(f"token ids: got shape {ids.shape}; allowed: {_ANY_IDS}")
    if ids.size and int(ids.min()) < 0:
        raise RequestError(f"token ids: got {int(ids.min())}, or an id above 2**63 - 1; allowed: {_ANY_IDS}")
    return ids


@lru_cache(MOST_ROOTS)
def _root(namespace: str, chunk_size: int, salts: tuple[str, ...]) -> bytes:
    root = _encode([namespace, str(chunk_size), *salts])
    return blake2b(root, digest_size=HASH_BYTES, person=b"lwkv root").digest()


def as_salts(salts: Any) -> tuple[str, ...]:
    """Give salts as they are compared. Raises RequestError for anything but a list or tuple of texts."""
    # A text is a sequence of texts too, and never meant as one.
    if not isinstance(salts, list | tuple) or not all(isinstance(salt, str) for salt in salts):
        raise RequestError(f"salts: got {salts!r}; allowed: a list or tuple of texts")
    return tuple(salts)


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
    raise RequestError(f"token ids: got {got}; allowed: {_ANY_IDS}")


def _encode(parts: Iterable[str]) -> bytes:
    """Write texts one after another so that no two lists of texts give the same bytes."""
    texts = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join([_count(len(texts)), *(_count(len(text)) + text for text in texts)])


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _slug(model: str) -> str:
    """Keep the end of a model's name, where names differ, in characters that are safe everywhere."""
    words = re.sub(r"[^a-z0-9._-]+", "-", model.lower())
    return words[-_SLUG_CHARS:].strip("._-") or "model"
