"""A pytest plugin (`-p poisoned_cuda`): whoever reads an attribute of torch.cuda fails, and is remembered."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch


class Touched(BaseException):
    """No `except` of a platform that looks whether a device is there may swallow it."""


class Poison(ModuleType):
    def __getattribute__(self, name: str) -> object:
        # What Python's own import system and pytest ask of any module is no use of CUDA.
        if name.startswith("__"):
            return super().__getattribute__(name)
        touched.append(name)
        raise Touched(f"torch.cuda.{name} was used")


touched: list[str] = []
sys.modules["torch.cuda"] = torch.cuda = Poison("torch.cuda")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if touched:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nread of torch.cuda: {touched}")
