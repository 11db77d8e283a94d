"""The owner's loop: takes connections, answers requests, and frees what processes held that are gone."""

from __future__ import annotations

import errno
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

from lwkv.shared_host.greeting import Hello, Welcome, read, why_not, write
from lwkv.shared_host.numa import ON_NODE, NodeShare
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.index import Client, NodeIndex
from lwkv.shared_host.owner.peer import Peer
from lwkv.shared_host.owner.promises import names_in
from lwkv.shared_host.owner.slabs import SlabOwners
from lwkv.shared_host.process import peer_of
from lwkv.shared_host.protocol import Message, Op, ProtocolError, State, pack_numbers
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)

SLAB_BYTES = 256 << 20
"""Most bytes that a client page-locks in one call, which holds its launches up; pages in it have one size."""

AWAKE_S = 0.001
"""Seconds that the owner looks for a request that was announced: to wake up takes as long as to answer it."""

NOTHING = Message(Op.PIN, 0, [pack_numbers([0]), b""])
"""A pin of no chunk: what is announced is answered faster where the processor's caches have what it needs."""

ACCEPT_REST_S = 1.0
"""Seconds without new connections where one could not be taken."""

MOST_READS = 64
"""Of a client of whom another one may have heard something, before that one is answered."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Memory(NamedTuple):
    """Shared memory by its descriptor, all of it there.

    Attributes:
        shares: which of it is near which NUMA node; none where there is one node.
        by_node: bytes that are on each.
    """

    descriptor: int
    num_bytes: int
    shares: Sequence[NodeShare] = ()
    by_node: Mapping[int, int] = {}


class Server:
    """Serves one memory at one address, on the thread that calls `serve`.

    Clients of several sizes of pages share it slab by slab, see SlabOwners.

    Args:
        linger_s: seconds without any client after which `serve` returns; None for never.
    """

    def __init__(
        self,
        address: Address,
        memory: Memory,
        slab_bytes: int = SLAB_BYTES,
        linger_s: float | None = None,
    ) -> None:
        self._address = address
        self._memory = memory
        self._slabs = SlabOwners(memory.num_bytes, slab_bytes, memory.shares)
        self._name = uuid4().hex
        self._nothing = NodeIndex(0, 1)
        self._indexes: dict[int, NodeIndex] = {}  # by the stride of their pages
        self._peers: set[Peer] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._is_stopped = False
        self._rests_until: float | None = None
        self._linger_s = linger_s
        self._alone_since = time.monotonic()
        self._awake_until = 0.0
        self._last_client = 0
        self._throttle = LogThrottle(log)

    def serve(self) -> None:
        """Serve until `stop`, or until nobody has been connected for `linger_s`."""
        self._selector.register(self._address.socket, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._alone_since = time.monotonic()
        while not self._is_stopped and self._linger_left() != 0:
            waits = [left for left in (self._accept_again(), self._linger_left()) if left is not None]
            for key, events in self._select(min(waits, default=None)):
                if isinstance(key.data, Peer):
                    if key.data.is_connected:
                        self._serve(key.data, events)
                elif isinstance(key.data, Gone):
                    self._read_rest(key.data.peer)
                    self._forget(key.data.peer)
                elif key.fileobj is self._address.socket:
                    self._accept()
        self._close()

    def _select(self, most_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """What can be done, after `most_s` seconds at most."""
        if time.monotonic() >= self._awake_until:
            return self._selector.select(most_s)
        found = self._selector.select(0)
        if not found:
            os.sched_yield()  # whoever announced a request may be waiting for this core
        return found

    def stop(self) -> None:
        """Have `serve` return; from any thread, and from a signal handler."""
        self._is_stopped = True
        with suppress(OSError):  # it has ended
            self._waker.send(b"\0")

    def status(self) -> dict[str, int]:
        """What there is, for people."""
        state = self._state()
        in_use = [stride * index.state().pages_in_use for stride, index in self._indexes.items()]
        return {
            "bytes": self._memory.num_bytes,
            "bytes_in_use": sum(in_use),
            "page_sizes": len(self._indexes),
            "pages_in_use": state.pages_in_use,
            "chunks": state.chunks,
            "chunks_evicted": state.evicted,
            "clients": sum(peer.is_connected for peer in self._clients()),
            "clients_leaving": sum(not peer.is_connected for peer in self._clients()),
            "pages_held": sum(peer.client.holds.num_pages for peer in self._clients() if peer.client),
            "chunks_promised": sum(peer.promises.num_chunks for peer in list(self._peers)),
            **{f"{ON_NODE}{number}": there for number, there in sorted(self._memory.by_node.items())},
        }

    def _state(self) -> State:
        """Of all sizes of pages."""
        return State(
            *map(sum, zip(State(), *(index.state() for index in self._indexes.values()), strict=True))
        )

    def _clients(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.client is not None]

    def _linger_left(self) -> float | None:
        """Seconds until `serve` returns if nobody connects; None where that is not so."""
        if self._linger_s is None or self._peers:
            return None
        return max(0.0, self._alone_since + self._linger_s - time.monotonic())

    def _accept_again(self) -> float | None:
        """Take connections again when it is time; else the seconds until then, None where they are taken."""
        if self._rests_until is None:
            return None
        left = self._rests_until - time.monotonic()
        if left > 0:
            return left
        self._selector.register(self._address.socket, selectors.EVENT_READ)
        self._rests_until = None
        return None

    def _rest(self, error: OSError) -> None:
        """Take no connections for a while: whoever wants one is still there at once."""
        self._throttle.warn("no connection can be taken, tried again every second: %s", error)
        self._selector.unregister(self._address.socket)
        self._rests_until = time.monotonic() + ACCEPT_REST_S

    def _accept(self) -> None:
        try:
            connection, _ = self._address.socket.accept()
        except (BlockingIOError, ConnectionError):  # whoever it was has left
            return
        except OSError as error:  # no descriptors, or no memory
            self._rest(error)
            return
        process, user = peer_of(connection)
        if user != os.geteuid():
            log.warning("refused process %d of user %d: the memory is user %d's", process, user, os.geteuid())
            connection.close()
            return
        try:
            peer = Peer(connection)
        except OSError as error:
            connection.close()
            if error.errno in NO_DESCRIPTORS:
                self._rest(error)
            else:
                log.warning("refused a client whose process cannot be watched: %s", error)
            return
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._selector.register(peer.process, selectors.EVENT_READ, Gone(peer))

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.send_waiting()
            if events & selectors.EVENT_READ:
                for message in peer.receive():
                    self._answer(peer, message)
        except ProtocolError as error:
            log.warning("a client is disconnected: %s", error)
            peer.promises.leave_all()  # some may have been given in what is not read any more
            self._disconnect(peer)
        except OSError:
            peer.promises.leave_all()
            self._disconnect(peer)
        except EOFError:
            self._disconnect(peer)
        else:
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        """Have the selector look for what can be done for a peer."""
        events = (selectors.EVENT_READ if peer.may_be_read else 0) | (
            selectors.EVENT_WRITE if peer.has_replies else 0
        )
        if self._selector.get_key(peer.socket).events != events:
            self._selector.modify(peer.socket, events, peer)

    def _answer(self, peer: Peer, message: Message) -> None:
        if message.op is Op.HELLO:
            self._greet(peer, message)
        elif message.op is Op.STATUS:
            peer.send(Op.REPLY, message.number, *self._head(peer), json.dumps(self.status()).encode())
        elif not peer.is_welcome:
            raise ProtocolError(f"got {message.op.name} before a hello")
        elif message.op is Op.BYE:
            peer.leave()
        elif message.op is Op.SOON:
            self._awake_until = time.monotonic() + AWAKE_S
            if peer.client is not None:
                peer.client.index.handle(peer.client, NOTHING)
        elif message.op in (Op.PROMISE, Op.GIVE):
            self._promise(peer, message)
        elif peer.client is None:
            peer.send(Op.REPLY, message.number, *self._head(peer), *self._has(message))
        else:
            self._answer_client(peer, peer.client, message)

    def _answer_client(self, peer: Peer, client: Client, message: Message) -> None:
        index = client.index
        try:
            parts = index.answer(client, message)
            if parts is not None:
                peer.send(Op.REPLY, message.number, *self._head(peer), *parts)
        finally:
            index.settle()  # also where the reply cannot be sent: part of it may have been

    def _promise(self, peer: Peer, message: Message) -> None:
        if peer.client is not None:
            raise ProtocolError(f"got {message.op.name} of a client with pages")
        if message.op is Op.GIVE:
            peer.promises.give(message)
            return
        for name in names_in(message):
            self._catch_up(name)
        try:
            parts = peer.promises.answer(message, self._client_of)
            peer.send(Op.REPLY, message.number, *self._head(peer), *parts)
        finally:
            for index in self._indexes.values():
                index.settle()

    def _catch_up(self, name: str) -> None:
        """Take what a client has sent by now: whoever asks may have heard from it what it has stored."""
        for peer in [peer for peer in self._clients() if peer.client and peer.client.name == name]:
            for _ in range(MOST_READS):
                if not peer.is_connected or not peer.has_sent():
                    break
                self._serve(peer, selectors.EVENT_READ)

    def _client_of(self, name: str) -> Client | None:
        """The client of that name that is connected."""
        named = [peer.client for peer in self._clients() if peer.is_connected and name]
        return next((client for client in named if client is not None and client.name == name), None)

    def _has(self, message: Message) -> list[bytes]:
        """Answer one that has no pages, and may ask what is there of any size."""
        answers = [index.handle(None, message) for index in (self._nothing, *self._indexes.values())]
        found = [answer[0] for answer in answers if answer is not None]
        return [bytes(map(max, zip(*found, strict=True)))]

    def _head(self, peer: Peer) -> list[bytes]:
        if peer.client is None:
            return [pack_numbers(self._state()), b""]
        return [pack_numbers(peer.client.index.state()), peer.client.news()]

    def _greet(self, peer: Peer, message: Message) -> None:
        hello = read(Hello, b"".join(message.parts[:1]))
        stride = hello.page_stride
        reason = why_not(hello) or self._why_not_these_pages(stride)
        if reason is not None:
            log.warning("refused a client: %s", reason)
            peer.send(Op.REFUSED, message.number, reason.encode())
            return
        peer.welcome()
        if not stride:
            peer.send(Op.WELCOME, message.number, write(Welcome(self._name)))
            return
        if peer.client is not None:
            raise ProtocolError("got a second hello")
        self._last_client += 1
        peer.client = self._index_of(stride).client(hello.node, hello.name, self._last_client)
        sizes = self._slabs.pages_of(stride)
        what = self._memory.num_bytes, *sizes, self._slabs.slab_bytes
        welcome = Welcome(self._name, *what, client=self._last_client)
        peer.send_with(Op.WELCOME, message.number, write(welcome), [self._memory.descriptor])

    def _why_not_these_pages(self, stride: int) -> str | None:
        """Why there can be no pages of this stride."""
        slab_bytes = self._slabs.slab_bytes
        if stride > slab_bytes:
            return f"a page has {stride} bytes; allowed: up to {slab_bytes}: lower chunk_size"
        if stride and not self._slabs.pages_of(stride)[0]:
            return f"the memory has {self._memory.num_bytes} bytes, and a page {stride}: give a larger --size"
        return None

    def _index_of(self, stride: int) -> NodeIndex:
        """That of pages of `stride` bytes; those of sizes that nobody has any more go."""
        used = {id(peer.client.index) for peer in self._clients() if peer.client is not None}
        for other, index in list(self._indexes.items()):
            if not len(index.tier) and id(index) not in used:
                self._slabs.leave(index)
                del self._indexes[other]
        if stride not in self._indexes:
            self._indexes[stride] = NodeIndex(*self._slabs.pages_of(stride), self._slabs)
        return self._indexes[stride]

    def _disconnect(self, peer: Peer) -> None:
        if peer.is_connected:
            self._selector.unregister(peer.socket)
            peer.disconnect()
        if peer.client is None:
            self._forget(peer)

    def _read_rest(self, peer: Peer) -> None:
        """Read what a process has sent before its end: what it has given others may be using."""
        while peer in self._peers and peer.is_connected and peer.has_sent():
            self._serve(peer, selectors.EVENT_READ)

    def _forget(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._alone_since = time.monotonic()
        self._selector.unregister(peer.process)
        if peer.is_connected:
            self._selector.unregister(peer.socket)
            peer.disconnect()
        peer.forget()

    def _close(self) -> None:
        for peer in list(self._peers):
            self._forget(peer)
        self._selector.close()
        for end in (self._wake, self._waker):
            end.close()


class Gone(NamedTuple):
    """Stands for a peer whose process is gone."""

    peer: Peer
