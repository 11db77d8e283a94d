"""A model's tensors by their Hugging Face names, and a model made of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from lwkv.errors import ConfigError
from lwkv.reference.model.llama import LayerWeights, Model, ModelWeights
from lwkv.reference.model.shape import ModelShape

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class TensorSource(Protocol):
    """Where tensors come from: a folder, a file, a random generator."""

    def names(self) -> set[str]: ...

    def read(self, name: str) -> Tensor:
        """Read one tensor of `names()`, on any device and of any float dtype."""


def tensor_dims(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """List every tensor that a model of this shape consists of, with its dimensions."""
    dims: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        dims |= {_prefix(layer) + name: size for name, size in _layer_dims(shape).items()}
    dims[NORM] = (shape.hidden_size,)
    if not shape.tied_embeddings:
        dims[HEAD] = dims[EMBEDDING]
    return dims


def assemble(
    shape: ModelShape, source: TensorSource, *, device: torch.device | str, dtype: torch.dtype
) -> Model:
    """Make a model of a source's tensors, converted to one device and dtype.

    Raises ConfigError if a tensor is missing, has other dimensions, or is of no known use: a model that
    needs more than this one has would compute something else.
    """
    dims = tensor_dims(shape)
    _check_names(set(dims), source.names())

    def take(name: str) -> Tensor:
        tensor = source.read(name)
        if tuple(tensor.shape) != dims[name]:
            raise ConfigError(
                f"tensor {name} has dimensions {tuple(tensor.shape)}; the model needs {dims[name]}"
            )
        return tensor.to(device=device, dtype=dtype)

    def join(prefix: str, names: Iterable[str]) -> Tensor | None:
        wanted = [prefix + name for name in names]
        return torch.cat([take(name) for name in wanted]) if wanted[0] in dims else None

    embedding = take(EMBEDDING)
    layers = tuple(_layer(_prefix(layer), join) for layer in range(shape.num_layers))
    head = embedding if shape.tied_embeddings else take(HEAD)
    return Model(shape, ModelWeights(embedding, layers, take(NORM), head))


class _Join(Protocol):
    def __call__(self, prefix: str, names: Iterable[str]) -> Tensor | None: ...


def _layer(prefix: str, join: _Join) -> LayerWeights:
    def one(*names: str) -> Tensor:
        tensor = join(prefix, names)
        assert tensor is not None
        return tensor

    return LayerWeights(
        attention_norm=one("input_layernorm.weight"),
        qkv=one("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        qkv_bias=join(prefix, ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")),
        q_norm=join(prefix, ("self_attn.q_norm.weight",)),
        k_norm=join(prefix, ("self_attn.k_norm.weight",)),
        output=one("self_attn.o_proj.weight"),
        mlp_norm=one("post_attention_layernorm.weight"),
        gate_up=one("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=one("mlp.down_proj.weight"),
    )


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _layer_dims(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, inner, q, kv = shape.hidden_size, shape.intermediate_size, shape.q_size, shape.kv_size
    dims: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if shape.qkv_bias:
        dims |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
    if shape.qk_norm:
        dims |= {f"self_attn.{name}_norm.weight": (shape.head_size,) for name in ("q", "k")}
    return dims


def _check_names(wanted: set[str], found: set[str]) -> None:
    missing = sorted(wanted - found)
    # Old exports carry the rotary table, and some carry the head although it is the embedding.
    unknown = sorted(name for name in found - wanted - {HEAD} if not name.endswith("rotary_emb.inv_freq"))
    for problem, names in (("lacks", missing), ("has, of no known use,", unknown)):
        if names:
            raise ConfigError(f"the model {problem} {len(names)} tensors: {', '.join(names[:4])}")
