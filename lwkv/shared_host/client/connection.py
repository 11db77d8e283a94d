"""A connection to the owner: requests that wait for a short time only, and notes that wait for nothing."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from lwkv.shared_host.protocol import Frames, Message, Op, ProtocolError, pack

READ_BYTES = 64 << 10
AWAKE_S = 0.001
"""Seconds that a request looks for its reply before it sleeps: to be woken takes as long as a reply."""

MOST_REQUESTS = 2**32 - 1
"""After so many their numbers begin again."""
Late = Callable[[Message], object]


class Connection:
    """A socket that an owner has taken. Thread-safe.

    One request is under way at a time. An owner that does not answer in time is not asked again before it
    has answered: it may be stopped, and go on later. What it answers then goes to the request's `late`.

    A child process of the one that made it gets no answers, and its notes are dropped.

    Args:
        timeout_s: seconds that a request may take, with those of other threads before it.
        wake: called for a note that is to be sent soon, by `tend`.

    Attributes:
        is_lost: the owner is gone, or what it said makes no sense; for good.
    """

    def __init__(self, connection: socket.socket, timeout_s: float, wake: Callable[[], object]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._timeout_s = timeout_s
        self._wake = wake
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._unsent = bytearray()
        self._frames = Frames()
        self._number = 0
        self._late: tuple[int, Late] | None = None
        self._process = os.getpid()
        self.is_lost = False

    @property
    def is_resting(self) -> bool:
        """Whether the owner has not answered in time, and has not done so since."""
        return self._late is not None

    @property
    def poll_mask(self) -> int:
        """What `tend` has to be called for, as `select.poll` has it; no answer that another thread awaits."""
        reads = select.POLLIN if self._late is not None else 0
        return reads | (select.POLLOUT if self._unsent else 0) | select.POLLRDHUP

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, op: Op, parts: Sequence[bytes], late: Late) -> Message | None:
        """Send a request, with all notes before it, and wait for its reply.

        None where the owner is lost, is resting, or does not answer in time; `late` gets the reply of the
        latter, should it come, from the thread that calls `tend`.
        """
        deadline = time.monotonic() + self._timeout_s
        if not self._may_ask() or not self._lock.acquire(timeout=self._timeout_s):
            return None
        try:
            return self._ask(op, parts, late, deadline) if self._may_ask() else None
        finally:
            self._lock.release()

    def tell(self, op: Op, *parts: bytes) -> None:
        """Send a note, soon and in order; never waits."""
        if not self.is_lost and not self._is_forked():
            self._outbox.append(pack(op, 0, parts))
            self._wake()

    def tell_at_once(self, op: Op) -> None:
        """Send a note that is of use now only, on this thread; never waits. Dropped while others send."""
        if not self._may_ask() or not self._lock.acquire(blocking=False):
            return
        try:
            self._outbox.append(pack(op, 0, ()))
            with self._losing():
                self._send()
            if self._unsent:
                self._wake()
        finally:
            self._lock.release()

    def push(self) -> None:
        """Have the owner's socket take all notes before this returns, as far as it has room for them.

        Waits for a request that is under way, for no longer than it may take.
        """
        if self.is_lost or self._is_forked() or not self._lock.acquire(timeout=self._timeout_s):
            return
        try:
            with self._losing():
                self._send()
        finally:
            self._lock.release()

    def tell_surely(self, op: Op, *parts: bytes) -> bool:
        """Send a note on this thread; whether the owner's socket has it, and will be read for it.

        Where it has no room now the note is not sent, nor later. One that went in part ends the connection.
        """
        if not self._may_ask() or not self._lock.acquire(timeout=self._timeout_s):
            return False
        try:
            with self._losing():
                self._send()
                return not self._unsent and self._has_sent(pack(op, 0, parts))
        finally:
            self._lock.release()
        return False

    def tend(self) -> None:
        """Send notes, and take what was late."""
        if self._is_forked():
            return
        with self._lock, self._losing():
            if self.is_lost:
                return
            self._send()
            if self._late is not None:
                for message in self._receive():
                    self._take_late(message)

    def close(self) -> None:
        """End the connection; requests find it lost. In a child process the parent's goes on."""
        if self._is_forked():
            self.is_lost = True
            return
        with self._lock:
            self._lose()

    def release(self) -> None:
        """Close the socket of a connection that is lost, once nobody polls it."""
        if self._is_forked():  # the lock may be held for ever
            self._socket.close()
            return
        with self._lock:
            self._socket.close()

    def _may_ask(self) -> bool:
        return not self.is_lost and self._late is None and not self._is_forked()

    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def _ask(self, op: Op, parts: Sequence[bytes], late: Late, deadline: float) -> Message | None:
        self._number = self._number % MOST_REQUESTS + 1
        number, reply = self._number, None
        self._outbox.append(pack(op, number, parts))
        with self._losing():
            reply = self._reply(number, deadline)
            if reply is None:
                self._late = number, late
                self._wake()
        return reply

    def _reply(self, number: int, deadline: float) -> Message | None:
        poll, awake_until = select.poll(), min(deadline, time.monotonic() + AWAKE_S)
        while True:
            self._send()
            for message in self._receive():
                if message.number != number:
                    raise ProtocolError(f"got a reply to {message.number}, expected one to {number}")
                return message
            if time.monotonic() < awake_until:
                os.sched_yield()  # the owner may be waiting for this core
                continue
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                return None

    def _send(self) -> None:
        while self._outbox:
            self._unsent += self._outbox.popleft()
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    def _has_sent(self, frame: bytes) -> bool:
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            return False
        if sent < len(frame):
            raise EOFError("the owner's socket has no room for a note")
        return True

    def _receive(self) -> list[Message]:
        with suppress(BlockingIOError):
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise EOFError
            return list(self._frames.feed(data))
        return []

    def _take_late(self, message: Message) -> None:
        if self._late is None or message.number != self._late[0]:
            raise ProtocolError(f"got a reply to {message.number}, which nobody asked for")
        (_, late), self._late = self._late, None
        late(message)

    def _losing(self) -> _Losing:
        return _Losing(self._lose)

    def _lose(self) -> None:
        self.is_lost = True
        self._outbox.clear()
        self._unsent.clear()
        self._late = None
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class _Losing:
    """Ends a connection where the owner is gone or says what makes no sense."""

    def __init__(self, lose: Callable[[], None]) -> None:
        self._lose = lose

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        if kind is None or not issubclass(kind, (OSError, EOFError, ProtocolError)):
            return False
        self._lose()
        return True
