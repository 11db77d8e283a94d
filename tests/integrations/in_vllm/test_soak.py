"""A long random run, little memory, a disk and a server that is killed and frozen: right answers and hits.

Half a minute of it runs with the other tests; `--soak MINUTES` runs longer, and prints what was found.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
import torch
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, Answer, assert_same, prompt, started, with_lwkv
from integrations.in_vllm.trouble import Trouble
from storage.servers import Server, redis_server, running, valkey_program

LAYERS = 4
REPORT_S = 300
BFLOAT16_TOLERANCE = 0.1
LEAST_PROMPTS = 20
"""However slow this machine is: the tokens of these do not all have room on disk."""
FAULT_FREE_SHARE = 0.95
"""Of the hits of an oracle with the disk's room: headers take some of the disk's room, and so do drafts."""


def assert_near(answers: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    """The same tokens, with nearly the same log-probabilities, up to two tokens that are as likely."""
    for answer, other in zip(answers, wanted, strict=True):
        assert len(answer.tokens) == len(other.tokens)
        for token, at, token_wanted, at_wanted in zip(
            answer.tokens, answer.logprobs, other.tokens, other.logprobs, strict=True
        ):
            assert abs(at - at_wanted) < BFLOAT16_TOLERANCE, (
                f"{token} has {at}, {token_wanted} had {at_wanted}"
            )
            if token != token_wanted:
                break


class Rooms(NamedTuple):
    """Chunks that each tier has room for.

    The server's is about: what its 24 MB hold of raw pages beside what it needs for itself.
    """

    host: int
    disk: int
    server: int


class Pages(NamedTuple):
    """How an engine keeps its KV: the model's dtype, tokens of a chunk, and bytes that a page takes.

    `compare` says whether answers are those wanted; in bfloat16 they depend on how batches are cut.
    """

    codec: str
    dtype: str
    chunk: int
    page_bytes: int
    compare: Callable[[Sequence[Answer], Sequence[Answer]], None]

    @property
    def chunk_gib(self) -> float:
        return LAYERS * self.page_bytes / 2**30

    @property
    def rooms(self) -> Rooms:
        """Chunks of as many tokens, whatever a chunk has."""
        host, disk, server = (number * CHUNK // self.chunk for number in (24, 80, 140))
        return Rooms(host, disk, server)


RAW = Pages("raw", "float32", CHUNK, CHUNK * 2 * 2 * 32 * 4, assert_same)
LOSSLESS = Pages("lossless", "bfloat16", 2 * CHUNK, 7 * 4096, assert_near)
"""A raw page would be 8 * 4096: docs/page-format.md has the sizes. With CHUNK tokens, pages do not shrink."""


class PrefixOracle:
    """The hits of a cache with room for `num_chunks` that drops the least recently used end of a prefix."""

    def __init__(self, num_chunks: int, chunk: int) -> None:
        self._room = num_chunks
        self._chunk = chunk
        self._used: dict[tuple[int, ...], int] = {}
        self._children: Counter[tuple[int, ...]] = Counter()
        self._now = 0

    def ask(self, ids: list[int]) -> int:
        """How many leading tokens of a prompt are there; afterwards all its full chunks have been used."""
        self._now += 1
        ends = range(self._chunk, len(ids) + 1, self._chunk)
        prefixes = [tuple(ids[:end]) for end in ends]
        found = next((i for i, prefix in enumerate(prefixes) if prefix not in self._used), len(prefixes))
        for prefix in prefixes:
            if prefix not in self._used:
                self._children[prefix[: -self._chunk]] += 1
            self._used[prefix] = self._now
        while len(self._used) > self._room:
            self._evict()
        return found * self._chunk

    def _evict(self) -> None:
        ends = (prefix for prefix in self._used if not self._children[prefix])
        oldest = min(ends, key=lambda prefix: (self._used[prefix], -len(prefix)))
        del self._used[oldest]
        self._children[oldest[: -self._chunk]] -= 1


class Conversations:
    """Random prompts: turns of conversations that grow, begin with shared documents, and are left."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._open: list[list[int]] = []
        self._seed = seed * 100_000

    def next_batch(self, most: int) -> list[list[int]]:
        return [self._next() for _ in range(self._random.randint(1, most))]

    def _next(self) -> list[int]:
        if len(self._open) < 12 or self._random.random() < 0.2:
            document = prompt(self._random.randrange(6), self._random.randrange(0, 700))
            self._open.append(document)
            self._open = self._open[-16:]
        number = self._random.randrange(len(self._open))
        self._seed += 1
        self._open[number] = self._open[number] + prompt(self._seed, self._random.randrange(1, 200))
        if len(self._open[number]) > 1500:
            return self._open.pop(number)
        return self._open[number]


def trouble_with(server: Server, seed: int) -> Trouble:
    """Kills and freezes a server now and then, and has it go on."""
    faults = {"freeze": (server.freeze, server.thaw), "kill": (server.kill, server.start)}
    return Trouble(faults, seed, quiet_s=(1, 12), lasting_s=(0.1, 5))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    room = ("--maxmemory", "24mb", "--maxmemory-policy", "volatile-ttl")
    server = redis_server(valkey_program(), tmp_path / "server", *room)
    with running(server):
        yield server


def settings_for(pages: Pages, server: Server, disk: Path, share: float = 1.0) -> dict[str, object]:
    """Room for so many chunks in host memory and on disk, of which a rank has `share`, and a server."""
    host_gib, disk_gib = pages.rooms.host * pages.chunk_gib * share, pages.rooms.disk * pages.chunk_gib
    return {
        "chunk_size": pages.chunk,
        "page_codec": pages.codec,
        "max_local_cpu_size": host_gib,
        "local_disk": str(disk),
        "max_local_disk_size": disk_gib,
        "remote_url": f"valkey://127.0.0.1:{server.port}",
        "extra_config": {"slab_bytes": int(host_gib * 2**30) // 4},
    }


SMALL_STEPS = {"enable_prefix_caching": False, "max_num_batched_tokens": 256}


def long_run(
    model: Path, plain: Elsewhere, pages: Pages, server: Server, folder: Path, minutes: float
) -> None:
    settings = settings_for(pages, server, folder / "disk")
    settings["max_local_disk_size"] = pages.rooms.disk * pages.chunk_gib * 1.1
    conversations = Conversations(seed=1)
    calm, troubled = Run("calm", conversations, pages), Run("troubled", conversations, pages)
    with started(model, **with_lwkv(**settings) | SMALL_STEPS, dtype=pages.dtype) as engine:
        assert engine.worker.engine.connector.codec.name == pages.codec
        # Each prompt alone, and the server well: what is found is at least what the disk's room allows.
        calm.go(engine, plain, minutes * 20, most_together=1)
        troubled.oracles = calm.oracles
        with trouble_with(server, seed=2) as trouble:
            troubled.go(engine, plain, minutes * 40, most_together=4)
        engine.at_rest()
        stats = engine.worker.engine.stats()
    print(f"\n{calm.summary()}\n{troubled.summary()}\ntroubles {dict(trouble.done)}; {stats}")
    assert calm.share(pages.rooms.disk) >= FAULT_FREE_SHARE
    assert not stats.get("chunks_not_coded", 0)


def test_a_long_run_with_failing_tiers_gives_right_answers_and_the_hits_that_its_room_allows(
    llama: Path, plain: Elsewhere, server: Server, tmp_path: Path, minutes: float
) -> None:
    long_run(llama, plain, RAW, server, tmp_path, minutes)


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(),
    reason="blocks of bfloat16 are packed for AMX, in no rows that are known",
)
def test_the_same_with_lossless_pages_and_the_hits_of_the_room_that_these_take(
    llama: Path, server: Server, tmp_path: Path, minutes: float
) -> None:
    plain = Elsewhere(llama, enable_prefix_caching=False, dtype=LOSSLESS.dtype)
    try:
        long_run(llama, plain, LOSSLESS, server, tmp_path, minutes / 2)
    finally:
        plain.close()


def test_two_ranks_answer_right_while_their_tiers_fail(
    llama: Path, plain: Elsewhere, server: Server, tmp_path: Path, minutes: float
) -> None:
    settings = settings_for(RAW, server, tmp_path / "disk", share=0.5)  # each rank has half of the heads
    ranks = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    engine = Elsewhere(llama, {}, **with_lwkv(**settings) | SMALL_STEPS, **ranks)
    run = Run("two ranks", Conversations(seed=3), RAW)
    try:
        engine.call("ask", [prompt(1, 40)])  # it has started then
        with trouble_with(server, seed=4) as trouble:
            run.go(TwoRanks(engine), plain, minutes * 30, most_together=4)
    finally:
        engine.close()
    print(f"\n{run.summary()}\ntroubles {dict(trouble.done)}")
    # Workers of their own cannot be waited for, and what failed is not there: there are hits, at least.
    assert run.share(RAW.rooms.host) > 0


class Asked(Protocol):
    """What is asked: an engine here, or one in processes of its own."""

    def ask(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]: ...

    def flush(self) -> object: ...


class TwoRanks:
    """An engine whose workers are in processes of their own."""

    def __init__(self, engine: Elsewhere) -> None:
        self._engine = engine

    def ask(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
        answers: list[Answer] = self._engine.call("ask", prompts, max_tokens)
        return answers

    def flush(self) -> None: ...


class Run:
    """Prompts, their answers compared, and the tokens that were found beside what oracles find."""

    def __init__(self, name: str, conversations: Conversations, pages: Pages) -> None:
        self._name = name
        self._conversations = conversations
        self._pages = pages
        self.oracles = {room: PrefixOracle(room, pages.chunk) for room in pages.rooms}
        self._batches = self._prompts = self._tokens = self._found = 0
        self._wanted: Counter[int] = Counter()

    def share(self, room: int) -> float:
        """What was found, of what an oracle with room for so many chunks finds."""
        return self._found / max(self._wanted[room], 1)

    def go(self, engine: Asked, plain: Elsewhere, seconds: float, most_together: int) -> None:
        now = time.monotonic()
        end, next_report = now + seconds, now + REPORT_S
        while (now := time.monotonic()) < end or self._prompts < LEAST_PROMPTS:
            batch = self._conversations.next_batch(most_together)
            answers: list[Answer] = engine.ask(batch, max_tokens=4)
            self._pages.compare(answers, plain.ask(batch, max_tokens=4))
            engine.flush()
            self._count(batch, answers)
            if now >= next_report:
                print(f"\n{self.summary()}", flush=True)
                next_report = now + REPORT_S

    def summary(self) -> str:
        oracles = ", ".join(
            f"{self._wanted[room]} by an oracle with room for {room} chunks ({self.share(room):.3f})"
            for room in self.oracles
        )
        return (
            f"{self._name}: {self._batches} batches, {self._prompts} prompts, {self._tokens} tokens asked, "
            f"{self._found} found; {oracles}"
        )

    def _count(self, batch: list[list[int]], answers: list[Answer]) -> None:
        chunk = self._pages.chunk
        self._batches += 1
        self._prompts += len(batch)
        for ids, answer in zip(batch, answers, strict=True):
            self._tokens += len(ids)
            self._found += answer.cached
            for room, oracle in self.oracles.items():
                # At least one token is computed, so a whole prompt is never found.
                self._wanted[room] += min(oracle.ask(ids), (len(ids) - 1) // chunk * chunk)
