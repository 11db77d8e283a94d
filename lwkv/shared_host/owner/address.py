"""The socket that an owner listens at: one owner for each, and nobody else's to connect to."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import ExitStack, suppress

from lwkv.errors import ConfigError
from lwkv.shared_host.socket_path import check_path


class Address:
    """A socket at `path`, mode 0600, that listens until `close`. A lock file beside it keeps others away.

    Raises:
        ConfigError: another owner is there, or the path cannot be used.
    """

    def __init__(self, path: str) -> None:
        check_path(path)
        self.path = path
        with ExitStack() as undo:
            try:
                self._lock = os.open(
                    f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
                undo.callback(os.close, self._lock)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remove_old()
                self.socket = socket.socket(socket.AF_UNIX)
                undo.callback(self.socket.close)
                mask = os.umask(0o177)  # not chmod: nobody else connects in between
                try:
                    self.socket.bind(path)
                finally:
                    os.umask(mask)
                self.socket.listen(64)
                self.socket.setblocking(False)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another owner listens at {path}: use it, end it, or give this one another --socket"
                ) from error
            except FileNotFoundError as error:
                folder = os.path.dirname(os.path.abspath(path))
                raise ConfigError(
                    f"cannot listen at {path}: there is no folder {folder}; make it, or give another --socket"
                ) from error
            except OSError as error:
                raise ConfigError(f"cannot listen at {path}: {error}; give another --socket") from error
            undo.pop_all()

    def close(self) -> None:
        """Take no more connections, and let another owner listen here."""
        self.socket.close()
        with suppress(OSError):
            os.unlink(self.path)
        os.close(self._lock)

    def _remove_old(self) -> None:
        """Remove the socket that an owner left which was killed; we have its lock."""
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise FileExistsError("there is a file that is no socket")
            os.unlink(self.path)
