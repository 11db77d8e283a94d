"""The Buffer connector: what is in the buffer, what a flush writes, and keys turned on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Dims, MemoryTier, Oracle, require_rest, run_slots
from torch import Tensor

from lwkv.connectors import Rope
from lwkv.engine import CacheEngine
from lwkv.errors import LayoutError, RequestError
from lwkv.platforms import Platform
from lwkv.storage import Status
from lwkv.telemetry.timeline import Timeline
from lwkv.transfer import NO_SLOT, Transfer

CHUNK = 8
LAYERS = 5
TOKENS = list(range(700, 724))
FROM, INTO = run_slots(0, 24), run_slots(32, 24, backwards=True)


class Bench:
    """An engine with TOKENS cached, and its connector driven by hand."""

    def __init__(self, oracle: Oracle, engine: CacheEngine) -> None:
        self.oracle, self.engine = oracle, engine
        self.connector: Any = engine.connector
        self.platform, self.device = oracle.platform, oracle.device

    def fill(self) -> None:
        self.oracle.compute(TOKENS, FROM)
        self.engine.store(TOKENS, slot_mapping=FROM)
        assert self.engine.flush()

    def hold(self) -> Any:
        return self.engine._storage.hold(self.engine._prompt_keys.keys(np.array(TOKENS), ()))

    def queue(self, load: Any, hold: Any, layers: range, loader: Any = None) -> None:
        for layer in layers:
            (loader or self.connector.loader).load_layer(load, layer, hold.host_pages(layer))

    def end(self, load: Any, hold: Any, loader: Any = None) -> None:
        (loader or self.connector.loader).leave_load(load)
        (loader or self.connector.loader).end_load(load)
        hold.release()

    def run(self, work: Callable[[], object]) -> None:
        self.platform.launch(self.platform.current_stream(self.device), work)

    def get_kv(self, load: Any, layer: int) -> list[Tensor]:
        """What the current stream finds in the buffer, copied to the host."""
        found: list[Tensor] = []
        k, v = self.connector.loader.get_kv(load, layer)
        self.run(lambda: found.extend([k.clone(), v.clone()]))
        self.platform.synchronize_device(self.device)
        return [t.cpu() for t in found]


@pytest.fixture
def make_bench(platform: Platform, device: torch.device) -> Any:
    def make(form: str = "vllm_2bnhd", lookahead: int = 1, **settings: Any) -> Bench:
        oracle = Oracle(platform, device, form, Dims(layers=LAYERS, blocks=20))
        return Bench(oracle, oracle.engine(CHUNK, lookahead=lookahead, enable_blending=True, **settings))

    return make


@pytest.fixture
def bench(make_bench: Any) -> Any:
    made: Bench = make_bench()
    made.fill()
    yield made
    require_rest(made.engine)
    made.engine.close()


def transfer(slots: Any = INTO) -> Transfer:
    return Transfer(np.array([CHUNK] * 3, np.int64), np.array(slots, np.int64))


def test_a_layer_waited_for_is_in_the_buffer_and_in_the_blocks(bench: Bench) -> None:
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer())
    for layer in range(LAYERS):
        bench.queue(load, hold, range(layer, layer + 1))
        bench.connector.loader.wait_layer(load, layer)
        bench.oracle.expect(TOKENS, INTO, layers=[layer])
        got = torch.stack(bench.get_kv(load, layer)).view(torch.int32)
        assert torch.equal(got, bench.oracle.rows(TOKENS, layer))
    bench.end(load, hold)
    bench.oracle.check()


def test_a_layer_stays_in_the_buffer_until_its_place_is_needed(bench: Bench) -> None:
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer())
    assert bench.connector.loader.num_buffered == 3
    bench.queue(load, hold, range(3))
    bench.connector.loader.wait_layer(load, 2)
    for layer in range(3):
        got = torch.stack(bench.get_kv(load, layer)).view(torch.int32)
        assert torch.equal(got, bench.oracle.rows(TOKENS, layer))
    bench.queue(load, hold, range(3, 4))
    bench.connector.loader.wait_layer(load, 3)
    got = torch.stack(bench.get_kv(load, 3)).view(torch.int32)
    assert torch.equal(got, bench.oracle.rows(TOKENS, 3))
    bench.end(load, hold)


def test_what_was_mended_in_the_buffer_reaches_the_blocks_with_a_flush(bench: Bench) -> None:
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer())
    mended = [900 + i for i in range(24)]
    bench.queue(load, hold, range(LAYERS))
    bench.connector.loader.wait_layer(load, LAYERS - 1)
    k, v = bench.connector.loader.get_kv(load, LAYERS - 1)
    rows = bench.oracle.rows(mended, LAYERS - 1).view(torch.float32)
    bench.run(lambda: (k.copy_(rows[0]), v.copy_(rows[1])))
    bench.connector.loader.flush(load, LAYERS - 1)
    bench.oracle.expect(TOKENS, INTO)
    bench.oracle.expect(mended, INTO, layers=[LAYERS - 1])
    bench.end(load, hold)
    bench.oracle.check()


def test_rows_are_those_of_the_moved_tokens(bench: Bench) -> None:
    slots = np.array(INTO)
    slots[[0, 1, 9]] = NO_SLOT
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer(slots))
    bench.queue(load, hold, range(1))
    bench.connector.loader.wait_layer(load, 0)
    moved = slots != NO_SLOT
    assert load.rows_of[moved].tolist() == list(range(21))
    assert set(load.rows_of[~moved].tolist()) == {NO_SLOT}
    got = torch.stack(bench.get_kv(load, 0)).view(torch.int32)
    assert torch.equal(got, bench.oracle.rows(TOKENS, 0)[:, moved])
    bench.oracle.expect(TOKENS, slots, layers=[0])
    bench.end(load, hold)
    bench.oracle.check()


def test_chunks_dropped_on_the_way_keep_the_others_rows(bench: Bench) -> None:
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer())
    bench.queue(load, hold, range(2))
    bench.connector.loader.drop_chunks(load, np.array([True, False, True]))
    kept = np.repeat([True, False, True], CHUNK)
    for layer in range(2, LAYERS):
        bench.connector.loader.load_layer(load, layer, hold.host_pages(layer)[[0, 2]])
    bench.connector.loader.wait_layer(load, LAYERS - 1)
    rows = load.rows_of
    assert rows.tolist() == [*range(8), *range(16, 24)]
    got = torch.stack(bench.get_kv(load, LAYERS - 1)).view(torch.int32)
    assert torch.equal(got[:, rows], bench.oracle.rows(TOKENS, LAYERS - 1)[:, kept])
    bench.oracle.expect(TOKENS, INTO, kept)
    bench.oracle.expect(TOKENS, INTO, ~kept, layers=range(2))
    bench.end(load, hold)
    bench.oracle.check()


def test_chunks_without_a_slot_may_be_all_that_is_left(bench: Bench) -> None:
    slots = np.array(INTO)
    slots[:CHUNK] = NO_SLOT
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer(slots))
    bench.queue(load, hold, range(1))
    bench.connector.loader.drop_chunks(load, np.array([True, False, False]))
    for layer in range(1, LAYERS):
        bench.connector.loader.load_layer(load, layer, hold.host_pages(layer)[:1])
    bench.connector.loader.wait_layer(load, LAYERS - 1)
    bench.oracle.expect(TOKENS, slots, layers=[0])
    bench.end(load, hold)
    bench.oracle.check()


def test_all_chunks_may_be_dropped(bench: Bench) -> None:
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer())
    bench.queue(load, hold, range(1))
    bench.connector.loader.drop_chunks(load, np.zeros(3, bool))
    for layer in range(1, LAYERS):
        bench.connector.loader.load_layer(load, layer, np.zeros(0, np.int64))
    bench.connector.loader.wait_layer(load, LAYERS - 1)
    bench.oracle.expect(TOKENS, INTO, layers=[0])
    bench.end(load, hold)
    bench.oracle.check()


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2, LAYERS, 9])
def test_the_engine_may_look_ahead_as_far_as_it_likes(make_bench: Any, lookahead: int, sync: bool) -> None:
    bench: Bench = make_bench(lookahead=lookahead)
    bench.fill()
    with bench.engine as engine:
        for into in (32, 56):
            *_, mask = engine.retrieve_layer(TOKENS, slot_mapping=run_slots(into, 24), sync=sync)
            assert mask.all()
            bench.oracle.expect(TOKENS, run_slots(into, 24))
            bench.oracle.check()
        require_rest(engine)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_chunk_that_fails_late_does_not_disturb_layers_queued_before(
    make_bench: Any, layer: int, lookahead: int, sync: bool
) -> None:
    tier = MemoryTier()
    bench: Bench = make_bench(tiers=[tier])
    bench.fill()
    bench.engine.close()
    again: Bench = make_bench(tiers=[tier], lookahead=lookahead)
    failing = again.engine._prompt_keys.keys(np.array(TOKENS), ())[1]
    tier.fails = lambda key: Status.MISS if (key.chunk, key.layer) == (failing, layer) else Status.OK
    with again.engine as engine:
        *_, mask = engine.retrieve_layer(TOKENS, slot_mapping=INTO, sync=sync)
        assert mask.tolist() == [True] * 8 + [False] * 8 + [True] * 8
        again.oracle.expect(TOKENS, INTO, mask)
        again.oracle.expect(TOKENS, INTO, ~mask.numpy(), layers=range(layer))
        again.oracle.check()
        require_rest(engine)


def test_with_mla_v_is_k(make_bench: Any) -> None:
    bench: Bench = make_bench("vllm_mla")
    bench.fill()
    hold, load = bench.hold(), bench.connector.loader.begin_load(transfer())
    bench.queue(load, hold, range(1))
    bench.connector.loader.wait_layer(load, 0)
    k, v = bench.get_kv(load, 0)
    assert torch.equal(k, v)
    assert torch.equal(k.view(torch.int32), bench.oracle.rows(TOKENS, 0)[0, :, :1])
    bench.end(load, hold)
    bench.engine.close()


def test_layers_of_different_dtypes_cannot_be_blended(platform: Platform, device: torch.device) -> None:
    oracle = Oracle(platform, device)
    caches = oracle.kvcaches | {"odd": torch.zeros(2, 16, 4, 2, 3, dtype=torch.float64, device=device)}
    engine = oracle.engine(CHUNK, enable_blending=True)
    fresh = type(engine.connector)(engine.config, platform, engine.connector._describe)
    with pytest.raises(LayoutError, match=r"'odd'.*cannot be blended"):
        fresh.register(caches)
    engine.close()


@pytest.mark.parametrize("form", ["vllm_2bnhd", "vllm_mla"])
@pytest.mark.parametrize("count", [1, 3, 24])
def test_kernels_see_no_difference_between_buffers_of_different_lengths(
    make_bench: Any, form: str, count: int
) -> None:
    """What a kernel is compiled for: sizes, strides, width of words and alignment of K and V."""
    bench: Bench = make_bench(form)
    kinds = []
    for moved in (0, count):
        slots = np.full(24, NO_SLOT)
        slots[: 24 - moved] = INTO[: 24 - moved]
        load = bench.connector.loader.begin_load(transfer(slots))
        for buffer in load.buffers:
            kinds += [(w.dtype, w.shape[1:], w.stride(), w.data_ptr() % 16) for w in buffer.words]
        bench.connector.loader.leave_load(load)
        bench.connector.loader.end_load(load)
    assert len(set(kinds)) == 1
    bench.engine.close()


def test_what_is_no_load_into_the_buffer_is_refused(bench: Bench) -> None:
    with pytest.raises(TypeError, match="was not begun by a BufferedLoader"):
        bench.connector.loader.get_kv(object(), 0)


# Keys turned on the way.


def turned(k: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """RoPE of k, (T, H, D), in fp64 by complex numbers."""
    half = len(rope.frequencies)
    angles = positions.double()[:, None] * torch.tensor(rope.frequencies, dtype=torch.float64)
    phase = torch.polar(torch.ones_like(angles), angles)[:, None]
    result = k.double().clone()
    pairs = result[..., : 2 * half]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if rope.interleaved else pairs.split(half, -1)
    spun = torch.complex(a, b) * phase
    a.copy_(spun.real)
    b.copy_(spun.imag)
    return result


class Keys:
    """A cache of real numbers whose keys are turned to their positions."""

    def __init__(self, platform: Platform, device: torch.device, rope: Rope) -> None:
        self.oracle = Oracle(platform, device, dims=Dims(layers=2, blocks=20, head_size=6))
        self.engine = self.oracle.engine(CHUNK, enable_blending=True)
        self.bench = Bench(self.oracle, self.engine)
        self.rope = rope
        self.raw = torch.randn(2, 2, 24, 2, 6, generator=torch.Generator().manual_seed(3))
        for layer, cache in enumerate(self.oracle.kvcaches.values()):
            k = turned(self.raw[layer, 0], torch.arange(24), rope).float()
            cache.flatten(1, 2)[:, :24] = torch.stack([k, self.raw[layer, 1]]).to(device)
        self.engine.store(TOKENS, slot_mapping=FROM)
        assert self.engine.flush()

    def load(self, shift: Any, slots: Any, in_place: bool = False) -> list[Tensor]:
        """K and V of every layer, each [2, 24, 2, 6], from the slots of a load with `shift`."""
        hold = self.bench.hold()
        shift = np.array(shift, np.int64)
        connector = self.bench.connector
        loader = connector.in_place if in_place else connector.loader
        load = loader.begin_load(transfer(slots), shift=shift)
        self.bench.queue(load, hold, range(2), loader)
        loader.wait_layer(load, 1)
        self.bench.end(load, hold, loader)
        self.oracle.platform.synchronize_device(self.oracle.device)
        return [cache.flatten(1, 2)[:, slots].cpu() for cache in self.oracle.kvcaches.values()]


@pytest.mark.parametrize("in_place", [False, True], ids=["by the buffer", "in place"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("frequencies", [(1.0, 0.2, 0.03), (0.5,)], ids=["whole", "partial"])
def test_a_shifted_key_is_as_if_computed_at_its_new_position(
    platform: Platform,
    device: torch.device,
    frequencies: tuple[float, ...],
    interleaved: bool,
    in_place: bool,
) -> None:
    rope = Rope(frequencies, interleaved)
    keys = Keys(platform, device, rope)
    keys.bench.connector.set_rope(rope)
    shift = np.repeat([40, 0, -7], CHUNK)
    for layer, got in enumerate(keys.load(shift, INTO, in_place)):
        wanted = turned(keys.raw[layer, 0], torch.arange(24) + torch.from_numpy(shift), rope)
        torch.testing.assert_close(got[0], wanted.float(), rtol=0, atol=1e-5)
        assert torch.equal(got[1], keys.raw[layer, 1])
    require_rest(keys.engine)
    keys.engine.close()


@pytest.mark.parametrize("in_place", [False, True], ids=["by the buffer", "in place"])
def test_a_shift_of_nothing_changes_nothing(platform: Platform, device: torch.device, in_place: bool) -> None:
    keys = Keys(platform, device, Rope((1.0, 0.5, 0.1)))
    keys.bench.connector.set_rope(keys.rope)
    for layer, got in enumerate(keys.load([0] * 24, INTO, in_place)):
        k = turned(keys.raw[layer, 0], torch.arange(24), keys.rope).float()
        assert torch.equal(got, torch.stack([k, keys.raw[layer, 1]]))
    keys.engine.close()


def refusal(platform: Platform, device: torch.device, rope: Rope, form: str, dims: Dims) -> str:
    engine = Oracle(platform, device, form, dims).engine(CHUNK, enable_blending=True)
    connector: Any = engine.connector
    with engine, pytest.raises(LayoutError) as caught:
        connector.set_rope(rope)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "dims", "text"),
    [
        ("vllm_mla", Dims(head_size=6), "layer 'layer_0' is MLA"),
        ("vllm_2bnhd", Dims(head_size=6, dtype=torch.uint8), "layer 'layer_0' is torch.uint8: register"),
        ("vllm_2bnhd", Dims(head_size=3), "layer 'layer_0' has heads of 3 elements, but the rope turns 4"),
    ],
    ids=["mla", "bytes", "small heads"],
)
def test_keys_that_cannot_be_turned_are_refused_with_the_rope(
    platform: Platform, device: torch.device, form: str, dims: Dims, text: str
) -> None:
    assert text in refusal(platform, device, Rope((1.0, 0.5)), form, dims)


def test_a_timeline_that_fails_makes_a_miss_and_no_exception(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Bench = make_bench()
    made.fill()
    timeline, failed = Timeline(made.oracle.platform, made.oracle.device), []
    keep = timeline._keep

    def fail_once(lane: Any, layer: int, *rest: Any) -> None:
        if layer == 1 and not failed:
            failed.append(layer)
            raise RuntimeError("the device fails, says the test")
        keep(lane, layer, *rest)

    monkeypatch.setattr(timeline, "_keep", fail_once)
    monkeypatch.setattr(made.connector.loader, "_timeline", timeline)
    assert not made.engine.retrieve(TOKENS, slot_mapping=INTO).any()
    assert made.engine.flush()
    require_rest(made.engine)
    made.engine.close()


def test_a_load_that_passes_by_the_buffer_has_nothing_in_it(bench: Bench) -> None:
    loader = bench.connector.in_place
    hold, load = bench.hold(), loader.begin_load(transfer())
    bench.queue(load, hold, range(1), loader)
    loader.wait_layer(load, 0)
    with pytest.raises(TypeError, match="was not begun by a BufferedLoader: it passes by the buffer"):
        bench.connector.loader.get_kv(load, 0)
    bench.end(load, hold, loader)


def test_a_shift_needs_the_model_s_rope_and_one_entry_a_token(bench: Bench) -> None:
    with pytest.raises(RequestError, match="call set_rope first"):
        bench.connector.loader.begin_load(transfer(), shift=np.zeros(24, np.int64))
    bench.connector.set_rope(Rope((1.0,)))
    with pytest.raises(RequestError, match="shift has 23 entries, the transfer has 24 tokens"):
        bench.connector.loader.begin_load(transfer(), shift=np.zeros(23, np.int64))
