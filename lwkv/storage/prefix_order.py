"""Chunks in eviction order, so that a prefix is evicted from its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class PrefixOrder(Generic[Key]):
    """Chunks in eviction order. Not thread-safe.

    A chunk is of use only with all chunks before it. Those that lack one of them are evicted first: they are
    orphans. The others are evicted by their last use. Using a chunk also uses those before it, and it is
    evicted before them.

    A call takes time by the chunks that it is given and those before them. None looks at all chunks.
    """

    def __init__(self) -> None:
        self._parents: OrderedDict[Key, Key | None] = OrderedDict()  # used longest ago first
        self._children: dict[Key, set[Key]] = {}  # of chunks that are here or not
        self._orphans: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: Key) -> bool:
        return key in self._parents

    def __iter__(self) -> Iterator[Key]:
        """The next to go first. Nothing may be added, used or removed meanwhile."""
        orphans = self._orphans
        if not orphans:
            return iter(self._parents)
        return chain(orphans, (key for key in self._parents if key not in orphans))

    def is_orphan(self, key: Key) -> bool:
        return key in self._orphans

    def by_use(self) -> Iterator[Key]:
        """All chunks, orphans too, those used longest ago first."""
        return iter(self._parents)

    def add(self, key: Key, parent: Key | None) -> None:
        """Have a chunk go last. `parent` is the one before it; None where there is none, or it is not known.

        Of a chunk that is here already its parent is learnt, if it was not known.
        """
        is_new = key not in self._parents
        if not is_new and (parent is None or self._parents[key] is not None):
            return
        self._parents[key] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(key)
        self._note_orphans(key, is_new)

    def add_all(self, keys: Sequence[Key], parents: Sequence[Key | None]) -> None:
        """As `add` of each, without a call for those that are new and lack nothing: somebody waits for it."""
        here, children, orphans = self._parents, self._children, self._orphans
        for key, parent in zip(keys, parents, strict=True):
            lacks_one = parent is not None and (parent not in here or parent in orphans)
            if lacks_one or key in here or key in children:
                self.add(key, parent)
                continue
            here[key] = parent
            if parent is not None:
                children.setdefault(parent, set()).add(key)

    def use(self, keys: Sequence[Key]) -> None:
        """Note that chunks are used, each prompt's first to last, and all that come before them."""
        self._move_to_end(reversed(keys))
        given = set(keys)
        for key in keys:
            parent = self._parents.get(key)
            if parent is not None and parent not in given:
                self._move_to_end(self.before(key))

    @property
    def orphans(self) -> Mapping[Key, None]:
        """Those that lack a chunk before them, the next to go first."""
        return self._orphans

    @property
    def parents(self) -> Mapping[Key, Key | None]:
        """The chunk before each of all that are here, those used longest ago first."""
        return self._parents

    def parent(self, key: Key) -> Key | None:
        """The chunk before one, if both are known."""
        return self._parents.get(key)

    def before(self, key: Key) -> Iterator[Key]:
        """The chunks before one that is here, its parent first, up to one that is not here."""
        seen = {key}
        parent = self._parents.get(key)
        while parent is not None and parent in self._parents and parent not in seen:
            yield parent
            seen.add(parent)
            parent = self._parents[parent]

    def has_behind(self, key: Key) -> bool:
        """Whether a chunk is here whose parent is this one, here or not."""
        return key in self._children

    def behind(self, key: Key) -> list[Key]:
        """The chunks behind one, here or not, those nearest to it first, each up to one that is not here."""
        found, seen = [key], {key}
        for near in found:
            new = [child for child in self._children.get(near, ()) if child not in seen]
            found += new
            seen.update(new)
        return found[1:]

    def remove(self, key: Key) -> None:
        """Forget a chunk, if it is here; all that are behind it are orphans then."""
        if key not in self._parents:
            return
        parent, was_orphan = self._parents.pop(key), key in self._orphans
        self._orphans.pop(key, None)
        if parent is not None:
            self._children[parent].discard(key)
            if not self._children[parent]:
                del self._children[parent]
        # Evicted from their end, chunks have none behind them.
        if not was_orphan and key in self._children:
            self._orphan(self.behind(key))

    def remove_all(self, keys: Sequence[Key]) -> None:
        """As `remove` of each, without a call for those that nothing is behind."""
        here, children, orphans = self._parents, self._children, self._orphans
        for key in keys:
            if key in children or key in orphans:
                self.remove(key)
                continue
            parent = here.pop(key, None)
            if parent is not None:
                beside = children[parent]
                beside.discard(key)
                if not beside:
                    del children[parent]

    def evict_first(self, key: Key) -> None:
        """Have a chunk that is here evicted before all others; those behind it are orphans from here on."""
        self._orphan(self.behind(key))
        self._orphans[key] = None
        self._orphans.move_to_end(key, last=False)

    def _move_to_end(self, keys: Iterator[Key]) -> None:
        parents, orphans = self._parents, self._orphans
        for key in keys:
            if key in parents:
                parents.move_to_end(key)
            if orphans and key in orphans:
                orphans.move_to_end(key)

    def _note_orphans(self, key: Key, is_new: bool) -> None:
        """Note whether a chunk lacks one before it, which is then so for all behind it.

        All that are behind a chunk that is new were orphans so far.
        """
        parent = self._parents[key]
        lacks_one = parent is not None and (parent not in self._parents or parent in self._orphans)
        if lacks_one:
            self._orphan([key] if is_new else [key, *self.behind(key)])
        elif is_new and key in self._children:
            for chunk in self.behind(key):
                self._orphans.pop(chunk, None)

    def _orphan(self, keys: Sequence[Key]) -> None:
        # The deepest are the first to go: they are the last that would be of use again.
        for key in reversed(keys):
            self._orphans.setdefault(key, None)


def leading(found: Sequence[Item | None]) -> list[Item]:
    """Those in front of the first that is None: what a prompt has in a row from its beginning."""
    # In C, as far as it goes: a chunk may be of a single token.
    length = found.index(None) if None in found else len(found)
    return [item for item in found[:length] if item is not None]


def parents_of(keys: Sequence[Key], before: Key | None = None) -> list[Key | None]:
    """The chunk before each of a prompt's chunks in a row; `before` is that before the first, if any."""
    return [before, *keys[:-1]] if keys else []
