from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_llama import llama_config
from torch import Tensor

from lwkv.errors import ConfigError
from lwkv.reference import (
    Model,
    ModelShape,
    PagedCache,
    Prompt,
    ReferenceEngine,
    RopeScaling,
    generate,
    load_hf_folder,
)
from lwkv.reference.model.random_model import RandomTensors, random_model
from lwkv.reference.model_files.hf_folder import shape_from_config

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 32}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}


def _tensors(shape: ModelShape) -> dict[str, Tensor]:
    source = RandomTensors(shape, seed=4, scale=2.0)
    return {name: source.read(name) for name in source.names()}


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def _answer(model: Model) -> list[int]:
    cache = PagedCache(model.shape, num_blocks=4, dtype=model.dtype)
    return generate(ReferenceEngine(model, cache), [Prompt(list(range(30, 50)), 8)])[0].tokens


@pytest.mark.parametrize(
    ("changes", "fields"),
    [({}, {}), (QWEN2, {"qkv_bias": True}), (QWEN3, {"qk_norm": True, "tied_embeddings": True})],
)
def test_a_model_written_to_a_folder_comes_back(
    changes: dict[str, Any], fields: dict[str, bool], shape: ModelShape, tmp_path: Path
) -> None:
    changed = replace(shape, **fields)
    _write(tmp_path, llama_config(shape, **changes), _tensors(changed))
    model = load_hf_folder(tmp_path)
    assert model.shape == changed
    assert _answer(model) == _answer(random_model(changed, seed=4))


def test_shards_are_found_by_their_index(shape: ModelShape, tmp_path: Path) -> None:
    tensors = _tensors(shape)
    _write(tmp_path, llama_config(shape), tensors)
    whole = _answer(load_hf_folder(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _answer(load_hf_folder(tmp_path)) == whole
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks b.safetensors, which its index names"):
        load_hf_folder(tmp_path)


def test_weights_keep_the_dtype_they_are_stored_in_unless_another_is_asked_for(
    shape: ModelShape, tmp_path: Path
) -> None:
    _write(
        tmp_path, llama_config(shape), {name: tensor.bfloat16() for name, tensor in _tensors(shape).items()}
    )
    assert load_hf_folder(tmp_path).dtype == torch.bfloat16
    assert load_hf_folder(str(tmp_path)).dtype == torch.bfloat16
    assert load_hf_folder(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_tensors_of_no_use_in_any_model_are_passed_over(shape: ModelShape, tmp_path: Path) -> None:
    tied = replace(shape, tied_embeddings=True)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5),
        "lm_head.weight": torch.ones(101, 48),
    }
    _write(tmp_path, llama_config(shape, tie_word_embeddings=True), _tensors(tied) | extra)
    assert _answer(load_hf_folder(tmp_path)) == _answer(random_model(tied, seed=4))


def test_a_missing_tensor_is_named(shape: ModelShape, tmp_path: Path) -> None:
    tensors = _tensors(shape)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    _write(tmp_path, llama_config(shape), tensors)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors: model.layers.1.mlp.up_proj.weight"):
        load_hf_folder(tmp_path)


def test_a_tensor_that_the_model_has_no_place_for_is_named(shape: ModelShape, tmp_path: Path) -> None:
    bias = {"model.layers.2.self_attn.o_proj.bias": torch.ones(48)}
    _write(tmp_path, llama_config(shape), _tensors(shape) | bias)
    with pytest.raises(
        ConfigError, match=r"of no known use, 1 tensors: model.layers.2.self_attn.o_proj.bias"
    ):
        load_hf_folder(tmp_path)


def test_a_tensor_of_other_dimensions_is_named(shape: ModelShape, tmp_path: Path) -> None:
    _write(tmp_path, llama_config(shape), _tensors(shape) | {"model.norm.weight": torch.ones(47)})
    with pytest.raises(
        ConfigError, match=r"model.norm.weight has dimensions \(47,\); the model needs \(48,\)"
    ):
        load_hf_folder(tmp_path)


def test_a_folder_without_a_model_is_refused(shape: ModelShape, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json in"):
        load_hf_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(shape)))
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_hf_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; supported are LlamaForCausalLM",
        ),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
            "sliding_window 64 is not supported",
        ),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* is not supported"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type 'longrope' is not supported; .* llama3, yarn",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "'yarn' with mscale is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str, shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config(llama_config(shape, **changes))


def test_a_field_that_is_missing_is_named(shape: ModelShape) -> None:
    config = llama_config(shape)
    del config["rms_norm_eps"]
    with pytest.raises(ConfigError, match=r"config.json lacks 'rms_norm_eps'"):
        shape_from_config(config)


@pytest.mark.parametrize(
    ("changes", "scaling", "base"),
    [
        ({"rope_scaling": {"rope_type": "default"}}, None, 10000.0),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling("linear", 2.0), 10000.0),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 3.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeScaling("llama3", 8.0, 64, high_freq_factor=3.0),
            5e5,
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
            RopeScaling("yarn", 4.0, 160),
            1e6,
        ),
    ],
)
def test_rope_parameters_are_read_in_their_old_and_new_place(
    changes: dict[str, Any], scaling: RopeScaling | None, base: float, shape: ModelShape
) -> None:
    found = shape_from_config(llama_config(shape, **changes))
    assert (found.rope_scaling, found.rope_base) == (scaling, base)


def test_sizes_that_may_be_left_out_follow_from_the_others(shape: ModelShape) -> None:
    config = llama_config(shape, num_key_value_heads=None, head_dim=None, partial_rotary_factor=0.5)
    found = shape_from_config(config)
    assert (found.num_kv_heads, found.head_size, found.rotary_size) == (6, 8, 4)
