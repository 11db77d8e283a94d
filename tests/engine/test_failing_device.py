"""A device that fails is a miss, and nothing stays held."""

from __future__ import annotations

import pytest
from engine.rig import CHUNK, LAYERS, failing_device, prompt, refuse, store
from oracle import Oracle, require_rest, run_slots


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_wait_that_fails_is_a_miss_in_as_many_steps_and_nothing_stays_held(
    oracle: Oracle, layer: int, buffered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, into = prompt(1, 24), run_slots(64, 24)
    with oracle.engine(CHUNK, enable_blending=buffered) as engine:
        store(oracle, engine, tokens, run_slots(0, 24))
        caplog.clear()
        with failing_device(engine, f"wait for layer {layer}"):
            taken = list(engine.retrieve_layer(tokens, slot_mapping=into))
        assert len(taken) == LAYERS + 2
        assert taken[0] == 24
        assert not taken[-1].any()  # type: ignore[union-attr]
        require_rest(engine)
        assert engine.stats()["load_failures_device"] == 3
        assert [record.getMessage()[:24] for record in caplog.records] == ["3 chunks are not loaded,"]
        assert engine.retrieve(tokens, slot_mapping=into).all()
        oracle.expect(tokens, into)
        oracle.check()


def test_a_failed_transfer_of_memory_to_staging_leaves_the_lane_fit(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 16), run_slots(0, 16))
        with monkeypatch.context() as refused:
            refused.setattr(type(engine.connector.platform), "load_batch", refuse(MemoryError))
            assert not engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).any()
        assert engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).all()
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        require_rest(engine)


def test_a_store_whose_end_cannot_be_waited_for_gives_its_pages_to_nobody(oracle: Oracle) -> None:
    engine = oracle.engine(CHUNK)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine.connector.saver, "end_save", refuse(RuntimeError))
        oracle.compute(prompt(1, 16), run_slots(0, 16))
        engine.store(prompt(1, 16), slot_mapping=run_slots(0, 16))
        assert engine.flush()
    assert engine.lookup(prompt(1, 16)) == 0
    stats = engine.stats()
    assert (stats["transfer_errors"], stats["pages_in_use"]) == (1, 2 * LAYERS)
    engine.close()
