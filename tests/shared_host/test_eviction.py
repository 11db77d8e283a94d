"""What engines find on one owner with little memory, beside a cache of the same room that all of them use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from shared_host.owners import OwnerThread, owner_at, watched_node
from storage.prefix_oracle import Event, Oracle, a_tree
from storage.rig import NUM_LAYERS, PAGE_BYTES, Rig, values

ENGINES = 3


class Node:
    """Engines on one owner with room for so many chunks."""

    def __init__(self, owner: OwnerThread, rigs: Sequence[Rig]) -> None:
        self.owner = owner
        self.rigs = rigs

    def happen(self, number: int, event: Event) -> None:
        """Have an engine store a prompt in steps, or load what there is of it; its bytes are right."""
        rig, prompt = self.rigs[number], event.prompt
        for end in range(event.step, len(prompt) + event.step, event.step) if event.step else ():
            write = rig.begin(*prompt[:end])
            if write is not None:
                write.commit()
        if not event.step:
            self.load(number, prompt)
        assert rig.host.is_settled()

    def load(self, number: int, prompt: Sequence[int]) -> int:
        """How many chunks of a prompt are found; their bytes are right."""
        rig = self.rigs[number]
        found = rig.lookup(*prompt)
        hold = rig.hold(*prompt)
        assert rig.load(hold) == values(*prompt[:found])
        hold.release()
        assert rig.host.is_settled()
        return found

    def require_no_dead_weight(self, prompts: Sequence[Sequence[int]]) -> None:
        """Each chunk that the owner has is found by some prompt, and nobody holds a page."""
        found = {chunk for prompt in prompts for chunk in prompt[: self.rigs[0].lookup(*prompt)]}
        (index,) = self.owner.server._indexes.values()
        assert len(found) == len(index.tier)
        assert index.pages.references == len(found) * NUM_LAYERS


@contextmanager
def node_of(room: int, engines: int = ENGINES) -> Iterator[Node]:
    with ExitStack() as ending:
        folder = Path(ending.enter_context(TemporaryDirectory()))
        owner = ending.enter_context(owner_at(folder / "host.sock", room * NUM_LAYERS))
        rigs = []
        for _ in range(engines):
            host, pool = ending.enter_context(watched_node(owner, PAGE_BYTES))
            rigs.append(Rig(memory=(pool, host)))
            ending.callback(rigs[-1].manager.close, 30.0)
        yield Node(owner, rigs)


@pytest.mark.parametrize("room", [3, 9, 16])
def test_engines_find_of_every_prompt_what_an_oracle_of_the_owner_s_room_finds(room: int) -> None:
    random, oracle = Random(room), Oracle(room)
    with node_of(room) as node:
        for _ in range(80):
            whole = random.choice(a_tree())
            prompt = whole[: random.randint(1, len(whole))]
            event = Event(prompt, random.choice([0, random.randint(1, 9)]))
            number = random.randrange(ENGINES)
            node.happen(number, event)
            oracle.use(prompt) if event.step else oracle.load(prompt)
            for prompt in a_tree():
                assert node.rigs[number - 1].lookup(*prompt) >= oracle.find(prompt), (event, prompt)
            node.require_no_dead_weight(a_tree())


@pytest.mark.parametrize("room", [1, 5, 16])
@pytest.mark.parametrize("step", [24, 5, 1])
def test_prompts_larger_than_the_memory_that_are_stored_at_once_leave_as_much_as_fits(
    step: int, room: int
) -> None:
    """Each engine has pages of its own at that time: nobody waits, and nothing is kept that nobody finds."""
    prompts = [list(range(100 * number, 100 * number + 24)) for number in range(1, ENGINES + 1)]
    with node_of(room) as node:
        for end in range(step, 24 + step, step):
            begun = [rig.begin(*prompt[:end]) for rig, prompt in zip(node.rigs, prompts, strict=True)]
            for write in begun:
                if write is not None:
                    write.commit()
            assert all(rig.host.is_settled() for rig in node.rigs)
            node.require_no_dead_weight(prompts)
        # Afterwards each engine has all of the memory to itself.
        for number, prompt in enumerate(prompts):
            node.happen(number, Event(tuple(prompt), step))
            assert node.load(number - 1, prompt) == room
