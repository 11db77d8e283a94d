"""Tests of the demo's real model: they are skipped where it is not installed, and fail there in CI."""

from __future__ import annotations

import os

import pytest

from lwkv.reference import find_smollm2
from lwkv.reference.smollm2 import INSTALL

in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
needs_smollm2 = pytest.mark.skipif(
    find_smollm2() is None and not in_ci, reason=f"SmolLM2 is not installed: {INSTALL}"
)
