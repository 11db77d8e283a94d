"""What becomes of a batch when the device fails."""

from __future__ import annotations

from collections.abc import Callable

from lwkv.errors import DEVICE_FAILURES


class DeviceFailuresTo:
    """Hands a device's failure to `give_up`, which ends a batch, instead of raising it; for `with`."""

    __slots__ = ("_give_up",)

    def __init__(self, give_up: Callable[[BaseException], object]) -> None:
        self._give_up = give_up

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, DEVICE_FAILURES):
            return False
        self._give_up(error)
        return True
