"""Which blocks of the paged cache are free."""

from __future__ import annotations

from collections.abc import Iterable

from lwkv.errors import RequestError


class BlockAllocator:
    """A stack of free blocks. The one freed last is taken first, so that a write that comes late is seen."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take blocks off the stack. Raises RequestError, and takes none, if there are fewer than `count`."""
        if count > len(self._free):
            raise RequestError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises RequestError for one that is free already or not of this cache."""
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._is_free[block]:
                raise RequestError(
                    f"block {block} cannot be freed: it is free, or not among {self.num_blocks} blocks"
                )
            self._is_free[block] = True
            self._free.append(block)
