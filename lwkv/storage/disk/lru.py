"""When the files of a folder were used, as this process knows it, and which of them is to go next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from lwkv.storage.prefix_order import PrefixOrder, parents_of

TOUCH_S = 10.0
STEP_S = 1e-6
"""By so much a chunk is older than the one before it, so that the order survives in the files' times."""
COMPLETE_S = 10.0
"""So long a chunk may lack the one before it: several are written at a time."""
MOST_LINKS = 16384


@dataclass(slots=True)
class FileUse:
    """When a file was last used, and the time set on it for other processes; in seconds since the epoch."""

    at: float
    file_time: float


class Spared(NamedTuple):
    """What is not to be evicted: files of these names, and `orphans` whose parent may be on its way."""

    names: Collection[str] = ()
    orphans: bool = False


class Uses:
    """Names of files in PrefixOrder, a prompt's last chunk first. Thread-safe.

    Other processes, and this one after a restart, know a file's last use by its time. It is never later than
    that of the chunk before it, and may be `TOUCH_S` seconds too early.
    """

    def __init__(self) -> None:
        self._uses: dict[str, FileUse] = {}
        self._order: PrefixOrder[str] = PrefixOrder()
        # The parents of files that are not here: named lately, about to be written, or just gone.
        self._links: OrderedDict[str, str | None] = OrderedDict()
        self._latest = 0.0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, name: str, at: float) -> None:
        """Learn of a file that was used then; what is known stays as it is."""
        with self._lock:
            if name not in self._uses:
                self._uses[name] = FileUse(at, at)
                self._order.add(name, self._links.pop(name, None))

    def follow(self, prompt: Sequence[str], now: float) -> dict[str, float]:
        """Note that the files of chunks in a row are used; return the times to set on files, by name."""
        with self._lock:
            for name, parent in zip(prompt, parents_of(prompt), strict=True):
                if name in self._uses:
                    self._order.add(name, parent)
                elif parent is not None:
                    self._link(name, parent)
            return self._use(prompt, now)

    def time_for(self, name: str, now: float) -> float:
        """The time that a new file is to have."""
        with self._lock:
            row = self._with_before([name])
            latest = self._not_before(now) - STEP_S * (len(row) - 1)
            for distance, before in enumerate(reversed(row[:-1]), 1):
                if (use := self._uses.get(before)) is not None:
                    return min(latest, use.file_time - STEP_S * distance)
            return latest

    def before(self, name: str) -> set[str]:
        """The names of the chunks before one, as far as is known, whether they have files or not."""
        with self._lock:
            return set(self._with_before([name])[:-1])

    def unknown(self, names: Collection[str]) -> list[str]:
        """Those of which no file is known."""
        with self._lock:
            return [name for name in names if name not in self._uses]

    def forget(self, name: str) -> None:
        with self._lock:
            self._remove(name)

    def evict_first(self, name: str) -> None:
        """Have a file be the next one that is taken."""
        with self._lock:
            self._uses[name] = FileUse(0.0, 0.0)
            self._order.add(name, None)
            self._order.evict_first(name)

    def take_oldest(self, spared: Spared, now: float) -> tuple[str, float] | None:
        """Take the file that is to go next out of the order: its name and when it was used. None for none."""
        with self._lock:
            latest = self._not_before(now) - COMPLETE_S
            useless = (name for name in self._order.orphans if self._uses[name].at <= latest)
            others = (
                name
                for name in self._order.by_use()
                if not (spared.orphans and self._order.is_orphan(name) and self._uses[name].at > latest)
            )
            name = next((name for name in chain(useless, others) if name not in spared.names), None)
            return None if name is None else (name, self._remove(name).at)

    def renew(self, found: Mapping[str, float]) -> None:
        """Know these files only, used when `found` or this process says, whichever is later."""
        with self._lock:
            former, self._uses = self._uses, {name: FileUse(at, at) for name, at in found.items()}
            for name, use in self._uses.items():
                if (known := former.get(name)) is not None:
                    use.at = max(use.at, known.at)
            order, self._order = self._order, PrefixOrder()
            for name in sorted(self._uses, key=lambda name: self._uses[name].at):
                self._order.add(name, order.parent(name) or self._links.pop(name, None))
                if not self._uses[name].at:
                    self._order.evict_first(name)

    def _use(self, prompt: Sequence[str], now: float) -> dict[str, float]:
        row = self._with_before(prompt)
        self._order.use(row)
        now = latest = self._not_before(now)
        times = {}
        for depth, name in enumerate(row):
            if (use := self._uses.get(name)) is not None:
                use.at = now - STEP_S * depth
                if not (now - TOUCH_S <= use.file_time <= latest):
                    times[name] = use.file_time = latest
                latest = use.file_time
            latest -= STEP_S
        return times

    def _with_before(self, prompt: Sequence[str]) -> list[str]:
        """Chunks in a row with all that are known to come before them."""
        before: dict[str, None] = {}
        name = self._parent(prompt[0])
        while name is not None and name not in before:
            before[name] = None
            name = self._parent(name)
        return [*reversed(before), *prompt]

    def _parent(self, name: str) -> str | None:
        return self._order.parent(name) or self._links.get(name)

    def _not_before(self, now: float) -> float:
        """`now`, which does not go back."""
        self._latest = max(self._latest, now)
        return self._latest

    def _remove(self, name: str) -> FileUse:
        # It may come again: another process has used it, or it is written anew.
        if (parent := self._order.parent(name)) is not None:
            self._link(name, parent)
        self._order.remove(name)
        return self._uses.pop(name, FileUse(0.0, 0.0))

    def _link(self, name: str, parent: str) -> None:
        self._links[name] = parent
        self._links.move_to_end(name)
        if len(self._links) > MOST_LINKS:
            self._links.popitem(last=False)
