from __future__ import annotations

import pytest
from storage.servers import Server

from lwkv.benchmarks.bench.findings import Absent
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.shapes import TINY
from lwkv.benchmarks.tiers.remote import RemoteFindings, measure_remote
from lwkv.platforms import Platform

MOVES = ["tier, put", "tier, get", "store", "load"]


def make_bench(platform: Platform, remote: str | None) -> Bench:
    return Bench(platform, platform.current_device(), TINY, 512, (16,), 1, remote=remote)


@pytest.mark.parametrize(("server", "scheme"), [("redis", "redis"), ("mooncake", "mooncake")])
def test_the_remote_tier_is_measured_and_checked_again_and_again(
    platform: Platform, request: pytest.FixtureRequest, server: str, scheme: str
) -> None:
    """A server outlives the runs: what one of them has put is not to be taken for what another has."""
    found: Server = request.getfixturevalue(server)
    bench = make_bench(platform, f"{scheme}://127.0.0.1:{found.port}")
    for _ in range(2):
        findings = measure_remote(bench)
        assert isinstance(findings, RemoteFindings)
        assert [move.name for move in findings.moves] == MOVES
        assert (findings.exact, list(findings.faults())) == (True, [])
        assert "client alone" in "\n".join(findings.lines(absolute=True))


def test_without_a_server_there_is_nothing_to_measure(platform: Platform) -> None:
    assert isinstance(measure_remote(make_bench(platform, None)), Absent)
