"""Why a page is not there."""

from __future__ import annotations

from enum import IntEnum


class Missing(IntEnum):
    """Why a chunk has no page in a layer. It stands where the page's number would, and is below 0."""

    MISS = -1
    """The tier that had the chunk does not have this layer of it."""
    ERROR = -2
    """Its tier failed, or is left alone because it did."""
    NO_MEMORY = -3
    """No page of host memory was free, and none could be freed."""
    LATE = -4
    """It did not arrive in time."""
