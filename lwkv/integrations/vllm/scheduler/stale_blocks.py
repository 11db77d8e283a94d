"""Blocks with wrong contents: their load failed, or what they hold depends on such a block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lwkv.integrations.vllm.orders import NULL_BLOCK
from lwkv.integrations.vllm.scheduler.scheduled import ScheduledRequest


class StaleBlocks:
    """Finds requests whose results depend on such blocks, so that none of these is stored.

    vLLM has one request of those that share a block compute it again, and counts it as computed for the
    others, in its prefix cache too. Where that request gets fewer tokens a step, or ends before, the others
    use what was never loaded, and what they compute is wrong too.

    Attributes:
        additions: how often blocks were added. A request whose blocks were tested since is tested again
            only when it gets blocks that others have.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # Of each block, how many leading tokens were computed anew.
        self._computed_anew: dict[int, int] = {}
        self.additions = 0

    def __len__(self) -> int:
        return len(self._computed_anew)

    def add(self, blocks: Iterable[int]) -> None:
        """Add blocks whose contents are wrong, whatever was known of them."""
        blocks = [block for block in blocks if block != NULL_BLOCK]
        self.additions += any(self._computed_anew.get(block) != 0 for block in blocks)
        self._computed_anew.update(dict.fromkeys(blocks, 0))

    def trusted_tokens(self, blocks: Sequence[int]) -> int:
        """Leading tokens of a request in `blocks` that are in no such block."""
        bad = (number for number, block in enumerate(blocks) if block in self._computed_anew)
        return self._block_size * next(bad, len(blocks))

    def concern(self, seen: int, written: Sequence[int]) -> bool:
        """Whether a request has to pass a step that writes `written`; `seen` additions were tested."""
        return bool(self._computed_anew) and (
            seen != self.additions or not self._computed_anew.keys().isdisjoint(written)
        )

    def pass_step(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Remove what a step computes, mark requests that use the others, and add what these compute."""
        for item in scheduled:
            spoiled_from = item.tracked.spoiled_from
            if spoiled_from is not None and item.computed <= spoiled_from:
                item.tracked.spoiled_from = None
        if not self._computed_anew:
            return
        parts = [(item, item.blocks()) for item in scheduled]
        for item, blocks in parts:
            self._take_out(item, blocks)
        before = None
        while before != self.additions:
            # A request may use blocks that another one computes in this very step.
            before = self.additions
            for item, blocks in parts:
                self._mark(item, blocks)
        for item in scheduled:
            item.tracked.tested_after = self.additions

    def _take_out(self, item: ScheduledRequest, blocks: Sequence[int]) -> None:
        size = self._block_size
        first = item.begin // size
        for number, block in enumerate(blocks[first : -(-item.in_place // size)], first):
            anew = self._computed_anew.get(block, size)
            # A block is not correct if what another request left in it, in front of `begin`, is wrong.
            if anew < size and item.begin <= number * size + anew:
                self._computed_anew[block] = max(anew, min(size, item.in_place - number * size))
                if self._computed_anew[block] == size:
                    del self._computed_anew[block]

    def _mark(self, item: ScheduledRequest, blocks: Sequence[int]) -> None:
        size, tracked = self._block_size, item.tracked
        read = blocks[: -(-item.computed // size)]
        if tracked.spoiled_from is None and not self._computed_anew.keys().isdisjoint(read):
            tracked.spoiled_from = next(
                (
                    number * size
                    for number, block in enumerate(read)
                    if self._computed_anew.get(block, size) < min(size, item.computed - number * size)
                ),
                None,
            )
        if tracked.spoiled_from is not None:
            self.add(blocks[item.computed // size : -(-item.in_place // size)])
