"""lwkv's linker with a clock around every call that SGLang's scheduler makes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lwkv.integrations.sglang.linker import LWKVLinker

CALLS = (
    "lookup",
    "load",
    "start_layer_wise_loading",
    "finish_layer_wise_loading",
    "offload",
    "num_completed_offloads",
    "pop_completed_offload",
)


class TimedLinker(LWKVLinker):
    """Writes how long each batch with a load kept the scheduler's thread, in ms by call, to a file.

    Args:
        extra_config: lwkv's settings, and "times": the file, a JSON list with an object for each such batch.
            The calls of a batch are those since the one before it ended.
    """

    def __init__(self, *arguments: Any, extra_config: dict[str, Any], **named: Any) -> None:
        self._file = Path(extra_config.pop("times"))
        self._batches: list[dict[str, float]] = []
        self._ms: dict[str, float] = {}
        self._has_given = False
        super().__init__(*arguments, extra_config=extra_config, **named)
        for name in CALLS:
            setattr(self, name, self._timed(name, getattr(self, name)))
        counter = self.layer_done_counter
        setattr(counter, "wait_until", self._timed("wait_until", counter.wait_until))  # noqa: B010

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments, **named)
            # An idle scheduler asks thousands of times a second what has been stored.
            if name != "num_completed_offloads" or self._has_given:
                self._ms[name] = self._ms.get(name, 0.0) + 1e3 * (time.perf_counter() - begin)
            self._has_given = name == "offload" or (self._has_given and name != "num_completed_offloads")
            if name == "finish_layer_wise_loading":
                self._end_batch()
            return result

        return timed

    def _end_batch(self) -> None:
        self._batches.append(self._ms)
        self._ms = {}
        self._file.write_text(json.dumps(self._batches))
