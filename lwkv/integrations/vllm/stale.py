"""Blocks whose load failed and that nobody has computed since."""

from __future__ import annotations

from collections.abc import Sequence, Set

from lwkv.integrations.vllm.scheduled import Scheduled


class StaleBlocks:
    """Finds requests that compute on such blocks, so that nothing of it is stored.

    vLLM has one request of those that share a block compute it again, and counts it as computed for the
    others, in its prefix cache too. Where that request gets fewer tokens a step, or ends before, the others
    run on what was never loaded.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Set[int]) -> None:
        """Learn which loads failed."""
        self._blocks |= blocks

    def pass_step(self, scheduled: Sequence[Scheduled]) -> None:
        """Take out what a step writes, and mark requests that it has compute on the rest."""
        size = self._block_size
        for item in scheduled if self._blocks else ():
            self._blocks.difference_update(item.blocks()[item.begin // size : item.in_place // size])
        for item in scheduled:
            tracked = item.tracked
            if tracked.spoiled_from is not None and item.computed <= tracked.spoiled_from:
                tracked.spoiled_from = None
            if self._blocks and tracked.spoiled_from is None and self._reads(item):
                tracked.spoiled_from = item.computed

    def _reads(self, item: Scheduled) -> bool:
        """Whether the step has a request compute on one of the blocks."""
        return not self._blocks.isdisjoint(item.blocks()[: -(-item.computed // self._block_size)])
