"""A simulated accelerator under the name `musa`: not Moore Threads hardware, no proof that lwkv runs on it.

`install()` compiles the C++ side (once per torch version and source text, into build/simulated_musa),
registers it as torch's PrivateUse1 device and puts a `torch.musa` module in place with the part of
torch_musa's names that a library moving memory needs. The names and their quirks were read from the source
of torch_musa 2.7.1 (2026-01); anything else is an AttributeError. One process can do this once, and must not
have a real torch_musa.

Streams, events, copies and nearly all operators are asynchronous: README.md says what is faithful.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch.utils import backend_registration

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "simulated_musa"
SOURCES = tuple(sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]))

DeviceLike: TypeAlias = "torch.device | str | int | None"

_native: Any = None


def compiler() -> str | None:
    """The C++ compiler to build with: $CXX, g++ or c++; None where there is none."""
    names = [os.environ.get("CXX", "g++"), "c++"]
    return next((found for found in map(shutil.which, names) if found), None)


def install(device_allocator: bool = False, synchronizes_device: bool = False) -> ModuleType:
    """Compile and register the device, and return the `torch.musa` it made.

    The two switches are quirks of torch_musa 2.7.1, off as there: whether its allocator is a
    `c10::DeviceAllocator` (`torch.accelerator.memory_stats` asks for one), and whether
    `torch.accelerator.synchronize` works.
    Raises RuntimeError where there is a `torch.musa` already, and where the compiler fails.
    """
    global _native
    if hasattr(torch, "musa"):
        raise RuntimeError("torch.musa is there already: a process can hold one, real or simulated")
    _native = _load(_build())
    backend_registration.rename_privateuse1_backend("musa")
    _native.start(device_allocator, synchronizes_device)
    module = _musa_module()
    torch._register_device_module("musa", module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    sys.modules["torch.musa"] = module
    torch.version.musa = "simulated"  # type: ignore[attr-defined]
    atexit.register(_native.stop)
    return module


def _torch_version() -> int:
    major, minor = torch.__version__.split(".")[:2]
    return int(major) * 100 + int(minor)


def _flags() -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        *("-std=c++20", "-O1", "-fPIC", "-shared", "-Wno-attributes"),
        f"-DSIMULATED_TORCH={_torch_version()}",
        "-DTORCH_EXTENSION_NAME=simulated_musa",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{include}" for include in includes),
        *(f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"),
        *("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-pthread"),
    ]


def _build() -> Path:
    """Compile if these sources haven't been, and return the library; two processes at once both compile."""
    text = "".join([sys.version, torch.__version__, str(torch.__file__), *map(Path.read_text, SOURCES)])
    library = BUILD / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [compiler() or "c++", str(HERE / "device.cpp"), "-o", str(unfinished), *_flags()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"this does not compile: {' '.join(command)}\n{done.stderr[-4000:]}")
        unfinished.replace(library)
    return library


def _load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulated_musa", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _index(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device if device >= 0 else int(_native.current_device())
    found = torch.device(device) if device is not None else torch.device("musa")
    if found.type != "musa":
        raise ValueError(f"Expected a musa device, but got: {found}")
    return int(_native.current_device()) if found.index is None else found.index


class Stream(torch.Stream):
    """As `torch_musa.Stream`: a subclass of `torch.Stream`, from the pool, or by its three numbers."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **numbers: int) -> Stream:
        if "stream_id" in numbers:
            return super().__new__(cls, priority=priority, **numbers)
        return super().__new__(cls, torch.device("musa", _index(device)), priority=priority)

    @property
    def musa_stream(self) -> int:
        return int(_native.stream_handle(self.device_index, self.stream_id))

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.musa_stream)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """As `torch_musa.Event`, but what that takes unchecked for a stream of its own is a TypeError here."""

    _is_timed: bool

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        event = super().__new__(cls, "musa", enable_timing=enable_timing)
        event._is_timed = enable_timing
        return event

    def record(self, stream: Any = None) -> None:
        super().record(_own(stream))

    def wait(self, stream: Any = None) -> None:
        super().wait(_own(stream))

    def elapsed_time(self, end_event: Any) -> float:
        if not (self._is_timed and end_event._is_timed):
            raise RuntimeError("MUSA error: invalid resource handle: both events need enable_timing=True")
        return float(_native.elapsed_ms(self.event_id, end_event.event_id))


def _own(stream: Any) -> Stream:
    if stream is None:
        return current_stream()
    if not isinstance(stream, Stream):
        raise TypeError(f"torch_musa reads this as a torch.musa.Stream without looking: {type(stream)}")
    return stream


class StreamContext:
    """Makes a stream, and its device, the thread's current ones; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = (current_device(), current_stream(self.stream.device))
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            device, stream = self._before
            set_stream(stream)
            set_device(device)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _native.set_device(stream.device_index)
        _native.set_stream(stream.device_index, stream.stream_id)


PRIVATE_USE_1: Any = torch._C._autograd.DeviceType.PrivateUse1


def _stream_at(device: int, stream_id: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=device, device_type=int(PRIVATE_USE_1))


def current_stream(device: DeviceLike = None) -> Stream:
    return _stream_at(_index(device), _native.current_stream(_index(device)))


def default_stream(device: DeviceLike = None) -> Stream:
    return _stream_at(_index(device), 0)


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return int(_native.device_count())


def current_device() -> int:
    return int(_native.current_device())


def set_device(device: DeviceLike) -> None:
    _native.set_device(_index(device))


@contextmanager
def device(device: DeviceLike) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: DeviceLike = None) -> None:
    _native.synchronize(_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    free, total = _native.memory_info(_index(device))
    return (int(free), int(total))


def manual_seed_all(seed: int) -> None:
    """Nothing to do: the simulated device draws from the CPU's generator."""


def musart() -> ModuleType:
    """The runtime's own calls. They return a `musaError`, which equals no int: take `int(error)`."""
    runtime = ModuleType("_musart")
    runtime.musaError = _native.musaError  # type: ignore[attr-defined]
    runtime.musaHostRegister = lambda ptr, size, flags: _native.register_host(ptr, size)  # type: ignore[attr-defined]
    runtime.musaHostUnregister = _native.unregister_host  # type: ignore[attr-defined]
    return runtime


NAMES = (
    *(Stream, Event, StreamContext, stream, set_stream, current_stream, default_stream),
    *(is_available, device_count, current_device, set_device, device),
    *(synchronize, mem_get_info, manual_seed_all, musart),
)


def _musa_module() -> ModuleType:
    module = ModuleType("torch.musa", "Simulated: see tests/simulated_musa.")
    for name in NAMES:
        setattr(module, name.__name__, name)
    module._is_in_bad_fork = _native.is_forked  # type: ignore[attr-defined]
    return module


def set_late(late: bool, *streams: torch.Stream) -> None:
    """Let `streams` (all there are, where none is given) run an operation only when somebody waits for it."""
    everywhere = [
        (device, number) for device in range(device_count()) for number in range(_native.stream_count())
    ]
    chosen = [(stream.device_index, stream.stream_id) for stream in streams] or everywhere
    for device, number in chosen:
        _native.set_late(device, number, late)


def set_delay(shortest: float = 0.0, longest: float | None = None, seed: int = 0) -> None:
    """Sleep so many seconds, drawn evenly between the two, before each operation of every stream."""
    _native.set_delay(shortest, shortest if longest is None else longest, seed)


def set_synchronizes_device(works: bool) -> None:
    """Whether `torch.accelerator.synchronize` works."""
    _native.set_can_synchronize_device(works)


def settle() -> None:
    """Forget delays and lateness, and run to the end of all streams; raises what an operation raised."""
    set_delay()
    set_late(False)
    for device in range(device_count()):
        synchronize(device)
