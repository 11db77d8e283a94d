"""Random prompts in little memory of both kinds: models with windows answer as they do without lwkv.

40 prompts of each model run with the other tests; `--soak MINUTES` asks 80 for each minute, and prints what
was found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, Engine, assert_same, prompt, started, with_lwkv
from kinds.kind_strategies import largest_boundary

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has all layers in one group here"
)

PROMPTS_A_MINUTE = 80
MOST_TOKENS = 640
MODELS: dict[str, tuple[Any, ...]] = {
    "gemma 3": (models.write_gemma, 64, "wwf" * 2),
    "gpt-oss": (models.write_gpt_oss, 128),
    "llama 4": (models.write_llama4, 128),
}
BLOCKS = {"gemma 3": 56, "gpt-oss": 56, "llama 4": 42}
"""Of vLLM's: so few that requests wait for them, and lose them."""
STEP_BY_STEP = "gemma 3"
"""With `--no-async-scheduling`: no step is scheduled before the result of the one before has come."""
ROOM_GIB = 5 * 2**20 / 2**30
"""160 pages, each of a chunk in one layer."""
SMALL = {
    "max_local_cpu_size": ROOM_GIB,
    "extra_config": {"slab_bytes": 1 << 20},
    "save_decode_cache": True,
}
TIGHT = {
    "max_model_len": 704,
    "max_num_batched_tokens": 200,
    "max_num_seqs": 4,
}


class Prompts:
    """Turns of conversations that begin with shared documents, grow, and are left."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._open: list[list[int]] = []
        self._seed = seed * 100_000

    def next_batch(self) -> list[list[int]]:
        return [self._next() for _ in range(self._random.randint(1, 4))]

    def _next(self) -> list[int]:
        if len(self._open) < 6 or self._random.random() < 0.2:
            self._open.append(prompt(self._random.randrange(4), self._random.randrange(0, 400)))
            self._open = self._open[-8:]
        number = self._random.randrange(len(self._open))
        self._seed += 1
        turn = self._open[number] + prompt(self._seed, self._random.randrange(1, 150))
        self._open[number] = turn
        if len(turn) > MOST_TOKENS - 150:
            self._open.pop(number)
        return turn[:MOST_TOKENS]


class Watched:
    """What an engine's scheduler finds and stores, each look-up compared with the rule by trying everything.

    Attributes:
        seen: how often something was found, promised and not allocated in the same step, and loaded.
        wanted: by the number of a kind that is not full, all chunks that some stored boundary needs.
    """

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self._groups = self._scheduler._groups
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
        assert found == largest_boundary(kinds, CHUNK, num_tokens, local, flags)
        self.seen["looked up"] += 1
        self.seen["found"] += found > local
        return found

    def matched(self, request: Any, num_local: int) -> int | None:
        answer: int | None = self._matched(request, num_local)
        if answer:
            self.seen["promised and not allocated at once"] += request.request_id in self._promised
            self._promised.add(request.request_id)
        return answer

    def orders(self, output: Any) -> Any:
        found = self._orders(output)
        self.seen["loaded"] += len(found.loads)
        self._promised -= set(output.num_scheduled_tokens)
        for store in found.stores:
            hashes = store.hashes.apart()
            for number, kind in enumerate(self._groups.kinds):
                if kind.form != "full":
                    self.wanted.setdefault(number, set()).update(
                        hashes[chunk]
                        for boundary in store.boundaries
                        for chunk in range(kind.first_needed(boundary) // CHUNK, boundary // CHUNK)
                    )
        return found


@pytest.fixture(scope="module", autouse=True)
def _local_attention_has_groups() -> Iterator[None]:
    """Without this, vLLM has all layers of Llama 4 in one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
        yield


@pytest.mark.parametrize("name", MODELS)
def test_random_prompts_in_little_memory_are_answered_as_without_lwkv(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    write, *shape = MODELS[name]
    model = models.written(write, tmp_path, *shape)
    most = PROMPTS_A_MINUTE * float(request.config.getoption("--soak"))
    computed = Elsewhere(model, enable_prefix_caching=False)
    try:
        blocks, ahead = BLOCKS[name], name != STEP_BY_STEP
        arguments = {"num_gpu_blocks_override": blocks, "async_scheduling": ahead, **TIGHT}
        with started(model, **arguments, **with_lwkv(**SMALL)) as engine:
            watched = Watched(engine)
            asked, tokens, cached = go(engine, computed, most, random.Random(name))
            at_rest(engine, watched)
            stats = engine.worker.engine.stats()
            preempted = engine.metric("vllm:num_preemptions")
            loaded = int(engine.metric("vllm:external_prefix_cache_hits"))
    finally:
        computed.close()
    print(
        f"\n{name}: {asked} prompts of {tokens} tokens, {cached} not computed, {loaded} of them loaded; "
        f"{dict(watched.seen)}, {preempted:.0f} preemptions, {stats['chunks_evicted']} chunks evicted"
    )
    assert watched.seen["loaded"] > 0
    assert loaded > 0
    assert preempted > 0
    assert stats["chunks_evicted"] > 0
    assert watched.seen["promised and not allocated at once"] > 0


def go(engine: Engine, computed: Elsewhere, most: float, chance: random.Random) -> tuple[int, int, int]:
    """Ask prompts, compare; now and then vLLM forgets its own. How many, of how many tokens, not computed."""
    prompts, asked, tokens, cached = Prompts(1), 0, 0, 0
    while asked < most:
        batch, length = prompts.next_batch(), chance.choice([4, 40])
        answers = engine.ask(batch, length)
        assert_same(answers, computed.ask(batch, length))
        asked, tokens = asked + len(batch), tokens + sum(map(len, batch))
        cached += sum(answer.cached for answer in answers)
        if chance.random() < 0.5:
            engine.forget()
    return asked, tokens, cached


def at_rest(engine: Engine, watched: Watched) -> None:
    """Nothing is pinned or under way, and of windows only what boundaries need is kept, in as many bytes."""
    engine.ask([prompt(1, 3)], 1)  # what is not needed any more is given back with the next step
    hybrid = engine.worker.engine
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
        stored = (
            CHUNK
            if kind.form != "window"
            else min(CHUNK, -(-(kind.span - 1) // kind.block_size) * kind.block_size)
        )
        page_tokens = hybrid._piece_tokens[key.kind]
        assert unit.num_pages * page_tokens <= kind.num_layers * stored
    assert sum(kept.values()) == stats["pages_in_use"]
