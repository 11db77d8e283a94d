"""The slabs of a node's memory: each is cut into pages of one size at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from lwkv.platforms.protocol import Int64s
from lwkv.shared_host.numa import NodeShare

_NOBODY = -1


class SlabUser(Protocol):
    """Whoever cuts slabs into pages of its size; see NodeIndex."""

    def give_up(self, slab: int) -> bool:
        """Have nothing in a slab any more, and return True; False where somebody uses what is in it."""


class SlabOwners:
    """Who has which slab. A slab that nobody has goes to whoever wants one.

    Where there is none, the slab goes that was used longest ago, whoever has it: so sizes share the memory by
    their use, as chunks of one size do. For one thread.

    Args:
        num_bytes: of the memory; its last slab may be smaller.
        shares: whole slabs that are near the same NUMA node.
    """

    def __init__(self, num_bytes: int, slab_bytes: int, shares: Sequence[NodeShare] = ()) -> None:
        self._num_bytes = num_bytes
        self.slab_bytes = slab_bytes
        self._shares = shares
        self._users: list[SlabUser] = []
        self._user_of = np.full(-(-num_bytes // slab_bytes), _NOBODY)
        self._used: Int64s = np.zeros(len(self._user_of), np.int64)
        self._uses = 0

    def __len__(self) -> int:
        return len(self._user_of)

    def pages_of(self, stride: int) -> tuple[int, int]:
        """How many pages of `stride` bytes there can be in all slabs, and in each but the last."""
        whole, rest = divmod(self._num_bytes, self.slab_bytes)
        return whole * (self.slab_bytes // stride) + rest // stride, self.slab_bytes // stride

    def near(self, node: int) -> tuple[int, int] | None:
        """The first slab that is near a NUMA node, and the one behind its last; None where none is."""
        for share in self._shares:
            if share.node.number == node:
                return share.first // self.slab_bytes, -(-share.end // self.slab_bytes)
        return None

    def take(self, user: SlabUser, end: int, first: int = 0) -> int | None:
        """Give `user` the first of the slabs [first, end) that nobody has; None where there is none."""
        free = np.flatnonzero(self._user_of[first:end] == _NOBODY)
        if not len(free):
            return None
        slab = first + int(free[0])
        self._give(slab, user)
        return slab

    def use(self, slabs: Iterable[int]) -> None:
        """Note that slabs are used."""
        self._uses += 1
        for slab in slabs:
            self._used[slab] = self._uses

    def take_oldest(self, user: SlabUser, only_older: bool) -> int | None:
        """Give `user` a slab of another one that can give it up, that which was used longest ago.

        Args:
            only_older: not those that were used after the oldest one of `user` itself.
        """
        number = self._number_of(user)
        own = self._used[self._user_of == number]
        newest = int(own.min()) if len(own) and only_older else self._uses + 1
        others = (self._user_of != number) & (self._user_of != _NOBODY) & (self._used < newest)
        slabs = np.flatnonzero(others)
        for slab in slabs[np.argsort(self._used[slabs], kind="stable")].tolist():
            if self._users[self._user_of[slab]].give_up(slab):
                self._give(slab, user)
                return int(slab)
        return None

    def leave(self, user: SlabUser) -> None:
        """Take back all slabs of a user that has nothing in them."""
        self._user_of[self._user_of == self._number_of(user)] = _NOBODY

    def _give(self, slab: int, user: SlabUser) -> None:
        self._user_of[slab] = self._number_of(user)
        self.use([slab])

    def _number_of(self, user: SlabUser) -> int:
        if user not in self._users:
            self._users.append(user)
        return self._users.index(user)
