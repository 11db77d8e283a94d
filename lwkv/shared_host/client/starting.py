"""Starts an owner of host memory where none listens."""

from __future__ import annotations

import os
import subprocess
import sys

LINGER_S = 300.0
"""Seconds that an owner which an engine started goes on without any client: an engine may be restarting."""

_started: list[subprocess.Popen[bytes]] = []  # a Popen that is dropped warns of a process that goes on


class OwnerStarter:
    """Starts `lwkv host` at a socket, once.

    It is a process of its own session, which outlives this one, and logs into a file beside the socket. Where
    several engines start one at the same time the first has the socket, and the others end.
    """

    def __init__(self, path: str, gib: float) -> None:
        self._path = path
        self._gib = gib
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> str:
        return f"{self._path}.log"

    def start(self) -> None:
        """Start it, if that was not done. Raises OSError."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "lwkv", "host", "--size", f"{self._gib:.6f}"]
        command += ["--socket", self._path, "--linger", str(LINGER_S)]
        log = os.open(self.log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,  # not this process's: whoever reads that would wait for the owner's end
                start_new_session=True,
            )
        finally:
            os.close(log)
        _started.append(self._process)

    def has_ended(self) -> bool:
        """Whether it ended: it failed, or another one was faster."""
        return self._process is not None and self._process.poll() is not None
