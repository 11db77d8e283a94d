"""From SGLang's hashes of pages to keys of chunks, which are pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from struct import iter_unpack

from lwkv.keys import HASH_BYTES, ChunkKey

# As ChunkKey._make, in a third of the time: where a page is one token, there is a key for every token.
_as_key = partial(tuple.__new__, ChunkKey)


def page_keys(namespace: str, hashes: Sequence[str]) -> list[ChunkKey]:
    """Give the key of every page.

    Args:
        namespace: what SGLang's hashes leave out.
        hashes: SHA-256 in hexadecimal. Each covers the page, all before it, and the request's salt and
            adapter; 128 bits of it are enough, as they are elsewhere in lwkv.
    """
    if not hashes:
        return []
    return list(map(_as_key, zip(repeat(namespace), _digests(hashes), strict=False)))


def _digests(hashes: Sequence[str]) -> Iterator[bytes]:
    """The first HASH_BYTES bytes of each."""
    data = bytes.fromhex("".join(hashes))
    rest = len(data) // len(hashes) - HASH_BYTES
    return chain.from_iterable(iter_unpack(f"{HASH_BYTES}s{rest}x", data))
