from __future__ import annotations

import threading
import time

from lwkv.storage.disk.drafts import Drafts

LONG_S = 60.0


def test_nobody_waits_where_nothing_else_is_being_written() -> None:
    drafts = Drafts()
    assert not drafts
    drafts.begin("a")
    assert drafts
    assert not drafts.wait_for_another(drafts.num_ended, {"a"}, time.monotonic() + LONG_S)
    assert not drafts.wait_for_another(drafts.num_ended, {"b"}, time.monotonic()), "not before the deadline"
    drafts.end("a")
    assert not drafts
    assert drafts.wait_for_another(0, set(), time.monotonic()), "one has ended since"


def test_a_file_that_is_written_twice_is_being_written_until_the_second_ends() -> None:
    drafts = Drafts()
    for name in ("a", "a"):
        drafts.begin(name)
    drafts.end("a")
    assert drafts
    assert not drafts.wait_for_another(1, {"a"}, time.monotonic() + LONG_S)
    drafts.end("a")
    assert not drafts


def test_who_waits_goes_on_when_a_file_ends() -> None:
    drafts = Drafts()
    drafts.begin("a")
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(drafts.wait_for_another(0, {"b"}, time.monotonic() + LONG_S))
    )
    thread.start()
    drafts.end("a")
    thread.join()
    assert found == [True]
