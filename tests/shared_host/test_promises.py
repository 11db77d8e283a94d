"""What an owner holds for clients because another process asked it to: who ends it, and that it is there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from selectors import SelectorKey
from tempfile import TemporaryDirectory
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from shared_host.owners import LONG_S, OwnerThread, owner_at, session_at
from shared_host.workers import (
    LAYERS,
    LENGTH,
    PAGE_BYTES,
    SHORT_S,
    freeze,
    kill,
    prompt,
    put,
    run_owner,
    start,
    status,
    thaw,
    wait_for,
    wrong_pages,
)
from storage.rig import keys

from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.promises import NodePromise, OwnerPromises, Promised
from lwkv.shared_host.client.session import Pinned, Session
from lwkv.shared_host.client.tier import NodeTier
from lwkv.shared_host.owner.index import Client, NodeIndex
from lwkv.shared_host.owner.peer import Peer
from lwkv.shared_host.owner.promises import UngivenPromises
from lwkv.shared_host.owner.server import Gone
from lwkv.shared_host.protocol import Message, Op, ProtocolError, pack, pack_keys, pack_numbers
from lwkv.storage import Chunk
from lwkv.telemetry.counters import Counters

PAGES = LAYERS * LENGTH * 2
"""Room for two prompts."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


@pytest.fixture
def owner(path: Path) -> Iterator[OwnerThread]:
    with owner_at(path, PAGES) as owner:
        yield owner


class Worker:
    """An engine's host memory."""

    def __init__(self, path: Path | str, timeout_s: float = LONG_S) -> None:
        self.pool: NodePool
        self.tier: NodeTier
        self.pool, self.tier = open_node_memory(str(path), CPU(), PAGE_BYTES, timeout_s, Counters())

    def store(self, number: int) -> bool:
        """Store what is missing of a prompt, if there is room for all of that."""
        missing = [n for n, there in zip(prompt(number), self.has(number), strict=True) if not there]
        return not missing or put(self.pool, self.tier, prompt(number), missing)

    def has(self, number: int) -> list[bool]:
        return self.tier.contains(keys(*prompt(number)))

    def load(self, promised: Promised | None, numbers: Sequence[int]) -> None:
        """Take over these chunks, all of them, compare their bytes, and give them back."""
        self.unpin(self.take_over(promised), numbers)

    def take_over(self, promised: Promised | None) -> list[Chunk]:
        assert promised is not None
        chunks = self.tier.take_over(promised)
        assert chunks is not None
        return [chunk for chunk in chunks if chunk is not None]

    def unpin(self, chunks: Sequence[Chunk], numbers: Sequence[int]) -> None:
        for number, chunk in zip(numbers, chunks, strict=True):
            assert wrong_pages(self.pool, number, chunk) == []
        self.tier.unpin(chunks)

    def settle(self) -> None:
        assert self.tier.is_settled()


@pytest.fixture
def workers(owner: OwnerThread, path: Path) -> Iterator[list[Worker]]:
    workers = [Worker(path) for _ in range(3)]
    yield workers
    for worker in workers:
        worker.pool.close()
    wait_for(lambda: status(path)["pages_held"] == 0)


@pytest.fixture
def scheduler(owner: OwnerThread, path: Path) -> Iterator[OwnerPromises]:
    scheduler = OwnerPromises(str(path), LONG_S)
    yield scheduler
    scheduler.close()


def promise_of(scheduler: OwnerPromises, number: int, *workers: Worker, first: int = 0) -> NodePromise:
    takers = [(worker.tier.name, keys(*prompt(number))) for worker in workers]
    promise = scheduler.promise(first, takers)
    assert promise is not None
    return promise


def is_at_rest(path: Path) -> bool:
    now = status(path)
    nothing = (now["pages_held"], now["chunks_promised"]) == (0, 0)
    return nothing and now["pages_in_use"] == now["chunks"] * LAYERS


def test_what_is_promised_stays_whatever_others_store_and_is_loaded_without_a_message(
    path: Path, workers: list[Worker], scheduler: OwnerPromises, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, _ = workers
    assert one.store(1)
    promise = promise_of(scheduler, 1, one)
    assert promise.there == [[True] * LENGTH]
    assert scheduler.give(promise, 0, LENGTH)
    for number in range(2, 7):
        assert other.store(number)
    assert not all(other.has(2))
    assert all(other.has(1))
    with monkeypatch.context() as patch:
        patch.setattr(Session, "pin", lambda *_: pytest.fail("a request is sent"))
        one.load(promise.promised[0], prompt(1))
    one.settle()
    assert is_at_rest(path)
    assert other.store(7)
    assert other.store(8)
    assert not any(other.has(1))


def test_a_promise_counts_as_a_use_of_the_whole_prompt(
    workers: list[Worker], scheduler: OwnerPromises
) -> None:
    one, other, _ = workers
    assert one.store(1)
    assert one.store(2)
    assert scheduler.give(promise_of(scheduler, 1, one, first=LENGTH), 0, 0) is False
    assert other.store(3)
    assert all(one.has(1))
    assert not any(one.has(2))


def test_only_what_is_given_stays_and_what_is_not_ends(
    path: Path, workers: list[Worker], scheduler: OwnerPromises
) -> None:
    one, *_ = workers
    assert one.store(1)
    promise = promise_of(scheduler, 1, one, first=1)
    assert status(path)["pages_held"] == (LENGTH - 1) * LAYERS
    assert status(path)["chunks_promised"] == LENGTH - 1
    assert scheduler.give(promise, 1, 2)
    assert promise.promised[0] is not None
    wait_for(lambda: status(path)["pages_held"] == LAYERS)
    assert status(path)["chunks_promised"] == 0
    one.load(promise.promised[0].part(1, 2), prompt(1)[2:3])
    one.settle()
    assert is_at_rest(path)


@pytest.mark.parametrize("ends", ["is taken back", "ends with its connection"])
def test_a_promise_that_is_not_given_holds_nothing_afterwards(
    path: Path, workers: list[Worker], ends: str
) -> None:
    scheduler = OwnerPromises(str(path), LONG_S)
    assert workers[0].store(1)
    promise = promise_of(scheduler, 1, *workers)
    assert status(path)["pages_held"] == 3 * LENGTH * LAYERS
    if ends == "is taken back":
        assert not scheduler.give(promise, 0, 0)
    else:
        scheduler.close()
    wait_for(lambda: is_at_rest(path))
    assert all(worker.has(1) == [True] * LENGTH for worker in workers)
    scheduler.close()


def test_ranks_hold_each_for_itself(path: Path, workers: list[Worker], scheduler: OwnerPromises) -> None:
    assert workers[0].store(1)
    promise = promise_of(scheduler, 1, *workers)
    assert scheduler.give(promise, 0, LENGTH)
    held = [worker.take_over(own) for worker, own in zip(workers, promise.promised, strict=True)]
    for worker, chunks in zip(workers, held, strict=True):
        assert workers[1].store(2)
        assert not workers[1].store(3) or all(workers[1].has(1))
        worker.unpin(chunks, prompt(1))
        worker.settle()
    assert is_at_rest(path)


def test_a_promise_is_for_those_who_are_there_and_of_what_each_has_and_can_use(
    path: Path, workers: list[Worker], scheduler: OwnerPromises
) -> None:
    one, other, _ = workers
    assert put(one.pool, one.tier, prompt(1), prompt(1)[:2])
    takers = [
        (one.tier.name, keys(*prompt(1))),
        ("nobody", keys(*prompt(1))),
        (other.tier.name, keys(*prompt(2))),
    ]
    promise = scheduler.promise(0, takers)
    assert promise is not None
    assert promise.there == [[True, True, False, False], None, [False] * LENGTH]
    assert promise.promised[1] is None
    assert promise.promised[0] is not None
    assert list(promise.promised[0].pinned.lengths) == [LAYERS, LAYERS, 0, 0]
    assert other.pool.session is not None
    other.pool.session.usable(0)
    other.settle()
    blind = promise_of(scheduler, 1, other)
    assert blind.there == [[False] * LENGTH]
    for each in (promise, blind):
        scheduler.give(each, 0, 0)
    wait_for(lambda: is_at_rest(path))


@contextmanager
def held_up(owner: OwnerThread, is_first: Callable[[object], bool]) -> Iterator[None]:
    """Have the owner do nothing inside, and then all that has come, some of it first."""
    gate, real = Event(), owner.server._select

    def select(most_s: float | None) -> list[tuple[SelectorKey, int]]:
        real(most_s)
        gate.wait()
        return sorted(real(0), key=lambda found: not is_first(found[0].data))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner.server, "_select", select)
        gate.set()
        status(Path(owner.address.path))  # what was waited for before is over
        gate.clear()
        try:
            yield
        finally:
            gate.set()


def asks_only(data: object) -> bool:
    return isinstance(data, Peer) and data.client is None


def test_what_one_has_stored_is_promised_to_whoever_asks_next(
    path: Path, owner: OwnerThread, workers: list[Worker], scheduler: OwnerPromises
) -> None:
    """The store is a note on one connection, the promise a request on another one, which is read first."""
    one, *_ = workers
    pages = one.pool.allocate(LAYERS * LENGTH)
    assert pages is not None
    with ThreadPoolExecutor(1) as threads:
        with held_up(owner, asks_only):
            one.tier.insert(keys(*prompt(1)), [Chunk(row) for row in pages.reshape(LENGTH, LAYERS)])
            promise = threads.submit(promise_of, scheduler, 1, one)
            wait_for(lambda: scheduler.session is not None and scheduler.session.connection._lock.locked())
            time.sleep(0.05)  # it is sent
        assert promise.result().there == [[True] * LENGTH]
    scheduler.give(promise.result(), 0, 0)


def test_what_a_process_has_given_before_its_end_is_heard_of_before_that(
    path: Path, owner: OwnerThread
) -> None:
    def give_and_die(name: str) -> None:
        scheduler = OwnerPromises(str(path), LONG_S)
        promise = scheduler.promise(0, [(name, keys(*prompt(1)))])
        assert promise is not None
        os.write(told, b"x")
        os.read(held, 1)
        assert scheduler.give(promise, 0, LENGTH)
        os.kill(os.getpid(), signal.SIGKILL)

    (hears, told), (held, go_on) = os.pipe(), os.pipe()
    worker = Worker(path)
    assert worker.store(1)
    process = start(give_and_die, worker.tier.name)
    os.read(hears, 1)
    with held_up(owner, lambda data: isinstance(data, Gone)):
        os.write(go_on, b"x")
        process.join(60)
    wait_for(lambda: status(path)["chunks_promised"] == 0)
    assert status(path)["pages_held"] == LENGTH * LAYERS
    worker.pool.close()
    wait_for(lambda: is_at_rest(path))
    for end in (hears, told, held, go_on):
        os.close(end)


def test_a_promise_to_an_earlier_connection_of_a_worker_is_not_taken_over(
    path: Path, workers: list[Worker], scheduler: OwnerPromises
) -> None:
    one, other, _ = workers
    assert one.store(1)
    promise = promise_of(scheduler, 1, one)
    assert scheduler.give(promise, 0, LENGTH)
    (promised,) = promise.promised
    assert promised is not None
    assert other.tier.take_over(promised) is None
    one.load(promised, prompt(1))


def test_a_worker_that_leaves_takes_its_holds_along_and_the_promise_may_be_given_all_the_same(
    path: Path, owner: OwnerThread, scheduler: OwnerPromises
) -> None:
    one, other = Worker(path), Worker(path)
    assert one.store(1)
    promise = promise_of(scheduler, 1, one, other)
    one.pool.close()
    wait_for(lambda: status(path)["pages_held"] == LENGTH * LAYERS)
    assert scheduler.give(promise, 0, 1)
    wait_for(lambda: status(path)["pages_held"] == LAYERS)
    assert promise.promised[1] is not None
    other.load(promise.promised[1].part(0, 1), prompt(1)[:1])
    other.settle()
    assert is_at_rest(path)
    other.pool.close()


def test_an_owner_that_is_late_has_promised_nothing_and_holds_nothing_when_it_goes_on(path: Path) -> None:
    owner = start(run_owner, path, PAGES)
    worker, scheduler = Worker(path, LONG_S), OwnerPromises(str(path), SHORT_S)
    assert worker.store(1)
    wait_for(
        lambda: (asked := scheduler.promise(0, [(worker.tier.name, [])])) is not None and asked.number > 0
    )
    worker.settle()
    freeze(owner)
    takers = [(worker.tier.name, keys(*prompt(1)))]
    assert scheduler.promise(0, takers) is None
    assert scheduler.promise(0, takers) is None
    thaw(owner)
    wait_for(lambda: scheduler.session is not None and not scheduler.session.connection.is_resting)
    wait_for(lambda: status(path)["pages_held"] == 0)
    worker.pool.close()
    scheduler.close()
    kill(owner)


def test_what_a_scheduler_has_given_is_its_workers_though_it_dies_before_the_owner_has_heard_of_it(
    path: Path,
) -> None:
    def promise_and_die(name: str) -> None:
        scheduler = OwnerPromises(str(path), LONG_S)
        given, kept = (scheduler.promise(0, [(name, keys(*prompt(number)))]) for number in (1, 2))
        assert given is not None
        assert kept is not None
        os.write(told, b"x")
        os.read(held_up, 1)  # the owner is frozen
        assert scheduler.give(given, 1, LENGTH)
        os.kill(os.getpid(), signal.SIGKILL)

    (hears, told), (held_up, go_on) = os.pipe(), os.pipe()
    owner = start(run_owner, path, PAGES)
    worker = Worker(path)
    assert worker.store(1)
    assert worker.store(2)
    process = start(promise_and_die, worker.tier.name)
    os.read(hears, 1)
    assert status(path)["chunks_promised"] == 2 * LENGTH
    freeze(owner)
    os.write(go_on, b"x")
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    thaw(owner)
    wait_for(lambda: status(path)["chunks_promised"] == 0)
    assert status(path)["pages_held"] == (LENGTH - 1) * LAYERS
    worker.pool.close()
    wait_for(lambda: is_at_rest(path))
    kill(owner)
    for end in (hears, told, held_up, go_on):
        os.close(end)


def test_a_note_for_which_the_socket_has_no_room_gives_nothing(path: Path) -> None:
    owner = start(run_owner, path, PAGES)
    worker, scheduler = Worker(path), OwnerPromises(str(path), LONG_S)
    assert worker.store(1)
    promise = promise_of(scheduler, 1, worker)
    assert scheduler.session is not None
    freeze(owner)
    with suppress(BlockingIOError):
        while True:
            scheduler.session.connection._socket.send(pack(Op.STATUS, 0, []))
    assert not scheduler.give(promise, 0, LENGTH)
    thaw(owner)
    wait_for(lambda: status(path)["pages_held"] == 0)
    worker.pool.close()
    scheduler.close()
    kill(owner)


def test_a_part_of_what_is_promised_has_its_own_pages_and_nothing_beyond() -> None:
    beside = {5: np.array([9])}
    promised = Promised("owner", 1, Pinned([2, 0, 3], np.array([3, 4, 5, 6, 7]), beside))
    for first, end, lengths, pages, spills in (
        (0, 2, [2, 0], [3, 4], {}),
        (1, 3, [0, 3], [5, 6, 7], beside),
        (2, 5, [3, 0, 0], [5, 6, 7], beside),
        (3, 4, [0], [], {}),
    ):
        part = promised.part(first, end)
        assert part[:2] == ("owner", 1)
        assert (part.pinned.lengths, part.pinned.pages.tolist()) == (lengths, pages)
        assert part.pinned.spills == spills


NUMBERS = st.lists(st.integers(-2, 6) | st.sampled_from([2**62, -(2**63)]), max_size=4).map(pack_numbers)
PARTS = NUMBERS | st.binary(max_size=70) | st.just(pack_keys(keys(1, 2))) | st.sampled_from([b"one", b"two"])


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from([Op.PROMISE, Op.GIVE]), st.lists(PARTS, max_size=5)), max_size=8))
def test_any_promise_is_answered_or_refused_and_holds_nothing_when_its_client_has_ended(
    requests: list[tuple[Op, list[bytes]]],
) -> None:
    index = NodeIndex(12, 5)
    clients = {name: index.client(name=name, number=number) for number, name in enumerate(("one", "two"))}
    for client in clients.values():
        client.end = 12
    pages = reserved(index, clients["one"], 4)
    commit = [pack_keys(keys(1, 2)), bytes(64), pack_numbers([2, 2]), pack_numbers(pages), b""]
    index.handle(clients["one"], Message(Op.COMMIT, 0, commit))
    clients["one"].holds.end_all()
    promises = UngivenPromises()
    for op, parts in requests:
        with suppress(ProtocolError):
            if op is Op.GIVE:
                promises.give(Message(op, 0, [*parts[:1], pack_numbers([0, 0])]))
            else:
                promises.answer(Message(op, 1, parts), clients.get)
        index.settle()
    promises.end()
    assert all(client.holds.num_pages == 0 for client in clients.values())
    assert index.pages.references == 4


def reserved(index: NodeIndex, client: Client, count: int) -> list[int]:
    answer = index.handle(client, Message(Op.RESERVE, 1, [pack_numbers([12]), pack_numbers([count])]))
    assert answer is not None
    numbers: list[int] = np.frombuffer(answer[0], "<i8").tolist()
    return numbers


def test_a_client_with_pages_that_promises_and_one_that_gives_what_it_has_not_are_disconnected(
    path: Path, workers: list[Worker], scheduler: OwnerPromises
) -> None:
    assert workers[0].store(1)
    kept = promise_of(scheduler, 1, workers[0])
    for stride, op, parts in (
        (4096, Op.PROMISE, [pack_numbers([0]), b"one", b""]),
        (0, Op.GIVE, [pack_numbers([1, 0, 0])]),
        (0, Op.PROMISE, []),
    ):
        session = session_at(path, stride)
        session.connection._socket.send(pack(op, 1, parts))
        wait_for(lambda session=session: (session.connection.tend(), session.has(0, ()) is None)[1])
        session.connection.release()
    scheduler.give(kept, 0, LENGTH)
    workers[0].load(kept.promised[0], prompt(1))


class PromiseMachine(RuleBasedStateMachine):
    """Engines of one and two workers that store, look up, load and leave: what was promised is there."""

    PROMPTS = 5

    def __init__(self) -> None:
        super().__init__()
        self.ending = ExitStack()
        folder = Path(self.ending.enter_context(TemporaryDirectory()))
        self.path = folder / "host.sock"
        self.ending.enter_context(owner_at(self.path, PAGES + LAYERS))
        self.workers = [[Worker(self.path)], [Worker(self.path), Worker(self.path)]]
        self.schedulers = [OwnerPromises(str(self.path), LONG_S) for _ in self.workers]
        self.open: list[tuple[int, int, NodePromise]] = []
        self.given: list[tuple[Worker, Promised, list[int]]] = []
        self.loading: list[tuple[Worker, list[Chunk], list[int]]] = []

    def teardown(self) -> None:
        while self.open:
            self.take_back()
        while self.given:
            self.begin_load()
        while self.loading:
            self.end_load()
        for some in self.workers:
            for worker in some:
                worker.settle()
        wait_for(lambda: is_at_rest(self.path))
        for scheduler in self.schedulers:
            scheduler.close()
        for some in self.workers:
            for worker in some:
                worker.pool.close()
        self.ending.close()

    @rule(engine=st.integers(0, 1), number=st.integers(0, PROMPTS - 1))
    def store(self, engine: int, number: int) -> None:
        self.workers[engine][-1].store(number)

    @rule(engine=st.integers(0, 1), number=st.integers(0, PROMPTS - 1), first=st.integers(0, LENGTH))
    def look_up(self, engine: int, number: int, first: int) -> None:
        promise = promise_of(self.schedulers[engine], number, *self.workers[engine], first=first)
        self.open.append((engine, number, promise))

    @precondition(lambda self: self.open)
    @rule(begin=st.integers(0, LENGTH), count=st.integers(1, LENGTH))
    def give(self, begin: int, count: int) -> None:
        engine, number, promise = self.open.pop(0)
        numbers = prompt(number)[-len(promise.promised[0].pinned.lengths) :] if promise.promised[0] else []
        end = min(begin + count, len(promise.promised[0].pinned.lengths) if promise.promised[0] else 0)
        if not self.schedulers[engine].give(promise, begin, end):
            return
        for worker, own in zip(self.workers[engine], promise.promised, strict=True):
            assert own is not None
            part = own.part(begin, end)
            there = [n for n, length in zip(numbers[begin:end], part.pinned.lengths, strict=True) if length]
            self.given.append((worker, part, there))

    @precondition(lambda self: self.open)
    @rule()
    def take_back(self) -> None:
        engine, _, promise = self.open.pop()
        assert not self.schedulers[engine].give(promise, 0, 0)

    @precondition(lambda self: self.given)
    @rule()
    def begin_load(self) -> None:
        worker, promised, numbers = self.given.pop(0)
        self.loading.append((worker, worker.take_over(promised), numbers))

    @precondition(lambda self: self.loading)
    @rule()
    def end_load(self) -> None:
        self.loading[0][0].unpin(*self.loading[0][1:])
        self.loading.pop(0)

    @rule(engine=st.integers(0, 1))
    def scheduler_ends(self, engine: int) -> None:
        """What it has given is loaded on; what it has not is nobody's."""
        self.schedulers[engine].close()
        self.schedulers[engine] = OwnerPromises(str(self.path), LONG_S)
        self.open = [item for item in self.open if item[0] != engine]

    @rule()
    def a_worker_ends(self) -> None:
        """With all that it held; another one takes its place."""
        self.open, kept = [], self.open
        for engine, _, promise in kept:
            self.schedulers[engine].give(promise, 0, 0)
        ended, self.workers[1][0] = self.workers[1][0], Worker(self.path)
        self.given = [item for item in self.given if item[0] is not ended]
        for worker, chunks, numbers in [item for item in self.loading if item[0] is ended]:
            worker.unpin(chunks, numbers)
        self.loading = [item for item in self.loading if item[0] is not ended]
        ended.pool.close()


TestPromises = PromiseMachine.TestCase
TestPromises.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
