"""lwkv's lines in vLLM's log."""

from __future__ import annotations

import copy
import logging
import os

from lwkv.telemetry.log_level import VARIABLE


class VllmHandler(logging.Handler):
    """Hands lines on to vLLM's handlers, which write time, level and place; `lwkv: ` is put in front."""

    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.msg = f"lwkv: {record.msg}"
        for handler in logging.getLogger("vllm").handlers:
            handler.handle(named)


def log_as_vllm() -> None:
    """Write lwkv's lines as vLLM writes its own, from vLLM's level on, or from that of LWKV_LOG_LEVEL.

    Changes nothing where vLLM has no handler of its own (VLLM_CONFIGURE_LOGGING=0). May be called again.
    """
    vllm, lwkv = logging.getLogger("vllm"), logging.getLogger("lwkv")
    if not vllm.handlers:
        return
    if not any(isinstance(handler, VllmHandler) for handler in lwkv.handlers):
        lwkv.addHandler(VllmHandler())
    # As vLLM's own: no line twice where the application has a handler at the root.
    lwkv.propagate = vllm.propagate
    if VARIABLE not in os.environ:
        lwkv.setLevel(vllm.getEffectiveLevel())
