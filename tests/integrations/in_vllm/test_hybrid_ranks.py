"""Two ranks with several groups of caches, and tiers below: both have all of a hit, or none has any."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from integrations.in_vllm import models, on_ranks
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Answer, assert_same, prompt, with_lwkv
from integrations.in_vllm.test_disk import with_disk
from storage.servers import Server, any_server_program, redis_server, running, wait_until

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has one group beside a connector"
)

TWO_RANKS = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
TIMEOUT_S = 3.0
"""That a request waits for a tier at most; long enough for a busy machine where nothing is wrong."""


class Ranks:
    """An engine of two ranks in processes of their own."""

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        self._engine = Elsewhere(model, {}, enable_prefix_caching=True, **settings, **TWO_RANKS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def ask(self, prompts: list[list[int]]) -> list[Answer]:
        answers: list[Answer] = self._engine.call("ask", prompts)
        return answers

    def each(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank says."""
        found: list[Any] = self._engine.call("on_ranks", function, *arguments)
        return found

    def empty(self) -> None:
        """Have all that was stored in lower tiers alone."""
        assert all(self.each(on_ranks.flush))
        self.each(on_ranks.evict_all)
        self._engine.call("forget")
        self.ask([prompt(1, 3)])  # the scheduler hears of it in its steps

    def rest(self) -> None:
        """Nothing is held for a request in any process."""
        wait_until(self._is_at_rest, "all to be given back")

    def _is_at_rest(self) -> bool:
        self.ask([prompt(1, 3)])  # what is not needed any more is given back in its steps
        waiting = self._engine.call("waiting")
        return not any(count for held in (*self.each(on_ranks.held), waiting) for count in held.values())


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a window of 64 and two without: three groups of two."""
    return models.written(models.write_gemma, tmp_path_factory.mktemp("gemma"), 64, "wwf" * 2)


@pytest.fixture(scope="module")
def computed(gemma: Path) -> Iterator[Elsewhere]:
    engine = Elsewhere(gemma, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = redis_server(any_server_program(), tmp_path / "server")
    with running(server):
        yield server


def on_disk(folder: Path) -> dict[str, Any]:
    return with_disk(folder, load_timeout_s=TIMEOUT_S)


def on_server(server: Server) -> dict[str, Any]:
    return with_lwkv(remote_url=f"valkey://127.0.0.1:{server.port}", load_timeout_s=TIMEOUT_S)


@pytest.fixture(params=["disk", "server"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Of engines with one tier below host memory."""
    if request.param == "disk":
        return on_disk(tmp_path / "disk")
    return on_server(request.getfixturevalue("server"))


def assert_found(ranks: Ranks, computed: Elsewhere, prompts: list[list[int]], found: list[int]) -> None:
    """Answers are those that are computed, and so many tokens of each prompt came from lwkv."""
    answers = ranks.ask(prompts)
    assert_same(answers, computed.ask(prompts))
    assert [answer.cached for answer in answers] == found


def test_a_hit_is_what_every_rank_has_of_every_kind(
    gemma: Path, computed: Elsewhere, settings: dict[str, Any]
) -> None:
    prompts = [prompt(4000, 300), prompt(4001, 200)]
    with Ranks(gemma, settings) as ranks:
        assert_found(ranks, computed, prompts, [0, 0])
        ranks.empty()
        assert_found(ranks, computed, prompts, [256, 192])
        ranks.rest()
    with Ranks(gemma, settings) as ranks:  # of another start
        assert_found(ranks, computed, prompts, [256, 192])
        for number, form in enumerate(("window", "full")):
            ids = prompt(4010 + number, 300)
            assert_found(ranks, computed, [ids[:130]], [0])
            ranks.each(on_ranks.flush)
            ranks.each(on_ranks.keep_back, number, form)
            ranks.each(on_ranks.evict_all)
            assert_found(ranks, computed, [ids, prompt(4020 + number, 200)], [128, 0])
            ranks.empty()
            ranks.each(on_ranks.keep_again, number)
            # The other rank has all, and this one all of the other kind.
            assert_found(ranks, computed, [ids, prompt(4020 + number, 200)], [128, 0])
            ranks.empty()
            assert_found(ranks, computed, [ids, prompt(4020 + number, 200)], [256, 192])
        ranks.rest()


def test_a_rank_that_has_lost_what_it_is_to_pin_leaves_the_other_with_nothing_pinned(
    gemma: Path, computed: Elsewhere, tmp_path: Path
) -> None:
    prompts = [prompt(4100, 300), prompt(4101, 200)]
    with Ranks(gemma, on_disk(tmp_path / "disk")) as ranks:
        assert_found(ranks, computed, prompts, [0, 0])
        ranks.empty()
        ranks.each(on_ranks.lose_at_pin, 1)
        assert_same(ranks.ask(prompts), computed.ask(prompts))
        ranks.rest()
        ranks.empty()
        assert_found(ranks, computed, prompts, [256, 192])
        ranks.rest()


def test_a_server_that_freezes_or_ends_while_requests_wait(
    gemma: Path, computed: Elsewhere, server: Server
) -> None:
    prompts = [prompt(4200, 300), prompt(4201, 200)]
    process = server._process
    assert process is not None
    with Ranks(gemma, on_server(server)) as ranks:
        assert_found(ranks, computed, prompts, [0, 0])
        ranks.empty()
        ranks.each(on_ranks.signal_at_fetch, 1, process.pid, signal.SIGSTOP)
        assert_same(ranks.ask(prompts), computed.ask(prompts))
        server.thaw()
        ranks.rest()
        wait_until(lambda: all(ranks.each(on_ranks.flush)), "tiers that take chunks again")
        ranks.each(on_ranks.signal_at_fetch, 0, process.pid, signal.SIGKILL)
        ranks.empty()
        assert_same(ranks.ask(prompts), computed.ask(prompts))
        ranks.rest()
        server.start()
        assert_same(ranks.ask(prompts), computed.ask(prompts))
        ranks.rest()


def test_a_disk_that_freezes_or_is_lost_while_requests_wait(
    gemma: Path, computed: Elsewhere, tmp_path: Path
) -> None:
    prompts = [prompt(4300, 300), prompt(4301, 200)]
    with Ranks(gemma, on_disk(tmp_path / "disk")) as ranks:
        assert_found(ranks, computed, prompts, [0, 0])
        ranks.empty()
        ranks.each(on_ranks.freeze_disk, 1)
        assert_same(ranks.ask(prompts), computed.ask(prompts))
        ranks.each(on_ranks.thaw_disk)
        ranks.rest()
        ranks.empty()
        ranks.each(on_ranks.remove_at_fetch, 0, str(tmp_path / "disk"))
        assert_same(ranks.ask(prompts), computed.ask(prompts))
        ranks.rest()
