"""The few calls of the CUDA driver that torch does not offer: batched copies, page-locking existing memory.

The driver gives a function as it was in a named CUDA version. `cuMemcpyBatchAsync` came with 12.8; the form
of 13.0 lacks the out argument for the run that failed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from lwkv.platforms.protocol import Int64s

_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE

_BATCH_OF_13 = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p)
_BATCH_OF_12_8 = (*_BATCH_OF_13[:-1], POINTER(c_size_t), c_void_p)

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
    "cuStreamGetCtx": (c_void_p, POINTER(c_void_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


class _Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class CopyAttributes(Structure):
    """CUmemcpyAttributes; one entry serves all runs of a batch."""

    _fields_ = [("order", c_int), ("source", _Location), ("destination", _Location), ("flags", c_uint)]


class _Out(threading.local):
    """A thread's out arguments, made once: a batch is queued for every layer."""

    def __init__(self) -> None:
        self.context, self.failed = c_void_p(), c_size_t()
        self.context_ref, self.failed_ref = byref(self.context), byref(self.failed)


class CudaDriver:
    """libcuda.so.1, or an object with the same functions. A call that fails raises RuntimeError."""

    def __init__(self, library: Any) -> None:
        self._calls: dict[str, Callable[..., int]] = {}
        for name, arguments in _ARGUMENTS.items():
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, c_int
            self._calls[name] = call
        self._contexts: dict[int, int] = {}
        self._contexts_lock = threading.Lock()
        self._streams: dict[int, int | None] = {}
        self._out = _Out()
        self._first_run = byref(c_size_t(0))
        self._orders = {
            order: byref(CopyAttributes(order=order)) for order in (_IN_STREAM_ORDER, _IN_ANY_ORDER)
        }
        self._batch, self._names_failed_run = self._find_batch()

    @classmethod
    def load(cls) -> CudaDriver | None:
        """Open the driver; None where there is none or it is too old to ask for versions."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except (OSError, AttributeError):
            return None

    @property
    def has_batch(self) -> bool:
        return self._batch is not None

    def copy_batch(self, to: Int64s, source: Int64s, sizes: Int64s, stream: int, any_order: bool) -> None:
        """Queue `sizes[i]` bytes from address `source[i]` to `to[i]`, in any order among themselves.

        With `any_order` the sources may be read before the stream gets there: only for page-locked memory
        that no queued work writes. `stream` is a handle, not that of the legacy default stream.
        """
        assert self._batch is not None
        out = self._out
        out.failed.value = sizes.size
        attributes = self._orders[_IN_ANY_ORDER if any_order else _IN_STREAM_ORDER]
        entered = self._enter(self._streams.get(stream) or self._context_of_stream(stream))
        result = self._batch(
            _address(to), _address(source), _address(sizes), sizes.size, attributes,
            self._first_run, 1, *((out.failed_ref,) if self._names_failed_run else ()), stream,
        )  # fmt: skip
        if entered:
            self._leave()
        if result:
            where = f" at run {out.failed.value} of {sizes.size}" if out.failed.value < sizes.size else ""
            raise self._error(f"cuMemcpyBatchAsync{where}", result)

    def copy_each(self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Queue `sizes[i]` bytes from address `source[i]` to `to[i]`, by a call for each, in stream order."""
        entered = self._enter(self._streams.get(stream) or self._context_of_stream(stream))
        copy, result = self._calls["cuMemcpyAsync"], 0
        for run in zip(to, source, sizes, strict=True):
            result = result or copy(*run, stream)
        if entered:
            self._leave()
        if result:
            raise self._error("cuMemcpyAsync", result)

    def register(self, address: int, nbytes: int, device: int) -> bool:
        """Page-lock host memory for all devices, in `device`'s context; False where the driver will not."""
        with self._context_of_device(device):
            return self._calls["cuMemHostRegister_v2"](address, nbytes, _PORTABLE) == 0

    def unregister(self, address: int, device: int) -> None:
        """Undo `register`, which was given the same device: another one's context may not be there yet.

        A finalizer comes here, maybe in the middle of any other call of this thread: it takes no lock, and
        out arguments of its own, as the thread's may be half made.
        """
        with self._context_of_device(device):
            self._do("cuMemHostUnregister", address)

    def _find_batch(self) -> tuple[Callable[..., int] | None, bool]:
        for version, arguments in ((12080, _BATCH_OF_12_8), (13000, _BATCH_OF_13)):
            address, status = c_void_p(), c_int()
            result = self._calls["cuGetProcAddress_v2"](
                b"cuMemcpyBatchAsync", byref(address), version, 0, byref(status)
            )
            if result == 0 and status.value == 0 and address.value:
                return ctypes.CFUNCTYPE(c_int, *arguments)(address.value), arguments is _BATCH_OF_12_8
        return None, False

    @contextmanager
    def _context_of_device(self, device: int) -> Iterator[None]:
        context, current = self._primary_context(device), c_void_p()
        self._do("cuCtxGetCurrent", byref(current))
        if current.value == context:
            yield
            return
        self._do("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent_v2", byref(current))

    def _enter(self, context: int | None) -> bool:
        # A thread that has made no CUDA call yet has no context, or it has another device's.
        out = self._out
        result = self._calls["cuCtxGetCurrent"](out.context_ref)
        if result:
            raise self._error("cuCtxGetCurrent", result)
        if context == out.context.value:
            return False
        self._do("cuCtxPushCurrent_v2", context)
        return True

    def _leave(self) -> None:
        self._do("cuCtxPopCurrent_v2", self._out.context_ref)

    def _context_of_stream(self, stream: int) -> int | None:
        # A stream keeps its context, and torch keeps its streams.
        self._do("cuStreamGetCtx", stream, self._out.context_ref)
        context = self._streams[stream] = self._out.context.value
        return context

    def _primary_context(self, device: int) -> int:
        context = self._contexts.get(device)
        return self._retain_context(device) if context is None else context

    def _retain_context(self, device: int) -> int:
        with self._contexts_lock:
            if device not in self._contexts:
                handle, context = c_int(), c_void_p()
                self._do("cuInit", 0)
                self._do("cuDeviceGet", byref(handle), device)
                self._do("cuDevicePrimaryCtxRetain", byref(context), handle.value)
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    def _do(self, name: str, *arguments: object) -> None:
        result = self._calls[name](*arguments)
        if result:
            raise self._error(name, result)

    def _error(self, what: str, result: int) -> RuntimeError:
        name = c_char_p()
        self._calls["cuGetErrorName"](result, byref(name))
        return RuntimeError(f"{what} failed: {(name.value or b'unknown error').decode()} ({result})")


def _address(array: Int64s) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
