"""Who is at the other end of a socket, and whether that process is gone for certain."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77  # from Linux 6.5


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process number, 0 if it is not to be seen from here, and the user of a peer when it connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def watch(connection: socket.socket) -> int:
    """A descriptor that can be read once the peer's process is gone, with all that it had under way.

    Raises OSError where the system cannot watch it.
    """
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    process, _ = peer_of(connection)
    if not process:
        raise ProcessLookupError("the process of the client is not to be seen from here")
    return os.pidfd_open(process)
