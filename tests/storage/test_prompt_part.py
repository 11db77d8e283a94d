from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from storage.rig import key, keys

from lwkv.keys import ChunkKey
from lwkv.storage.prefix_order import parents_of
from lwkv.storage.prompt_part import PromptPart, prompt_parts


def test_a_tier_learns_once_of_all_chunks_of_a_part() -> None:
    part = PromptPart(keys(1, 2), ["disk", "far"])
    heard: list[tuple[str, Sequence[ChunkKey]]] = []
    for tier in ("disk", "far", "disk"):
        part.let_know(tier, lambda prompt, tier=tier: heard.append((tier, list(prompt))))
    assert heard == [("disk", keys(1, 2)), ("far", keys(1, 2))]


def test_a_tier_that_failed_learns_of_it_the_next_time() -> None:
    part = PromptPart(keys(1), ["disk"])

    def fails(prompt: Sequence[ChunkKey]) -> None:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        part.let_know("disk", fails)
    heard: list[Sequence[ChunkKey]] = []
    part.let_know("disk", heard.append)
    assert heard == [keys(1)]


def test_who_comes_meanwhile_waits_until_the_tier_knows() -> None:
    part = PromptPart(keys(1), ["disk", "far"])
    begun, go_on, done = threading.Event(), threading.Event(), []

    def follow(prompt: Sequence[ChunkKey]) -> None:
        begun.set()
        go_on.wait()
        done.append("knows")

    def second() -> None:
        part.let_know("disk", follow)
        done.append("second")

    threads = [threading.Thread(target=part.let_know, args=("disk", follow)), threading.Thread(target=second)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    part.let_know("far", lambda _: done.append("far"))  # another tier does not wait
    go_on.set()
    for thread in threads:
        thread.join()
    assert done == ["far", "knows", "second"]


def test_chunks_of_one_prompt_in_a_row_are_one_part() -> None:
    parents = [*parents_of(keys(1, 2)), *parents_of(keys(1, 3)), key(7), key(8)]
    parts = prompt_parts(keys(1, 2, 1, 3, 8, 9), parents, [])
    assert [part.keys for part in parts] == [
        *[keys(1, 2)] * 2,
        *[keys(1, 3)] * 2,
        *[keys(7, 8, 9)] * 2,
    ]
    assert parts[0] is parts[1] is not parts[2]


def test_a_tier_learns_of_a_part_in_rows() -> None:
    part = PromptPart(keys(1, 2), ["disk"], lambda chunks: [[key(7), chunk] for chunk in chunks])
    heard: list[Sequence[ChunkKey]] = []
    part.let_know("disk", heard.append)
    assert heard == [keys(7, 1), keys(7, 2)]
