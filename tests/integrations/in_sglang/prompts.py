"""Random prompts that share beginnings, in batches of several sizes."""

from __future__ import annotations

import random
from itertools import accumulate

VOCABULARY = range(3, 500)
NUM_PROMPTS = 200


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids; a longer text of a seed begins with a shorter one."""
    drawn = random.Random(seed)
    return [drawn.choice(VOCABULARY) for _ in range(count)]


def _batches() -> list[list[list[int]]]:
    """200 prompts of 1 to 400 tokens: documents in full or in part, most with something new behind them."""
    drawn = random.Random(0)
    documents = [tokens(seed, 300) for seed in range(12)]
    prompts = [
        drawn.choice(documents)[: drawn.randrange(1, 301)] + tokens(1000 + i, drawn.choice([0, 1, 17, 100]))
        for i in range(NUM_PROMPTS)
    ]
    sizes = [1, 7, 2, 12, 3, 5, 10] * 5
    ends = list(accumulate(sizes))
    batches = [prompts[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    assert ends[-1] == NUM_PROMPTS
    return batches


BATCHES = _batches()
DOCUMENTS = [[tokens(2000 + seed, 200)] for seed in range(4)]
ALL_BATCHES = [*BATCHES, *DOCUMENTS]
