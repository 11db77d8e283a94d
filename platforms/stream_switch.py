"""Making a stream current for a while."""

from __future__ import annotations

from typing import Any

from lwkv.platforms.protocol import Stream


class StreamSwitch:
    """Makes `stream` and its device current from entry to exit, as the device module's own context does.

    That one costs the host 15 us more, and this is entered for every layer. Enter an object once; it
    belongs to the thread that enters it.
    """

    __slots__ = ("_module", "_outer", "_replaced", "_stream")

    def __init__(self, module: Any, stream: Stream) -> None:
        self._module, self._stream = module, stream

    def __enter__(self) -> None:
        module, stream = self._module, self._stream
        device, target = module.current_device(), stream.device_index
        self._replaced = module.current_stream(target)
        self._outer = self._replaced if target == device else module.current_stream(device)
        module.set_stream(stream)

    def __exit__(self, *_: object) -> None:
        if self._outer is not self._replaced:
            self._module.set_stream(self._replaced)
        # Last, since it makes its device current again as well.
        self._module.set_stream(self._outer)
