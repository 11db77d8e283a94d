"""The CUDA platform's glue: a driver made of C callbacks stands for libcuda."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
import torch

from lwkv.platforms import CopyBatch, accelerator
from lwkv.platforms.cpu import CPU
from lwkv.platforms.cuda import CUDA, FEW_RUNS
from lwkv.platforms.cuda_driver import CopyAttributes, CudaDriver

STREAM_CONTEXT, THREAD_CONTEXT = 0x51, 0x7E
PRIMARY_CONTEXTS = (0x9A, 0x9B)  # by device
ORDER_STREAM, ORDER_ANY = 1, 3
HANDLE = 0x5EED
OUT = POINTER(c_void_p)


class FakeLibrary:
    """The driver's functions as C callbacks, so that arguments cross the real calling convention.

    `version` is that of the newest batch function it has: 12080, 13000 or None.
    """

    def __init__(self, version: int | None = 12080) -> None:
        self.version = version
        self.batches: list[tuple[list[tuple[int, int, int]], int, int]] = []  # runs, order, stream
        self.contexts = [THREAD_CONTEXT]
        self.stacks: list[list[int]] = []
        self.locked: dict[int, tuple[int, int]] = {}
        self.made_contexts: list[int] = []
        self.locked_in: list[int] = []
        self.unlocked_in: list[int] = []
        self.result = 0
        self.asked: list[int] = []
        self._batch_of_12 = CFUNCTYPE(
            c_int, c_void_p, c_void_p, c_void_p, c_size_t,
            POINTER(CopyAttributes), POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_void_p,
        )(self.batch_of_12)  # fmt: skip
        self._batch_of_13 = CFUNCTYPE(
            c_int, c_void_p, c_void_p, c_void_p, c_size_t,
            POINTER(CopyAttributes), POINTER(c_size_t), c_size_t, c_void_p,
        )(self.batch_of_13)  # fmt: skip
        self.cuInit = CFUNCTYPE(c_int, c_uint)(lambda flags: 0)
        self.cuGetErrorName = CFUNCTYPE(c_int, c_int, POINTER(c_char_p))(self.name_error)
        self.cuGetProcAddress_v2 = CFUNCTYPE(c_int, c_char_p, OUT, c_int, c_uint64, POINTER(c_int))(self.find)
        self.cuStreamGetCtx = CFUNCTYPE(c_int, c_void_p, OUT)(lambda stream, out: put(out, STREAM_CONTEXT))
        self.cuCtxGetCurrent = CFUNCTYPE(c_int, OUT)(lambda out: put(out, self.contexts[-1]))
        self.cuCtxPushCurrent_v2 = CFUNCTYPE(c_int, c_void_p)(self.push)
        self.cuCtxPopCurrent_v2 = CFUNCTYPE(c_int, OUT)(lambda out: put(out, self.contexts.pop()))
        self.cuDeviceGet = CFUNCTYPE(c_int, POINTER(c_int), c_int)(lambda out, device: put(out, device))
        self.cuDevicePrimaryCtxRetain = CFUNCTYPE(c_int, OUT, c_int)(self.make_context)
        self.cuMemcpyAsync = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)(self.copy)
        self.cuMemHostRegister_v2 = CFUNCTYPE(c_int, c_void_p, c_size_t, c_uint)(self.lock)
        self.cuMemHostUnregister = CFUNCTYPE(c_int, c_void_p)(self.unlock)

    def find(self, name: bytes, out: Any, version: int, flags: int, status: Any) -> int:
        self.asked.append(version)
        assert (name, flags) == (b"cuMemcpyBatchAsync", 0)
        found = self._batch_of_12 if version == 12080 else self._batch_of_13
        status[0] = 0 if version == self.version else 1
        return put(out, ctypes.cast(found, c_void_p).value if version == self.version else None)

    def batch_of_12(self, to: int, source: int, sizes: int, count: int, *rest: Any) -> int:
        attributes, firsts, entries, failed, stream = rest
        if self.result:
            failed[0] = 1
        return self.batch_of_13(to, source, sizes, count, attributes, firsts, entries, stream)

    def batch_of_13(self, to: int, source: int, sizes: int, count: int, *rest: Any) -> int:
        attributes, firsts, entries, stream = rest
        assert (entries, firsts[0], attributes[0].flags) == (1, 0, 0)
        assert count >= entries, "the driver refuses a batch of nothing"
        assert stream not in (None, 0, 1), "the driver refuses the legacy default stream"
        self.stacks.append(list(self.contexts))
        runs = list(zip(numbers(to, count), numbers(source, count), numbers(sizes, count), strict=True))
        self.batches.append((runs, attributes[0].order, stream))
        return self.result

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        self.stacks.append(list(self.contexts))
        self.batches.append(([(to, source, nbytes)], ORDER_STREAM, stream))
        return self.result

    def name_error(self, result: int, out: Any) -> int:
        out[0] = {1: b"CUDA_ERROR_INVALID_VALUE", 400: b"CUDA_ERROR_INVALID_HANDLE"}.get(result)
        return 0

    def push(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def make_context(self, out: Any, device: int) -> int:
        self.made_contexts.append(device)
        return put(out, PRIMARY_CONTEXTS[device])

    def lock(self, address: int, nbytes: int, flags: int) -> int:
        if not self.result:
            self.locked[address] = (nbytes, flags)
            self.locked_in.append(self.contexts[-1])
        return self.result

    def unlock(self, address: int) -> int:
        if self.result:
            return self.result
        del self.locked[address]
        self.unlocked_in.append(self.contexts[-1])
        return 0


def put(out: Any, value: int | None) -> int:
    out[0] = value
    return 0


def numbers(address: int, count: int) -> list[int]:
    return list((c_size_t * count).from_address(address))


def batch_of(slab: torch.Tensor, stable: bool = False, runs: int = FEW_RUNS + 1) -> CopyBatch:
    host, device = np.arange(runs) * 5 + 1, np.arange(runs) * 7 + 2
    return CopyBatch(
        [slab], np.zeros(runs, np.int64), host, slab.data_ptr() + host, device, np.arange(runs) + 3, stable
    )


def runs_of(batch: CopyBatch, buffer: torch.Tensor) -> list[tuple[int, int, int]]:
    """(device address, host address, size) of every run."""
    device = (batch.device_offsets + buffer.data_ptr()).tolist()
    return list(zip(device, batch.host_addresses.tolist(), batch.sizes.tolist(), strict=True))


def torch_cuda() -> Mapping[str, inspect.Signature | None]:
    functions = (
        "is_available", "device_count", "current_device", "set_device", "current_stream", "set_stream",
        "synchronize", "mem_get_info",
    )  # fmt: skip
    found: dict[str, inspect.Signature | None] = {
        name: inspect.signature(getattr(torch.cuda, name)) for name in functions
    }
    methods = {"Stream": ("wait_event", "wait_stream", "synchronize"),
               "Event": ("record", "wait", "query", "synchronize", "elapsed_time")}  # fmt: skip
    for kind, names in methods.items():
        made = inspect.signature(getattr(torch.cuda, kind).__new__)
        found[kind] = made.replace(parameters=list(made.parameters.values())[1:])
        for name in names:
            found[f"{kind}.{name}"] = inspect.signature(getattr(getattr(torch.cuda, kind), name))
    return {**found, "Stream.cuda_stream": None, "Stream.device_index": None}


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def cuda(make_stub: Callable[..., Any], library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> CUDA:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    make_stub("cuda", torch_cuda())
    platform = CUDA()
    platform.driver = CudaDriver(library)
    # A torch built for CUDA has its C functions also where it has no device.
    platform.streams, platform.events = platform.module, platform.module.Event
    return platform


def test_every_call_fits_the_installed_torch(
    cuda: CUDA, use_everything: Callable[[Any, torch.device], None]
) -> None:
    use_everything(cuda, torch.device("cuda", 1))


def test_the_attributes_have_the_drivers_size() -> None:
    assert ctypes.sizeof(CopyAttributes) == 24


@pytest.mark.parametrize(("version", "asked"), [(12080, [12080]), (13000, [12080, 13000])])
def test_both_forms_of_the_batch_call_are_found_and_called_right(version: int, asked: list[int]) -> None:
    library = FakeLibrary(version)
    driver = CudaDriver(library)
    assert driver.has_batch
    assert library.asked == asked
    to, source, sizes = np.array([11, 12, 13]), np.array([21, 22, 23]), np.array([1, 2, 3])
    driver.copy_batch(to, source, sizes, HANDLE, any_order=True)
    assert library.batches == [([(11, 21, 1), (12, 22, 2), (13, 23, 3)], ORDER_ANY, HANDLE)]


def test_a_driver_without_the_batch_call_has_not_the_feature() -> None:
    driver = CudaDriver(FakeLibrary(None))
    assert not driver.has_batch


def test_a_load_copies_from_host_to_device_in_stream_order(cuda: CUDA, library: FakeLibrary) -> None:
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    batch = batch_of(torch.zeros(64, dtype=torch.uint8))
    cuda.load_batch(buffer, batch, stream)
    assert library.batches == [(runs_of(batch, buffer), ORDER_STREAM, 0xBEEF)]


def test_a_load_of_stable_memory_may_read_ahead(cuda: CUDA, library: FakeLibrary) -> None:
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    batch = batch_of(torch.zeros(64, dtype=torch.uint8), stable=True)
    cuda.load_batch(buffer, batch, stream)
    assert library.batches == [(runs_of(batch, buffer), ORDER_ANY, 0xBEEF)]


def test_a_save_copies_from_device_to_host_always_in_stream_order(cuda: CUDA, library: FakeLibrary) -> None:
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    batch = batch_of(torch.zeros(64, dtype=torch.uint8), stable=True)
    cuda.save_batch(buffer, batch, stream)
    expected = [(host, device, size) for device, host, size in runs_of(batch, buffer)]
    assert library.batches == [(expected, ORDER_STREAM, 0xBEEF)]


@pytest.mark.parametrize("runs", range(1, FEW_RUNS + 1))
def test_few_runs_are_copied_by_a_call_for_each(cuda: CUDA, library: FakeLibrary, runs: int) -> None:
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    batch = batch_of(torch.zeros(64, dtype=torch.uint8), runs=runs)
    cuda.load_batch(buffer, batch, stream)
    cuda.save_batch(buffer, batch, stream)
    expected = runs_of(batch, buffer) + [
        (host, device, size) for device, host, size in runs_of(batch, buffer)
    ]
    assert library.batches == [([run], ORDER_STREAM, 0xBEEF) for run in expected]


def test_few_runs_that_fail_leave_the_threads_context_and_raise_the_first_error(
    cuda: CUDA, library: FakeLibrary
) -> None:
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    library.result = 400
    with pytest.raises(RuntimeError, match=r"^cuMemcpyAsync failed: CUDA_ERROR_INVALID_HANDLE \(400\)"):
        cuda.load_batch(buffer, batch_of(torch.zeros(64, dtype=torch.uint8), runs=2), stream)
    assert (len(library.batches), library.contexts) == (1, [THREAD_CONTEXT])


@pytest.mark.parametrize(("handle", "runs"), [(0, 2), (1, 2), (0, 1), (0xBEEF, 0)])
def test_the_default_stream_and_batches_of_nothing_take_plain_copies(
    cuda: CUDA, library: FakeLibrary, handle: int, runs: int
) -> None:
    stream = cuda.new_stream(torch.device("cuda", 0))
    stream.cuda_stream = handle
    slab, buffer = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    batch = batch_of(slab, runs=runs)
    cuda.load_batch(buffer, batch, stream)
    assert library.batches == []
    assert buffer.count_nonzero() == batch.sizes.sum()
    slab.zero_()
    cuda.save_batch(buffer, batch, stream)
    assert slab.sum() == buffer.sum()


@pytest.mark.parametrize("driver", [None, CudaDriver(FakeLibrary(None))])
def test_without_the_batch_call_a_batch_is_a_loop_of_copies(cuda: CUDA, driver: CudaDriver | None) -> None:
    cuda.driver = driver
    assert not cuda.features.batch_copy
    assert cuda.features.host_register == (driver is not None)
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    cuda.load_batch(buffer, batch_of(torch.arange(64, dtype=torch.uint8), runs=2), stream)
    assert buffer[:16].tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 0, 6, 7, 8, 9, 0, 0, 0]


def test_a_call_runs_in_the_streams_context_and_leaves_the_threads(cuda: CUDA, library: FakeLibrary) -> None:
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    for contexts in ([THREAD_CONTEXT], [THREAD_CONTEXT, STREAM_CONTEXT]):
        library.contexts = list(contexts)
        cuda.load_batch(buffer, batch_of(torch.zeros(64, dtype=torch.uint8)), stream)
        assert library.contexts == contexts
    assert library.stacks == [[THREAD_CONTEXT, STREAM_CONTEXT]] * 2


def test_an_error_of_the_driver_is_raised_with_its_name_and_run(cuda: CUDA, library: FakeLibrary) -> None:
    stream, buffer = cuda.new_stream(torch.device("cuda", 0)), torch.zeros(64, dtype=torch.uint8)
    library.result = 1
    with pytest.raises(
        RuntimeError, match=r"cuMemcpyBatchAsync at run 1 of 3 failed: CUDA_ERROR_INVALID_VALUE \(1\)"
    ):
        cuda.load_batch(buffer, batch_of(torch.zeros(64, dtype=torch.uint8), runs=3), stream)
    assert library.contexts == [THREAD_CONTEXT]


def test_the_newer_form_raises_without_the_run() -> None:
    library = FakeLibrary(13000)
    library.result = 400
    ones = np.ones(2, np.int64)
    with pytest.raises(RuntimeError, match=r"^cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_HANDLE"):
        CudaDriver(library).copy_batch(ones, ones, ones, HANDLE, any_order=False)


def test_memory_is_registered_for_all_devices(cuda: CUDA, library: FakeLibrary) -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    assert cuda.host_register(memory)
    assert library.locked == {memory.data_ptr(): (16, 1)}
    cuda.host_unregister(memory)
    assert library.locked == {}


@pytest.mark.parametrize("context", [0, THREAD_CONTEXT, *PRIMARY_CONTEXTS])
@pytest.mark.parametrize("device", [0, 1])
def test_memory_is_unregistered_by_way_of_the_device_it_was_registered_by(
    cuda: CUDA, library: FakeLibrary, device: int, context: int
) -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    library.contexts = [context]
    cuda.set_device(torch.device("cuda", device))
    assert cuda.host_register(memory)
    cuda.set_device(torch.device("cuda", 1 - device))
    cuda.host_unregister(memory)
    assert library.locked_in == library.unlocked_in == [PRIMARY_CONTEXTS[device]]
    assert library.made_contexts == [device], "one of another device costs it hundreds of MiB"
    assert library.contexts == [context]


def test_memory_dropped_by_a_thread_that_made_no_call_yet_takes_no_other_devices_context(
    cuda: CUDA, library: FakeLibrary
) -> None:
    cuda.set_device(torch.device("cuda", 1))
    held = [cuda.alloc_pinned(5000)]
    library.contexts = [0]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert library.unlocked_in == [PRIMARY_CONTEXTS[1]]
    assert (library.locked, library.contexts, library.made_contexts) == ({}, [0], [1])


def test_memory_that_is_not_registered_is_not_unregistered(cuda: CUDA, library: FakeLibrary) -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    cuda.host_unregister(memory)
    assert cuda.host_register(memory)
    cuda.host_unregister(memory)
    cuda.host_unregister(memory)
    assert len(library.unlocked_in) == 1


def test_odd_sizes_are_locked_exactly_and_unlocked_when_dropped(cuda: CUDA, library: FakeLibrary) -> None:
    memory = cuda.alloc_pinned(5000)
    assert memory.data_ptr() % 4096 == 0
    assert library.locked == {memory.data_ptr(): (5000, 1)}
    del memory
    assert library.locked == {}


@pytest.mark.parametrize("nbytes", [5000, 1 << 20, (1 << 20) + 1])
def test_the_system_has_given_the_memory_before_the_driver_locks_it(
    cuda: CUDA, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Launches wait for as long as the driver locks memory, and for the system only if it does both."""
    given = []
    monkeypatch.setattr(
        accelerator, "populate", lambda array: given.append((array.nbytes, dict(library.locked)))
    )
    memory = cuda.alloc_pinned(nbytes)
    assert given == [(nbytes, {})]
    assert library.locked == {memory.data_ptr(): (nbytes, 1)}


def test_memory_that_cannot_be_locked_says_what_to_lower(cuda: CUDA, library: FakeLibrary) -> None:
    library.result = 1
    assert not cuda.host_register(torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(MemoryError, match=r"5000 bytes .*host memory.*max_local_cpu_size"):
        cuda.alloc_pinned(5000)


@pytest.mark.parametrize("call", ["copy_each", "copy_batch"])
def test_memory_dropped_while_a_thread_makes_its_out_arguments_is_unlocked(
    cuda: CUDA, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The collector may run anywhere, also inside the constructor of what a thread has for itself."""
    held, driver, byref = [cuda.alloc_pinned(5000)], cuda.driver, ctypes.byref
    assert driver is not None
    ones = np.ones(2, np.int64)
    numbers = {"copy_each": ([11], [21], [1], HANDLE), "copy_batch": (ones, ones, ones, HANDLE, False)}[call]
    errors: list[str] = []

    def collect(memory: Any) -> Any:
        held.clear()
        return byref(memory)

    def work() -> None:
        getattr(driver, call)(*numbers)

    monkeypatch.setattr("lwkv.platforms.cuda_driver.byref", collect)
    monkeypatch.setattr("sys.unraisablehook", lambda failed: errors.append(repr(failed.exc_value)))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (held, library.locked, errors) == ([], {}, [])
    assert len(library.batches) == 1
    assert library.contexts == [THREAD_CONTEXT]


def test_memory_dropped_inside_a_call_leaves_the_calls_context_alone(
    cuda: CUDA, library: FakeLibrary
) -> None:
    """Between asking for the current context and looking at the answer the collector may ask as well."""
    held, driver = [cuda.alloc_pinned(5000)], cuda.driver
    assert driver is not None
    library.contexts = [STREAM_CONTEXT]
    driver.copy_each([11], [21], [1], HANDLE)
    ask = driver._calls["cuCtxGetCurrent"]

    def ask_and_collect(out: Any) -> int:
        result = ask(out)
        held.clear()
        return result

    driver._calls["cuCtxGetCurrent"] = ask_and_collect
    driver.copy_each([11], [21], [1], HANDLE)
    assert (library.locked, library.contexts) == ({}, [STREAM_CONTEXT])
    assert library.stacks == [[STREAM_CONTEXT]] * 2, "the thread was in the stream's context already"


def test_memory_that_cannot_be_unlocked_is_kept_and_unlocked_later(
    cuda: CUDA, library: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    """Its address is nobody else's meanwhile: whoever had it could not lock it."""
    memory = cuda.alloc_pinned(5000)
    address = memory.data_ptr()
    library.result = 1
    del memory
    assert list(library.locked) == [address]
    assert "stays page-locked for now: cuMemHostUnregister failed" in caplog.text
    library.result = 0
    others = [cuda.alloc_pinned(5000) for _ in range(5)]
    assert set(library.locked) == {other.data_ptr() for other in others}


def test_memory_of_others_that_cannot_be_unregistered_can_be_tried_again(
    cuda: CUDA, library: FakeLibrary
) -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    assert cuda.host_register(memory)
    library.result = 1
    with pytest.raises(RuntimeError, match="cuMemHostUnregister failed"):
        cuda.host_unregister(memory)
    library.result = 0
    cuda.host_unregister(memory)
    assert library.locked == {}


def test_torch_memory_that_is_not_aligned_is_cut_to_a_page(
    cuda: CUDA, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        raw = torch.zeros(nbytes + 8192, dtype=torch.uint8)
        start = -raw.data_ptr() % 4096 + 64
        return raw[start : start + nbytes]

    monkeypatch.setattr(cuda, "_alloc_with_torch", allocate)
    memory = cuda.alloc_pinned(8192)
    assert memory.data_ptr() % 4096 == 0
    assert memory.shape == (8192,)
    assert asked == [8192, 8192 + 4095]


def test_memory_that_torch_did_not_lock_is_not_given_out(cuda: CUDA, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = torch.zeros(8192, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: ordinary)
    with pytest.raises(MemoryError, match="8192 bytes"):
        cuda.alloc_pinned(8192)


def test_a_machine_without_the_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert CudaDriver.load() is None


def test_a_driver_too_old_to_ask_for_versions_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeLibrary()
    del old.cuGetProcAddress_v2
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    assert CudaDriver.load() is None


def test_the_cpu_platform_never_touches_cuda(poisoned_cuda: None) -> None:
    cpu = CPU()
    device, page = cpu.current_device(), cpu.alloc_pinned(64)
    stream, event, buffer = (
        cpu.new_stream(device),
        cpu.new_event(timing=True),
        torch.zeros(64, dtype=torch.uint8),
    )
    cpu.load_batch(buffer, batch_of(page), stream)
    cpu.copy_async(page, buffer, stream)
    cpu.launch(stream, lambda: buffer.add_(1))
    cpu.record(event, stream)
    cpu.synchronize_event(event)
    cpu.close()
