"""Keeps an engine in touch with the owner of its host memory, and finds a new one when that is gone."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from lwkv.background.exit import end_at_exit, waitable
from lwkv.errors import ConfigError
from lwkv.shared_host.client.connecting import NoOwnerError
from lwkv.shared_host.client.session import Session
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)

SEARCH_S = 0.5
"""Seconds between looking for a new owner and looking again."""

NEWS_S = 1.0
"""Seconds after which the owner is asked for news, though nobody wants anything of it."""


class Pages(Protocol):
    """Whoever has pages of the owner; see NodePool."""

    session: Session | None

    def attach(self, session: Session) -> None: ...

    def detach(self) -> None: ...


class Waker:
    """Wakes one thread from `poll`; any thread may call it, and it never waits."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._event)

    def __call__(self) -> None:
        with suppress(BlockingIOError):  # it is awake
            os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)


class Keeper:
    """A thread that sends notes, takes late answers, and looks for an owner where there is none.

    Args:
        open_session: as `connect`, for this engine.
        waker: what connections of `open_session` call.
    """

    def __init__(
        self, pages: Pages, open_session: Callable[[], Session], waker: Waker, counters: Counters
    ) -> None:
        self._pages = weakref.ref(pages)
        self._open = open_session
        self._waker = waker
        self._counters = counters
        self._throttle = LogThrottle(log)
        self._leaving = False
        self._was_resting = False
        end_at_exit(self)
        self._thread = threading.Thread(target=self._run, name="lwkv-host-memory", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Send what is to be sent, and end; never waits for that."""
        self._leaving = True
        self._waker()

    def join(self, seconds: float) -> None:
        self._thread.join(waitable(seconds))

    def _run(self) -> None:
        while not self._leaving and self._step():
            pass
        pages = self._pages()
        if pages is not None and pages.session is not None:
            pages.session.connection.tend()
            pages.session.connection.close()
            pages.session.connection.release()

    def _step(self) -> bool:
        """Do what is next; False where nobody has the pages any more."""
        pages = self._pages()
        if pages is None:
            return False
        session = pages.session
        if session is None:
            self._search(pages)
        elif session.connection.is_lost:
            self._lose(pages, session)
        else:
            del pages
            self._tend(session)
        return True

    def _tend(self, session: Session) -> None:
        connection, poll = session.connection, select.poll()
        poll.register(self._waker, select.POLLIN)
        poll.register(connection, connection.poll_mask)
        found = dict(poll.poll(1000 * NEWS_S))
        self._waker.clear()
        connection.tend()
        if found.get(connection.fileno(), 0) & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
            connection.close()
        elif not found:
            session.has(0, ())
        self._note_rest(connection.is_resting)

    def _note_rest(self, is_resting: bool) -> None:
        """Count and log that the owner does not answer, once each time."""
        if is_resting and not self._was_resting:
            self._counters.add("host_memory_late")
            self._throttle.warn("the owner of host memory does not answer: nothing is in it until it does")
        self._was_resting = is_resting

    def _lose(self, pages: Pages, session: Session) -> None:
        self._counters.add("host_memory_lost")
        self._throttle.warn("the owner of host memory is gone: nothing is in it until there is another")
        pages.detach()
        session.connection.release()

    def _search(self, pages: Pages) -> None:
        try:
            session = self._open()
            pages.attach(session)
        except NoOwnerError:
            self._rest()
        except ConfigError as error:
            self._throttle.warn("%s", error)
            self._rest()
        else:
            log.info("found a new owner of host memory, %s", session.welcome.owner)

    def _rest(self) -> None:
        until = time.monotonic() + SEARCH_S
        while not self._leaving and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._waker, select.POLLIN)
            poll.poll(1000 * left)
            self._waker.clear()
