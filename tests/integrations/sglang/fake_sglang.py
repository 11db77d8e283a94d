"""SGLang's side of a linker's contract: a scheduler with pages on the device, and a model that checks them.

Its prefix tree is a table of pages by hash: all that a linker sees of a tree are the pages that it lacks.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import Oracle

from lwkv.engine import CacheEngine
from lwkv.integrations.sglang.link import CacheLink


@dataclass
class PoolTransfer:
    """As SGLang's PoolTransfer."""

    keys: list[str] | None = None
    device_indices: torch.Tensor | None = None
    name: str = "kv"


@dataclass(eq=False)
class Prompt:
    """One request: what it asks for, and what it got from where, in pages."""

    rid: str
    tokens: list[int]
    salt: str = ""
    from_device: int = 0
    from_host: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)


def hashes_of(tokens: Sequence[int], page_size: int, salt: str = "") -> list[str]:
    """SHA-256 of every whole page, chained."""
    found, parent = [], hashlib.sha256(salt.encode()).digest() if salt else b""
    for end in range(page_size, len(tokens) + 1, page_size):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[end - page_size : end])
        parent = hashlib.sha256(parent + data).digest()
        found.append(parent.hex())
    return found


class FakeSGLang:
    """One worker. `stream` is what the model computes on; the test's own is the scheduler's.

    Page 0 is SGLang's dummy page, which nobody is given.
    """

    def __init__(
        self,
        oracle: Oracle,
        engine: CacheEngine,
        stream: Any = None,
        num_ranks: int = 1,
        forgets: bool = True,
        drafts: int = 0,
        flush_name: str | None = None,
    ) -> None:
        self.oracle, self.engine, self.platform = oracle, engine, oracle.platform
        self.page = engine.config.chunk_size
        self.stream = stream or self.platform.current_stream(oracle.device)
        self.target_layers = oracle.dims.layers - drafts
        self.link = CacheLink(engine, self.target_layers, num_ranks, stream, forgets, flush_name)
        self.counter = self.link.layer_counter
        self.free = list(range(oracle.dims.slots // self.page - 1, 0, -1))
        self.tree: OrderedDict[str, int] = OrderedDict()
        self.stored: set[str] = set()
        self.pending: list[list[str]] = []
        self.results: list[bool] = []
        self.aborted: list[Prompt] = []
        self.expects_failure = self.is_spoiled = False
        self.others_have = math.inf
        self._count = 0

    def prompt(self, tokens: Sequence[int], salt: str = "") -> Prompt:
        self._count += 1
        return Prompt(f"r{self._count}", list(tokens), salt, hashes=hashes_of(tokens, self.page, salt))

    def run(self, *prompts: Sequence[int], salt: str = "") -> list[Prompt]:
        """One batch, and the scheduler's next tick."""
        batch = [self.prompt(tokens, salt) for tokens in prompts]
        for prompt in batch:
            self.match(prompt)
            self.admit(prompt)
        self.forward(batch)
        self.tick()
        return batch

    def match(self, prompt: Prompt) -> int:
        """Look a waiting request up; as SGLang does, at least one token is left to compute."""
        usable = prompt.hashes[: (len(prompt.tokens) - 1) // self.page]
        prompt.from_device = next((i for i, key in enumerate(usable) if key not in self.tree), len(usable))
        tail = usable[prompt.from_device :]
        lengths = self.link.lookup(prompt.rid, [PoolTransfer(tail)]) if tail else []
        assert lengths == sorted(set(lengths))
        assert not lengths or 0 < lengths[0] <= lengths[-1] <= len(tail)
        # Other ranks may answer less.
        prompt.from_host = max((length for length in lengths if length <= self.others_have), default=0)
        return prompt.from_host

    def admit(self, prompt: Prompt) -> None:
        """Give a request its pages, and have what it was promised loaded."""
        self._touch(prompt.hashes[: prompt.from_device])
        prompt.pages = [self.tree[key] for key in prompt.hashes[: prompt.from_device]]
        if prompt.from_host:
            promised = prompt.hashes[prompt.from_device : prompt.from_device + prompt.from_host]
            pages = self.take(prompt.from_host)
            if self.link.load(prompt.rid, [PoolTransfer(promised, self._slots(pages))]):
                prompt.pages += pages
            else:
                self.free += pages
                prompt.from_host = 0
        rest = -(-len(prompt.tokens) // self.page) - len(prompt.pages)
        prompt.pages += self.take(rest)

    def forward(self, batch: Sequence[Prompt], waits: int = 2) -> None:
        """Compute a batch: every layer reads what was loaded of it, and writes the rest."""
        index = self.link.start_layer_wise_loading()
        assert (index >= 0) == any(prompt.from_host for prompt in batch)
        self.counter.set_consumer(index)
        with self.platform.use_stream(self.stream):
            for layer in range(self.oracle.dims.layers):
                # Drafts compute behind the target, and wait for nothing of their own.
                for _ in range(waits if layer < self.target_layers else 0):
                    self.counter.wait_until(layer)
                for prompt in batch:
                    self._compute(prompt, layer)
        good = self.link.finish_layer_wise_loading(index)
        for prompt in batch:
            if good or not prompt.from_host:
                self._insert(prompt)
            else:
                self._abort(prompt)

    def decode(self, index: int) -> None:
        """A step of decoding, which SGLang gives the number of the prefill it came from."""
        self.counter.set_consumer(index)
        for layer in range(self.oracle.dims.layers):
            self.counter.wait_until(layer)

    def tick(self) -> int:
        """Take what is stored by now, once all that is under way has ended."""
        self.link.num_completed_offloads()
        assert self.link.wait_idle(30)
        assert self.engine.flush()
        done = self.link.num_completed_offloads()
        for _ in range(done):
            self.results.append(self.link.pop_completed_offload())
            keys = self.pending.pop(0)
            self.stored |= set(keys) if self.results[-1] else set()
        return done

    def evict(self, num_pages: int | None = None) -> None:
        """Drop pages from the device, oldest first; the next ones to use them find zeros."""
        locked = {key for keys in self.pending for key in keys}
        for key in [key for key in self.tree if key not in locked][:num_pages]:
            page = self.tree.pop(key)
            self.stored.discard(key)
            with self.platform.use_stream(self.stream):
                self.oracle.zero(self._slots([page]).tolist())
            self.free.append(page)

    def flush(self) -> None:
        """SGLang's flush_cache."""
        self.link.reset()
        self.pending.clear()
        self.evict()

    def take(self, count: int) -> list[int]:
        if len(self.free) < count:
            self.evict(count - len(self.free))
        assert len(self.free) >= count, "the device is too small for this test"
        return [self.free.pop() for _ in range(count)]

    def _compute(self, prompt: Prompt, layer: int) -> None:
        slots, salt = self._slots(prompt.pages).tolist()[: len(prompt.tokens)], prompt.salt or None
        known = (prompt.from_device + prompt.from_host) * self.page
        if known and not self.expects_failure:
            self.oracle.read(prompt.tokens[:known], slots[:known], layer, prompt.rid, salt)
            self.oracle.expect(prompt.tokens[:known], slots[:known], layers=[layer], salt=salt)
        self.oracle.compute(prompt.tokens, [-1] * known + slots[known:], layers=[layer], salt=salt)

    def _insert(self, prompt: Prompt) -> None:
        """Put a request's whole pages into the tree, and give away what is not stored."""
        new = [key for key in prompt.hashes if key not in self.tree]
        for key, page in zip(prompt.hashes, prompt.pages, strict=False):
            if self.tree.setdefault(key, page) != page:
                self.free.append(page)
        self.free += prompt.pages[len(prompt.hashes) :]
        self._touch(prompt.hashes)
        if new:
            indices = self._slots([self.tree[key] for key in new])
            if self.link.offload([PoolTransfer(new, indices)]):
                self.pending.append(new)

    def _abort(self, prompt: Prompt) -> None:
        self.aborted.append(prompt)
        slots = self._slots(prompt.pages)
        self.oracle.forget(slots.cpu(), [True] * len(slots))
        self.free += prompt.pages[prompt.from_device :]

    def _touch(self, hashes: Sequence[str]) -> None:
        # The deepest page is the first to go.
        for key in reversed(hashes):
            self.tree.move_to_end(key)

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        starts = torch.tensor(pages, dtype=torch.int64, device=self.oracle.device).view(-1, 1) * self.page
        return (starts + torch.arange(self.page, device=self.oracle.device)).flatten()
