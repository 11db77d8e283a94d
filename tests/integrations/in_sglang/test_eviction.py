"""Hits in a real SGLang, prompt by prompt, are those of a cache that drops the page used longest ago."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from pathlib import Path

from integrations.in_sglang.prompts import tokens
from integrations.in_sglang.rig import PAGE, Engine, started, with_lwkv

DOCUMENTS = [tokens(3000 + seed, 300) for seed in range(8)]
NUM_PROMPTS = 40
SHORT = tokens(4000, 3)
"""A prompt of no whole page, during which SGLang hands over all that is to be stored."""


def prompts() -> list[list[int]]:
    """A part of a document, and sometimes more; no answer fills the last page."""
    drawn, found = random.Random(6), []
    for number in range(NUM_PROMPTS):
        prompt = drawn.choice(DOCUMENTS)[: drawn.randrange(1, 19) * PAGE]
        prompt = prompt + tokens(5000 + number, drawn.choice([0, 0, PAGE, 3 * PAGE]))
        found.append(prompt + tokens(6000 + number, drawn.randrange(1, PAGE - 3)))
    return found


class LastUsed:
    """So many pages; of a prompt the last one is dropped first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._pages: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def ask(self, prompt: list[int]) -> int:
        """How many tokens of a prompt are found; then all of its whole pages are here."""
        pages = [tuple(prompt[:end]) for end in range(PAGE, len(prompt) + 1, PAGE)]
        found = next((i for i, page in enumerate(pages) if page not in self._pages), len(pages))
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._room:
            self._pages.popitem(last=False)
        return found * PAGE


def test_hits_are_those_of_a_cache_of_the_same_room(llama: Path) -> None:
    # In host memory a page takes 32 KiB: 65 pages, of which all documents have 144.
    with started(llama, **with_lwkv(max_local_cpu_size=0.002)) as engine:
        oracle = LastUsed(room_of(engine))
        expected, found = [], []
        for prompt in prompts():
            expected.append(oracle.ask(prompt))
            (answer,) = engine.ask([prompt])
            assert answer.from_device == 0
            found.append(answer.from_host)
            engine.ask([SHORT])
            engine.flush()
    assert found == expected
    assert 0 < sum(found) < sum(len(prompt) // PAGE * PAGE for prompt in prompts())


def room_of(engine: Engine) -> int:
    """How many of SGLang's pages lwkv says that it has room for."""
    said = re.search(rf"for (\d+) chunks of {PAGE} tokens", engine.log)
    assert said is not None, engine.log
    return int(said[1])
