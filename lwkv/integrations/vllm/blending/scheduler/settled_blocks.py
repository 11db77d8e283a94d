"""Which tokens of running requests were surely computed before a step begins."""

from __future__ import annotations

from typing import Any


class SettledBlocks:
    """Knows whether a step may read blocks that vLLM's prefix cache gives it before it computes anything.

    vLLM gives blocks of one request to another in the very step that computes them. That is right for its own
    forward pass, in which each layer writes before it reads, and wrong for what reads them before that.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: dict[str, Any] = {}
        self._in_place: dict[str, int] = {}
        self._prefilling: set[str] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def follow(self, request: Any) -> None:
        """Learn of a request."""
        if self._requests.get(request.request_id) is not request:
            self._requests[request.request_id] = request
            self._in_place.pop(request.request_id, None)
            self._prefilling.discard(request.request_id)

    def end(self, request_id: str) -> None:
        """Forget one that has ended."""
        self._requests.pop(request_id, None)
        self._in_place.pop(request_id, None)
        self._prefilling.discard(request_id)

    def pass_step(self, output: Any) -> None:
        """Take what a step of vLLM's scheduler output computes for computed from the next one on."""
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self.note(new.req_id, new.num_computed_tokens + scheduled.get(new.req_id, 0))
        cached = output.scheduled_cached_reqs
        # The many that only decode are settled.
        for name, computed in (
            zip(cached.req_ids, cached.num_computed_tokens, strict=True) if self._prefilling else ()
        ):
            if name in self._prefilling:
                self.note(name, computed + scheduled.get(name, 0))

    def note(self, request_id: str, in_place: int) -> None:
        """Take `in_place` leading tokens of a request for computed from the next step on; 0 as it begins."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._in_place[request_id] = in_place
        if in_place < request.num_prompt_tokens:
            self._prefilling.add(request_id)
        else:
            self._prefilling.discard(request_id)

    def wait(self, request_id: str) -> None:
        """Learn that a request computes nothing: it waits, maybe with blocks for a blend, or ends."""
        self._in_place.pop(request_id, None)
        self._prefilling.discard(request_id)

    def has_others(self, request_id: str) -> bool:
        """Whether other requests than this one are running, or begin to."""
        return len(self._in_place) > (request_id in self._in_place)

    def forget(self) -> None:
        """Take nothing of any running request for computed until it is noted again."""
        self._in_place = dict.fromkeys(self._in_place, 0)
        self._prefilling = set(self._in_place)

    def has(self, request: Any, num_tokens: int) -> bool:
        """Whether no other request may be computing the first `num_tokens` of this one, whole blocks."""
        return not any(
            in_place < num_tokens and self._have_in_common(self._requests[name], request, in_place)
            for name, in_place in self._in_place.items()
            if self._requests[name] is not request
        )

    def _have_in_common(self, one: Any, other: Any, token: int) -> bool:
        """Whether two requests have the block of a token, and so all before it, in common."""
        block = token // self._block_size
        return _hash_at(one, block) == _hash_at(other, block) is not None


def _hash_at(request: Any, block: int) -> bytes | None:
    """What stands for all tokens of a request up to the end of a block; None where it has not as many."""
    hashes = request.block_hashes
    return hashes[block] if block < len(hashes) else None
