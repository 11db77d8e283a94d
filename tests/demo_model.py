"""Models for tests of the demo: a tiny one, and its real one.

Tests of the real model are skipped where it is not installed, and fail there in CI.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import tokenizers
from safetensors.torch import save_file
from small_llama import llama_config

from lwkv.reference import ModelShape, find_smollm2
from lwkv.reference.model.random_model import RandomTensors
from lwkv.reference.model_files.smollm2 import INSTALL

in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
needs_smollm2 = pytest.mark.skipif(
    find_smollm2() is None and not in_ci, reason=f"SmolLM2 is not installed: {INSTALL}"
)


def write_tokenizer(folder: Path, text: str) -> int:
    """Make every word of `text` a token; returns how many there are."""
    words = sorted(set(re.findall(r"\w+|[^\w\s]+", text)))
    vocab = {word: number for number, word in enumerate(["?", *(word for word in words if word != "?")])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return len(vocab)


def write_model(folder: Path, text: str) -> Path:
    """Write a random model of three layers that knows the words of `text`."""
    folder.mkdir()
    vocab_size = write_tokenizer(folder, text)
    shape = ModelShape(3, 24, 4, 2, 6, 28, vocab_size, max_positions=1500)
    (folder / "config.json").write_text(json.dumps(llama_config(shape)))
    tensors = RandomTensors(shape, seed=5, scale=2.0)
    save_file({name: tensors.read(name) for name in tensors.names()}, folder / "model.safetensors")
    return folder
