"""Tables on their way to the device: from page-locked memory that is kept, never overwritten too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blend.conftest import Bench


def test_tables_go_out_of_memory_that_is_kept(bench: Bench) -> None:
    rows = bench.blender()._rows
    tables = [np.arange(count, dtype=np.int64).reshape(-1, 2) for count in (600, 4, 600, 1200)]
    sent = [rows.send(table) for table in tables]
    bench.engine.connector.platform.synchronize_device(bench.model.device)
    for table, there in zip(tables, sent, strict=True):
        assert there.device == bench.model.device
        assert torch.equal(there.cpu(), torch.from_numpy(table))
    again = [rows.send(table) for table in tables[:2]]
    assert [there.tolist() for there in again] == [table.tolist() for table in tables[:2]]
    if bench.model.device.type == "cpu":  # elsewhere a copy may still be under way when the next is sent
        assert [pinned.nbytes for pinned, _ in rows._pinned] == [8192, 16384]


def test_memory_that_is_still_copied_out_of_is_left_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bench.blender()._rows
    monkeypatch.setattr(rows._platform, "query", lambda event: False)
    sent = [rows.send(np.full(3, value, np.int64)) for value in (7, 8)]
    assert len({pinned.data_ptr() for pinned, _ in rows._pinned}) == 2
    assert [there.tolist() for there in sent] == [[7] * 3, [8] * 3]


def test_numbers_are_read_back_from_memory_that_others_get_afterwards(bench: Bench) -> None:
    rows = bench.blender()._rows
    wanted = np.array([9, 4, 7], np.int64)
    with rows.read_back(rows.send(wanted)) as get:
        sent = [rows.send(np.full(3, value, np.int64)) for value in (5, 6)]
        assert get().tolist() == wanted.tolist()
    assert [there.tolist() for there in sent] == [[5] * 3, [6] * 3]
    kept = len(rows._pinned)
    with rows.read_back(sent[0]) as get:
        assert get().tolist() == [5] * 3
    assert len(rows._pinned) in (kept, kept + 1)  # a copy may still be under way
