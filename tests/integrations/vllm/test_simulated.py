"""The worker that only takes time asks a tier for the same as Prefetches does; what each reads in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.vllm.simulated import Tier, Worker
from storage.rig import keys

from lwkv.integrations.vllm.orders import Fetch, StepOrders, packed
from lwkv.keys import ChunkKey
from lwkv.storage.prefetch import CHUNKS_AT_A_TIME, GROUPS_AT_ONCE, Prefetches

Asked = list[list[ChunkKey]]


class Simulated:
    """The worker of a simulation, whose tier reads one group of chunks after the other."""

    def __init__(self) -> None:
        self.worker = Worker(0, Tier(lambda now: 1e9))
        self.asked: Asked = []
        self.now = 0.0
        self._group = self.worker._group
        self.worker._group = self._noted  # type: ignore[method-assign]

    def begin(self, number: int, prompt: list[ChunkKey], first: int) -> None:
        self._order(StepOrders(1, 0, fetches=[Fetch(number, first, [packed(prompt)])]))

    def release(self, number: int) -> None:
        self._order(StepOrders(1, 0, released=[number]))

    def end_group(self) -> bool:
        """Have the group come that was asked for first; False where none is on its way."""
        coming = [group.ends[-1] for group in self.worker._under_way]
        self.now = min(coming, default=self.now)
        self.worker.pass_until(self.now)
        return bool(coming)

    def ended(self) -> list[int]:
        ended, self.worker._ended = self.worker._ended, []
        return ended

    @property
    def in_vain(self) -> int:
        return self.worker.in_vain

    def _order(self, orders: StepOrders) -> None:
        self.worker.begin(orders, self.now)
        self.worker.pass_until(self.now)  # groups of which all is there

    def _noted(self, group: list[ChunkKey], *more: Any) -> Any:
        self.asked.append(group)
        return self._group(group, *more)


class Held:
    """Chunks of one group, as a Hold, and the call for each that is missing."""

    def __init__(self, found: Sequence[ChunkKey], missing: Sequence[ChunkKey]) -> None:
        self.found = [SimpleNamespace(key=key) for key in found]
        self.missing = list(missing)
        self.is_released = False
        self.calls: list[Future[Any]] = []

    def release(self) -> None:
        self.is_released = True


class Real:
    """Prefetches over a tier whose groups come when the test says so: it reads one chunk at a time."""

    def __init__(self) -> None:
        self.kept: set[ChunkKey] = set()
        self.asked: Asked = []
        self.in_vain = 0
        self.host = self
        self._coming: list[Held] = []
        storage: Any = self
        self.prefetches = Prefetches(storage)

    def begin(self, number: int, prompt: list[ChunkKey], first: int) -> None:
        self.prefetches.begin(number, prompt, first)
        self._settle()

    def release(self, number: int) -> None:
        self.prefetches.release(number)
        self._settle()

    def end_group(self) -> bool:
        if not self._coming:
            return False
        held = self._coming.pop(0)
        read = [key for key, call in zip(held.missing, held.calls, strict=True) if not call.cancelled()]
        if held.is_released:
            self.in_vain += len(read)
        else:
            self.kept.update(read)
        for call in held.calls:
            if not call.cancelled():
                call.set_result(None)
        self._settle()
        return True

    def ended(self) -> list[int]:
        return self.prefetches.ended()

    def note_use(self, prompt: Sequence[ChunkKey]) -> None:
        """Nothing: nothing is evicted here."""

    def hold(self, prompt: Sequence[ChunkKey], first: int, is_noted: bool) -> Held:
        group = list(prompt[first:])
        self.asked.append(group)
        return Held(group, [key for key in group if key not in self.kept])

    def batched_get(self, held: Held, over: Callable[[], object]) -> list[Future[Any]]:
        held.calls = [Future() for _ in held.missing]
        for call in held.calls:
            call.add_done_callback(lambda _: over())
        if held.calls:
            self._coming.append(held)
        return held.calls

    def pin(self, group: Sequence[ChunkKey]) -> list[ChunkKey | None]:
        return [key if key in self.kept else None for key in group]

    def unpin(self, chunks: Sequence[ChunkKey]) -> None:
        """Nothing: nothing is evicted here."""

    def _settle(self) -> None:
        assert self.prefetches._jobs.wait_idle(30.0)
        for held in self._coming[:1]:
            if held.calls[0]._state == "PENDING":
                held.calls[0].set_running_or_notify_cancel()


PROMPTS = st.lists(st.tuples(st.integers(1, 24), st.integers(0, 23), st.booleans()), min_size=1, max_size=4)
STEPS = st.lists(st.sampled_from(["comes", "comes", "comes", "begins", "is released"]), max_size=40)


@given(PROMPTS, STEPS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_simulated_worker_asks_for_the_same_groups_at_the_same_times(
    prompts: list[tuple[int, int, bool]], steps: list[str], random: Any
) -> None:
    """Also where prompts are released: what is read in vain is no more than was asked for at a time."""
    real, simulated = Real(), Simulated()
    both, begun, released = (real, simulated), 0, 0
    for step in [*steps, *["comes"] * 60]:
        if step == "begins" and begun < len(prompts):
            length, first, is_other = prompts[begun]
            prompt = keys(*range(100 * is_other, 100 * is_other + length))
            for one in both:
                one.begin(begun, prompt, min(first, length - 1))
            begun += 1
        elif step == "is released" and begun:
            number = random.randrange(begun)
            released += 1
            for one in both:
                one.release(number)
        elif step == "comes":
            assert len({one.end_group() for one in both}) == 1
        assert simulated.asked == real.asked
        assert real.in_vain <= released, "what is being read"
        assert real.in_vain <= simulated.in_vain <= released * GROUPS_AT_ONCE * CHUNKS_AT_A_TIME
        assert simulated.ended() == real.ended()
    assert simulated.worker.kept == {key.hash for key in real.kept}
    real.prefetches.close()
