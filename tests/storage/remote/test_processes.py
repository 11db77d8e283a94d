"""Processes that share a remote tier; what they open, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import python_path
from storage.remote_place import ALL, Place
from storage.servers import Server

TESTS = Path(__file__).parents[2]
# It ends as programs do: nothing is closed.
ENGINE = """
import sys
from oracle import Dims, Oracle, run_slots
from lwkv.platforms import open_platform

platform, (url, what) = open_platform("cpu"), sys.argv[1:]
oracle = Oracle(platform, platform.current_device(), dims=Dims(blocks=32))
engine = oracle.engine(8, remote_url=url)
tokens, slots = list(range(16)), run_slots(0, 16)
if what == "store":
    oracle.compute(tokens, slots)
    engine.store(tokens, slot_mapping=slots)
    assert engine.flush()
else:
    assert engine.retrieve(tokens, slot_mapping=slots).all()
    oracle.expect(tokens, slots)
    oracle.check()
print(what)
"""


@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_a_process_finds_what_another_one_has_left_and_both_end_well(
    request: pytest.FixtureRequest, kind: str
) -> None:
    server: Server = request.getfixturevalue(kind)
    for what in ("store", "load"):
        done = subprocess.run(
            [sys.executable, "-c", ENGINE, f"{kind}://127.0.0.1:{server.port}", what],
            env=os.environ | {"PYTHONPATH": python_path(TESTS, TESTS.parent)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (0, f"{what}\n"), done.stderr


def listening() -> set[str]:
    """The sockets of this process that others can connect to."""
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    open_now = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)}
    return inodes & open_now


def test_nothing_listens_for_a_tier_on_valkey(redis: Server) -> None:
    before = listening()
    place = Place(f"redis://127.0.0.1:{redis.port}")
    place.store(1)
    assert place.load(1) == [ALL]
    assert listening() == before
    place.tier.close()
