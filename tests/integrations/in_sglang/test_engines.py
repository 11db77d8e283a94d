"""A real SGLang answers with lwkv what it answers without, and computes less."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from integrations.in_sglang.prompts import BATCHES, DOCUMENTS
from integrations.in_sglang.rig import PAGE, REST_S, Answer, Engine, started, with_lwkv

Expected = dict[tuple[int, ...], list[int]]
PROMPT = DOCUMENTS[0]
WHOLE = 192  # of 200 tokens, in pages


def require_right(answers: Sequence[Answer], batch: Sequence[list[int]], expected: Expected) -> None:
    for prompt, answer in zip(batch, answers, strict=True):
        assert answer.tokens == expected[tuple(prompt)]


@pytest.mark.parametrize(
    ("arguments", "host_gib"),
    [
        pytest.param({}, 0.02, id="overlap"),
        # A page takes 4 KiB of each layer at least.
        pytest.param(
            {"disable_overlap_schedule": True, "page_size": 1, "max_total_tokens": 2500}, 0.15, id="page 1"
        ),
    ],
)
def test_random_prompts_in_mixed_batches_have_the_same_answers(
    llama: Path, expected: Expected, arguments: dict[str, object], host_gib: float
) -> None:
    # The device holds a few of the documents, so that most come from the linker; prefills are cut in parts.
    settings = {"max_total_tokens": 3072, "chunked_prefill_size": 256, **arguments}
    with started(llama, **settings, **with_lwkv(max_local_cpu_size=host_gib)) as engine:
        from_host = 0
        for batch in BATCHES:
            answers = engine.ask(batch)
            require_right(answers, batch, expected)
            from_host += sum(answer.from_host for answer in answers)
    total = sum(len(prompt) for batch in BATCHES for prompt in batch)
    assert from_host > total // 20


def test_two_ranks_load_the_same(llama: Path, expected: Expected) -> None:
    with started(llama, tp_size=2, **with_lwkv()) as engine:
        for batch in DOCUMENTS:
            require_right(engine.ask(batch), batch, expected)
        engine.flush()
        for batch in DOCUMENTS:
            (loaded,) = engine.ask(batch)
            assert (loaded.from_device, loaded.from_host) == (0, WHOLE)
            require_right([loaded], batch, expected)


def test_ranks_whose_disks_differ_load_what_all_of_them_have(
    llama: Path, expected: Expected, tmp_path: Path
) -> None:
    """Host memory has room for one document. Files are spoiled while the engine runs, some of either rank."""
    settings = with_lwkv(local_disk=str(tmp_path), max_local_disk_size=1, max_local_cpu_size=0.0004)
    with started(llama, tp_size=2, **settings) as engine:
        for batch in DOCUMENTS:
            require_right(engine.ask(batch), batch, expected)
        assert eventually(lambda: spoil(tmp_path, every=11) > 0)
        found = 0
        for batch in (*DOCUMENTS, *BATCHES[:4], *DOCUMENTS):
            # What is asked for the first time is brought up meanwhile, or after.
            for _ in range(2):
                engine.flush()
                answers = engine.ask(batch)
                require_right(answers, batch, expected)
                found += sum(answer.from_host for answer in answers)
        assert found > 0
        assert "External linker load failed" not in engine.log


class TestDisk:
    """One folder through the lives of several engines."""

    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("disk")

    @staticmethod
    def engine_on(llama: Path, folder: Path) -> Engine:
        return Engine(llama, enable_metrics=True, **with_lwkv(local_disk=str(folder), max_local_disk_size=1))

    def test_what_is_in_host_memory_is_loaded_after_a_flush(
        self, llama: Path, expected: Expected, folder: Path
    ) -> None:
        engine = self.engine_on(llama, folder)
        try:
            for batch in DOCUMENTS:
                (answer,) = engine.ask(batch)
                assert (answer.from_device, answer.from_host) == (0, 0)
                require_right([answer], batch, expected)
            (again,) = engine.ask(PROMPT)
            assert (again.from_device, again.from_host) == (WHOLE, 0)
            engine.flush()
            (loaded,) = engine.ask(PROMPT)
            assert (loaded.from_device, loaded.from_host) == (0, WHOLE)
            require_right([loaded], PROMPT, expected)
            assert eventually(lambda: engine.metric("sglang:lwkv_tokens_retrieved_total") == WHOLE)
            assert engine.metric("sglang:lwkv_chunks") >= WHOLE // PAGE
        finally:
            engine.close()

    def test_what_is_on_disk_is_found_after_a_restart_and_what_is_spoiled_is_computed(
        self, llama: Path, expected: Expected, folder: Path
    ) -> None:
        spoiled = spoil(folder, every=7)
        assert spoiled
        engine = self.engine_on(llama, folder)
        try:
            found = 0
            for batch in DOCUMENTS:
                (first,) = engine.ask(batch)
                require_right([first], batch, expected)
                engine.flush()
                (answer,) = engine.ask(batch)
                require_right([answer], batch, expected)
                found += answer.from_host
            assert found > 0
            shutil.rmtree(folder)
            for batch in (*DOCUMENTS, *BATCHES[:6]):
                require_right(engine.ask(batch), batch, expected)
        finally:
            engine.close()


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold within a while."""
    deadline = time.monotonic() + REST_S
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def spoil(folder: Path, every: int) -> int:
    """Change a byte in the middle of some files; return of how many."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size > 4 * PAGE]
    for path in files[::every]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    return len(files[::every])
