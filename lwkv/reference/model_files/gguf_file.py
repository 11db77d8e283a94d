"""Models from a GGUF file (llama.cpp's format), dequantised."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lwkv.errors import ConfigError
from lwkv.reference.model.llama import Model
from lwkv.reference.model.shape import ModelShape, RopeScaling
from lwkv.reference.model.weights import EMBEDDING, HEAD, NORM, assemble
from lwkv.reference.model_files.packages import require_package

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": NORM, "output.weight": HEAD}


class GGUFFile:
    """An open GGUF file: its fields, and its tensors by their Hugging Face names.

    Raises ConfigError if there is no such file or the package `gguf` is not installed.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._gguf = require_package("gguf", "reading a GGUF file")
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"no GGUF file {path}")
        self._reader = self._gguf.GGUFReader(path)
        self._tensors = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.architecture = self.field("general.architecture", "")

    def field(self, name: str, default: Any = None) -> Any:
        """Read a metadata field. Raises ConfigError if it is missing and there is no default."""
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if default is None:
            raise ConfigError(f"the GGUF file lacks the field {name!r}")
        return default

    def names(self) -> set[str]:
        return set(self._tensors)

    def num_rows(self, name: str) -> int:
        """Count a matrix's rows. Raises ConfigError if it is not there."""
        if name not in self._tensors:
            raise ConfigError(f"the GGUF file lacks the tensor {name!r}")
        return int(self._tensors[name].shape[-1])

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        # Tensors stored as float32 are views of the file, which torch refuses to share.
        values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
        rows = torch.from_numpy(np.require(values, requirements="W"))
        if self.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "head_count" if "q_proj" in name else "head_count_kv"
            return _half_split(rows, self.field(f"llama.attention.{heads}"))
        return rows


def load_gguf(
    file: GGUFFile, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Model:
    """Load a model. Raises ConfigError naming what is missing or not supported."""
    return assemble(shape_from_gguf(file), file, device=device, dtype=dtype)


def shape_from_gguf(file: GGUFFile) -> ModelShape:
    """Read a model's shape from the metadata. Raises ConfigError naming what is missing or not supported."""
    name = file.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if "rope_freqs.weight" in file.names():
        raise ConfigError(
            "rope_freqs.weight in a GGUF file is not supported; load the model's Hugging Face folder"
        )
    heads, hidden = file.field(f"{name}.attention.head_count"), file.field(f"{name}.embedding_length")
    head_size = file.field(f"{name}.attention.key_length", hidden // heads)
    return ModelShape(
        num_layers=file.field(f"{name}.block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=file.field(f"{name}.attention.head_count_kv", heads),
        head_size=head_size,
        intermediate_size=file.field(f"{name}.feed_forward_length"),
        vocab_size=file.num_rows(EMBEDDING),
        max_positions=file.field(f"{name}.context_length"),
        rope_base=file.field(f"{name}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file),
        rotary_fraction=file.field(f"{name}.rope.dimension_count", head_size) / head_size,
        norm_eps=file.field(f"{name}.attention.layer_norm_rms_epsilon"),
        tied_embeddings=HEAD not in file.names(),
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
    )


def _rope_scaling(file: GGUFFile) -> RopeScaling | None:
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.field(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"rope scaling {kind!r} in a GGUF file is not supported; supported are none, linear, yarn"
        )
    return RopeScaling(
        kind, file.field(f"{prefix}.factor"), file.field(f"{prefix}.original_context_length", 0)
    )


def _hf_name(name: str) -> str:
    """Translate a tensor's name; one that is not known stays, and is refused when the model is assembled."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return _OTHER_NAMES.get(name, name)


def _half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of rotated rows: pairs side by side become the two halves of a head."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
