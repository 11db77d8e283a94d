from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from lwkv.errors import ConfigError
from lwkv.reference import GGUFFile, ModelShape, RopeScaling, load_gguf, random_model
from lwkv.reference.model.random_model import RandomTensors
from lwkv.reference.model.weights import EMBEDDING
from lwkv.reference.model_files.gguf_file import shape_from_gguf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Write = Callable[..., GGUFFile]


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def _interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """The rows of q or k as llama.cpp keeps them: row i of a half beside row i of the other."""
    first, second = rows.view(num_heads, 2, -1, rows.shape[1]).unbind(1)
    return torch.stack((first, second), dim=2).flatten(0, 2)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a random model as llama.cpp's converter would, with the metadata changed as asked."""

    def write(
        shape: ModelShape, architecture: str = "llama", quantise: bool = False, **extra: object
    ) -> GGUFFile:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        writer.add_block_count(shape.num_layers)
        writer.add_context_length(shape.max_positions)
        writer.add_embedding_length(shape.hidden_size)
        writer.add_feed_forward_length(shape.intermediate_size)
        writer.add_head_count(shape.num_heads)
        writer.add_head_count_kv(shape.num_kv_heads)
        writer.add_key_length(shape.head_size)
        writer.add_layer_norm_rms_eps(shape.norm_eps)
        writer.add_rope_freq_base(shape.rope_base)
        for name, value in extra.items():
            getattr(writer, f"add_{name}")(value)
        source = RandomTensors(shape, seed=4, scale=2.0)
        for name in sorted(source.names()):
            tensor = source.read(name)
            if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = _interleaved(tensor, shape.num_heads if "q_proj" in name else shape.num_kv_heads)
            kind = gguf.GGMLQuantizationType.Q8_0 if quantise and name == EMBEDDING else None
            data = tensor.numpy() if kind is None else gguf.quantize(tensor.numpy(), kind)
            writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GGUFFile(tmp_path / "model.gguf")

    return write


@pytest.fixture
def even_shape(shape: ModelShape) -> ModelShape:
    return replace(shape, hidden_size=64)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {}),
        ("qwen2", {"qkv_bias": True, "tied_embeddings": True}),
        ("qwen3", {"qk_norm": True}),
    ],
)
def test_a_model_written_as_gguf_comes_back(
    architecture: str, fields: dict[str, bool], write: Write, shape: ModelShape
) -> None:
    changed = replace(shape, **fields)
    model, original = load_gguf(write(changed, architecture)), random_model(changed, seed=4)
    assert model.shape == replace(changed, norm_eps=model.shape.norm_eps)
    assert model.shape.norm_eps == pytest.approx(changed.norm_eps)
    assert torch.equal(model.weights.head, original.weights.head)
    for found, written in zip(model.weights.layers, original.weights.layers, strict=True):
        for name in written.__slots__:
            left, right = getattr(found, name), getattr(written, name)
            assert (left is right is None) or torch.equal(left, right), name


def test_quantised_tensors_are_near_what_was_written(write: Write, even_shape: ModelShape) -> None:
    found = load_gguf(write(even_shape, quantise=True)).weights.embedding
    written = random_model(even_shape, seed=4).weights.embedding
    assert 0 < (found - written).abs().max() < 0.02


def test_rope_scaling_is_read(write: Write, shape: ModelShape) -> None:
    file = write(
        shape,
        rope_scaling_type=gguf.RopeScalingType.YARN,
        rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=40,
        rope_dimension_count=4,
    )
    found = shape_from_gguf(file)
    assert (found.rope_scaling, found.rotary_size) == (RopeScaling("yarn", 4.0, 40), 4)


def test_a_rope_scaling_that_is_not_supported_is_named(write: Write, shape: ModelShape) -> None:
    file = write(shape, rope_scaling_type=gguf.RopeScalingType.LONGROPE)
    with pytest.raises(
        ConfigError, match="'longrope' in a GGUF file is not supported; supported are none, linear"
    ):
        shape_from_gguf(file)


def test_an_architecture_that_is_not_supported_is_named(write: Write, shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match="'gemma2' is not supported; supported are llama, qwen2, qwen3"):
        load_gguf(write(shape, "gemma2"))


def test_a_missing_file_and_a_missing_field_are_named(
    write: Write, shape: ModelShape, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no GGUF file .*nothing.gguf"):
        GGUFFile(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ConfigError, match=r"lacks the field 'tokenizer.ggml.tokens'"):
        write(shape).field("tokenizer.ggml.tokens")
