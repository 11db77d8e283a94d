"""Which of the reused tokens are computed again: the ways to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.rows import PromptReuse
from lwkv.errors import ConfigError
from lwkv.platforms.protocol import Int64s


@runtime_checkable
class AtStart(Protocol):
    """Chooses before the first layer, from where the tokens stand: all else is never computed."""

    def choose(self, reuse: PromptReuse, budget: int) -> Int64s:
        """Positions of reused tokens, int64 (n,), all different; `budget` of them, unless it knows better."""


@runtime_checkable
class ByChange(Protocol):
    """Chooses at check layers, by how much a token's KV differs there from what was loaded.

    Every reused token is computed up to the first of `layers`; from each on only those chosen there, out of
    those chosen before. `shares` are fractions of all reused tokens.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def shares(self) -> tuple[float, ...]: ...

    @property
    def threshold(self) -> float | None:
        """The least score of a row that is chosen; None for any."""

    def score(self, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensor:
        """How much each row has changed, float32 (rows,); all are (rows, kv heads, head size)."""


@runtime_checkable
class ByAttention(Protocol):
    """Chooses by what the question looks at, having computed it alone up to `layer` over reused KV.

    `first_layer` to `layer` are those whose attention counts.
    """

    @property
    def first_layer(self) -> int: ...

    @property
    def layer(self) -> int: ...


Selector: TypeAlias = "AtStart | ByChange | ByAttention"


@dataclass(frozen=True)
class AllTokens:
    """Everything is computed, as if nothing were cached."""

    def choose(self, reuse: PromptReuse, budget: int) -> Int64s:
        return reuse.candidates


@dataclass(frozen=True)
class NoTokens:
    """Nothing reused is computed: plain reuse, with keys moved to their positions."""

    def choose(self, reuse: PromptReuse, budget: int) -> Int64s:
        return np.zeros(0, np.int64)


@dataclass(frozen=True)
class RandomTokens:
    """As many as the budget allows, drawn with a fixed seed: what a choice has to be better than."""

    seed: int = 0

    def choose(self, reuse: PromptReuse, budget: int) -> Int64s:
        drawn = np.random.default_rng(self.seed).permutation(len(reuse.candidates))[:budget]
        return reuse.candidates[drawn]


@dataclass(frozen=True)
class FirstTokens:
    """The first `count` reused tokens of each segment (EPIC's LegoLink); None for a share of the budget."""

    count: int | None = None

    def choose(self, reuse: PromptReuse, budget: int) -> Int64s:
        starts = np.searchsorted(reuse.candidates, np.array(reuse.segment_starts, np.int64))
        lengths = np.diff(np.append(starts, len(reuse.candidates)))
        within = np.arange(len(reuse.candidates)) - np.repeat(starts, lengths)
        count = budget // max(len(starts), 1) if self.count is None else self.count
        return reuse.candidates[within < count]


@dataclass(frozen=True)
class Deviation:
    """The tokens whose V or K has changed most at the check layers: CacheBlend's choice.

    Args:
        part: "v" or "k".
        layers: check layers, ascending, from 1 on: at layer 0 nothing has changed.
        shares: of the reused tokens, for each check layer; descending shares are gradual filtering.
        threshold: least squared change over the squared length of what was loaded; None for any.

    Raises:
        ConfigError: another part; layers and shares that do not fit; a layer 0; a share outside 0 to 1, or a
            last one of 0 behind others, which would choose tokens to compute none of them.
    """

    part: str = "v"
    layers: tuple[int, ...] = (1,)
    shares: tuple[float, ...] = (0.15,)
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.part not in ("v", "k"):
            raise ConfigError(f"part {self.part!r} cannot be compared; allowed: 'v' or 'k'")
        if not self.layers or self.layers[0] < 1 or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"check layers are {self.layers}; give one or more from 1 on, ascending")
        for share in self.shares:
            require_share("shares", share)
        if len(self.layers) != len(self.shares) or list(self.shares) != sorted(self.shares, reverse=True):
            raise ConfigError(
                f"shares are {self.shares}; give one for each of {self.layers}, none above the last"
            )
        if self.shares[0] > 0 and self.shares[-1] == 0:
            raise ConfigError(
                f"shares are {self.shares}: the last is what is computed; let it be above 0, or all be 0"
            )

    def score(self, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensor:
        new, old = (v.float(), old_v.float()) if self.part == "v" else (k.float(), old_k.float())
        changed = (new - old).square().sum((1, 2))
        return changed if self.threshold is None else changed / old.square().sum((1, 2)).clamp_min(1e-20)


@dataclass(frozen=True)
class QueryAttention:
    """The tokens that the question looks at, in layers `first_layer` to `layer` over the reused KV.

    Where facts are looked up is in the middle of a model: `of` gives layers of a model of so many.
    """

    first_layer: int
    layer: int

    @classmethod
    def of(cls, num_layers: int) -> QueryAttention:
        """The layers to ask in a model of so many."""
        return cls(num_layers // 2, 2 * num_layers // 3)

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer <= self.layer:
            raise ConfigError(
                f"layers {self.first_layer} to {self.layer} are no layers to ask; allowed: 0 <= a <= b"
            )


def configured_selector(name: str, plan: Sequence[tuple[int, float]], num_layers: int) -> Selector:
    """What `blend_selector` means in a model of so many layers.

    Args:
        plan: check layers with their shares, as of `Config.blend_plan`.

    Raises:
        ConfigError: as `Deviation`, or a check layer that the model does not have.
    """
    if name == "query":
        return QueryAttention.of(num_layers)
    if name == "prefix_k":
        return FirstTokens()
    layers, shares = zip(*plan, strict=True)
    if layers[-1] >= num_layers:
        raise ConfigError(
            f"blend_check_layers: got {layers}; allowed are layers 1 to {num_layers - 1} of this model"
        )
    return Deviation("v", layers, shares)


def require_share(name: str, share: float) -> None:
    """Raise ConfigError for what is no part of the reused tokens."""
    if not 0 <= share <= 1:
        raise ConfigError(f"{name}: got {share}; allowed: from 0 for none to 1 for all, so 0.15 for 15 %")


def top(scores: Tensor, always: Tensor, num_kept: int) -> Tensor:
    """The rows that are `always` kept, and as many others of highest score as make `num_kept` in all.

    Returns their numbers, int64 (num_kept,), ascending. Nothing is read back from the device.
    """
    ranked = torch.where(always, torch.inf, torch.nan_to_num(scores, nan=0.0, posinf=3e38))
    return ranked.topk(num_kept).indices.sort().values
