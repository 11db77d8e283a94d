from __future__ import annotations

import threading

from lwkv.telemetry.counters import Counters


def test_totals_add_up_by_name() -> None:
    counters = Counters()
    counters.add("loads")
    counters.add("loads", 4)
    counters.add("none", 0)
    assert counters.totals() == {"loads": 5, "none": 0}


def test_totals_are_a_copy() -> None:
    counters = Counters()
    counters.totals()["loads"] = 9
    assert counters.totals() == {}


def test_nothing_is_lost_when_threads_count_together() -> None:
    counters = Counters()
    threads = [threading.Thread(target=lambda: [counters.add("n", 3) for _ in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.totals() == {"n": 8 * 2000 * 3}
