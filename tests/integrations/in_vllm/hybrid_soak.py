"""Random prompts for models with several groups of caches, and what is found and kept meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from integrations.in_vllm.rig import Engine, prompt
from kinds.kind_strategies import largest_boundary


@dataclass(frozen=True)
class Lengths:
    """Tokens of a document with which conversations begin, of a turn, and of a whole prompt, at most."""

    document: int = 400
    turn: int = 150
    prompt: int = 640


SHORT = Lengths()


class Prompts:
    """Turns of conversations that begin with shared documents, grow, and are left."""

    def __init__(self, seed: int, lengths: Lengths = SHORT) -> None:
        self._random = random.Random(seed)
        self._lengths = lengths
        self._open: list[list[int]] = []
        self._seed = seed * 100_000

    def next_batch(self, most: int = 4) -> list[list[int]]:
        return [self._next() for _ in range(self._random.randint(1, most))]

    def _next(self) -> list[int]:
        lengths = self._lengths
        if len(self._open) < 6 or self._random.random() < 0.2:
            self._open.append(prompt(self._random.randrange(4), self._random.randrange(0, lengths.document)))
            self._open = self._open[-8:]
        number = self._random.randrange(len(self._open))
        self._seed += 1
        turn = self._open[number] + prompt(self._seed, self._random.randrange(1, lengths.turn))
        self._open[number] = turn
        if len(turn) > lengths.prompt - lengths.turn:
            self._open.pop(number)
        return turn[: lengths.prompt]


class Watched:
    """What an engine's scheduler finds and stores, each look-up compared with the rule by trying everything.

    Attributes:
        seen: how often something was found, promised, promised and not allocated in the same step, promised
            to a request that had lost its blocks, and loaded; and how many tokens.
        wanted: by the number of a kind that is not full, all chunks that some stored boundary needs.
    """

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self._groups = self._scheduler._groups
        self._chunk = self._groups.chunk_size.tokens
        self._promised: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.wanted: dict[int, set[bytes]] = {}
        self._boundary, self._matched = (
            self._scheduler._index.boundary,
            self._scheduler.num_new_matched_tokens,
        )
        self._orders = self._scheduler.orders
        self._scheduler._index.boundary = self.boundary
        self._scheduler.num_new_matched_tokens = self.matched
        self._scheduler.orders = self.orders

    def boundary(self, hashes: Sequence[bytes], num_tokens: int, local: int = 0) -> int:
        found: int = self._boundary(hashes, num_tokens, local)
        index, kinds = self._scheduler._index, self._groups.kinds
        flags = [
            np.array([chunk in index._everywhere[n] for chunk in hashes], bool) for n in range(len(kinds))
        ]
        assert found == largest_boundary(kinds, self._chunk, num_tokens, local, flags)
        self.seen["looked up"] += 1
        self.seen["found"] += found > local
        return found

    def matched(self, request: Any, num_local: int) -> int | None:
        answer: int | None = self._matched(request, num_local)
        if answer:
            self.seen["promised and not allocated at once"] += request.request_id in self._promised
            self.seen["promised after a preemption"] += bool(request.num_preemptions)
            self._promised.add(request.request_id)
        return answer

    def orders(self, output: Any) -> Any:
        found = self._orders(output)
        apart = {order.request_id for order in found.loads_apart}
        loads = [*found.loads, *found.loads_apart]
        self.seen["loaded"] += len(loads)
        self.seen["tokens loaded"] += sum(order.boundary - order.local for order in loads)
        self._promised -= {*output.num_scheduled_tokens} | apart
        for store in found.stores:
            hashes = store.hashes.apart()
            for number, kind in enumerate(self._groups.kinds):
                if kind.form != "full":
                    self.wanted.setdefault(number, set()).update(
                        hashes[chunk]
                        for boundary in store.boundaries
                        for chunk in range(
                            kind.first_needed(boundary) // self._chunk, boundary // self._chunk
                        )
                    )
        return found


def at_rest(engine: Engine, watched: Watched) -> None:
    """Nothing is pinned or under way.

    Of windows and states only what boundaries need is kept, in as many bytes, and of states no more than
    their share.
    """
    engine.ask([prompt(1, 3)], 1)  # what is not needed any more is given back with the next step
    hybrid = engine.worker.engine
    chunk = hybrid.chunk_size
    assert hybrid.flush(30)
    stats = hybrid.stats()
    assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)
    assert "stores_dropped" not in engine.worker._counters.totals()
    assert stats["pages_in_use"] == stats["page_references"]
    kept = Counter[int]()
    for key, unit in hybrid._tier._units.items():
        kind = hybrid.kinds[key.kind]
        kept[key.kind] += unit.num_pages
        if kind.form != "full":
            assert key.hash in watched.wanted[key.kind]
        if kind.form == "state":
            assert unit.num_pages == kind.num_layers * -(-kind.block_bytes // hybrid.page_bytes)
            continue
        stored = (
            chunk
            if kind.form != "window"
            else min(chunk, -(-(kind.span - 1) // kind.block_size) * kind.block_size)
        )
        page_tokens = hybrid._piece_tokens[key.kind]
        assert unit.num_pages * page_tokens <= kind.num_layers * stored
    assert sum(kept.values()) == stats["pages_in_use"]
    states = sum(pages for number, pages in kept.items() if hybrid.kinds[number].form == "state")
    assert states <= hybrid.max_pages // 4
