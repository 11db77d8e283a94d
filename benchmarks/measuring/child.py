"""A process that is asked by lines of JSON and answers by lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class Child:
    """A module that runs in a process of its own, and says with its first answer that it is ready.

    Args:
        name: of the engine, for people.
        module: what is run; its argument is `arguments`, in JSON.
        environment: what is other than here.
        own_session: for an engine that kills its whole group where something goes wrong.

    Raises RuntimeError, here and in `ask`, where the process has ended.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        own_session: bool = False,
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=own_session,
        )
        try:
            self._receive()
        except RuntimeError:
            self.close()
            raise

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine {self.name!r} has ended; what it said is above")
        return json.loads(line)
