"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lwkv.errors import ConfigError
from lwkv.reference.model_files.gguf_file import GGUFFile
from lwkv.reference.model_files.packages import require_package

_CONTROL = 3  # the token type of control tokens in GGUF files
_PURPOSE = "turning text into tokens"


class Tokenizer:
    """A tokenizer of the package `tokenizers` and the tokens that end a model's answer."""

    def __init__(self, backend: Any, stop_tokens: frozenset[int]) -> None:
        self._backend = backend
        self.stop_tokens = stop_tokens

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids; control tokens written in it count as such, and none are added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn token ids into text, without control tokens."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=True)
        return text


def tokenizer_from_folder(folder: str | PathLike[str]) -> Tokenizer:
    """Load tokenizer.json of a Hugging Face folder, and the stop tokens its configuration names.

    Raises ConfigError if there is none or the package `tokenizers` is not installed.
    """
    tokenizers = require_package("tokenizers", _PURPOSE)
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"no tokenizer.json in {folder}")
    stop: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            stop |= set(ids) if isinstance(ids, list) else {ids} - {None}
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), frozenset(stop))


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Rebuild SmolLM2's byte-level BPE from a GGUF file.

    Raises ConfigError for another kind of tokenizer, or if the package `tokenizers` is not installed.
    """
    tokenizers = require_package("tokenizers", _PURPOSE)
    kind = (file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "default"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"GGUF tokenizer {kind} is not supported; supported is ('gpt2', 'smollm')")
    tokens = file.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    pre = tokenizers.pre_tokenizers
    backend.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    types = file.field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens(control)
    return Tokenizer(backend, frozenset({file.field("tokenizer.ggml.eos_token_id")}))
