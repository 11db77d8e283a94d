"""Turning keys to other positions: the tables, and what cannot be turned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lwkv.connectors import Rope
from lwkv.connectors.rope import Turning
from lwkv.connectors.row_tables import RowTables
from lwkv.errors import ConfigError
from lwkv.platforms import Platform


@pytest.mark.parametrize("frequencies", [(), (1.0, math.inf), (math.nan,)], ids=str)
def test_frequencies_are_finite_and_there(frequencies: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="finite and at least one"):
        Rope(frequencies)


def test_each_row_has_the_cosines_and_sines_of_its_shift(platform: Platform, device: torch.device) -> None:
    frequencies, shift = (1.0, 0.1, 0.003), np.array([5, -70000, 5, 0], np.int64)
    stream = platform.current_stream(device)
    turning = Turning(Rope(frequencies), shift, RowTables(platform, device, stream, {}))
    rows = np.array([3, 1, 0], np.int64)
    turn = turning.of(rows)
    platform.synchronize_device(device)
    angles = torch.from_numpy(shift[rows]).double()[:, None] * torch.tensor(frequencies).double()
    for table, wanted in zip((turn.cos, turn.sin), (angles.cos(), angles.sin()), strict=True):
        assert len(table) == 3, "one for each different shift"
        torch.testing.assert_close(table[turn.angle_of].cpu(), wanted.float(), rtol=0, atol=1e-4)
