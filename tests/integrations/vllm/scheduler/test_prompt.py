from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.integrations.vllm.scheduler.prompt import is_cacheable, salts_of, token_ids, wants_hits
from lwkv.keys import chunk_keys


def request(**attributes: Any) -> Any:
    return SimpleNamespace(**{"all_token_ids": list(range(20)), "prompt_token_ids": [1], **attributes})


def picture(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_tokens_are_those_of_prompt_and_answer() -> None:
    assert token_ids(request(), 7).tolist() == list(range(7))


def test_placeholders_stand_for_their_medium_and_other_tokens_for_themselves() -> None:
    ids = token_ids(request(mm_features=[picture("a", 3, 4)]), 20).tolist()
    assert [i for i, token in enumerate(ids) if token != i] == [3, 4, 5, 6]
    assert len(set(ids[3:7])) == 4
    assert all(2**62 <= token < 2**63 for token in ids[3:7])


def test_a_key_changes_with_every_medium_and_with_its_place() -> None:
    variants = [
        [],
        [picture("a", 3, 4)],
        [picture("b", 3, 4)],
        [picture("a", 4, 4)],
        [picture("a", 3, 4), picture("c", 10, 2)],
        [picture("a", 3, 4), picture("d", 10, 2)],
    ]
    keys = [chunk_keys(token_ids(request(mm_features=media), 20), 20, "name")[0] for media in variants]
    assert len(set(keys)) == len(variants)
    assert keys[1] == chunk_keys(token_ids(request(mm_features=[picture("a", 3, 4)]), 20), 20, "name")[0]


@pytest.mark.parametrize("num_tokens", [0, 2, 3, 5, 7, 20])
def test_a_prompt_that_is_cut_within_a_medium_begins_as_the_whole_one(num_tokens: int) -> None:
    whole = request(mm_features=[picture("a", 3, 4), picture("b", 12, 5)])
    assert token_ids(whole, num_tokens).tolist() == token_ids(whole, 20).tolist()[:num_tokens]


def test_identifiers_that_are_almost_the_same_give_other_tokens() -> None:
    ids = [tuple(token_ids(request(mm_features=[picture(f"{i:05}", 0, 1)]), 1).tolist()) for i in range(5000)]
    assert len(set(ids)) == 5000


def test_salts_are_the_lora_the_cache_salt_and_the_resets() -> None:
    lora = SimpleNamespace(lora_name="style", lora_path="/models/style", lora_int_id=3)
    requests = [
        salts_of(request()),
        salts_of(request(cache_salt="one")),
        salts_of(request(lora_request=lora)),
        salts_of(request(lora_request=lora, cache_salt="one")),
        salts_of(request(), epoch="one"),
        salts_of(request(), epoch="two"),
    ]
    assert requests[0] == ()
    assert len(set(requests)) == len(requests)


def test_prompts_of_embeddings_are_left_alone() -> None:
    assert is_cacheable(request())
    assert not is_cacheable(request(prompt_token_ids=None))
    assert not is_cacheable(request(prompt_embeds=object()))


def test_prompts_whose_log_probabilities_are_wanted_are_computed() -> None:
    assert wants_hits(request())
    assert wants_hits(request(sampling_params=SimpleNamespace(prompt_logprobs=None)))
    assert not wants_hits(request(sampling_params=SimpleNamespace(prompt_logprobs=0)))
    assert not wants_hits(request(skip_reading_prefix_cache=True))
