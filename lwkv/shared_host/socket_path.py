"""Where owner and clients meet."""

from __future__ import annotations

import os
import sys

from lwkv.errors import ConfigError

MOST_PATH_BYTES = 107
"""What a UNIX socket's address has room for."""

_NEEDED = ("memfd_create", "eventfd", "pidfd_open")


def check_path(path: str) -> None:
    """Raise ConfigError for a path that no socket can have, or a system without what is needed."""
    if missing := [name for name in _NEEDED if not hasattr(os, name)]:
        raise ConfigError(
            f"host memory of a node is for Linux, and for a Python built for it: this one ({sys.platform}) "
            f"lacks os.{', os.'.join(missing)}; leave host_memory out"
        )
    length = len(os.fsencode(path))
    if not 0 < length <= MOST_PATH_BYTES or "\0" in path:
        raise ConfigError(
            f"socket {path!r}: got {length} bytes; allowed: 1 to {MOST_PATH_BYTES}, none of them 0"
        )


def default_path() -> str:
    """Where an owner listens that is given no path: a place of this user's."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return f"{folder}/lwkv-host.sock" if folder else f"/tmp/lwkv-host-{os.geteuid()}.sock"
