"""Toy models that are closed, and found at rest, after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hybrid.rig import Toy

from lwkv.platforms import Platform


@pytest.fixture
def toy(platform: Platform, device: torch.device) -> Iterator[Callable[..., Toy]]:
    made: list[Toy] = []

    def make(*arguments: object, **settings: object) -> Toy:
        made.append(partial(Toy, platform, device)(*arguments, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
