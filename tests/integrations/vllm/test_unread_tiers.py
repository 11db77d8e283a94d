"""A tier that the worker leaves alone is not offered by the scheduler, though its lookups are answered."""

from __future__ import annotations

from integrations.vllm.scripted import CHUNK, Scripted, ScriptedRequest, expected
from storage.faulty_tier import Fault, FaultyTier, hanging

PROMPTS = [[prompt * 100 + token for token in range(2 * CHUNK + 1)] for prompt in range(4)]


def filled() -> FaultyTier:
    """A tier that has all chunks of the prompts."""
    tier = FaultyTier()
    engine = Scripted(0, own_cache=False, lower=[tier])
    for number in range(len(PROMPTS)):
        ask(engine, number)
    assert engine.ranks[0].engine.flush()
    pages = dict(tier.pages)
    engine.close()
    tier = FaultyTier()
    tier.pages = pages
    return tier


def ask(engine: Scripted, number: int) -> tuple[int, int]:
    """Tokens that the scheduler claimed, and blocks that failed; the answer must be right."""
    engine.loaded = engine.failed = 0
    engine.add(ScriptedRequest(f"prompt {number}", PROMPTS[number], 1))
    engine.run()
    assert engine.answers[f"prompt {number}"] == [expected(PROMPTS[number], engine.num_ranks)]
    return engine.loaded, engine.failed


def test_a_tier_whose_reads_hang_is_offered_once_and_again_when_it_answers() -> None:
    tier = filled()
    tier.faults["get"] = hanging()
    engine = Scripted(0, own_cache=False, lower=[tier], load_timeout_s=0.2)
    claimed, failed = ask(engine, 0)
    assert claimed == 2 * CHUNK
    assert failed > 0
    for number in (1, 2):
        assert ask(engine, number) == (0, 0)
    tier.end_faults()
    assert engine.ranks[0].engine.flush()
    engine.add(ScriptedRequest("elsewhere", [1, 2, 3], 1))
    engine.run()  # the scheduler hears of it
    assert ask(engine, 3) == (2 * CHUNK, 0)
    engine.close()


def test_a_tier_that_rests_after_errors_is_not_offered_before_its_rest_is_over() -> None:
    tier = filled()
    tier.faults["get"] = Fault(RuntimeError("down"))
    engine = Scripted(0, own_cache=False, lower=[tier], prefetch_layers=3)
    claimed, failed = ask(engine, 0)
    assert claimed == 2 * CHUNK
    assert failed > 0
    assert ask(engine, 1) == (0, 0)
    engine.close()
