from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lwkv.background.exit import waitable


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
workers._lock.acquire()
pid = os.fork()
if pid:
    workers._lock.release()
    print(os.waitpid(pid, 0)[1])
    gate.set()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
