"""Models from a Hugging Face folder: config.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwkv.errors import ConfigError
from lwkv.reference.model.llama import Model
from lwkv.reference.model.shape import ModelShape, RopeScaling
from lwkv.reference.model.weights import assemble
from lwkv.reference.model_files.packages import require_package

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# config.json's names of RopeScaling's fields, for each kind the ones that it may have.
_SCALING_FIELDS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_positions",
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        "original_max_position_embeddings": "original_positions",
    },
}
_NOT_SCALING = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


def load_hf_folder(
    folder: str | PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Model:
    """Load a model; `dtype` None keeps the one that its embedding is stored in.

    Raises ConfigError naming what is missing or not supported.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"no config.json in {folder}")
    source = SafetensorsFolder(folder)
    shape = shape_from_config(json.loads(path.read_text(encoding="utf-8")))
    return assemble(shape, source, device=device, dtype=dtype or source.dtype)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Read a model's shape from config.json's content.

    Raises ConfigError for an architecture, a switch or a rope type that is not supported, and for a field
    that is missing.
    """
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_switches(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            rope_base=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rope_scaling=_rope_scaling(rope, config),
            rotary_fraction=rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0,
            norm_eps=config["rms_norm_eps"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}") from error


def _refuse_switches(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {config['hidden_act']!r} is not supported; supported is 'silu'")
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if windowed:
        raise ConfigError(
            f"sliding_window {config['sliding_window']} is not supported; supported is full attention"
        )
    for switch in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(switch):
            raise ConfigError(
                f"{switch} {config[switch]!r} is not supported; supported is a model without it"
            )


def _rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in _SCALING_FIELDS:
        raise ConfigError(
            f"rope type {kind!r} is not supported; supported are default, {', '.join(_SCALING_FIELDS)}"
        )
    fields = _SCALING_FIELDS[kind]
    unknown = sorted(set(rope) - set(fields) - _NOT_SCALING)
    if unknown:
        raise ConfigError(
            f"rope type {kind!r} with {', '.join(unknown)} is not supported; known: {', '.join(fields)}"
        )
    values = {fields[name]: value for name, value in rope.items() if name in fields}
    if kind == "yarn":
        values.setdefault("original_positions", config["max_position_embeddings"])
    return RopeScaling(kind, **values)


class SafetensorsFolder:
    """The tensors of a folder's safetensors files. Raises ConfigError if there is none, or a shard lacks."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        folder = Path(folder)
        self._open = require_package("safetensors", "reading a Hugging Face folder").safe_open
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files: dict[str, Path] = {name: folder / file for name, file in files.items()}
        else:
            self._files = self._list(folder / "model.safetensors")
        missing = sorted({path.name for path in self._files.values() if not path.is_file()})
        if missing:
            raise ConfigError(f"{folder} lacks {', '.join(missing)}, which its index names")

    def _list(self, path: Path) -> dict[str, Path]:
        if not path.is_file():
            raise ConfigError(f"{path.parent} has neither model.safetensors nor model.safetensors.index.json")
        with self._open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)

    @property
    def dtype(self) -> torch.dtype:
        return self.read("model.embed_tokens.weight").dtype

    def names(self) -> set[str]:
        return set(self._files)

    def read(self, name: str) -> Tensor:
        with self._open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor
