"""Chunks that outlive the process, and files that do not deserve it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, Engine, assert_same, prompt, started, with_lwkv


def with_disk(folder: Path, **settings: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return with_lwkv(local_disk=str(folder), max_local_disk_size=0.25, **settings)


def chunk_files(folder: Path) -> list[Path]:
    """The files of chunks: all large ones."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def shared(llama: Path, folder: Path) -> Iterator[Engine]:
    with started(llama, enable_prefix_caching=False, **with_disk(folder)) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    shared.at_rest()


@pytest.fixture
def only_on_disk(engine: Engine) -> Callable[[list[list[int]]], None]:
    """Has prompts cached, and none of them in host memory."""

    def ask(prompts: list[list[int]]) -> None:
        engine.ask(prompts)
        engine.evict_all()
        engine.ask([prompt(0, 20)])  # the scheduler hears of it with the next step
        engine.new_hits()

    return ask


def test_a_second_process_finds_what_the_first_stored_before_it_was_killed(
    llama: Path, plain: Elsewhere, tmp_path: Path
) -> None:
    prompts = [prompt(300, 300), prompt(301, 200)]
    first = Elsewhere(llama, enable_prefix_caching=False, **with_disk(tmp_path))
    assert_same(first.call("ask", prompts), plain.ask(prompts))
    assert first.call("flush")
    first.kill()
    with started(llama, enable_prefix_caching=False, **with_disk(tmp_path)) as second:
        assert_same(second.ask(prompts), plain.ask(prompts))
        assert second.new_hits() == 256 + 192
        second.at_rest()


def test_processes_with_other_chunks_or_fp8_pages_find_nothing_of_each_other(
    llama: Path, plain: Elsewhere, tmp_path: Path
) -> None:
    """So nobody gets fp8 who did not ask; and who did gets answers of KV that is rounded, and no worse."""
    prompts = [prompt(305, 256 + 20)]
    rounded = []
    for other in ({"page_codec": "fp8"}, {"chunk_size": 32}, {}):
        # What vLLM keeps itself is not stored; here it keeps what it has until it is rounded.
        settings = with_disk(tmp_path, **other) | {"enable_prefix_caching": not other}
        with started(llama, **settings) as engine:
            assert_same(engine.ask(prompts), plain.ask(prompts))
            assert engine.new_hits() == 0
            assert engine.flush()
            if not other:
                round_blocks(engine)
            if other.get("chunk_size") is None:
                rounded.append(engine.ask(prompts))
                assert [answer.cached for answer in rounded[-1]] == [256]
    of_fp8_pages, of_rounded_blocks = rounded
    assert_same(of_fp8_pages, of_rounded_blocks)
    with pytest.raises(AssertionError):
        assert_same(of_fp8_pages, plain.ask(prompts))


def round_blocks(engine: Engine) -> None:
    """Round all KV that vLLM has, as docs/page-format.md says of fp8: blocks are [heads, 2, elements]."""
    for layer in engine.worker.engine.connector.layers:
        halves = layer.k.view(torch.float32).view(len(layer.k), 2, 2, -1)
        keys, values = (halves[:, :, half].view(-1, 2, BLOCK, BLOCK) for half in (0, 1))
        keys[:] = in_fp8(keys.mT).mT  # which are [elements, tokens]
        values[:] = in_fp8(values)


def in_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Rows of floats [..., elements], the largest of each scaled to 128 or more, but less than 256."""
    significant, exponent = torch.frexp(rows.abs().amax(-1, keepdim=True))
    exponent += torch.round(significant * 16) == 16
    scale = 2.0 ** (8 - exponent)
    return (rows * scale).to(torch.float8_e4m3fn).float() / scale


def test_what_is_only_on_disk_is_loaded_from_there(
    engine: Engine, plain: Elsewhere, only_on_disk: Callable[[list[list[int]]], None]
) -> None:
    prompts = [prompt(310, 300), prompt(311, 500)]
    only_on_disk(prompts)
    assert_same(engine.ask(prompts), plain.ask(prompts))
    assert engine.new_hits() == 256 + 448
    assert engine.worker.engine.stats()["disk_hits"] >= 4 + 7


def test_files_that_vanish_between_the_lookup_and_the_load_are_computed_anew(
    engine: Engine,
    plain: Elsewhere,
    folder: Path,
    only_on_disk: Callable[[list[list[int]]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt(320, 300), prompt(321, 150)]
    only_on_disk(prompts[:1])
    begin = engine.worker.begin

    def empties_first(orders: object) -> None:
        monkeypatch.undo()
        for path in chunk_files(folder):
            path.unlink()
        begin(orders)

    monkeypatch.setattr(engine.worker, "begin", empties_first)
    assert_same(engine.ask(prompts), plain.ask(prompts))
    engine.new_hits()
    assert_same(engine.ask(prompts), plain.ask(prompts))
    assert engine.new_hits() == 256 + 128


def test_a_folder_that_vanishes_is_a_cache_that_is_empty(
    engine: Engine, plain: Elsewhere, folder: Path, only_on_disk: Callable[[list[list[int]]], None]
) -> None:
    prompts = [prompt(330, 300)]
    only_on_disk(prompts)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert_same(engine.ask(prompts), plain.ask(prompts))
    assert engine.new_hits() == 0


@pytest.mark.parametrize("where", [0.1, 0.4, 0.9])
def test_one_wrong_bit_in_every_file_is_noticed(
    engine: Engine,
    plain: Elsewhere,
    folder: Path,
    only_on_disk: Callable[[list[list[int]]], None],
    where: float,
) -> None:
    prompts = [prompt(340 + int(10 * where), 300)]
    only_on_disk(prompts)
    for path in chunk_files(folder):
        data = bytearray(path.read_bytes())
        data[int(where * len(data))] ^= 4
        path.write_bytes(data)
    for _ in range(2):
        assert_same(engine.ask(prompts), plain.ask(prompts))
    # By now it was computed, stored and loaded again.
    engine.new_hits()
    assert_same(engine.ask(prompts), plain.ask(prompts))
    assert engine.new_hits() == 256
