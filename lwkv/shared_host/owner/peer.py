"""One connection of an owner, and the process behind it."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import suppress

from lwkv.shared_host.owner.index import Client
from lwkv.shared_host.owner.promises import UngivenPromises
from lwkv.shared_host.process import watch
from lwkv.shared_host.protocol import FIRST_BYTES, MOST_REQUEST_BYTES, Frames, Message, Op, pack

READ_BYTES = 64 << 10
MOST_WAITING = 8 << 20
"""Bytes of replies that wait for a client; one that does not read them is not read from."""


class Peer:
    """A client's socket. It outlives the connection: holds end when the process is gone, not before.

    Attributes:
        client: what the index has of it; None before its hello, and for one that only asks.
        process: a descriptor that can be read once the process is gone.
        is_connected: False once the connection is closed.
        promises: what it has promised to others.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.process = watch(connection)
        self.socket = connection
        self.client: Client | None = None
        self.is_welcome = False
        self.is_connected = True
        self.promises = UngivenPromises()
        self._frames = Frames(FIRST_BYTES)
        self._waiting = bytearray()

    @property
    def may_be_read(self) -> bool:
        return len(self._waiting) < MOST_WAITING

    @property
    def has_replies(self) -> bool:
        """Whether some are not sent yet."""
        return bool(self._waiting)

    def receive(self) -> Iterator[Message]:
        """The messages that have come. Raises OSError or ProtocolError; EOFError at the end."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError as error:  # behind all that came before the end
            raise EOFError from error
        if not data:
            raise EOFError
        yield from self._frames.feed(data)

    def has_sent(self) -> bool:
        """Whether anything can be read, or the end."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def welcome(self) -> None:
        """Take all of its messages from now on."""
        self.is_welcome = True
        self._frames.most_bytes = MOST_REQUEST_BYTES

    def send(self, op: Op, number: int, *parts: bytes) -> None:
        """Send a message, now or when the client reads. Raises OSError."""
        self._waiting += pack(op, number, parts)
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send what the client has room for. Raises OSError."""
        try:
            with suppress(BlockingIOError):
                while self._waiting:
                    del self._waiting[: self.socket.send(self._waiting)]
        except BrokenPipeError:  # it has ended: what it has sent before that is still to be read
            self._waiting.clear()

    def send_with(self, op: Op, number: int, part: bytes, descriptors: list[int]) -> None:
        """Send a first, small message with descriptors. Raises OSError."""
        socket.send_fds(self.socket, [pack(op, number, [part])], descriptors)

    def disconnect(self) -> None:
        """Close the connection, behind all that was read of it; the process is watched on."""
        self.is_connected = False
        self.promises.end()
        self._waiting.clear()
        self._frames = Frames(0)
        self.socket.close()

    def leave(self) -> None:
        """The client holds nothing any more, and says so; its process may go on."""
        if self.client is not None:
            self.client.holds.end_all()
            self.client.is_gone = True
            self.client = None

    def forget(self) -> None:
        """The process is gone: end all that it held."""
        self.leave()
        os.close(self.process)
