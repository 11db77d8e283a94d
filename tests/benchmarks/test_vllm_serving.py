from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.benchmarks import vllm_pair
from lwkv.benchmarks.measuring.shapes import TINY
from lwkv.benchmarks.throttled.remote import installed_in
from lwkv.benchmarks.vllm.conversations import Conversations, Conversed, Conversing
from lwkv.benchmarks.vllm.engines import MODES, engine_arguments, parse_modes
from lwkv.benchmarks.vllm.load import Load, Served, Server
from lwkv.benchmarks.vllm_conversations import Plan as ConversationPlan
from lwkv.benchmarks.vllm_pair import Pair
from lwkv.benchmarks.vllm_serving import Finding, Plan, faults, serve_in_turns
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage import TierSetup
from lwkv.storage.registry import examine_tier, open_tiers
from lwkv.telemetry.counters import Counters

PLAN = Plan((1, 2), seconds=0.4, every_s=0.1, prefix=64, suffix=8, alone=3, alone_suffix=16)


class Stepped:
    """vLLM's engine as far as the load needs it: each step gives every request a token."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 500)
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.resets = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        self.requests[name] = [], parameters.max_tokens

    def step(self) -> list[Any]:
        outputs = []
        for name, (tokens, most) in list(self.requests.items()):
            tokens.append(7)
            outputs.append(
                SimpleNamespace(
                    request_id=name, num_cached_tokens=64, outputs=[SimpleNamespace(token_ids=list(tokens))]
                )
            )
            if len(tokens) >= most:
                del self.requests[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Stepped:
    parameters = SimpleNamespace(SamplingParams=lambda **named: SimpleNamespace(**named))
    monkeypatch.setitem(__import__("sys").modules, "vllm", parameters)
    return Stepped()


def serve(engine: Stepped, load: Load) -> Served:
    def reset() -> bool:
        engine.resets += 1
        return True

    return Server(SimpleNamespace(llm_engine=engine, reset_prefix_cache=reset)).serve(load)


def test_every_document_arrives_once_beside_those_that_decode(engine: Stepped) -> None:
    load = Load(decoders=3, seconds=0.2, every_s=0.05, prefix=64, suffix=8, prepare=True)
    served = serve(engine, load)
    assert len(served.ttft_ms) == len(served.cold_ms) == len(load.documents()) == 4
    assert served.cached == [64] * 4
    assert served.decoded == len(served.gaps_ms) > 0
    assert engine.resets == 1
    assert not engine.requests


def test_without_prompts_requests_only_decode(engine: Stepped) -> None:
    served = serve(engine, Load(decoders=2, seconds=0.05, every_s=0.0, prefix=64, suffix=8))
    assert (served.ttft_ms, served.cold_ms, engine.resets) == ([], [], 0)
    assert served.decoded > 0


def test_the_engines_get_what_they_are_named_after() -> None:
    def settings(mode: str) -> dict[str, Any]:
        arguments = engine_arguments(mode, Path("model"), TINY, PLAN, Path("disk"))
        transfer = arguments.get("kv_transfer_config", {})
        return arguments | transfer.get("kv_connector_extra_config", {})

    assert "kv_transfer_config" not in settings("plain")
    assert settings("native")["kv_offloading_size"] > 1
    assert settings("lwkv-lossless")["page_codec"] == "lossless"
    assert "page_codec" not in settings("lwkv")
    assert settings("lwkv-bulk")["use_layerwise"] is False
    assert settings("lwkv-disk")["local_disk"] == "disk"
    assert settings("lwkv")["max_local_cpu_size"] > 1
    assert settings("lwkv-100")["remote_url"] == "throttled://100"
    assert settings("lmcache")["kv_transfer_config"]["kv_connector"] == "LMCacheConnectorV1"


def test_conversations_take_turns_that_grow_and_none_answers_two_at_once(engine: Stepped) -> None:
    plan = Conversations(conversations=3, turns=2, first=20, more=8, answer=2, at_once=2)
    server = Server(SimpleNamespace(llm_engine=engine))
    asked = []
    add = engine.add_request

    def noted(name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        asked.append((len(prompt["prompt_token_ids"]), len(engine.requests)))
        add(name, prompt, parameters)

    engine.add_request = noted  # type: ignore[method-assign]
    found = Conversing(server, plan).run()
    assert sorted(found.turns) == [(talk, turn) for talk in range(3) for turn in range(2)]
    assert sorted(found.prompts) == [20] * 3 + [28] * 3
    assert sorted(length for length, _ in asked) == [20] * 3 + [28] * 3
    assert max(running for _, running in asked) < 2
    assert plan.tokens(1, 1, 500)[:20] == plan.tokens(1, 0, 500)


def test_other_first_tokens_of_a_turn_are_a_fault() -> None:
    one = Conversed([(0, 0), (0, 1)], [5.0, 3.0], [0, 20], [20, 28], [7, 8], 2.0)
    same = Conversed([(0, 1), (0, 0)], [5.0, 3.0], [0, 20], [20, 28], [8, 7], 2.0)
    other = Conversed([(0, 1), (0, 0)], [5.0, 3.0], [0, 20], [20, 28], [8, 9], 2.0)
    plan = ConversationPlan(Conversations(1, 2, 20, 8, 1, 1), 0.3)
    found = [Finding(mode, 1.0, {}, each) for mode, each in zip(MODES, (one, same, other), strict=False)]
    assert faults(found, plan) == [f"{MODES[2]}, conversations: first tokens differ from those of {MODES[0]}"]


def test_the_throttled_store_is_found_as_a_tier_and_is_one_for_all_that_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_in(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(remote_url="throttled://1000")
    setup = TierSetup(config, 2, 64, "raw", Counters())
    (tier,), (other,) = open_tiers(setup), open_tiers(setup)
    assert tier is other
    assert examine_tier("throttled://1000", config) == {"rate": "1000 MB/s"}
    with pytest.raises(ConfigError, match="has no rate"):
        open_tiers(TierSetup(Config(remote_url="throttled://fast"), 2, 64, "raw", Counters()))


def served(first_tokens: list[int], cached: int) -> dict[str, Served]:
    beside = Served([1.0] * 3, [2.0] * 3, 1.0, 6, [cached] * 3, first_tokens, [3.0] * 3)
    return {"decode 1": Served([], [1.0], 1.0, 1), "beside": beside}


def test_tokens_that_differ_and_prompts_that_were_not_cached_are_faults() -> None:
    plain, good = Finding("plain", 1.0, served([1, 2, 3], 0)), Finding("lwkv", 1.0, served([3, 1, 2], 64))
    slow = Finding("lwkv-100", 1.0, served([1, 2, 3], 0))
    assert faults([plain, good, slow], PLAN) == [], "what a slow tier has may be computed"
    assert faults([plain, Finding("lwkv", 1.0, served([1, 2, 4], 32))], PLAN) == [
        "lwkv, beside: 3 of 3 prompts were not cached",
        "lwkv, beside: first tokens differ from those of plain",
    ]


def test_every_load_goes_to_all_engines_before_the_next_one() -> None:
    asked: list[tuple[str, Any]] = []

    def engine(mode: str) -> Any:
        def note(load: Any) -> Any:
            asked.append((mode, load))
            return Served() if isinstance(load, Load) else Conversed()

        return SimpleNamespace(mode=mode, start_s=2.0, serve=note, converse=note)

    talks = Conversations(1, 2, 20, 8, 1, 1)
    plan = replace(PLAN, conversations=talks)
    findings = serve_in_turns([engine("plain"), engine("lwkv")], plan)
    loads = [*plan.loads().values(), talks]
    assert asked == [(mode, load) for load in loads for mode in ("plain", "lwkv")]
    assert [list(finding.served) for finding in findings] == [list(plan.loads())] * 2
    assert all(finding.conversed is not None for finding in findings)


def test_an_engine_has_room_for_each_load_and_no_document_comes_in_two_of_them() -> None:
    loads = PLAN.loads()
    assert list(loads) == ["decode 1", "decode 2", "alone", "beside"]
    assert [len(load.documents()) for load in loads.values()] == [0, 0, 3, 4]
    assert not set(loads["alone"].documents()) & set(loads["beside"].documents())
    assert PLAN.tokens_cached == 4 * (64 + 8)
    assert PLAN.longest >= 64 + 16
    talks = replace(PLAN, conversations=Conversations(9, 2, 200, 8, 4, 2))
    assert talks.longest >= 212
    assert talks.tokens_cached == 9 * 212
    assert talks.tokens_in_gpu >= 3 * 212


def test_what_is_computed_before_has_the_prefix_and_other_new_tokens() -> None:
    load = PLAN.loads()["alone"]
    before, after = (prompt(500).tokens(1000) for prompt in (load.prepared, load.prompt))
    assert before[:64] == after[:64]
    assert before[64:] != after[64:]


def test_an_engine_of_another_name_is_refused_with_the_names_there_are() -> None:
    assert parse_modes("lwkv,plain") == ["lwkv", "plain"]
    with pytest.raises(ConfigError, match="'lwvk'; allowed: plain, native"):
        parse_modes("plain,lwvk")


def test_each_turn_is_answered_by_one_engine_of_a_pair_and_by_the_same_in_both_modes() -> None:
    plan = ConversationPlan(Conversations(8, 3, 20, 8, 2, 2), 0.5)
    pair = Pair(TINY, plan, ("0", "1"), 0.5)
    rounds = [[list(each.asked()) for each in both] for both in pair.rounds()]
    for turn, both in enumerate(rounds):
        assert all(both)
        assert sorted(both[0] + both[1]) == [(talk, turn) for talk in range(8)]
    assert rounds == [[list(each.asked()) for each in both] for both in pair.rounds()]
    assert len({tuple(both[0]) for both in rounds}) == 3
    assert pair.gib == TINY.kv_bytes(8 * (20 + 16 + 2) // 2) / 2**30
    assert pair.engines_a_device == 1
    assert replace(pair, devices=("0", "0")).engines_a_device == 2
    assert replace(pair, devices=("0", "0"), together=True).engines_a_device == 4


@pytest.mark.parametrize("together", [False, True])
def test_both_modes_of_a_pair_get_the_same_conversations_and_end(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[tuple[int, int]]]] = []
    running: list[str] = []

    class Answering:
        start_s = 1.5

        def __init__(self, mode: str) -> None:
            self.mode = mode

        def converse(self, conversations: Conversations) -> Conversed:
            assert running == (list(vllm_pair.MODES) if together else [self.mode])
            asked.append((self.mode, list(conversations.asked())))
            return Conversed(turns=list(conversations.asked()), seconds=2.0)

    @contextmanager
    def engines(mode: str, pair: Pair) -> Iterator[list[Answering]]:
        running.append(mode)
        running.sort(key=vllm_pair.MODES.index)
        yield [Answering(mode), Answering(mode)]
        running.remove(mode)

    monkeypatch.setattr(vllm_pair, "engines", engines)
    monkeypatch.setattr(vllm_pair.Engine, "converse", Answering.converse)
    plan = ConversationPlan(Conversations(4, 2, 20, 8, 2, 2), 0.5)
    findings = vllm_pair.measure(Pair(TINY, plan, ("0", "0"), 0.5, together))
    assert [finding.mode for finding in findings] == list(vllm_pair.MODES)
    assert not running
    first, second = ([turns for mode, turns in asked if mode == each] for each in vllm_pair.MODES)
    assert sorted(first) == sorted(second)
    for finding in findings:
        assert finding.conversed is not None
        assert sorted(finding.conversed.turns) == [(talk, turn) for talk in range(4) for turn in range(2)]
        assert finding.conversed.seconds == 4.0


def test_an_engine_answers_the_turns_that_it_is_asked_and_no_others(engine: Stepped) -> None:
    plan = Conversations(3, 2, 20, 8, 2, 2, only=[(2, 1), (0, 1)])
    found = Conversing(Server(SimpleNamespace(llm_engine=engine)), plan).run()
    assert found.turns == [(2, 1), (0, 1)]
    assert found.prompts == [28, 28]
