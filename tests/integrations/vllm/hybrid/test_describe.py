from __future__ import annotations

import pytest
import torch

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.hybrid.describe import _require_all


def test_a_layer_in_no_group_may_have_the_memory_of_one_in_a_group() -> None:
    caches = {name: torch.zeros(4) for name in "abc"}
    caches["d"] = caches["a"]
    _require_all(caches, {"a", "b", "c"})


@pytest.mark.parametrize(("registered", "grouped"), [("abc", "ab"), ("ab", "abc")])
def test_any_other_layer_without_a_group_or_cache_is_refused_by_name(registered: str, grouped: str) -> None:
    with pytest.raises(ConfigError, match="groups of KV caches: c"):
        _require_all({name: torch.zeros(4) for name in registered}, {*grouped})
