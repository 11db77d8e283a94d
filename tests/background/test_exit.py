from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lwkv.background.exit import waitable

ROUNDS = 10


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (3.5, 3.5),
        (-1.0, 0.0),
        (float("inf"), threading.TIMEOUT_MAX),
        (1e10, threading.TIMEOUT_MAX),
        (float("-inf"), 0.0),
    ],
)
def test_any_time_can_be_waited_for(seconds: float, wanted: float) -> None:
    assert waitable(seconds) == wanted


BUSY = """
import sys, threading, torch
from lwkv.telemetry.counters import Counters
from lwkv.background.completion_thread import CompletionThread
from lwkv.background.workers import Workers

torch.set_num_threads(1)
begun, left = threading.Event(), threading.Event()
def busy():
    begun.set()
    memory = torch.zeros(1 << 16)
    while not left.wait(0):
        memory = memory.clone()
    for _ in range(2000):
        memory = memory.clone()
    print("returned", flush=True)
{make}
begun.wait()
threading.Thread(target=lambda: (threading.main_thread().join(), left.set())).start()
"""
MADE = {
    "workers": "workers = Workers('exit', 1); workers.submit(busy); workers.submit(lambda: print('queued'))",
    "completions": "CompletionThread(Counters()).submit(busy)",
}


@pytest.mark.parametrize("kind", MADE)
def test_a_thread_inside_torch_returns_before_the_interpreter_goes_away(kind: str) -> None:
    """What is queued behind it does not begin any more."""
    ended = subprocess.run(
        [sys.executable, "-c", BUSY.format(make=MADE[kind])], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, "returned\n"), ended.stderr


def test_a_child_process_leaves_its_parents_threads_alone() -> None:
    program = """
import os, threading
from lwkv.background.workers import Workers
workers, begun, gate = Workers("exit", 1), threading.Event(), threading.Event()
workers.submit(lambda: (begun.set(), gate.wait()))
begun.wait()
workers._queue._lock.acquire()
pid = os.fork()
if pid:
    workers._queue._lock.release()
    print(os.waitpid(pid, 0)[1])
    gate.set()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


STORE = """
import sys, torch, lwkv
torch.set_num_threads(1)
metadata = lwkv.CacheMetadata("model", 8, 2, 64, torch.float16)
caches = [torch.randn(2, 64, 16, 2, 64).half() for _ in range(8)]
config = lwkv.Config(
    chunk_size=16, max_local_cpu_size=0.5, local_disk=sys.argv[1], max_local_disk_size=1.0, use_layerwise=True
)
hints = lwkv.LayoutHints(block_size=16)
cache = lwkv.CacheEngine.create(config, metadata, caches, layout_hints=hints, platform="cpu")
cache.store(list(range(1024)), slot_mapping=torch.arange(1024))
print("stored", flush=True)
"""


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_a_script_that_ends_after_a_store_without_close_ends_as_it_should(
    round_: int, tmp_path: Path
) -> None:
    """Threads of the disk tier start, if at all, while the interpreter exits."""
    ended = subprocess.run(
        [sys.executable, "-c", STORE, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, "stored\n"), ended.stderr


def run_and_exit(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


MAKES_OTHERS = """
import os, threading
from lwkv.background.exit import end_at_exit
from lwkv.background.workers import Workers

def job():
    print("begun", flush=True)

class MakesOthers:
    def __init__(self, depth):
        self.depth, self.gate = depth, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        end_at_exit(self)
    def run(self):
        self.gate.wait()
        if self.depth:
            made.append(MakesOthers(self.depth - 1))
        both = workers.submit(job).cancelled(), Workers("late", 1).submit(job).cancelled()
        os.write(1, b"%s %s\\n" % tuple(str(each).encode() for each in both))  # whole: others write too
    def leave(self):
        self.gate.set()
    def join(self, seconds):
        self.thread.join(seconds)

workers, made = Workers("exit", 1), []
made.append(MakesOthers(2))
"""


def test_what_is_made_during_the_exit_ends_too_and_no_worker_starts_its_first_thread_then() -> None:
    ended = run_and_exit(MAKES_OTHERS)
    assert (ended.returncode, ended.stdout) == (0, "True True\n" * 3), ended.stderr


def test_no_completion_thread_starts_during_the_exit() -> None:
    program = """
import atexit
from lwkv.telemetry.counters import Counters
from lwkv.background.completion_thread import CompletionThread
def late():
    try:
        CompletionThread(Counters())
    except RuntimeError as error:
        print(error)
atexit.register(late)
CompletionThread(Counters())
"""
    ended = run_and_exit(program)
    assert (ended.returncode, ended.stdout) == (0, "the interpreter is exiting: create engines before that\n")


def test_a_stream_that_is_first_used_during_the_exit_is_refused() -> None:
    program = """
import atexit, torch
from lwkv.platforms.cpu import CPU
platform = CPU()
def late():
    try:
        stream.put(lambda: print("ran"))
    except RuntimeError as error:
        print(error)
atexit.register(late)
stream = platform.new_stream(torch.device("cpu"))
"""
    ended = run_and_exit(program)
    assert (ended.returncode, ended.stdout.partition(";")[0]) == (0, "this stream's platform was closed")
