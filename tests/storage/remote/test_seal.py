from __future__ import annotations

import pytest
from storage.rig import key
from storage.servers import require_client

from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage.remote.seal import MOST_SEAL_BYTES, seal_of

PAGE = bytes(range(256)) * 20
KEY = LayerKey(key(1), 2)


@pytest.fixture(autouse=True)
def _has_client() -> None:
    """What makes the checksums comes with it."""
    require_client()


@pytest.mark.parametrize(
    "other",
    [
        LayerKey(key(2), 2),
        LayerKey(key(1), 3),
        LayerKey(ChunkKey("other", key(1).hash), 2),
        LayerKey(ChunkKey("mode", key(1).hash), 2),
    ],
)
def test_another_key_has_another_seal(other: LayerKey) -> None:
    assert seal_of(KEY, memoryview(PAGE)) != seal_of(other, memoryview(PAGE))


@pytest.mark.parametrize("place", [0, 1, 4095, len(PAGE) - 1])
def test_one_bit_makes_another_seal(place: int) -> None:
    changed = bytearray(PAGE)
    changed[place] ^= 1
    assert seal_of(KEY, memoryview(PAGE)) != seal_of(KEY, memoryview(changed))


def test_bytes_in_another_order_or_number_have_another_seal() -> None:
    halves = PAGE[: len(PAGE) // 2 + 7], PAGE[len(PAGE) // 2 + 7 :]
    others = [halves[1] + halves[0], PAGE[:-1], PAGE + b"\0", b"", b"\0"]
    seals = {seal_of(KEY, memoryview(other)) for other in [PAGE, *others]}
    assert len(seals) == 1 + len(others)


def test_the_same_page_has_the_same_seal_everywhere() -> None:
    """What other machines and later versions have put is not to be lost."""
    text, rest = (
        b"lwkv1 model.01000000000000000000000000000000.2 ",
        "001400000000000087cf83cc9a055cf4f875f2fa2e99df80",
    )
    assert seal_of(KEY, memoryview(PAGE)) == text + bytes.fromhex(rest)


def test_a_seal_of_the_longest_key_fits() -> None:
    longest = LayerKey(ChunkKey("n" * 128, bytes(16)), 999_999)
    assert len(seal_of(longest, memoryview(PAGE))) <= MOST_SEAL_BYTES
