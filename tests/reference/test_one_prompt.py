from __future__ import annotations

import math

import torch

from lwkv.reference import Model
from lwkv.reference.one_prompt import OnePrompt, divergence


def test_an_answer_is_computed_over_the_prompt_in_the_cache_as_all_at_once(model: Model) -> None:
    prompt = OnePrompt(model, longest=40)
    tokens = [7 * number % 50 for number in range(30)]
    first = prompt.compute(tokens, 0)[-1:]
    answer, rest = prompt.decode(len(tokens), int(first.argmax()), 4, stop_tokens=())
    assert (len(answer), len(rest)) == (4, 3)
    assert len(set(prompt.slots(40).tolist())) == 40
    prompt.cache.fill(math.nan)
    whole = prompt.compute([*tokens, *answer[:-1]], 0)[len(tokens) - 1 :]
    assert whole.argmax(-1).tolist() == answer
    assert divergence(whole, torch.cat([first, rest])) < 1e-6 < divergence(whole.flip(0), whole)
    alone, none = prompt.decode(len(tokens), answer[0], 4, stop_tokens={answer[0]})
    assert (alone, len(none)) == (answer[:1], 0)
