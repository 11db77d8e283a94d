"""Progress bars for whoever waits at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

# Called with the number of steps done since the last call.
Tick = Callable[[int], object]


def ignore(steps: int) -> None:
    """Show nothing."""


def say(text: str) -> None:
    """Show what begins, before there is anything to count; on stderr, and only at a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Tick]:
    """Show on stderr how many of `total` steps are done; call what is yielded for each.

    Silent where stderr is no terminal or the package `tqdm` is not installed.
    """
    if not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield ignore
        return
    form = "{desc:32} {percentage:3.0f}% |{bar:30}| {elapsed}"
    with import_module("tqdm").tqdm(desc=title, total=total, bar_format=form, leave=False) as bar:
        yield bar.update
