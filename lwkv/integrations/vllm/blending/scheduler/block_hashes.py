"""Keeping blended KV out of vLLM's prefix cache, which finds blocks by hashes of the tokens before them."""

from __future__ import annotations

from hashlib import blake2b
from secrets import token_bytes
from typing import Any


def can_be_salted(request: Any, block_size: int) -> bool:
    """Whether a request has the hashes of all its full blocks in a list, as vLLM 0.22 to 0.32 keep them."""
    hashes = getattr(request, "block_hashes", None)
    return isinstance(hashes, list) and len(hashes) == request.num_tokens // block_size


def salt(request: Any, first: int) -> None:
    """Replace the hashes of a request's blocks from number `first` on by ones that no other request has.

    For before vLLM notes the request's blocks in its cache. Blocks that fill later are hashed behind the last
    of these. There is one at least: else the next would be hashed behind an exact one.
    """
    hashes = request.block_hashes
    if first >= len(hashes):
        raise ValueError(f"block {first} of {len(hashes)} full ones: there is none to be salted")
    secret = token_bytes(16)
    # Of the type that vLLM's own are, and as long.
    hashes[first:] = [
        type(own)(blake2b(own, digest_size=min(len(own), 64), key=secret).digest()) for own in hashes[first:]
    ]
