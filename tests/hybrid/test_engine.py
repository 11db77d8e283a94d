"""Several kinds of caches in one engine: what is loaded is what would be computed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hybrid.rig import GIB, Running, Toy, full, largest, local, state, window

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.hybrid import Group, HybridEngine, Store
from lwkv.kinds import ChunkSize, Kind
from lwkv.platforms import Platform

Make = Callable[..., Toy]
MODELS = {
    "gemma: a window above a chunk": ([full(), window(19)], [1, 2], 8),
    "gpt-oss: a window below a chunk": ([full(), window(6)], [1, 1], 16),
    "two windows": ([full(), window(30), window(5)], [1, 2, 1], 8),
    "qwen-next": ([full(8), state(8)], [1, 3], 8),
    "a window, a state and blocks of two sizes": ([full(4), window(10), state(8)], [1, 1, 2], 16),
    "chunked local attention": ([full(8), local(32, 8)], [1, 3], 8),
    "windows alone": ([window(12)], [2], 8),
    "window and state without full attention": ([window(12, 8), state(8)], [1, 1], 8),
    "a window of one token": ([full(), window(1)], [1, 1], 8),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, toy: Make) -> Toy:
    return toy(*MODELS[request.param])


def test_a_prompt_goes_on_at_its_last_boundary(model: Toy) -> None:
    tokens = list(range(100, 177))
    assert model.ask(tokens, step=24) == 0
    assert model.ask(tokens, step=24) == 76 // model.chunk * model.chunk
    assert model.ask([*tokens, *range(30)], step=24) >= 72 // model.chunk * model.chunk


def test_what_differs_at_the_end_goes_on_where_all_kinds_are_whole(model: Toy) -> None:
    tokens = list(range(100, 177))
    model.ask(tokens, step=32)
    other = [*tokens[:50], *range(40)]
    assert model.ask(other, step=32) <= 48
    assert model.ask(other, step=32) == 89 // model.chunk * model.chunk


def test_requests_of_a_step_share_blocks_up_to_the_middle_of_a_chunk(toy: Make) -> None:
    """As where an engine has the beginning of two prompts itself: both are stored, and both loaded."""
    model = toy([full(), window(5)], [1, 2], 8)
    prompts = [[*range(12), *range(50, 62)], [*range(12), *range(70, 82)]]
    first = model.start(prompts[0])
    model.run_step([], [(first, 12)])

    def behind_the_first() -> list[Running]:
        running = [model.start(prompt) for prompt in prompts]
        for request in running:
            request.tables = [[*table[:3]] for table in shared]
            request.computed = request.local = 12
        return running

    shared = [[*table] for table in first.tables]
    running = behind_the_first()
    model.run_step([], [(request, 24) for request in running])
    assert model.engine.flush(20.0)
    assert [model.boundary([*prompt, 1]) for prompt in prompts] == [24, 24]
    for request in running:
        model.end(request)
    again = behind_the_first()
    pins = [model.engine.pin(request.hashes, 12, 24) for request in again]
    model.run_step([(request, model.load(request, 24)) for request in again], [])
    for request, pin in zip(again, pins, strict=True):
        assert pin is not None
        model.engine.unpin(pin)
        model.end(request)
    model.end(first)


TREE = [
    [*range(100, 100 + shared), *range(1000 * branch, 1000 * branch + rest)]
    for shared, branch, rest in [(77, 1, 0), (77, 2, 40), (40, 3, 45), (24, 4, 9), (0, 5, 60), (77, 1, 20)]
]


@pytest.mark.parametrize("seed", range(3))
def test_little_memory_is_used_for_what_was_asked_last(seed: int, toy: Make) -> None:
    """After each request it is found again, wherever it fits; bytes are compared in each step."""
    chance = random.Random(seed)
    kinds, groups, chunk = MODELS[sorted(MODELS)[chance.randrange(len(MODELS))]]
    roomy = toy(kinds, groups, chunk)
    roomy.ask(TREE[1])
    pages = max(roomy.engine.stats()["pages_in_use"] + chance.randint(0, 40), 60)
    model = toy(kinds, groups, chunk, pages=pages)
    for _ in range(12):
        tokens = chance.choice(TREE)
        has = [model.watcher.has.get(number, set()) for number in range(len(kinds))]
        assert model.boundary(tokens) == largest(model, tokens, has)
        model.ask(tokens)
        model.rest()
        assert model.boundary(tokens) == (len(tokens) - 1) // chunk * chunk, tokens


def test_what_is_pinned_is_loaded_however_much_is_stored_meanwhile(toy: Make) -> None:
    model = toy([full(), window(19), state(8)], [1, 2, 1], 8, pages=70)
    tokens = list(range(90))
    model.ask(tokens)
    request = model.start(tokens)
    pin = model.engine.pin(request.hashes, 0, 88)
    assert pin is not None
    for start in range(1000, 6000, 1000):
        model.ask(range(start, start + 90))
    assert model.boundary(tokens) == 88
    model.run_step([(request, model.load(request, 88))], [(request, 90)])
    model.engine.unpin(pin)
    model.end(request)
    model.ask(range(7000, 7090))
    assert model.boundary(tokens) < 88


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_overlap_load_what_they_were_promised(seed: int, toy: Make) -> None:
    """Several run at once, in steps of odd sizes, in little memory; some are given up half way."""
    chance = random.Random(seed)
    kinds = [full(), window(chance.choice([6, 19])), *[state(8)] * chance.randint(0, 1)]
    model = toy(kinds, [1] * len(kinds), 8, pages=44)
    running: dict[int, tuple] = {}
    for number in range(40):
        if len(running) < 3:
            tokens = chance.choice(TREE)
            request, found = model.start(tokens), model.boundary(tokens)
            pin = model.engine.pin(request.hashes, 0, found) if found else None
            assert pin is not None or not found
            running[number] = request, pin, [(request, model.load(request, found))] if found else []
        loads, parts = [], []
        for key, (request, pin, load) in running.items():
            end = min(request.computed + chance.choice([3, 8, 16, 33]), len(request.tokens))
            if len(kinds) == 3 and end < len(request.tokens):
                end = max(end // 8 * 8, min(request.computed // 8 * 8 + 8, len(request.tokens)))
            loads += load
            parts.append((request, end))
            running[key] = request, pin, []
        model.run_step(loads, parts)
        for key, (request, pin, _) in [*running.items()]:
            if request.computed == len(request.tokens) or chance.random() < 0.1:
                if pin is not None:
                    model.engine.unpin(pin)
                model.end(request)
                del running[key]
    for request, pin, _ in running.values():
        if pin is not None:
            model.engine.unpin(pin)
        model.end(request)
    assert model.engine.flush(20.0)
    assert model.engine.counts()["tokens_retrieved"] > 100
    assert model.engine.counts()["chunks_evicted"] > 0


def test_of_a_prompt_larger_than_host_memory_as_much_is_found_as_fits_of_all_kinds(toy: Make) -> None:
    # A chunk has 2 pages of full attention, and 4 of the windows of its two groups, of which 3 chunks count.
    model = toy([full(), window(19)], [1, 2], 8, pages=40)
    tokens = list(range(200))
    assert model.ask(tokens, step=16, settles=True) == 0
    found = model.boundary(tokens)
    assert found % 8 == 0
    assert found // 8 * 2 + 3 * 4 <= 40
    assert found >= 8 * 10
    assert model.ask(tokens, step=16, settles=True) == found


def pages_of(*numbers: int) -> int:
    return sum(numbers)


def test_no_more_is_kept_and_moved_than_is_needed(toy: Make) -> None:
    model = toy([full(), window(19), state(8)], [1, 2, 1], 8)
    tokens = list(range(90))
    model.ask(tokens)
    counts = model.engine.stats()
    # 11 chunks of full attention, 3 of each window's, one state: 2 layers each.
    assert counts["pages_in_use"] == pages_of(11 * 2, 2 * 3 * 2, 2)
    assert counts["tokens_stored"] == pages_of(11 * 8, 2 * 3 * 8, 1)
    model.ask(tokens)
    after = model.engine.stats()
    # Windows from the block of token 88 - 18 on. What is there is not stored again.
    assert after["tokens_retrieved"] == pages_of(88, 2 * (88 - 68), 1)
    assert after["tokens_stored"] == counts["tokens_stored"]


def test_a_window_below_a_chunk_keeps_and_moves_its_blocks_alone(toy: Make) -> None:
    model = toy([full(), window(6)], [1, 1], 16)
    model.ask(range(90))
    counts = model.engine.stats()
    assert counts["tokens_stored"] == 80 + 8
    # Both kinds fit into the smallest page that there is.
    assert counts["pages_in_use"] == pages_of(5 * 2, 2)
    assert model.ask(range(90)) == 80
    assert model.engine.stats()["tokens_retrieved"] == 80 + 8


@pytest.mark.parametrize("local_tokens", [80, 84])
def test_what_the_engine_has_itself_is_not_loaded(toy: Make, local_tokens: int) -> None:
    model = toy([full(), window(19)], [1, 1], 8)
    tokens = list(range(90))
    model.ask(tokens)
    request = model.start(tokens)
    request.local = request.computed = local_tokens
    model.allocate(request, [0, 60], local_tokens)
    for group in range(2):
        for layer in range(2):
            model.write(request, group, layer, 0 if group == 0 else 60, local_tokens)
    pin = model.engine.pin(request.hashes, local_tokens, 88)
    assert pin is not None
    model.run_step([(request, model.load(request, 88))], [(request, 90)])
    model.engine.unpin(pin)
    assert model.engine.flush(20.0)
    assert model.engine.stats()["tokens_retrieved"] == 2 * (88 - local_tokens)
    model.end(request)


def test_requests_that_load_and_store_share_a_step(toy: Make) -> None:
    model = toy([full(), window(10), state(8)], [1, 1, 1], 8)
    one, other = list(range(50)), [*range(30), *range(500, 530)]
    model.ask(one)
    first, second = model.start(one), model.start(other)
    pin = model.engine.pin(first.hashes, 0, 48)
    assert pin is not None
    model.run_step([(first, model.load(first, 48))], [(first, 50), (second, 56)])
    model.engine.unpin(pin)
    model.engine.unpin(pin)
    model.end(first)
    model.end(second)
    assert model.engine.flush(20.0)
    assert model.boundary(other) == 56


def test_where_a_load_fails_nothing_of_the_step_is_stored_of_any_kind(toy: Make) -> None:
    model = toy([full(), window(10), state(8)], [1, 1, 1], 8)
    gone, other = model.start(list(range(50))), model.start(list(range(700, 740)))
    model.allocate(other, [0, 0, 0], 40)
    model.steps.begin([model.load(gone, 48)], [Store(other.hashes, 0, 40, other.tables)])
    model.steps.start_load_kv()
    for layer, group in model._hooks():
        model.steps.wait_for_layer_load(model.names(group)[layer])
        model.steps.save_kv_layer(model.names(group)[layer])
    assert model.steps.wait_for_save() == ([False], False)
    assert model.steps.wait_for_save() == ([False], False)
    assert model.engine.flush(20.0)
    assert model.engine.stats()["pages_in_use"] == 0


@pytest.mark.parametrize("how", ["load_all", "load_now", "load_apart"])
def test_all_layers_can_be_loaded_without_any_hook(toy: Make, how: str) -> None:
    model = toy([full(), window(10), state(8)], [1, 2, 1], 8)
    tokens = list(range(50))
    model.ask(tokens)
    request = model.start(tokens)
    load = model.load(request, 48)
    pin = model.engine.pin(request.hashes, 0, 48)
    assert pin is not None
    if how == "load_now":
        assert model.engine.load_now([load]) == [True]
    elif how == "load_apart":
        apart = model.engine.load_apart([load])
        while not apart.have_arrived():
            pass
        assert apart.loaded == [True]
    else:
        model.steps.begin([load], ())
        model.steps.load_all()
    for group in range(4):
        for layer in range(2):
            model.look([(request, load)], group, layer)
    if how == "load_all":
        assert model.steps.wait_for_save() == ([True], False)
    model.check()
    model.engine.unpin(pin)
    model.end(request)


def test_a_load_of_what_is_not_there_is_not_taken_for_done(toy: Make) -> None:
    model = toy([full(), state(8)], [1, 1], 8)
    request = model.start(list(range(50)))
    assert model.engine.pin(request.hashes, 0, 48) is None
    assert model.engine.load_now([model.load(request, 48)]) == [False]
    model.end(request)


def test_of_blocks_that_slid_out_nothing_is_stored(toy: Make) -> None:
    model = toy([full(), window(10)], [1, 1], 8)
    request = model.start(list(range(50)))
    model.run_step([], [(request, 40)], boundaries=set())
    model.run_step([], [(request, 50)], boundaries={16, 40, 48})
    model.end(request)
    assert model.engine.flush(20.0)
    # 16 lies behind the window. 40 needs of chunk 3 its end alone, but the chunk is not whole any more.
    assert model.watcher.has[1] == {request.hashes[i] for i in (4, 5)}


def test_a_window_of_whole_chunks_can_be_stored_at_the_start_of_a_step(toy: Make) -> None:
    model = toy([full(), window(17)], [1, 1], 8)
    request = model.start(list(range(50)))
    model.run_step([], [(request, 40)], boundaries=set())
    model.run_step([], [(request, 44)], boundaries={40})
    model.end(request)
    assert model.engine.flush(20.0)
    assert model.boundary(list(range(50))) == 40


def test_a_state_is_stored_where_the_step_ends_alone(toy: Make) -> None:
    model = toy([full(8), state(8)], [1, 1], 8)
    request = model.start(list(range(50)))
    model.run_step([], [(request, 44)], boundaries={8, 40})
    model.run_step([], [(request, 48)], boundaries={48})
    model.end(request)
    assert model.engine.flush(20.0)
    assert model.watcher.has[1] == {request.hashes[5]}


def test_states_take_a_quarter_of_the_memory_at_most(toy: Make) -> None:
    model = toy([full(8), state(8)], [1, 3], 8, pages=200)
    for start in range(30):
        model.ask(range(1000 * start, 1000 * start + 17))
    assert 0 < 6 * len(model.watcher.has[1]) <= 50
    assert len(model.watcher.has[0]) == 60


def test_a_step_without_work_ends_like_any_other(toy: Make) -> None:
    model = toy([full(), window(10)], [1, 1], 8)
    model.steps.begin((), ())
    assert model.steps.wait_for_save() == ([], False)
    model.steps.wait_for_layer_load("no such layer")
    model.steps.save_kv_layer("no such layer")


def engine(platform: Platform, kinds: list[Kind], groups: list[Group], **config: object) -> HybridEngine:
    return HybridEngine(Config(use_layerwise=True, **config), kinds, groups, ChunkSize(8, 8, 256), platform)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"host_memory": "/tmp/none.socket"}, r"host_memory: got '/tmp/none.socket'; set it to null"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk: got true; set it to false"),
        ({"page_codec": "lossless"}, "page_codec: got 'lossless'; set it to 'raw' or 'auto'"),
        ({"page_codec": "fp8"}, "page_codec: got 'fp8'; set it to 'raw' or 'auto'"),
    ],
)
def test_settings_that_do_not_work_with_several_kinds_are_named(
    toy: Make, platform: Platform, setting: dict[str, object], text: str
) -> None:
    model = toy([full(), window(10)], [1, 1], 8)
    with pytest.raises(ConfigError, match=text):
        engine(platform, model.kinds, [*model.engine.groups], **setting)


def test_too_little_memory_and_wrong_kinds_are_refused(toy: Make, platform: Platform) -> None:
    model = toy([full(), window(10)], [1, 1], 8)
    groups = [*model.engine.groups]
    with pytest.raises(ConfigError, match="two chunks of all kinds of caches need 12: raise max_local_cpu"):
        engine(platform, model.kinds, groups, max_local_cpu_size=11 * 4096 / GIB)
    wrong = [Kind("full", 4, 2, 64), Kind("window", 4, 2, 64, span=10)]
    with pytest.raises(ConfigError, match=r"Kind.block_bytes, 64, is too small for these caches"):
        engine(platform, wrong, groups)
