"""From SGLang's hashes of pages to keys of chunks, which are pages."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.keys import HASH_BYTES, ChunkKey


def page_keys(namespace: str, hashes: Sequence[str]) -> list[ChunkKey]:
    """Give the key of every page.

    Args:
        namespace: what SGLang's hashes leave out.
        hashes: SHA-256 in hexadecimal. Each covers the page, all before it, and the request's salt and
            adapter; 128 bits of it are enough, as they are elsewhere in lwkv.
    """
    digests = bytes.fromhex("".join(hashes))
    step = len(digests) // max(len(hashes), 1)
    starts = range(0, len(digests), max(step, 1))
    return [ChunkKey(namespace, digests[start : start + HASH_BYTES]) for start in starts]
