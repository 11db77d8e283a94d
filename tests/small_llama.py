"""Small Llamas: their shape, and what a Hugging Face folder says of one."""

from __future__ import annotations

from typing import Any

from lwkv.reference import ModelShape


def small_shape(num_layers: int) -> ModelShape:
    """Every size another number, so that none stands for another one unseen."""
    return ModelShape(
        num_layers=num_layers,
        hidden_size=48,
        num_heads=6,
        num_kv_heads=2,
        head_size=10,
        intermediate_size=56,
        vocab_size=101,
        max_positions=160,
    )


def llama_config(shape: ModelShape, **changes: Any) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        **changes,
    }
