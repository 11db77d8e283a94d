"""What a cache finds of prompts if it evicts them from their ends, and histories to compare it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

Prompt = tuple[int, ...]


@dataclass
class Oracle:
    """What a cache of the same room finds that never waits, and loses nothing that there is room for.

    Of `room` chunks it keeps those used last; of one use those nearest to the beginning of the prompt.
    """

    room: int
    last_use: dict[int, tuple[int, int]] = field(default_factory=dict)
    now: int = 0

    def find(self, prompt: Sequence[int]) -> int:
        return next((i for i, chunk in enumerate(prompt) if chunk not in self.last_use), len(prompt))

    def use(self, prompt: Sequence[int]) -> None:
        self.now += 1
        self.last_use |= {chunk: (self.now, -depth) for depth, chunk in enumerate(prompt)}
        kept = sorted(self.last_use, key=lambda chunk: self.last_use[chunk], reverse=True)[: self.room]
        self.last_use = {chunk: self.last_use[chunk] for chunk in kept}

    def load(self, prompt: Sequence[int]) -> None:
        self.use(prompt[: self.find(prompt)])


@dataclass(frozen=True)
class Event:
    """What happens to one prompt: it is stored in steps of `step` chunks, or loaded where that is 0."""

    prompt: Prompt
    step: int


def a_tree() -> list[Prompt]:
    """Prompts that share beginnings of several lengths: numbers are chunks."""
    system, talk = range(10, 14), range(20, 31)
    return [
        (*system, *talk),
        (*system, *talk[:5], 40, 41, 42),
        (*system, 50, 51, 52, 53, 54),
        tuple(range(60, 80)),
        (*range(60, 65), 81, 82),
        (90,),
    ]


@st.composite
def events(draw: st.DrawFn) -> Event:
    prompt = draw(st.sampled_from(a_tree()))
    length = draw(st.integers(1, len(prompt)))
    return Event(prompt[:length], draw(st.integers(0, 9)))
