"""What a group of layers keeps of a prompt, and what of it a request needs to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from lwkv.errors import ConfigError
from lwkv.platforms.protocol import Int64s

Form: TypeAlias = Literal["full", "window", "local", "state"]

FORMS: tuple[Form, ...] = get_args(Form)
_WITH_SPAN = ("window", "local")


@dataclass(frozen=True)
class Kind:
    """Layers that keep the same of a prompt: one or several of the engine's groups, with equal specs.

    Args:
        form: "full" keeps all tokens (MLA and indexers too); "window" looks back `span` tokens, its own
            included; "local" looks back to the last multiple of `span`; "state" keeps one state, which stands
            for all tokens before it.
        block_size: tokens of a block of the engine; of a state, tokens from one that is kept to the next.
        num_layers: of all groups of this kind, on this rank.
        block_bytes: of one block in one layer, or of one state in one layer, without the engine's padding.
        dtypes: names of what the bytes are.
        span: tokens, for "window" and "local".
        tag: what else decides the bytes, such as the layout of a convolution's state or the backend.

    Raises:
        ConfigError: numbers that no kind has, with the field, the value and what is allowed.
    """

    form: Form
    block_size: int
    num_layers: int
    block_bytes: int
    dtypes: tuple[str, ...] = ()
    span: int = 0
    tag: str = ""

    def __post_init__(self) -> None:
        self._require("form", self.form in FORMS, f"one of {', '.join(FORMS)}")
        for name in ("block_size", "num_layers", "block_bytes"):
            number = getattr(self, name)
            self._require(name, type(number) is int and number >= 1, "a whole number of 1 or more")
        if self.form in _WITH_SPAN:
            self._require("span", type(self.span) is int and self.span >= 1, "a whole number of 1 or more")
        else:
            self._require("span", self.span == 0, f"0 for {self.form!r}")

    @property
    def name(self) -> str:
        """For logs and metrics: "full", "window-1024", "local-8192", "state"."""
        return f"{self.form}-{self.span}" if self.span else self.form

    @property
    def key_part(self) -> str:
        """All by which its pages differ from those of other kinds, for the namespace of their keys."""
        dtypes = "+".join(self.dtypes)
        return f"{self.name} of {self.block_size}: {self.num_layers} x {self.block_bytes} {dtypes} {self.tag}"

    def first_needed(self, boundary: int, local: int = 0) -> int:
        """The token from which on, up to `boundary`, a request must have this kind to go on there.

        Args:
            boundary: a multiple of `block_size`. local: tokens that the engine has of all kinds itself.

        Returns:
            A multiple of `block_size`; `boundary` where nothing is needed.
        """
        return int(self.first_needed_all(np.array([boundary]), local)[0])

    def first_needed_all(self, boundaries: Int64s, local: int = 0) -> Int64s:
        """As `first_needed`, for many boundaries, int64 (n,)."""
        if self.form == "state":
            return np.maximum(boundaries - self.block_size, 0)
        first = np.minimum(np.maximum(self._looks_back_to(boundaries), local), boundaries)
        return first // self.block_size * self.block_size

    def first_stored(self, chunk_start: int, chunk_end: int) -> int:
        """The token of a chunk from which on it is stored; `chunk_end` where nothing of it is ever needed.

        Boundaries are the ends of chunks. The last one that a token can be needed at is no end before
        `chunk_end`, and what `chunk_end` needs is also all that later ones need of this chunk.
        """
        return max(chunk_start, self.first_needed(chunk_end))

    def _looks_back_to(self, boundaries: Int64s) -> Int64s:
        """The first token that the token at each boundary looks back to."""
        if self.form == "window":
            return np.maximum(boundaries - self.span + 1, 0)
        return boundaries - boundaries % self.span if self.form == "local" else np.zeros_like(boundaries)

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"Kind.{name}: got {getattr(self, name)!r}; allowed: {allowed}")
