from __future__ import annotations

from storage.rig import Rig, key, keys

from lwkv.integrations.vllm.worker.presence import Presence


def hashes(*numbers: int) -> list[bytes]:
    return [key(number).hash for number in numbers]


def test_chunks_that_came_or_went_are_reported_once_and_as_they_are_now(rig: Rig) -> None:
    presence = Presence(rig.manager)
    rig.store(1, 2)
    assert presence.changes([]) == (hashes(1, 2), [])
    assert presence.changes([]) == ([], [])
    rig.store(3)
    assert rig.host.evict(rig.host.evictable())
    rig.store(3)
    kept, dropped = presence.changes([])
    assert (set(kept), set(dropped)) == (set(hashes(3)), set(hashes(1, 2)))


def test_a_chunk_is_reported_ahead_and_is_on_its_way_until_it_has_arrived(rig: Rig) -> None:
    presence = Presence(rig.manager)
    write = rig.begin(1, 2)
    assert write is not None
    assert presence.changes(keys(1, 2, 3)) == (hashes(1, 2), hashes(3))
    assert presence.on_its_way == set(keys(1, 2))
    write.commit()
    assert presence.changes([]) == (hashes(1, 2), [])
    assert not presence.on_its_way


def test_a_chunk_that_was_reported_and_never_arrives_is_taken_back(rig: Rig) -> None:
    presence = Presence(rig.manager)
    write = rig.begin(1)
    assert write is not None
    presence.changes(keys(1))
    write.abort()
    assert presence.changes([]) == ([], hashes(1))


def test_what_was_in_memory_already_is_reported_once_and_is_not_on_its_way(rig: Rig) -> None:
    presence = Presence(rig.manager)
    rig.store(1)
    presence.changes([])
    assert presence.changes(keys(1)) == (hashes(1), [])
    assert not presence.on_its_way
    assert presence.changes([]) == ([], [])


def test_what_is_on_its_way_is_reported_once(rig: Rig) -> None:
    presence = Presence(rig.manager)
    write = rig.begin(1)
    assert write is not None
    assert presence.changes(keys(1)) == (hashes(1), [])
    assert presence.changes([]) == ([], [])
    assert presence.on_its_way == set(keys(1))
    write.abort()
    assert presence.changes([]) == ([], hashes(1))
