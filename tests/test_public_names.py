from __future__ import annotations

import pytest

import lwkv


def test_the_public_names_are_complete_and_told_by_dir() -> None:
    homes = [name for names in lwkv._HOMES.values() for name in names.split()]
    assert sorted(lwkv.__all__) == sorted([*homes, "__version__"])
    assert dir(lwkv) == sorted(lwkv.__all__)


@pytest.mark.parametrize("name", lwkv.__all__)
def test_a_public_name_can_be_had(name: str) -> None:
    assert getattr(lwkv, name) is not None


def test_another_name_is_an_attribute_error_that_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"no 'Cache'; it has .*CacheEngine, "):
        _ = lwkv.Cache
