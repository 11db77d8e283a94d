"""Reference models written down without any of the code under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lwkv.reference import ModelShape
from lwkv.reference.model.random_model import RandomTensors
from lwkv.reference.model.rope import inverse_frequencies, magnitude

KV = tuple[list[Tensor], list[Tensor]]  # a layer's K before it is turned, and V: head by head
# Called with a layer, the computed positions, and the K and V of all tokens.
Keep = Callable[[int, Tensor, KV], Tensor]


class Dense:
    """A model written down plainly: float64, one token's view of all earlier ones, head by head."""

    def __init__(self, shape: ModelShape, source: RandomTensors) -> None:
        self.shape = shape
        self.tensors = {name: source.read(name).double() for name in source.names()}

    def logits(self, tokens: list[int]) -> Tensor:
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for layer in range(self.shape.num_layers):
            x = x + self._attention(f"model.layers.{layer}.", x)
            x = x + self._mlp(f"model.layers.{layer}.", x)
        head = "model.embed_tokens.weight" if self.shape.tied_embeddings else "lm_head.weight"
        return self._norm("model.norm", x) @ self.tensors[head].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x
            / (x.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps).sqrt()
            * self.tensors[name + ".weight"]
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[name + ".weight"].T + self.tensors.get(name + ".bias", 0)

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        x = self._norm(prefix + "post_attention_layernorm", x)
        gate = self._linear(prefix + "mlp.gate_proj", x)
        return self._linear(
            prefix + "mlp.down_proj", gate * gate.sigmoid() * self._linear(prefix + "mlp.up_proj", x)
        )

    def _heads(self, name: str, x: Tensor, rotated: bool) -> list[Tensor]:
        heads = list(self._linear(f"{name}_proj", x).split(self.shape.head_size, dim=-1))
        if self.shape.qk_norm and rotated:
            heads = [self._norm(f"{name}_norm", head) for head in heads]
        return [self._rotate(head) for head in heads] if rotated else heads

    def _rotate(self, head: Tensor) -> Tensor:
        return self._turn(head, torch.arange(len(head)))

    def _turn(self, head: Tensor, positions: Tensor) -> Tensor:
        half = self.shape.rotary_size // 2
        angles = torch.outer(positions.double(), inverse_frequencies(self.shape))
        turn = torch.polar(torch.full_like(angles, magnitude(self.shape)), angles)
        turned = torch.complex(head[:, :half].contiguous(), head[:, half : 2 * half].contiguous()) * turn
        return torch.cat((turned.real, turned.imag, head[:, 2 * half :]), dim=-1)

    def _attention(self, prefix: str, x: Tensor) -> Tensor:
        x = self._norm(prefix + "input_layernorm", x)
        q, k = (self._heads(f"{prefix}self_attn.{name}", x, True) for name in "qk")
        v = self._heads(f"{prefix}self_attn.v", x, False)
        outs = []
        for number, query in enumerate(q):
            kv = number * len(k) // len(q)
            scores = query @ k[kv].T / self.shape.head_size**0.5
            later = torch.ones_like(scores).triu(1).bool()
            outs.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v[kv])
        return self._linear(prefix + "self_attn.o_proj", torch.cat(outs, dim=-1))


class DenseBlend(Dense):
    """Prompts of which some tokens' KV was computed elsewhere: each layer's keys and values put together."""

    def alone(self, tokens: Sequence[int], num_dropped: int) -> list[KV]:
        """Every layer's K and V of `tokens` computed alone, the first `num_dropped` of them left out."""
        found: list[KV] = []
        x = self.tensors["model.embed_tokens.weight"][list(tokens)]
        everywhere = torch.arange(len(tokens))
        for layer in range(self.shape.num_layers):
            k, v = self._kv(layer, x)
            found.append(([head[num_dropped:] for head in k], [head[num_dropped:] for head in v]))
            x = self._blended(layer, x, everywhere, k, v)
        return found

    def blend(
        self,
        tokens: Sequence[int],
        computed: Sequence[int],
        reused: dict[int, list[KV]],
        keep: Keep | None = None,
    ) -> Tensor:
        """Logits of the last token, where only `computed` positions are computed.

        `reused` has the KV of all others, and may have that of these, by the position where it begins. After
        a layer's KV only those of the computed positions go on that `keep` gives, ascending.
        """
        rows = torch.tensor(list(computed))
        x = self.tensors["model.embed_tokens.weight"][[tokens[i] for i in computed]]
        for layer in range(self.shape.num_layers):
            k, v = self._kv(layer, x)
            whole_k = [self._join(len(tokens), rows, k, reused, layer, 0, h) for h in range(len(k))]
            whole_v = [self._join(len(tokens), rows, v, reused, layer, 1, h) for h in range(len(v))]
            if keep is not None:
                kept = keep(layer, rows, (whole_k, whole_v))
                x, rows = x[torch.isin(rows, kept)], kept
            x = self._blended(layer, x, rows, whole_k, whole_v)
        head = "model.embed_tokens.weight" if self.shape.tied_embeddings else "lm_head.weight"
        return self._norm("model.norm", x[-1]) @ self.tensors[head].T

    def _kv(self, layer: int, x: Tensor) -> KV:
        prefix = f"model.layers.{layer}."
        x = self._norm(prefix + "input_layernorm", x)
        return (
            self._plain_heads(f"{prefix}self_attn.k", x, True),
            self._plain_heads(f"{prefix}self_attn.v", x, False),
        )

    def _plain_heads(self, name: str, x: Tensor, normed: bool) -> list[Tensor]:
        heads = list(self._linear(f"{name}_proj", x).split(self.shape.head_size, dim=-1))
        if self.shape.qk_norm and normed:
            heads = [self._norm(f"{name}_norm", head) for head in heads]
        return heads

    def _join(
        self,
        num_tokens: int,
        rows: Tensor,
        own: list[Tensor],
        reused: dict[int, list[KV]],
        layer: int,
        part: int,
        head: int,
    ) -> Tensor:
        whole = torch.full((num_tokens, self.shape.head_size), float("nan"), dtype=torch.float64)
        for start, layers in reused.items():
            kept = layers[layer][part][head]
            whole[start : start + len(kept)] = kept
        whole[rows] = own[head]
        return whole

    def _blended(self, layer: int, x: Tensor, rows: Tensor, k: list[Tensor], v: list[Tensor]) -> Tensor:
        """A layer's output for the rows at positions `rows`, over all keys up to each."""
        prefix = f"model.layers.{layer}."
        normed = self._norm(prefix + "input_layernorm", x)
        places = torch.arange(len(k[0]))
        later, outs = places > rows[:, None], []
        for number, query in enumerate(self._plain_heads(f"{prefix}self_attn.q", normed, True)):
            kv = number * len(k) // self.shape.num_heads
            scores = self._turn(query, rows) @ self._turn(k[kv], places).T / self.shape.head_size**0.5
            outs.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v[kv])
        x = x + self._linear(prefix + "self_attn.o_proj", torch.cat(outs, dim=-1))
        return x + self._mlp(prefix, x)
