"""What commands that run a model and write files need first: a free core and a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lwkv.errors import ConfigError
from lwkv.platforms import Platform


@contextmanager
def core_for_transfers(platform: Platform) -> Iterator[None]:
    """Where the host is the device, keep one core free of compute: transfers are threads there."""
    before = torch.get_num_threads()
    if platform.device_type == "cpu":
        torch.set_num_threads(max(1, min(before, len(os.sched_getaffinity(0)) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_writable(folder: Path) -> None:
    """Make `folder` where it is missing. Raises ConfigError if nothing can be written there."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose a folder with --output"
        ) from error
