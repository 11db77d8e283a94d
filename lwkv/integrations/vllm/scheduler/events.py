"""What came and went, as vLLM publishes it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from lwkv.integrations.vllm.scheduler.kv_events import Removed, Stored

MEDIUM = "CPU"


def as_event(change: Stored | Removed) -> Any:
    """vLLM's event for one chunk; its block is the chunk."""
    if isinstance(change, Removed):
        return BlockRemoved(block_hashes=[change.hash], medium=MEDIUM)
    return BlockStored(
        block_hashes=[change.hash],
        parent_block_hash=change.parent,
        token_ids=list(change.tokens),
        block_size=len(change.tokens),
        lora_id=None,
        medium=MEDIUM,
        lora_name=change.lora,
    )
