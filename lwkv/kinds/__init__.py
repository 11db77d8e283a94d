"""Kinds of KV caches in one model, and how far a prompt can go on from what is cached of each."""

from lwkv.kinds.boundary import find_boundary
from lwkv.kinds.chunk_size import ChunkSize, choose_chunk_size
from lwkv.kinds.index import KindIndex
from lwkv.kinds.kind import Kind

__all__ = ["ChunkSize", "Kind", "KindIndex", "choose_chunk_size", "find_boundary"]
