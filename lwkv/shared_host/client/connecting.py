"""How a client finds an owner, and maps its memory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from lwkv.errors import ConfigError, LwkvError
from lwkv.shared_host.client.connection import Connection
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.client.starting import OwnerStarter
from lwkv.shared_host.client.wait_log import WaitLog
from lwkv.shared_host.greeting import Hello, Welcome, read, write
from lwkv.shared_host.mapping import map_memory
from lwkv.shared_host.memfd import is_sealed
from lwkv.shared_host.process import peer_of
from lwkv.shared_host.protocol import Frames, Message, Op, ProtocolError, pack
from lwkv.shared_host.socket_path import check_path

HELLO_S = 5.0
"""Seconds that an owner may take to greet; nobody waits for that but who looks for a new owner."""

FIRST_HELLO_S = 300.0
"""The same of whoever starts, at least: an owner listens before it has taken its memory, of any size."""

ENDED_S = 2.0
"""Seconds that nobody may listen after the owner that was started has ended."""

_MOST_DESCRIPTORS = 16


class NoOwnerError(LwkvError, ConnectionError):
    """Nobody listens at the socket, or nobody who answers."""

    @property
    def is_starting(self) -> bool:
        """Whether somebody listens who has not answered yet, or has more to answer than it can queue."""
        return isinstance(self.__cause__, (TimeoutError, BlockingIOError))


def connect(
    path: str,
    hello: Hello,
    timeout_s: float,
    wake: Callable[[], object],
    hello_s: float = HELLO_S,
    waits: WaitLog | None = None,
) -> Session:
    """Greet the owner that listens at `path` and map its memory.

    Args:
        hello_s: seconds that it may take to greet.
        waits: logs meanwhile that it does not.

    Raises:
        ConfigError: it cannot serve this client, and will not.
        NoOwnerError: there is none now.
    """
    check_path(path)
    with ExitStack() as undo:
        line = socket.socket(socket.AF_UNIX)
        undo.callback(line.close)
        descriptors: list[int] = []
        undo.callback(_close, descriptors)
        line.settimeout(hello_s)
        try:
            line.connect(path)
            _require_own(line, path)
            line.sendall(pack(Op.HELLO, 1, [write(hello)]))
            answer = _receive(line, descriptors, time.monotonic() + hello_s, waits)
        except (OSError, EOFError) as error:
            raise NoOwnerError(f"no owner of host memory answers at {path}: {error}") from error
        except ProtocolError as error:
            raise ConfigError(f"host_memory: what listens at {path} is no owner: {error}") from error
        welcome = _require_welcome(answer, path)
        memory = _map(descriptors, welcome, path) if welcome.num_bytes else torch.empty(0, dtype=torch.uint8)
        # The socket is the connection's now.
        connection = Connection(socket.socket(fileno=line.detach()), timeout_s, wake)
        return Session(connection, welcome, memory)


def wait_for_owner(
    path: str,
    hello: Hello,
    timeout_s: float,
    wake: Callable[[], object],
    patience_s: float,
    starter: OwnerStarter | None = None,
) -> Session:
    """As `connect`, and try again for `patience_s` seconds: the owner may be starting, too.

    One that listens has as long to greet, and FIRST_HELLO_S at least: it listens before it has its memory.

    Args:
        starter: starts one where there is none.

    Raises:
        ConfigError: it cannot serve this client, or there is none.
    """
    deadline = time.monotonic() + patience_s
    refused_until = deadline
    waits = WaitLog(path)
    while True:
        hello_s = max(FIRST_HELLO_S, deadline - time.monotonic())
        try:
            return connect(path, hello, timeout_s, wake, hello_s, waits)
        except NoOwnerError as error:
            is_starting = error.is_starting
            if is_starting:
                waits.note(deadline - time.monotonic())
            if time.monotonic() >= (deadline if is_starting else refused_until):
                raise ConfigError(f"host_memory: {error}; {_advice(path, starter, is_starting)}") from error
        if starter is not None and not is_starting:
            refused_until = _start(starter, refused_until)
        time.sleep(0.1)


def _start(starter: OwnerStarter, deadline: float) -> float:
    """Start an owner; until when nobody may listen."""
    try:
        starter.start()
    except OSError as error:
        raise ConfigError(f"host_memory: cannot start an owner: {error}") from error
    # Another engine's may have been faster, and listens at once.
    return min(deadline, time.monotonic() + ENDED_S) if starter.has_ended() else deadline


def _advice(path: str, starter: OwnerStarter | None, is_starting: bool) -> str:
    if is_starting:
        return "its owner listens but is stopped, or has not taken all of its memory yet"
    if starter is None:
        return f"start it with: lwkv host --size GIB --socket {path}"
    return f"one was started, and {starter.log_path} says why it does not answer"


def _require_own(line: socket.socket, path: str) -> None:
    _, user = peer_of(line)
    if user != os.geteuid():
        raise ConfigError(
            f"host_memory: user {user} listens at {path}, and this is user {os.geteuid()}: whoever has the "
            "pages can read and change them; run owner and engines as one user"
        )


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _receive(line: socket.socket, descriptors: list[int], deadline: float, waits: WaitLog | None) -> Message:
    """The first message; the descriptors that come with it are added to `descriptors`.

    Raises OSError, EOFError, ProtocolError.
    """
    frames = Frames()
    while True:
        left = deadline - time.monotonic()
        line.settimeout(max(0.001, left if waits is None else min(left, waits.left())))
        try:
            data, more, _, _ = socket.recv_fds(line, 1 << 16, _MOST_DESCRIPTORS)
        except TimeoutError:
            if waits is None or time.monotonic() >= deadline:
                raise
            waits.note(deadline - time.monotonic())
            continue
        descriptors += more
        if not data:
            raise EOFError("the connection was closed")
        for message in frames.feed(data):
            return message


def _require_welcome(answer: Message, path: str) -> Welcome:
    text = b"".join(answer.parts[:1])
    if answer.op is Op.REFUSED:
        raise ConfigError(f"host_memory: the owner at {path} refused: {text.decode(errors='replace')}")
    if answer.op is not Op.WELCOME:
        raise ConfigError(f"host_memory: what listens at {path} is no owner of host memory")
    try:
        return read(Welcome, text)
    except ProtocolError as error:
        raise ConfigError(f"host_memory: what listens at {path}: {error}") from error


def _map(descriptors: Sequence[int], welcome: Welcome, path: str) -> torch.Tensor:
    if len(descriptors) != 1:
        raise ConfigError(f"host_memory: got {len(descriptors)} descriptors from {path}; expected 1")
    if not is_sealed(descriptors[0]):
        raise ConfigError(f"host_memory: the memory of the owner at {path} may shrink; it is none of lwkv's")
    try:
        return map_memory(descriptors[0], welcome.num_bytes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"host_memory: cannot map the memory of the owner at {path}: {error}") from error
