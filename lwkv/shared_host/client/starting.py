"""Starts an owner of host memory where none listens."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import ExitStack

LINGER_S = 300.0
"""Seconds that an owner which an engine started goes on without any client: an engine may be restarting."""

# No link: in a folder that others write, one of theirs would have this user's files written.
_LOG_FLAGS = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

# Ends at once, so that the owner is no child of the engine: engines kill all of their children when they end.
_LAUNCH = """
import subprocess, sys
subprocess.Popen(sys.argv[2:], pass_fds=[int(sys.argv[1])], start_new_session=True)
"""


class OwnerStarter:
    """Starts `lwkv host` at a socket, once.

    It is a process of its own session and no child of this one, which it outlives, and logs into a file
    beside the socket. Where several engines start one at the same time the first has the socket, and the
    others end.
    """

    def __init__(self, path: str, gib: float) -> None:
        self._path = path
        self._gib = gib
        self._life: int | None = None  # a pipe whose other end the owner has, and nobody else

    @property
    def log_path(self) -> str:
        return f"{self._path}.log"

    def start(self) -> None:
        """Start it, if that was not done. Raises OSError."""
        if self._life is not None:
            return
        with ExitStack() as undo:
            # Not this process's log: whoever reads that would wait for the owner's end.
            log = os.open(self.log_path, _LOG_FLAGS, 0o600)
            undo.callback(os.close, log)
            self._life, end = os.pipe()
            undo.callback(os.close, end)
            launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(end), *self._command()]
            launched = subprocess.run(
                launch, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, pass_fds=[end]
            )
        if launched.returncode:
            raise ChildProcessError(
                f"its launcher ended with {launched.returncode}, and {self.log_path} says why"
            )

    def has_ended(self) -> bool:
        """Whether it ended: it failed, or another one was faster."""
        if self._life is None:
            return False
        ends = select.poll()
        ends.register(self._life, select.POLLIN)
        return bool(ends.poll(0))

    def close(self) -> None:
        """Look after the owner no more; it goes on."""
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "lwkv", "host", "--size", f"{self._gib:.6f}"]
        return [*command, "--socket", self._path, "--linger", str(LINGER_S)]
