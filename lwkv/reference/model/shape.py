"""What a Llama-family model looks like, without its weights."""

from __future__ import annotations

from dataclasses import dataclass

from lwkv.errors import ConfigError

ROPE_KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched past the context the model was first trained on.

    `kind` is one of `ROPE_KINDS`. `original_positions` is that first context in tokens (llama3 and yarn).
    `low_freq_factor` and `high_freq_factor` belong to llama3; the last four to yarn, where
    `attention_factor` None means the YaRN paper's 0.1 ln(factor) + 1.

    Raises ConfigError for an unknown kind, a factor under 1 or a missing `original_positions`.
    """

    kind: str
    factor: float
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(
                f"rope scaling {self.kind!r} is not supported; supported are {', '.join(ROPE_KINDS)} and none"
            )
        if self.factor < 1:
            raise ConfigError(f"rope scaling factor must be at least 1, got {self.factor}")
        if self.kind != "linear" and self.original_positions < 1:
            raise ConfigError(
                f"rope scaling {self.kind!r} needs original_positions, got {self.original_positions}"
            )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of one model.

    `rotary_fraction` is the part of a head that is rotated, from its start. `max_positions` is the longest
    request in tokens. `qkv_bias` is Qwen2's, `qk_norm` (an RMS norm over each head of q and k) is Qwen3's.

    Raises ConfigError if the sizes do not fit each other.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int = 8192
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.rotary_size < 2 or self.rotary_size % 2 or self.rotary_size > self.head_size:
            raise ConfigError(
                f"rotary_fraction {self.rotary_fraction} of head_size {self.head_size} rotates "
                f"{self.rotary_size} elements; it must be an even number from 2 to {self.head_size}"
            )

    @property
    def rotary_size(self) -> int:
        return int(self.head_size * self.rotary_fraction)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size
