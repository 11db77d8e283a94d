"""The scheduler's half does what changes, not what runs: counted in hashes and requests looked at."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from integrations.vllm.scheduler.lookup.test_index import Shelf

from lwkv import keys as key_module
from lwkv.benchmarks.vllm_scheduler import CHUNK, Decoding
from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.request_state import RequestState
from lwkv.transfer import Chunking

INFO = RankInfo(0, "model")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every chunk that was hashed."""
    sizes: list[int] = []
    blake2b = key_module.blake2b

    def counts(data: bytes, **arguments: Any) -> Any:
        if arguments["person"] == b"lwkv chunk":
            sizes.append(len(data))
        return blake2b(data, **arguments)

    monkeypatch.setattr(key_module, "blake2b", counts)
    return sizes


class Reads(list[int]):
    """Token ids that note how many were read."""

    read = 0

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        self.read += len(found) if isinstance(item, slice) else 1
        return found


def looked_at(decoding: Decoding) -> list[str]:
    """The requests that the scheduler's half looks at from now on."""
    seen: list[str] = []
    requests = decoding.scheduler._requests
    part = requests._part

    def notes(output: Any, request_id: str, *rest: Any) -> Iterable[Any]:
        seen.append(request_id)
        return part(output, request_id, *rest)

    requests._part = notes  # type: ignore[method-assign]
    return seen


def test_requests_that_only_decode_are_not_looked_at() -> None:
    decoding = Decoding(20, 3 * CHUNK, False)
    seen = looked_at(decoding)
    for _ in range(2 * CHUNK):
        assert not decoding.step().moves_anything
    assert seen == []


def test_with_decoded_tokens_each_request_is_looked_at_when_its_chunk_is_full(hashed: list[int]) -> None:
    decoding = Decoding(5, 3 * CHUNK, True)
    hashed.clear()
    seen = looked_at(decoding)
    stored = 0
    for _ in range(3 * CHUNK):
        stored += len(decoding.step().stores)
    assert stored == 5 * 3
    assert len(seen) == stored
    assert hashed == [16 + 8 * CHUNK] * stored, "a new chunk costs its own tokens"


def test_with_drafts_no_chunk_is_stored_later_than_it_is_full() -> None:
    decoding = Decoding(3, CHUNK, True, num_drafts=3)
    at = [decoding.requests[0].num_tokens for _ in range(4 * CHUNK) if decoding.step(accepted=2).stores]
    chunks = [tokens // CHUNK for tokens in at]
    assert chunks == list(range(chunks[0], chunks[0] + len(chunks)))
    assert len(chunks) >= 3


def test_tokens_are_read_and_hashed_once_however_often_a_prompt_is_asked_for(hashed: list[int]) -> None:
    index = ChunkIndex(1, CHUNK)
    index.introduce(INFO)
    ids = Reads(range(10 * CHUNK))
    request: Any = SimpleNamespace(all_token_ids=ids, num_tokens=len(ids), num_prompt_tokens=len(ids))
    tracked = RequestState.follow(request, Chunking(CHUNK, False), "")
    for end in (3 * CHUNK, CHUNK, 7 * CHUNK + 1, 10 * CHUNK, 10 * CHUNK):
        keys = tracked.chunks.keys(index, end)
        assert keys[0] == key_module.chunk_keys(range(len(keys[0]) * CHUNK), CHUNK, "model")
    hashed.clear()
    tracked.chunks.keys(index, 10 * CHUNK)
    assert (ids.read, hashed) == (10 * CHUNK, [])


def test_the_key_of_a_rest_stands_for_its_tokens_in_whatever_order_keys_are_asked_for() -> None:
    index = ChunkIndex(1, CHUNK, partial=True)
    index.introduce(INFO)
    ids = list(range(5 * CHUNK))
    request: Any = SimpleNamespace(all_token_ids=ids, num_tokens=len(ids), num_prompt_tokens=len(ids))
    tracked = RequestState.follow(request, Chunking(CHUNK, True), "")
    for end in (2 * CHUNK + 3, CHUNK + 1, 2 * CHUNK, CHUNK + 2, 3 * CHUNK + 3, 5 * CHUNK, CHUNK):
        wanted = key_module.chunk_keys(ids[:end], CHUNK, "model", partial=True)
        assert tracked.chunks.keys(index, end) == [wanted]


def test_what_was_given_out_stays_as_it_is_when_the_request_grows() -> None:
    index = ChunkIndex(1, CHUNK)
    index.introduce(INFO)
    ids = list(range(3 * CHUNK))
    request: Any = SimpleNamespace(all_token_ids=ids, num_tokens=len(ids), num_prompt_tokens=len(ids))
    tracked = RequestState.follow(request, Chunking(CHUNK, False), "")
    (span,) = tracked.store(index, 0, 2 * CHUNK)
    move = tracked.move(index, span, [1, 2, 3], CHUNK)
    tracked.store(index, 2 * CHUNK, 3 * CHUNK)
    assert move.tokens.tolist() == ids[: 2 * CHUNK]
    assert move.blocks.tolist() == [1, 2]
    (span,) = tracked.store(index, 2 * CHUNK, 3 * CHUNK) or [span]
    assert np.array_equal(tracked.move(index, span, [1, 2, 3], CHUNK).tokens, ids[: span.num_tokens])


def test_a_waiting_request_is_looked_up_again_only_for_news_of_its_own_chunks() -> None:
    ids = list(range(4 * CHUNK + 1))
    own = key_module.chunk_keys(ids, CHUNK, "model")
    shelf = Shelf(*own[:2])
    index = ChunkIndex(1, CHUNK, open_lower_tiers=lambda _: shelf, clock=lambda: 0.0)
    index.introduce(INFO)
    request: Any = SimpleNamespace(all_token_ids=ids, num_tokens=len(ids))
    tracked = RequestState.follow(request, Chunking(CHUNK, False), "")
    assert tracked.found.hit(index, CHUNK, 0) == 2 * CHUNK
    shelf.asked.clear()
    for number in range(500):
        index.learn(RankReport(INFO, number, kept=[number.to_bytes(16, "big")]))
        assert tracked.found.hit(index, CHUNK, 0) == 2 * CHUNK
    assert shelf.asked == []
    index.learn(RankReport(INFO, 501, kept=[own[2].hash]))
    assert tracked.found.hit(index, CHUNK, 0) == 3 * CHUNK
    shelf.asked.clear()
    index.learn(RankReport(INFO, 502, dropped=[own[2].hash]))
    for number in range(500):  # more than is remembered
        index.learn(RankReport(INFO, number, kept=[number.to_bytes(16, "big")]))
    assert tracked.found.hit(index, CHUNK, 0) == 2 * CHUNK
