"""The model that the demo runs: SmolLM2 as installed, or one that the user has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from lwkv.cli.demo.progress import Tick, progress_bar
from lwkv.errors import ConfigError
from lwkv.reference import (
    GGUFFile,
    Model,
    Tokenizer,
    find_smollm2,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from lwkv.reference.model.shape import ModelShape
from lwkv.reference.model.weights import TensorSource, assemble
from lwkv.reference.model_files.gguf_file import shape_from_gguf
from lwkv.reference.model_files.hf_folder import SafetensorsFolder, shape_from_config
from lwkv.reference.model_files.smollm2 import INSTALL


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model with its tokenizer, under the name of the file or folder it came from."""

    name: str
    model: Model
    tokenizer: Tokenizer


def find_model(path: Path | None) -> Path:
    """Give `path` itself, or the installed SmolLM2's file. Raises ConfigError where there is none."""
    if path is None:
        path = find_smollm2()
        if path is None:
            raise ConfigError(f"SmolLM2 is not installed: {INSTALL}")
    if not path.exists():
        raise ConfigError(f"no model at {path}: give a GGUF file or a Hugging Face folder")
    return path


def load_model(path: Path, device: torch.device, dtype: torch.dtype) -> NamedModel:
    """Load a GGUF file or a Hugging Face folder, with a progress bar.

    Raises ConfigError naming what is missing, broken or not supported.
    """
    name = path.resolve().name.removesuffix(".gguf")
    try:
        shape, source, make_tokenizer = _open_folder(path) if path.is_dir() else _open_gguf(path)
        with progress_bar(f"Loading {name[:20]}", len(source.names())) as tick:
            model = assemble(shape, _Watched(source, tick), device=device, dtype=dtype)
        return NamedModel(name, model, make_tokenizer())
    except ConfigError:
        raise
    except _file_errors() as error:
        raise ConfigError(f"{path} cannot be read as a model, it may be broken: {error}") from error


def _file_errors() -> tuple[type[Exception], ...]:
    """What the packages that are installed raise for a broken file."""
    if find_spec("safetensors") is None:
        return (ValueError,)
    return (ValueError, import_module("safetensors").SafetensorError)


_Opened = tuple[ModelShape, TensorSource, Callable[[], Tokenizer]]


def _open_gguf(path: Path) -> _Opened:
    file = GGUFFile(path)
    return shape_from_gguf(file), file, lambda: tokenizer_from_gguf(file)


def _open_folder(path: Path) -> _Opened:
    config = path / "config.json"
    if not config.is_file():
        raise ConfigError(f"no config.json in {path}: a Hugging Face folder has one")
    shape = shape_from_config(json.loads(config.read_text(encoding="utf-8")))
    return shape, SafetensorsFolder(path), lambda: tokenizer_from_folder(path)


class _Watched:
    """A source that reports each tensor read."""

    def __init__(self, source: TensorSource, tick: Tick) -> None:
        self._source = source
        self._tick = tick

    def names(self) -> set[str]:
        return self._source.names()

    def read(self, name: str) -> Tensor:
        tensor = self._source.read(name)
        self._tick(1)
        return tensor
