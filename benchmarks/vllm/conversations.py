"""Conversations whose turns grow, as an agent's do: most of each prompt was computed for the turn before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lwkv.benchmarks.vllm.child import Prompt


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations that take turns. A new turn begins when fewer than `at_once` are being answered.

    Attributes:
        conversations: of which each has as many turns as the others; they come round in order.
        turns: of each conversation.
        first: tokens of the first turn's prompt.
        more: tokens that each later prompt has behind those of the one before.
        answer: tokens that are generated for each.
        at_once: prompts that are answered at a time.
        only: conversation and turn of those that are asked, in this order; all of them by default.
    """

    conversations: int
    turns: int
    first: int
    more: int
    answer: int
    at_once: int
    only: Sequence[tuple[int, int]] | None = None

    def asked(self) -> Iterator[tuple[int, int]]:
        """Conversation and turn of what is asked, in order."""
        if self.only is not None:
            return ((talk, turn) for talk, turn in self.only)
        return ((talk, turn) for turn in range(self.turns) for talk in range(self.conversations))

    @property
    def longest(self) -> int:
        """Tokens of the last prompt of a conversation, and its answer."""
        return self.first + (self.turns - 1) * self.more + self.answer

    def tokens(self, conversation: int, turn: int, vocabulary: int) -> list[int]:
        """The prompt of a turn: that of the turn before, and `more` tokens."""
        whole = Prompt(self.longest, 31_000 + conversation, 0, 0, False).tokens(vocabulary)
        return whole[: self.first + turn * self.more]


@dataclass(slots=True)
class Conversed:
    """What the turns took, in the order in which they were answered: milliseconds and tokens.

    Attributes:
        turns: conversation and turn of each.
        cached: tokens of each prompt that vLLM did not compute.
        prompts: tokens of each prompt.
    """

    turns: list[tuple[int, int]] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def first_by_turn(self) -> dict[tuple[int, int], int]:
        """The first token of each turn's answer."""
        return dict(zip(self.turns, self.first_tokens, strict=True))


class Serves(Protocol):
    """An engine that is stepped: `vllm_load.Server`."""

    @property
    def vocabulary(self) -> int: ...

    def ask(self, tokens: list[int], max_tokens: int, what: str) -> str: ...

    def step(self) -> list[tuple[Any, float]]: ...


class Conversing:
    """Has an engine answer all turns."""

    def __init__(self, server: Serves, plan: Conversations) -> None:
        self._server = server
        self._plan = plan
        self._waiting = deque(plan.asked())
        self._asked: dict[str, tuple[tuple[int, int], float, int]] = {}
        self._result = Conversed()

    def run(self) -> Conversed:
        begin = time.perf_counter()
        while self._waiting or self._asked:
            self._ask()
            for output, now in self._server.step():
                self._note(output, now)
        self._result.seconds = time.perf_counter() - begin
        return self._result

    def _ask(self) -> None:
        # A turn is asked when the one before it was answered: with as many at once, others wait as well.
        while self._waiting and len(self._asked) < self._plan.at_once and not self._is_answered_now():
            talk, turn = self._waiting.popleft()
            tokens = self._plan.tokens(talk, turn, self._server.vocabulary)
            name = self._server.ask(tokens, self._plan.answer, "turn")
            self._asked[name] = (talk, turn), time.perf_counter(), len(tokens)

    def _is_answered_now(self) -> bool:
        """Whether the conversation that comes next still waits for an answer."""
        return any(talk == self._waiting[0][0] for (talk, _), _, _ in self._asked.values())

    def _note(self, output: Any, now: float) -> None:
        turn, asked, length = self._asked[output.request_id]
        if turn not in self._result.turns:
            self._result.turns.append(turn)
            self._result.ttft_ms.append(1e3 * (now - asked))
            self._result.cached.append(output.num_cached_tokens or 0)
            self._result.prompts.append(length)
            self._result.first_tokens.append(int(output.outputs[0].token_ids[0]))
        if len(output.outputs[0].token_ids) >= self._plan.answer:
            del self._asked[output.request_id]
