"""Models with several groups of caches, and a disk below host memory, in a real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.faulty_disk import FaultyDisk
from integrations.in_vllm.rig import Engine, assert_same, prompt, started
from integrations.in_vllm.test_disk import with_disk

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has one group beside a connector"
)

TIMEOUT_S = 2.0


def write_gemma(folder: Path) -> None:
    models.write_gemma(folder, 64, "wwf" * 2)


def empty(engine: Engine) -> None:
    """Have nothing in vLLM's own cache, nor in host memory."""
    assert engine.flush()
    tier = engine.worker.engine._tier
    assert tier.evict(tier.evictable())
    engine.forget()
    engine.ask([prompt(1, 3)], 1)  # the scheduler hears of it with the next step
    engine.new_hits()


def at_rest(engine: Engine) -> None:
    engine.ask([prompt(1, 3)], 1)
    assert engine.flush()
    stats = engine.worker.engine.stats()
    assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)


@pytest.mark.parametrize(("write", "hits"), [(write_gemma, 256 + 192), (models.write_lfm2, 288 + 192)])
def test_a_disk_brings_after_a_restart_what_was_computed_and_answers_are_the_same_whatever_it_does(
    write: Callable[[Path], None], hits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.written(write, tmp_path / "model")
    prompts = [prompt(3500, 300), prompt(3501, 200)]
    arguments = with_disk(tmp_path / "disk", load_timeout_s=TIMEOUT_S) | {"enable_prefix_caching": True}
    with started(model, enable_prefix_caching=False) as plain:
        wanted = plain.ask(prompts)
    with started(model, **arguments) as engine:
        assert_same(engine.ask(prompts), wanted)
        assert engine.new_hits() == 0
        assert engine.flush()
    disk = FaultyDisk(tmp_path / "disk", monkeypatch)
    with started(model, **arguments) as engine:
        for _ in range(2):
            assert_same(engine.ask(prompts), wanted)
            assert engine.new_hits() == hits
            empty(engine)
        disk.freeze()
        assert_same(engine.ask(prompts), wanted)
        disk.thaw()
        engine.forget()
        assert_same(engine.ask(prompts), wanted)
        assert engine.flush()
        empty(engine)
        disk.lose_all()
        assert_same(engine.ask(prompts), wanted)
        assert engine.new_hits() == 0
        at_rest(engine)
