"""The doctor's look at a model: which kinds of caches its layers have, and what they take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from lwkv.cli.doctor.model_refusals import find_refusals, has_several_groups
from lwkv.cli.doctor.report import Report
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.kinds import Kind, choose_chunk_size
from lwkv.kinds.model_config import ModelKinds, UnknownLayersError, read_model
from lwkv.kinds.words import boundary_bytes, describe_kind, size, token_bytes


def examine_model(report: Report, config: Config, folder: str, block_size: int) -> None:
    """Fill in what a model keeps; one that cannot be read, or that the engine would refuse, is a fault."""
    try:
        model = read_model(read_folder(folder), block_size)
    except UnknownLayersError as error:
        report.advice.append(f"The model {folder} cannot be looked at: {error}.")
        return
    except (ConfigError, ImportError, OSError, ValueError) as error:
        report.faults.append(f"the model {folder} cannot be looked at: {error}")
        return
    version = report.versions.get("vllm")
    report.model = dict(_rows(model, config, block_size, has_several_groups(model, version)))
    faults = find_refusals(model, config, version)
    report.faults += [f"the engine would refuse the model {folder} beside lwkv: {fault}" for fault in faults]


def read_folder(folder: str) -> Any:
    """The configuration of a model's text, as transformers has it. Nothing is downloaded.

    Raises OSError or ValueError for what is no model, ImportError without transformers.
    """
    if folder.startswith(("/", ".", "~")) and not os.path.isdir(os.path.expanduser(folder)):
        raise FileNotFoundError("there is no such folder; give the folder with the model's config.json")
    return (
        import_module("transformers")
        .AutoConfig.from_pretrained(os.path.expanduser(folder), local_files_only=True)
        .get_text_config()
    )


def _rows(model: ModelKinds, config: Config, block_size: int, several: bool) -> Iterator[tuple[str, str]]:
    for kind in model.kinds:
        yield kind.name, describe_kind(kind)
    for name, count in model.others.items():
        yield (
            name,
            f"{count} layers, which keep no KV of tokens: what they take is logged when the engine starts",
        )
    if several:
        unless = "" if model.others else ", as long as --disable-hybrid-kv-cache-manager is not set"
        yield "groups of caches", f"several in vLLM{unless}"
        works = "refused" if model.others else "only ngram and eagle work"
        yield "speculative decoding", f"{works} beside lwkv in vLLM, where caches are in several groups"
    if model.others:
        yield "prefix caching", "only vLLM with --enable-prefix-caching finds states again"
        yield "chunk_size", "logged when the engine starts: its blocks are as large as states need"
    elif model.kinds:
        yield "chunk_size", choose_chunk_size(config.chunk_size, [block_size]).words()
        yield "max_local_cpu_size", _capacity(model.kinds, config.max_host_bytes)


def _capacity(kinds: tuple[Kind, ...], num_bytes: int) -> str:
    """How many tokens of one prompt fit, with its windows, and if all layers kept all tokens."""
    every = int(num_bytes / sum(map(token_bytes, kinds)))
    shown = f"{size(num_bytes)} hold {every:,} tokens"
    growing = sum(token_bytes(kind) for kind in kinds if kind.form == "full")
    windows = sum(map(boundary_bytes, kinds))
    if not windows or not growing:
        return shown
    most = max(0, int((num_bytes - windows) / growing))
    return (
        f"{size(num_bytes)} hold a prompt of {most:,} tokens where windows are kept alone, {every:,} tokens "
        "where all layers keep all"
    )
