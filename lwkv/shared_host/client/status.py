"""What an owner says of itself, for people."""

from __future__ import annotations

import json

from lwkv.shared_host.client.connecting import NoOwnerError, connect
from lwkv.shared_host.greeting import Hello

TIMEOUT_S = 2.0


def read_status(path: str) -> dict[str, int]:
    """Numbers by name, as `Server.status` has them.

    Raises:
        ConfigError: the owner that listens at `path` has another version, or another user.
        NoOwnerError: there is none, or it does not answer.
    """
    session = connect(path, Hello(0), TIMEOUT_S, lambda: None, TIMEOUT_S)
    try:
        answer = session.status()
    finally:
        session.connection.close()
        session.connection.release()
    if answer is None:
        raise NoOwnerError(f"the owner of host memory at {path} does not answer")
    numbers: dict[str, int] = json.loads(answer)
    return numbers
