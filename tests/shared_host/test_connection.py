"""One connection for long: its numbers, its notes, its end; and in a child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from shared_host.owners import OwnerThread, owner_at, pool_at, session_at
from storage.rig import PAGE_BYTES, keys

from lwkv.shared_host.client import connection
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.client.tier import NodeTier
from lwkv.shared_host.protocol import Op
from lwkv.storage import Chunk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


@pytest.fixture
def owner(path: Path) -> Iterator[OwnerThread]:
    with owner_at(path, 8) as owner:
        yield owner


@pytest.fixture
def session(owner: OwnerThread, path: Path) -> Iterator[Session]:
    session = session_at(path)
    yield session
    session.connection.close()
    session.connection.release()


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a forked child that calls `work`."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_requests_go_on_when_all_numbers_have_been_used(session: Session) -> None:
    session.connection._number = connection.MOST_REQUESTS - 2
    for _ in range(5):
        assert session.has(8, keys(1)) == [False]
    assert session.connection._number == 3
    assert not session.connection.is_lost


def test_a_child_process_does_not_end_the_connection_of_its_parent(session: Session) -> None:
    def leave() -> None:
        session.bye()
        session.connection.tend()
        session.connection.close()
        session.connection.release()

    pages, _ = session.reserve(8, 2)
    assert pages is not None
    with session.connection._lock:  # another thread of the parent has it
        assert in_child(leave) == 0
    assert session.has(8, keys(1)) == [False]
    assert session.state.pages_in_use == 2


def test_uses_are_not_kept_for_an_owner_that_does_not_answer(session: Session) -> None:
    session.connection._late = 7, lambda _: None
    for _ in range(100):
        session.use(keys(1, 2, 3))
    assert not session.connection._outbox
    session.free(np.array([1]), np.array([1]))
    assert len(session.connection._outbox) == 1, "what is held is given back whenever the owner goes on"
    session.connection._outbox.clear()
    session.connection._late = None


def test_what_comes_when_the_pool_is_closed_is_given_back(owner: OwnerThread, path: Path) -> None:
    with pool_at(path, PAGE_BYTES) as pool:
        tier, session = NodeTier(pool), pool.session
        assert session is not None
        pages, kept = pool.allocate(2), pool.allocate(1)
        assert pages is not None
        assert kept is not None
        tier.insert(keys(1), [Chunk(pages)])
        pinned = session.pin(8, keys(1))
        reserved, _ = session.reserve(8, 3)
        assert pinned is not None
        assert reserved is not None
        assert owner.server.status()["pages_held"] == 6
        pool.close()  # while threads are between the owner's answer and what they do with it
        assert pool.adopt(session, pinned) is None
        assert pool._take_over(session, reserved) is None
        assert session.has(0, ()) == []
        assert owner.server.status()["pages_held"] == 1
        pool.release(kept)
        assert pool.adopt(session, pinned) is None
        session.connection.tend()
        assert not session.connection.is_lost


def test_pages_in_use_can_be_asked_for_while_the_owner_goes(owner: OwnerThread, path: Path) -> None:
    with pool_at(path, PAGE_BYTES) as pool:
        session = pool.session
        assert session is not None

        class Going(type(pool)):  # type: ignore[misc]
            """Loses its owner between any two looks at it."""

            looks = 0

            @property
            def session(self) -> Session | None:
                Going.looks += 1
                return session if Going.looks % 2 else None

        pool.__class__ = Going
        assert pool.pages_in_use == 0
        pool.__class__ = Going.__base__


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 50_000, b"7", b'"page_stride"', b"\xff"])
def test_an_owner_lives_on_whatever_a_client_says_first(session: Session, path: Path, text: bytes) -> None:
    other = session_at(path)
    assert other.connection.ask(Op.HELLO, [text], lambda _: None) is None
    assert other.connection.is_lost
    other.connection.release()
    assert session.has(8, keys(1)) == [False]
