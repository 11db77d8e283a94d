"""Orders to move a request's tokens into or out of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.integrations.vllm.orders import Move
from lwkv.integrations.vllm.scheduler.kv_events import KVEventLog
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.request_state import RequestState, TokenRange


class Moves:
    """Writes orders, and notes their chunks for vLLM's KV events.

    Args:
        block_size: tokens of a block of vLLM's block tables.
        events: None where vLLM wants no events.
    """

    def __init__(self, index: ChunkIndex, block_size: int, events: KVEventLog | None) -> None:
        self._index = index
        self._block_size = block_size
        self._events = events

    def num_slots(self, blocks: Sequence[int]) -> int:
        """Tokens that fit into `blocks`."""
        return len(blocks) * self._block_size

    def order(self, tracked: RequestState, blocks: Sequence[int], span: TokenRange) -> Move:
        """The order to move `span` into or out of `blocks`."""
        move = tracked.move(self._index, span, blocks, self._block_size)
        if self._events is not None and move.keys:
            lora = getattr(tracked.request, "lora_request", None)
            keys = tracked.chunks.keys(self._index, span.num_tokens)[0]
            self._events.expect(move, keys, None if lora is None else str(lora.lora_name))
        return move
