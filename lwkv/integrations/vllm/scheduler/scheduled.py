"""One request's part in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lwkv.integrations.vllm.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What a step does for a request.

    Attributes:
        begin, computed, in_place: tokens in place before the step, with those that it loads or that came
            while the request waited, and after it.
        blocks: gives vLLM's blocks of the request in this step.
    """

    tracked: RequestState
    begin: int
    computed: int
    in_place: int
    blocks: Callable[[], Sequence[int]]
