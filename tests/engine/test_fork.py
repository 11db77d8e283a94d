"""An engine in a forked child process, which has none of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).parents[2]
PROGRAM = """
import logging, os, torch
from lwkv import CacheEngine, CacheMetadata, Config

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
caches = {f"layer_{i}": torch.zeros(2, 16, 4, 2, 3) for i in range(3)}
metadata = CacheMetadata("toy", 3, 2, 3, torch.float32)
config = Config(chunk_size=8, max_local_cpu_size=2**-8)
engine = CacheEngine.create(config, metadata, caches, layout_hints={"block_size": 4}, platform="cpu")
tokens = list(range(24))
engine.store(tokens, slot_mapping=tokens)
child = os.fork()
if child == 0:
    engine.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert engine.flush() and engine.lookup(tokens) == 24
engine.close()
"""


def test_closing_in_a_forked_child_waits_for_nothing_and_does_not_say_that_it_did() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=TREE,
        env=os.environ | {"LWKV_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "still in flight" not in done.stderr
    assert done.stderr.count("closed in a forked child process") == 1
    assert "WARNING" not in done.stderr
