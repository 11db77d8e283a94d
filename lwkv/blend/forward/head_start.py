"""The first layer of prompts of which nothing is known, computed before anything is looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import ComputedRows, PromptReuse
from lwkv.blend.model import BlendModel
from lwkv.blend.request import CheckedBlend
from lwkv.kernels import Rows
from lwkv.platforms import Event


@dataclass(frozen=True, slots=True)
class HeadStart:
    """What came of layer 0 for all rows of all prompts; for passes that begin with all of these.

    It reads and writes nothing of the cache, so loads need not wait for it: only for `behind`, which was
    recorded before it. The pass writes `k` and `v` to the rows `at`, over what was loaded of them.

    Attributes:
        rows: all of the prompts, as if nothing of them were reused.
        hidden: the rows' states behind the layer.
        angles: as `BlendModel.angles` gives them.
    """

    behind: Event
    rows: ComputedRows
    hidden: Tensor
    at: Rows
    angles: Any
    k: Tensor
    v: Tensor


@torch.no_grad()
def head_start(
    model: BlendModel, cache: PagedRows, prompts: Sequence[CheckedBlend], behind: Event
) -> HeadStart:
    """Queue it on the current stream."""
    none = np.zeros(0, np.int64)
    reuses = [PromptReuse(prompt, 0, np.zeros(len(prompt), bool)) for prompt in prompts]
    rows = ComputedRows.of(reuses, [none] * len(prompts), cache.send)
    hidden = model.embed(rows.tokens)
    angles = model.angles(rows.positions, max(map(len, prompts)))
    q, k, v = model.project(0, hidden, angles)
    attended = [cache.attend(q[part], k[part], v[part], rows.positions[part]) for part in rows.parts]
    hidden = model.finish(0, hidden, torch.cat(attended))
    return HeadStart(behind, rows, hidden, cache.at(rows.slots), angles, k, v)
