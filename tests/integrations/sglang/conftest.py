from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from integrations.sglang.fake_sglang import FakeSGLang
from oracle import Dims, Oracle

from lwkv.platforms import Platform

PAGE = 4


@pytest.fixture
def make(platform: Platform, device: torch.device) -> Iterator[Callable[..., FakeSGLang]]:
    """Makes a worker: its pool's form, a page's size, layers of the target and of drafts, whether the model
    is late, and settings of `Oracle.engine`."""
    made: list[FakeSGLang] = []

    def make(
        form: str = "sglang_kv",
        page: int = PAGE,
        device_pages: int = 16,
        forgets: bool = True,
        num_ranks: int = 1,
        stream: bool = True,
        drafts: int = 0,
        layers: int = 3,
        late: bool = True,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> FakeSGLang:
        # Pages of the tensor are SGLang's only where heads come first in it.
        oracle = Oracle(platform, device, form, Dims(layers + drafts, device_pages, page, dtype=dtype))
        engine = oracle.engine(page, **{"pages": layers * 64, "load_streams": 1, **settings})
        forward = platform.new_stream(device) if stream else None
        if platform.name == "cpu" and forward is not None:
            forward.late = late  # if so, nothing of the model is done before somebody waits for it
        made.append(FakeSGLang(oracle, engine, forward, num_ranks, forgets, drafts))
        return made[-1]

    yield make
    for sglang in made:
        sglang.link.close()
        if not sglang.is_spoiled:
            sglang.oracle.check()
