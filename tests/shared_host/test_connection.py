"""One connection for long: its numbers, its notes, its end; and in a child process."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_host.owners import LONG_S, OwnerThread, owner_at, pool_at, session_at
from storage.rig import PAGE_BYTES, keys

from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.shared_host import protocol
from lwkv.shared_host.client import connection
from lwkv.shared_host.client import session as client_session
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.client.tier import NodeTier
from lwkv.shared_host.greeting import Hello, write
from lwkv.shared_host.memfd import make_memory
from lwkv.shared_host.owner import server
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.protocol import Frames, Message, Op, pack, read_numbers, read_spills
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


def test_a_client_that_leaves_before_it_gets_the_reply_to_a_pin_holds_its_pages_all_the_same(
    owner: OwnerThread, path: Path
) -> None:
    """What a reply does not need is done behind it, also where the reply cannot be sent."""
    with pool_at(path, PAGE_BYTES) as pool:
        tier, pages = NodeTier(pool), pool.allocate(3)
        assert pages is not None
        tier.insert(keys(1), [Chunk(pages)])
        assert tier.is_settled()
    assert owner.server.status()["pages_held"] == 0
    session = session_at(path)
    parts = [protocol.pack_numbers([8]), protocol.pack_keys(keys(1))]
    session.connection._socket.send(pack(Op.PIN, 1, parts))
    session.connection.close()
    session.connection.release()
    asking = session_at(path)
    assert asking.has(8, keys(1)) == [True]
    assert owner.server.status()["pages_held"] == 3, "its process is not gone"
    asking.connection.close()
    asking.connection.release()


def test_a_load_can_be_announced_whatever_the_connection_does(owner: OwnerThread, session: Session) -> None:
    session.announce()
    assert session.has(8, keys(1)) == [False]
    with session.connection._lock:  # another thread sends
        session.announce()
    assert in_child(session.announce) == 0
    session.connection._late = 7, lambda _: None  # the owner is stopped
    session.announce()
    assert not session.connection._outbox
    session.connection._late = None
    owner.server.stop()
    session.connection.close()
    session.announce()
    assert not session.connection._outbox


def test_the_owner_does_not_sleep_while_a_request_is_announced(
    session: Session, owner: OwnerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Semaphore(0)
    real = os.sched_yield
    monkeypatch.setattr(server, "AWAKE_S", LONG_S)
    monkeypatch.setattr(server.os, "sched_yield", lambda: (looks.release(), real()))
    session.announce()
    for _ in range(3):
        assert looks.acquire(timeout=LONG_S)
    assert session.has(8, keys(1)) == [False]


def test_what_is_announced_changes_nothing(owner: OwnerThread, path: Path) -> None:
    with pool_at(path, PAGE_BYTES) as pool:
        tier, pages = NodeTier(pool), pool.allocate(3)
        assert pages is not None
        tier.insert(keys(1), [Chunk(pages)])
        assert tier.is_settled()
        before = owner.server.status()
        for _ in range(3):
            tier.announce()
        assert tier.is_settled()
        assert owner.server.status() == before


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


def sent_commits(
    session: Session, monkeypatch: pytest.MonkeyPatch, lengths: list[int], spills: dict[int, Int64s]
) -> list[Message]:
    """What is sent for chunks of pages 0, 1, ...; every message is one that the owner takes."""
    sent: list[bytes] = []
    monkeypatch.setattr(session.connection, "tell", lambda op, *parts: sent.append(pack(op, 0, parts)))
    names = [ChunkKey("", number.to_bytes(16, "little")) for number in range(len(lengths))]
    session.commit(names, [None, *names[:-1]], lengths, np.arange(sum(lengths)), spills)
    messages = [message for frame in sent for message in Frames(protocol.MOST_REQUEST_BYTES).feed(frame)]
    assert b"".join(message.parts[0] for message in messages) == protocol.pack_keys(names)
    assert [n for message in messages for n in read_numbers(message.parts[2]).tolist()] == lengths
    pages = [read_numbers(message.parts[3]).tolist() for message in messages]
    assert [page for part in pages for page in part] == list(range(sum(lengths)))
    for message, part in zip(messages, pages, strict=True):
        beside = {page: spill.tolist() for page, spill in read_spills(message.parts[4]).items()}
        assert beside == {page: spills[page].tolist() for page in part if page in spills}
    return messages


def test_chunks_with_much_beside_their_pages_are_committed_in_messages_that_the_owner_takes(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_chunks, beside = 120_000, np.arange(10)
    messages = sent_commits(session, monkeypatch, [1] * num_chunks, dict.fromkeys(range(num_chunks), beside))
    numbers = num_chunks * (3 + len(beside))
    assert len(messages) == -(-numbers // protocol.MOST_PAGES)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 4), max_size=12), st.dictionaries(st.integers(0, 20), st.integers(0, 5)))
def test_every_chunk_is_committed_once_with_what_is_beside_it(
    session: Session, lengths: list[int], beside: dict[int, int]
) -> None:
    spills = {page: np.arange(count) for page, count in beside.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_session, "MOST_PAGES", 9)
        patch.setattr(client_session, "MOST_KEYS", 10)
        for message in sent_commits(session, patch, lengths, spills):
            num_chunks = len(message.parts[2]) // 8
            numbers = (len(message.parts[3]) + len(message.parts[4])) // 8
            assert num_chunks == 1 or (num_chunks <= 5 and numbers <= 9)


def test_what_one_message_has_no_room_for_goes_in_several(
    owner: OwnerThread, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_session, "MOST_PAGES", 3)
    monkeypatch.setattr(client_session, "MOST_KEYS", 4)
    with pool_at(path, PAGE_BYTES) as pool:
        tier, pages = NodeTier(pool), pool.allocate(7)
        assert pages is not None
        names = keys(1, 2, 3, 4, 5, 6)
        ends = [1, 3, 4, 5, 6, 7]  # one has two pages
        chunks = [Chunk(own) for own in np.split(pages, ends[:-1])]
        tier.insert(names, chunks)
        assert tier.is_settled()
        assert owner.server.status()["chunks"] == 6
        assert owner.server.status()["pages_held"] == 0
        # What one message cannot ask for is not found.
        assert tier.contains(names) == [True] * 4 + [False] * 2
        pinned = tier.pin(names)
        assert [chunk is not None for chunk in pinned] == [True] * 4 + [False] * 2
        assert [list(chunk.pages) for chunk in pinned if chunk] == [[0], [1, 2], [3], [4]]
        tier.use(names)
        tier.unpin([chunk for chunk in pinned if chunk])
        assert tier.is_settled()
        assert owner.server.status()["pages_held"] == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_who_sends_too_much_is_disconnected(owner: OwnerThread, path: Path, is_known: bool) -> None:
    """The owner keeps what has come of a message: from a stranger hardly anything."""
    most = protocol.MOST_REQUEST_BYTES if is_known else protocol.FIRST_BYTES
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        if is_known:
            line.sendall(pack(Op.HELLO, 1, [write(Hello(0))]))
            assert line.recv(4096)
        line.sendall((most + 1).to_bytes(4, "little") + bytes([Op.HAS, 0, 0, 0, 0, 0]))
        with suppress(ConnectionResetError):
            assert line.recv(4096) == b""
    assert owner.server.status()["clients"] == 0


class Refusing:
    """A listening socket with which the system has no descriptors left for some time."""

    def __init__(self, listening: socket.socket, failures: int) -> None:
        self._listening = listening
        self._left = failures
        self.times: list[float] = []

    def accept(self) -> object:
        self.times.append(time.monotonic())
        if self._left:
            self._left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listening.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listening, name)


def test_an_owner_without_descriptors_rests_and_takes_the_connection_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "ACCEPT_REST_S", 0.05)
    address = Address(str(path))
    address.socket = refusing = Refusing(address.socket, 3)  # type: ignore[assignment]
    descriptor = make_memory(4096)
    serving = server.Server(address, server.Memory(descriptor, 4096))
    thread = threading.Thread(target=serving.serve)
    thread.start()
    session = session_at(path)
    assert session.has(8, keys(1)) == [False]
    assert len(refusing.times) == 4
    assert min(np.diff(refusing.times)) >= 0.05
    assert sum("Too many open files" in line for line in caplog.messages) == 1
    session.connection.close()
    session.connection.release()
    serving.stop()
    thread.join()
    address.close()
    os.close(descriptor)
