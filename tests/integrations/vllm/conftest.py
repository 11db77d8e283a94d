from __future__ import annotations

from collections.abc import Iterator

import pytest
from storage.rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Eight chunks of host memory."""
    rig = Rig()
    yield rig
    rig.end()
