from __future__ import annotations

from dataclasses import replace

import pytest

from lwkv.errors import ConfigError
from lwkv.reference import ModelShape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"rotary_fraction": 0.5}, "rotates 5 elements; it must be an even number from 2 to 10"),
        ({"rotary_fraction": 2.0}, "rotates 20 elements"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, float], message: str, shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(shape, **change)
