"""One request as the scheduler's half follows it, in a model with several groups of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lwkv.integrations.vllm.hybrid.prompt_hashes import PromptHashes
from lwkv.integrations.vllm.scheduler.prompt import salts_of

STRIDE = 8
"""Within a long prompt, a window is stored once for so many times its tokens, and a state once for so many
times as much full attention."""


@dataclass(slots=True, eq=False)
class HybridRequest:
    """A request and how far its chunks are taken care of.

    Attributes:
        hashes: of its chunks.
        load: tokens [local, boundary) that are to be loaded in the step that is planned; None for none.
        tables: its blocks when it got them, of each group.
        handled: leading tokens whose chunks were ordered to be stored in this run.
        known: tokens that are known of those that this run has computed; fewer than these by drafts, and by
            what is still being sampled. 0 before its first step.
        parted_at: tokens up to which all of full attention was found when it was asked last: where prompts
            part, others may go on as well.
        failed: how often chunks that were found could not be pinned, or loaded, one time after the other.
        state_at: tokens of the last state that this run has stored, or begins with.
        found_behind: tokens of vLLM's own behind which something was found last; -1: nothing was.
    """

    hashes: PromptHashes
    load: tuple[int, int] | None = None
    handled: int = 0
    known: int = 0
    parted_at: int = 0
    failed: int = 0
    state_at: int = 0
    found_behind: int = -1
    tables: Sequence[Sequence[int]] = field(default=())

    @classmethod
    def follow(cls, request: Any, chunk_size: int, epoch: str) -> HybridRequest:
        return cls(PromptHashes(request, salts_of(request, epoch), chunk_size))

    @property
    def request(self) -> Any:
        """vLLM's own."""
        return self.hashes.request

    def begin(self) -> None:
        """Begin to run: what was ordered in an earlier run may be gone."""
        self.load, self.tables, self.handled, self.known, self.state_at = None, (), 0, 0, 0

    def end_of_stores(self, decodes_too: bool) -> int:
        """Tokens of which chunks are stored: those of the prompt, or all that are known."""
        request = self.request
        known = int(request.num_tokens)
        return known if decodes_too else min(known, int(request.num_prompt_tokens))

    def learn_known(self, computed: int, known: int) -> int:
        """Of a step's `computed` tokens before it, those that were known in the step before; note `known`."""
        before, self.known = min(computed, self.known or computed), known
        return before

    def boundaries(self, computed: int, end: int, most_looked_back: int) -> frozenset[int]:
        """Where others may go on, of the multiples of the chunk size from `computed` to `end`.

        At the end of the prompt, for the same prompt and for one that goes on behind it; where this prompt
        has parted from others; now and then in between; and after every chunk of generated tokens.
        """
        size, prompt = self.hashes.chunk_size, int(self.request.num_prompt_tokens)
        last, stride = prompt // size * size, max(1, -(-STRIDE * most_looked_back // size)) * size
        wanted = {last, (prompt - 1) // size * size, self.parted_at}
        wanted.update(range(-(-computed // stride) * stride, end + 1, stride))
        wanted.update(range(max(last, -(-computed // size) * size), end + 1, size))
        return frozenset(at for at in wanted if max(computed, size) <= at <= end and at % size == 0)

    def state_boundaries(self, computed: int, end: int, worth: int) -> frozenset[int]:
        """`end`, a multiple of the chunk size at which a step ends, if others may go on there; else none.

        A state is there where a step ends, and what other kinds have elsewhere is of no use without it. They
        are stored at the end of the prompt, where it has parted from others, behind generated tokens, and now
        and then in between.

        Args:
            computed: tokens before the step. worth: tokens of as much full attention as a state.
        """
        size, prompt = self.hashes.chunk_size, int(self.request.num_prompt_tokens)
        if not self.handled:
            self.state_at = computed
        # vLLM knows where prompts part in its own cache, and has a step end there.
        parted_at = self.parted_at, int(getattr(self.request, "shared_prefix_boundary", 0)) // size * size
        is_at_end = end >= (prompt - 1) // size * size
        is_wanted = is_at_end or end in parted_at or end - self.state_at >= STRIDE * worth
        if is_wanted:
            self.state_at = end
        return frozenset({end} if is_wanted else ())
