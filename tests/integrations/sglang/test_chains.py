from __future__ import annotations

import pytest

from lwkv.integrations.sglang import chains
from lwkv.integrations.sglang.chains import Chains


def test_the_page_before_is_known_of_all_pages_but_the_first() -> None:
    known = Chains()
    known.note(["a", "b", "c"])
    known.note([])
    assert [known.parent(page) for page in "abcd"] == [None, "a", "b", None]


def test_what_was_asked_for_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MOST_PAGES", 2)
    known = Chains()
    for first in "adgjm":
        known.note([first, f"{first}1", f"{first}2", f"{first}3"])
    assert known.parent("m1") == "m"
    assert known.parent("a1") is None
    assert len(known._parents) + len(known._older) <= 10
