"""What the host does for a layer: how deep its calls go, and how many they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from oracle import Dims, Oracle, run_slots

import lwkv
from lwkv.engine import CacheEngine, Request
from lwkv.integrations.vllm.orders import Move, StepOrders
from lwkv.integrations.vllm.worker.side import WorkerSide
from lwkv.platforms.cpu import CPU
from lwkv.steps import LayerSteps

ROOT = str(Path(lwkv.__file__).parent)
CHUNK, LAYERS, CHUNKS = 256, 32, 32
LOADED, STORED = list(range(CHUNK * CHUNKS)), list(range(9000, 9000 + CHUNK))
BLOCK = 16
# Block 0 is none to vLLM.
INTO, FROM = run_slots(BLOCK, len(LOADED)), run_slots(BLOCK + len(LOADED), len(STORED))
BLOCKS = 1 + (len(LOADED) + len(STORED)) // BLOCK


def is_counted(frame: FrameType) -> bool:
    """Whether it runs lwkv's own code above the platforms, which differ."""
    file = frame.f_code.co_filename
    # What is not a function of its own in every Python, such as a comprehension, is left out.
    nameless = frame.f_code.co_name.startswith("<")
    return file.startswith(ROOT) and "platforms" not in file and not nameless


def calls_within(work: Callable[[], object]) -> int:
    """How many functions in Python `work` calls on this thread; a generator that goes on counts, too."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and is_counted(frame)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def called_within(work: Callable[[], object], marks: tuple[str, ...] = ()) -> list[str]:
    """The functions that `calls_within` counts, in order, and calls and returns of the platform's `marks`."""
    names: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        if (event in ("call", "return") and name in marks) or (event == "call" and is_counted(frame)):
            names.append(name)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names


def frames_to(name: str, work: Callable[[], object]) -> list[list[str]]:
    """For every call of the platform's `name` that `work` makes on this thread, the functions down to it."""
    found: list[list[str]] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name != name:
            return
        functions, caller = [name], frame.f_back
        while caller is not None:
            if is_counted(caller):
                functions.insert(0, caller.f_code.co_name)
            caller = caller.f_back
        found.append(functions)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def platform() -> Iterator[CPU]:
    cpu = CPU()
    yield cpu
    cpu.close()


@pytest.fixture(params=[1, 8], ids=["a layer a buffer", "eight layers a buffer"])
def layers_per_buffer(request: Any) -> int:
    number: int = request.param
    return number


@pytest.fixture
def engine(platform: CPU, layers_per_buffer: int) -> Iterator[CacheEngine]:
    """One with LOADED in it; each of its staging buffers holds so many layers of that."""
    dims = Dims(layers=LAYERS, blocks=BLOCKS, block_size=BLOCK, heads=1, head_size=2)
    oracle = Oracle(platform, platform.current_device(), dims=dims)
    staging = 6 * layers_per_buffer * CHUNKS * oracle.page_bytes(CHUNK)
    settings = {"staging_bytes": staging, "group_bytes": 2 * LAYERS * oracle.page_bytes(CHUNK)}
    pages = 2 * LAYERS * CHUNKS
    with oracle.engine(CHUNK, pages, **settings) as engine:
        engine.store(LOADED, slot_mapping=INTO)
        assert engine.flush()
        yield engine


def test_a_layer_s_copy_is_eight_calls_below_the_hook(engine: CacheEngine) -> None:
    steps = LayerSteps(engine)
    steps.begin([Request(LOADED, INTO)], [Request(STORED, FROM)])
    steps.start_load_kv()

    def forward() -> None:
        for layer in range(LAYERS):
            steps.wait_for_layer_load(layer)

    found = frames_to("load_batch", forward)
    assert found
    for functions in found:
        assert functions[0] == "wait_for_layer_load"
        assert len(functions) <= 8 or "send" in functions, functions
    steps.wait_for_save()


def test_no_hook_queues_many_layers_and_those_behind_it_are_on_their_way(
    engine: CacheEngine, layers_per_buffer: int
) -> None:
    steps, ahead = LayerSteps(engine), engine.connector.loader.layers_ahead
    steps.begin([Request(LOADED, INTO)], [])
    steps.start_load_kv()
    load, copies = steps._load, []
    assert load is not None
    for layer in range(LAYERS):
        copies.append(len(frames_to("load_batch", lambda n=layer: steps.wait_for_layer_load(n))))
        if layer + 1 < LAYERS:
            assert load._queued > min(layer + 1 + ahead(load._load, layer + 1, True), LAYERS - 1)
    assert max(copies) <= 4
    assert steps.wait_for_save().loaded[0].all()


def run_steps(engine: CacheEngine) -> None:
    steps = LayerSteps(engine)
    steps.begin([Request(LOADED, INTO)], [Request(STORED, FROM)])
    steps.look_up()
    steps.start_load_kv()
    for layer in range(LAYERS):
        steps.wait_for_layer_load(layer)
        steps.save_kv_layer(layer)
    result = steps.wait_for_save()
    assert result.loaded[0].all()
    assert result.stored


def run_worker(engine: CacheEngine) -> None:
    """As vLLM's hooks drive a worker, without vLLM."""
    worker = WorkerSide(engine, 0, BLOCK)
    into, source = np.split(np.arange(1, BLOCKS), [len(LOADED) // BLOCK])
    load = Move(np.array(LOADED), (), into, 0, len(LOADED))
    store = Move(np.array(STORED), (), source, 0, len(STORED))
    worker.begin(StepOrders(1, 0, [load], [store]))
    worker.look_up()
    worker.start_load()
    for layer in range(LAYERS):
        worker.wait_for_layer(f"layer_{layer}")
        worker.save_layer(f"layer_{layer}")
    worker.end()
    assert worker.invalid_blocks() == set()
    worker.report()
    assert worker.new_counts()["tokens_retrieved"] == len(LOADED)


@pytest.mark.parametrize("work", [run_steps, run_worker], ids=["steps", "vLLM's worker"])
def test_a_load_and_a_store_take_no_more_calls_than_they_used_to(
    engine: CacheEngine, work: Callable[[CacheEngine], None], layers_per_buffer: int
) -> None:
    """As counted when each layer was a step of a generator."""
    most = {(run_steps, 1): 1659, (run_steps, 8): 1336, (run_worker, 1): 1963, (run_worker, 8): 1640}
    assert LAYERS < calls_within(lambda: work(engine)) <= most[work, layers_per_buffer]


def run_decode_step(worker: WorkerSide, step: int) -> None:
    """What vLLM calls in a step that moves nothing, whose graph is replayed as a whole."""
    worker.begin(StepOrders(step, step - 1))
    worker.look_up()
    worker.encode()
    worker.start_load(hooks_come=False)
    worker.end()
    assert worker.requests_ended() == worker.invalid_blocks() == set()
    worker.report()
    worker.new_counts()


def test_a_step_that_only_decodes_costs_as_little_after_prompts_as_before(engine: CacheEngine) -> None:
    worker = WorkerSide(engine, 0, BLOCK, clock=lambda: 0.0)
    worker.new_counts()  # the next ones come a second later
    before = calls_within(lambda: run_decode_step(worker, 1))
    into, source = np.split(np.arange(1, BLOCKS), [len(LOADED) // BLOCK])
    load = Move(np.array(LOADED), (), into, 0, len(LOADED))
    worker.begin(StepOrders(2, 1, [load], [Move(np.array(STORED), (), source, 0, len(STORED))]))
    worker.start_load()
    for layer in range(LAYERS):
        worker.wait_for_layer(f"layer_{layer}")
        worker.save_layer(f"layer_{layer}")
    worker.end()
    assert engine.flush()
    run_decode_step(worker, 3)  # reports what has come
    assert calls_within(lambda: run_decode_step(worker, 4)) == before <= 22


def new_prompt(number: int, chunks: int) -> list[int]:
    return list(range(100_000 * number, 100_000 * number + CHUNK * chunks))


def store_and_end(engine: CacheEngine, number: int, chunks: int) -> tuple[list[str], list[str]]:
    """Store a prompt that no prompt before was; what was called before its first copy, and behind its end.

    Its end runs here, in place of the thread that ends batches.
    """
    ends: list[Callable[[], object]] = []
    tokens, slots = new_prompt(number, chunks), INTO[: CHUNK * chunks]
    with pytest.MonkeyPatch.context() as here:
        here.setattr(engine._completions, "submit", lambda end, batch=None: ends.append(end))
        before = called_within(lambda: engine.store(tokens, slot_mapping=slots), ("save_batch",))
    (end,) = ends
    behind = called_within(end, ("d2h_fence",))
    engine._completions._expected.clear()
    assert engine.lookup(tokens) == len(tokens)
    last = len(behind) - 1 - behind[::-1].index("d2h_fence")
    return before[: before.index("save_batch")], behind[last + 1 :]


def test_the_first_copy_of_a_store_is_queued_after_what_it_needs_alone(
    engine: CacheEngine, layers_per_buffer: int
) -> None:
    """Its keys but the first, the claims, and what the other layers' copies are come later."""
    for number in (1, 2):  # until host memory is full
        store_and_end(engine, number, CHUNKS)
    before, _ = store_and_end(engine, 3, CHUNKS)
    assert "evict" in before
    assert before.count("chunk_keys") == 1
    assert before.count("lacks_slot") == 1
    assert not {"begin_write", "remove"}.intersection(before)
    assert ("_make_copies" in before) == (layers_per_buffer > 1)
    assert len(before) <= 130


def test_what_is_done_behind_the_last_copy_does_not_grow_with_the_chunks(engine: CacheEngine) -> None:
    few, many = (store_and_end(engine, number, chunks)[1] for number, chunks in ((1, 4), (2, CHUNKS)))
    assert few == many
    assert "commit" in many
    assert len(many) <= 30
