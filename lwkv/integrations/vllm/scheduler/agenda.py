"""Which running requests a step has to look at, of the many that only decode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set


class Agenda:
    """Running requests are awake, and looked at in every step, or asleep for some steps, or for good.

    A request that decodes gets no more than a few tokens a step, so it is known how many steps its next chunk
    takes at least. One that is woken too early is looked at and sleeps on.
    """

    def __init__(self) -> None:
        self._awake: set[str] = set()
        self._due: defaultdict[int, list[str]] = defaultdict(list)
        self._wakes_at: dict[str, int] = {}

    def wake(self, request_id: str) -> None:
        """Look at a request from the next step on."""
        self._wakes_at.pop(request_id, None)
        self._awake.add(request_id)

    def sleep(self, request_id: str, until_step: int | None) -> None:
        """Look at a request in the step of this number, in no earlier one; None for in none."""
        self._awake.discard(request_id)
        self._wakes_at.pop(request_id, None)
        if until_step is not None:
            self._wakes_at[request_id] = until_step
            self._due[until_step].append(request_id)

    def leave(self, request_id: str) -> None:
        """Forget a request."""
        self.sleep(request_id, None)

    def begin_step(self, step: int) -> Set[str]:
        """The requests to look at in a step; steps come in order."""
        for request_id in self._due.pop(step, ()):
            if self._wakes_at.get(request_id) == step:
                self.wake(request_id)
        return self._awake
