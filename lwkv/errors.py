"""The errors lwkv raises.

LwkvError
├── ConfigError           (ValueError)    the user configured something wrongly; raised at start
├── PlatformError         (ValueError)    a platform that is unknown, or that lwkv does not support
├── PlatformMissingError  (RuntimeError)  a known platform that is not there
├── LayoutError           (ValueError)    a registered KV tensor that cannot be described with certainty
├── RequestError          (ValueError)    tokens, mask or slots of one request are wrong
└── ClosedError           (RuntimeError)  used after close()
"""

from __future__ import annotations

from collections.abc import Callable


class LwkvError(Exception):
    """Root of all errors that lwkv raises itself."""


class ConfigError(LwkvError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class PlatformError(LwkvError, ValueError):
    """A platform that lwkv does not know or does not support."""


class PlatformMissingError(LwkvError, RuntimeError):
    """A platform that lwkv knows, and that cannot be used on this machine."""


class LayoutError(LwkvError, ValueError):
    """A KV tensor whose layout is unknown, ambiguous or unsupported."""


class RequestError(LwkvError, ValueError):
    """Tokens, mask or slot mapping of a request that do not fit each other or the cache."""


class ClosedError(LwkvError, RuntimeError):
    """An object was used after it had been closed."""


DEVICE_FAILURES = (RuntimeError, MemoryError)
"""What is raised by a device that fails, or by one or the host without memory; there is nothing narrower."""


class ErrorsTo:
    """Hands an error to a function instead of the thread it happens in."""

    def __init__(self, note: Callable[[BaseException], object]) -> None:
        self._note = note

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._note(error)
        return True
