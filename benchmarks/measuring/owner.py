"""An owner of host memory in a process of its own, for what is measured with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lwkv.shared_host.client.connecting import NoOwnerError
from lwkv.shared_host.client.status import read_status


@contextmanager
def owner_of(gib: float) -> Iterator[tuple[str, float]]:
    """Its socket, and the seconds until it answered with all its memory; it ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        path, begun = f"{folder}/host.sock", time.monotonic()
        command = [sys.executable, "-m", "lwkv", "host", "--size", str(gib), "--socket", path]
        owner = subprocess.Popen(command)
        try:
            while not _answers(path):
                if owner.poll() is not None:
                    raise RuntimeError(f"the owner of host memory ended with {owner.returncode}")
                time.sleep(0.01)
            yield path, time.monotonic() - begun
        finally:
            owner.terminate()
            owner.wait()


def _answers(path: str) -> bool:
    """Whether an owner answers: it listens before it has its memory."""
    try:
        read_status(path)
    except NoOwnerError:
        return False
    return True
