"""lwkv's linker with a clock around every call that SGLang's scheduler makes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lwkv.benchmarks.sglang.stalls import STALLS_SUFFIX, Stalls
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
            The calls of a batch are those since the one before it ended. The file with STALLS_SUFFIX behind
            its name gets what Stalls found of some of them.
    """

    def __init__(self, *arguments: Any, extra_config: dict[str, Any], **named: Any) -> None:
        self._file = Path(extra_config.pop("times"))
        self._batches: list[dict[str, float]] = []
        self._ms: dict[str, float] = {}
        self._has_given = False
        self._ended: int | None = None
        super().__init__(*arguments, extra_config=extra_config, **named)
        for name in CALLS:
            setattr(self, name, self._timed(name, getattr(self, name)))
        connector = self.link.engine.connector
        self._stalls = Stalls(connector.platform, connector.device)
        self._found: list[dict[str, float]] = []
        counter = self.layer_done_counter
        self._wait_until = self._timed("wait_until", counter.wait_until)
        setattr(counter, "wait_until", self._marked_wait)  # noqa: B010

    def _marked_wait(self, layer: int) -> None:
        is_marked = self._stalls.before(self.layer_done_counter.consumer_index, layer)
        self._wait_until(layer)
        if is_marked:
            self._stalls.behind()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if name == "num_completed_offloads" and not self._has_given and self._ended is not None:
                self._write(self._ended)
            begin = time.perf_counter()
            result = call(*arguments, **named)
            # An idle scheduler asks thousands of times a second what has been stored.
            if name != "num_completed_offloads" or self._has_given:
                self._ms[name] = self._ms.get(name, 0.0) + 1e3 * (time.perf_counter() - begin)
            self._has_given = name == "offload" or (self._has_given and name != "num_completed_offloads")
            if name == "start_layer_wise_loading":
                self._stalls.begin(result)
            if name == "finish_layer_wise_loading":
                self._end_batch(*arguments)
            return result

        return timed

    def _end_batch(self, index: int) -> None:
        self._batches.append(self._ms)
        self._ms, self._ended = {}, index

    def _write(self, index: int) -> None:
        """Write what was found up to batch `index` once the device is past it: files delay answers."""
        if not self._stalls.is_over():
            return
        self._ended = None
        self._file.write_text(json.dumps(self._batches))
        found = self._stalls.take(index)
        if found:
            self._found.append(found)
            self._file.with_name(self._file.name + STALLS_SUFFIX).write_text(json.dumps(self._found))
