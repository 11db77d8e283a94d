"""The errors lwkv raises.

LwkvError
├── ConfigError    (ValueError)    the user configured something wrongly; raised at start
├── LayoutError    (ValueError)    a registered KV tensor that cannot be described with certainty
├── RequestError   (ValueError)    tokens, mask or slots of one request are wrong
└── ClosedError    (RuntimeError)  used after close()
"""

from __future__ import annotations


class LwkvError(Exception):
    """Root of all errors that lwkv raises itself."""


class ConfigError(LwkvError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class LayoutError(LwkvError, ValueError):
    """A KV tensor whose layout is unknown, ambiguous or unsupported."""


class RequestError(LwkvError, ValueError):
    """Tokens, mask or slot mapping of a request that do not fit each other or the cache."""


class ClosedError(LwkvError, RuntimeError):
    """An object was used after it had been closed."""


DEVICE_FAILURES = (RuntimeError, MemoryError)
"""What is raised by a device that fails, or by one or the host without memory; there is nothing narrower."""
