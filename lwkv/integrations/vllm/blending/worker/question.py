"""What a prompt's question looks at, by vLLM's own layers over reused KV."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.attention import attention_paid
from lwkv.blend.forward.forward_pass import MOST_ASKING
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.selector import ByAttention
from lwkv.integrations.vllm.blending.model.calls import Layers
from lwkv.platforms.protocol import Int64s


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt up to its last token, of which the tokens from `first` on ask.

    Attributes:
        tokens, slots: int64 (tokens,).
    """

    tokens: Int64s
    slots: Int64s
    first: int


def ask(
    layers: Layers,
    cache: PagedRows,
    reuse: PromptReuse,
    question: Question,
    selector: ByAttention,
    wait: Callable[[int], None],
    is_coming: Callable[[int], bool],
) -> Generator[int | None, None, Tensor]:
    """What the question pays to each of the prompt's tokens; gives the rows computed for it, layer by layer.

    The rows that are computed in any case are computed over what is reused, and are in the cache behind it.

    Args:
        reuse: of the prompt, which has the question's rows, too, or ends in front of them.
        wait, is_coming: as in `BlendPass.parts`; where a layer's loads are coming, it gives None.

    Returns: float32 (tokens,), on the device.
    """
    positions = asking_rows(reuse, question)
    num_asking = min(int((positions >= question.first).sum()), MOST_ASKING)
    there = cache.send(positions[-num_asking:])
    whole = cache.at(cache.send(question.slots))
    states, calls = layers.embed(question.tokens[positions]), layers.calls(positions, question.slots)
    paid = torch.zeros(len(question.tokens), device=there.device)
    for layer in range(selector.layer + 1):
        if is_coming(layer):
            yield None
        wait(layer)
        if layer < selector.first_layer:
            states = layers.run(layer, calls, states)
        else:
            seen = layers.run_seen(layer, calls, states)
            states = seen.states
            paid = paid + attention_paid(seen.q[-num_asking:], cache.read(layer, whole)[0], there)
        yield len(positions)
    return paid


def asking_rows(reuse: PromptReuse, question: Question) -> Int64s:
    """The positions that are computed before any are chosen, int64 (rows,), ascending."""
    return np.concatenate([reuse.always, np.arange(len(reuse.prompt), len(question.tokens))])
