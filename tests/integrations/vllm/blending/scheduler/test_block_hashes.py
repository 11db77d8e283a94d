"""Hashes of blocks that no other request has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.integrations.vllm.blending.scheduler.block_hashes import can_be_salted, salt


def request(num_tokens: int, num_hashes: int) -> Any:
    return SimpleNamespace(num_tokens=num_tokens, block_hashes=[bytes([n] * 32) for n in range(num_hashes)])


def test_only_hashes_from_the_first_blended_block_on_change() -> None:
    one, other = request(20, 5), request(20, 5)
    before = list(one.block_hashes)
    salt(one, 2)
    salt(other, 2)
    assert one.block_hashes[:2] == before[:2] == other.block_hashes[:2]
    everything = before[2:] + one.block_hashes[2:] + other.block_hashes[2:]
    assert len(set(everything)) == 9
    assert all(len(name) == 32 for name in everything)


def test_one_hash_at_least_is_salted() -> None:
    with pytest.raises(ValueError, match="none to be salted"):
        salt(request(20, 5), 5)


@pytest.mark.parametrize(("num_hashes", "can"), [(5, True), (4, False), (10, False), (0, False)])
def test_a_request_must_have_one_for_every_full_block(num_hashes: int, can: bool) -> None:
    assert can_be_salted(request(23, num_hashes), 4) is can


def test_other_ways_to_keep_hashes_cannot_be_salted() -> None:
    assert not can_be_salted(SimpleNamespace(num_tokens=8, block_hashes=(b"", b"")), 4)
    assert not can_be_salted(SimpleNamespace(num_tokens=8), 4)
