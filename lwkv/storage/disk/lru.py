"""When the files of a folder were used, as this process knows it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOUCH_S = 10.0


@dataclass(slots=True)
class Use:
    """When a file was last used, and when the other processes were told of it, in seconds since the epoch."""

    at: float
    told_at: float


class Uses:
    """Names of files, those used longest ago first. Thread-safe."""

    def __init__(self) -> None:
        self._uses: OrderedDict[str, Use] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, name: str, at: float) -> None:
        """Learn of a file that was used then; what is known stays as it is."""
        with self._lock:
            self._uses.setdefault(name, Use(at, at))

    def use(self, names: Sequence[str], now: float) -> list[str]:
        """Note that files are used, the last of them first; return those that others are to be told of."""
        told = []
        with self._lock:
            for name in reversed(names):
                use = self._uses.get(name)
                if use is not None:
                    self._uses.move_to_end(name)
                    use.at = now
                    if now - use.told_at > TOUCH_S:
                        use.told_at = now
                        told.append(name)
        return told

    def forget(self, name: str) -> None:
        with self._lock:
            self._uses.pop(name, None)

    def let_go_first(self, name: str) -> None:
        """Have a file be the next one that is taken."""
        with self._lock:
            self._uses[name] = Use(0.0, 0.0)
            self._uses.move_to_end(name, last=False)

    def take_oldest(self) -> tuple[str, float] | None:
        """Take the file used longest ago out of the order: its name and when that was. None where none is."""
        with self._lock:
            if not self._uses:
                return None
            name, use = self._uses.popitem(last=False)
            return name, use.at

    def renew(self, found: Mapping[str, float]) -> None:
        """Know these files only, used when `found` or this process says, whichever is later."""
        with self._lock:
            uses = {name: Use(at, at) for name, at in found.items()}
            for name, use in uses.items():
                if (known := self._uses.get(name)) is not None:
                    use.at = max(use.at, known.at)
            self._uses = OrderedDict(sorted(uses.items(), key=lambda item: item[1].at))
