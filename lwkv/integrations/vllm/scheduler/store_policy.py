"""Which of a request's tokens are stored at all."""

from __future__ import annotations

from dataclasses import dataclass

from lwkv.integrations.vllm.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """By configuration.

    Attributes:
        stores: whether this vLLM stores anything.
        decodes_too: whether generated tokens are stored.
    """

    stores: bool
    decodes_too: bool

    def end(self, tracked: RequestState, in_place: int) -> int:
        """Those of a request's first `in_place` tokens that are to be stored."""
        if not self.stores:
            return 0
        request = tracked.request
        if tracked.blended_from is not None:
            in_place = min(in_place, tracked.blended_from)
        if self.decodes_too:
            # What comes after the known tokens are drafts, or ids that are still being sampled.
            return min(in_place, int(request.num_tokens))
        return min(in_place, int(request.num_prompt_tokens))
