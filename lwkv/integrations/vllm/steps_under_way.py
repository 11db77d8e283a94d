"""The steps that vLLM has scheduled and whose results have not come, and what rests on what in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from lwkv.integrations.vllm.orders import NULL_BLOCK


class Table(NamedTuple):
    """A request and its blocks, of one group, in the order of its tokens."""

    request_id: str
    blocks: Sequence[int]


class Spoiled(NamedTuple):
    """Requests that have read blocks without data, and these blocks with all that were computed from them."""

    requests: set[str]
    blocks: set[int]


class StepsUnderWay:
    """Knows the blocks of requests that began in these steps, of those too that have ended since.

    Only such a request can share a block that was loaded in one of these steps: vLLM looks into its prefix
    cache where a request begins.
    """

    def __init__(self) -> None:
        self._steps: deque[Any] = deque()

    def scheduled(self, output: Any) -> None:
        """A step was scheduled: vLLM's scheduler output."""
        self._steps.append(output)

    def result_comes(self, output: Any) -> None:
        """The result of a step has come. Those of steps before it will not come any more."""
        if any(step is output for step in self._steps):
            while self._steps[0] is not output:
                self._steps.popleft()

    def result_came(self, output: Any) -> None:
        """All was done with the result of a step."""
        if self._steps and self._steps[0] is output:
            self._steps.popleft()

    def tables(self) -> list[Table]:
        """The blocks of each request that began in these steps; of one that began again, each time."""
        tables: list[Table] = []
        latest: dict[str, list[int]] = {}
        for step in self._steps:
            for request_id, blocks, anew in _new_blocks(step):
                if anew:
                    latest[request_id] = []
                    tables.append(Table(request_id, latest[request_id]))
                if request_id in latest:
                    latest[request_id] += blocks
        return tables


def spoiled(invalid: Set[int], tables: Iterable[Table]) -> Spoiled:
    """What depends on blocks without data: requests read all their blocks, and compute those behind."""
    tables, found = list(tables), Spoiled(set(), set(invalid))
    before = -1
    while before != len(found.blocks):
        before = len(found.blocks)
        for request_id, blocks in tables:
            first = next((number for number, block in enumerate(blocks) if block in found.blocks), None)
            if first is not None:
                found.requests.add(request_id)
                found.blocks.update(blocks[first:])
        found.blocks.discard(NULL_BLOCK)
    return found


def _new_blocks(step: Any) -> Iterator[tuple[str, Sequence[int], bool]]:
    """The blocks that requests get in a step, of the first group, and whether they begin with these."""
    for new in step.scheduled_new_reqs:
        yield new.req_id, new.block_ids[0], True
    cached = step.scheduled_cached_reqs
    for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield request_id, blocks[0] if blocks else (), request_id in cached.resumed_req_ids
