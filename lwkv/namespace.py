"""The namespace of keys: one text for everything that changes the bytes of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from hashlib import blake2b

from lwkv.metadata import CacheMetadata

FORMAT_VERSION = 1
"""Goes up when the bytes of a page, or what a key is made of, change: older pages are never found then."""

_SLUG_CHARS = 48


def encode(parts: Iterable[str]) -> bytes:
    """Write texts one after another so that no two lists of texts give the same bytes."""
    texts = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join([_count(len(texts)), *(_count(len(text)) + text for text in texts)])


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


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
    digest = blake2b(encode([str(FORMAT_VERSION), *parts]), digest_size=16, person=b"lwkv namespace")
    return f"{_slug(metadata.model)}-{digest.hexdigest()}"


def _slug(model: str) -> str:
    """Keep the end of a model's name, where names differ, in characters that are safe everywhere."""
    words = re.sub(r"[^a-z0-9._-]+", "-", model.lower())
    return words[-_SLUG_CHARS:].strip("._-") or "model"
