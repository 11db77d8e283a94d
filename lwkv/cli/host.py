"""`lwkv host`: owns host memory that the engines of a node share."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time

from lwkv.errors import ConfigError
from lwkv.platforms.host_limits import read_limits
from lwkv.platforms.host_memory import HUGE_BYTES
from lwkv.pool.memory_limits import gib
from lwkv.shared_host.memfd import fill, make_memory
from lwkv.shared_host.numa import on_nodes, read_nodes, spread
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.server import SLAB_BYTES, Memory, Server
from lwkv.shared_host.socket_path import default_path

log = logging.getLogger(__name__)

MOST_THREADS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=_gibibytes, required=True, metavar="GIB", help="host memory to own")
    parser.add_argument(
        "--socket",
        default=default_path(),
        help="where engines find it: their host_memory (default: %(default)s)",
    )
    parser.add_argument(
        "--huge-pages", action="store_true", help="take huge pages of 2 MiB that the system has set aside"
    )
    parser.add_argument(
        "--linger",
        type=_seconds,
        metavar="S",
        help="end after so many seconds without any engine (default: go on for ever)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=min(MOST_THREADS, os.cpu_count() or 1),
        help="threads that allocate the memory (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Own the memory until SIGTERM or SIGINT, or until nobody has used it for --linger. Returns 0."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    num_bytes = _whole_bytes(args.size)
    if args.threads < 1:
        raise ConfigError(f"--threads: got {args.threads}; allowed: 1 or more")
    # What the log line says is what engines are to have, wherever they run.
    path = os.path.abspath(args.socket)
    address = Address(path)
    try:
        begun = time.monotonic()
        descriptor = make_memory(num_bytes, args.huge_pages)
        shares = spread(num_bytes, SLAB_BYTES, read_nodes())
        filled = fill(descriptor, num_bytes, args.threads, shares)
        server = Server(
            address, Memory(descriptor, num_bytes, filled.shares, filled.by_node), linger_s=args.linger
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        log.info(
            "%s of host memory at %s, taken in %.1f s, %s of it in huge pages%s",
            gib(num_bytes),
            path,
            time.monotonic() - begun,
            gib(filled.huge_bytes),
            f", {on_nodes(filled.by_node)}" if filled.by_node else "",
        )
        server.serve()
    finally:
        address.close()
    return 0


def _gibibytes(text: str) -> float:
    """The number in `text`. Raises ArgumentTypeError, as argparse expects."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; allowed: a number of GiB without a unit, as in --size 40"
        ) from None


def _seconds(text: str) -> float:
    """The number in `text`. Raises ArgumentTypeError, as argparse expects."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; allowed: a number of seconds above 0, without a unit, as in --linger 300"
        )
    return seconds


def _whole_bytes(size: float) -> int:
    """The bytes of `size` GiB, whole huge pages. Raises ConfigError."""
    num_bytes = int(size * (1 << 30)) // HUGE_BYTES * HUGE_BYTES if 0 < size < 1 << 20 else 0
    if not num_bytes:
        raise ConfigError(f"--size: got {size:g}; allowed: a number of GiB from {HUGE_BYTES / 2**30:.3f}")
    for limit in read_limits():
        if num_bytes > limit.total:
            raise ConfigError(
                f"--size: got {size:g} GiB, but {limit.what} is {gib(limit.total)}; lower --size"
            )
    return num_bytes
