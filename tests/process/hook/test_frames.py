"""Stacks of a running thread are read again and again without harm."""

from __future__ import annotations

import subprocess
import sys

import pytest

_READS = """
import gc, sys, threading, time
from haiprof.in_job import frames
from haiprof.in_job.frames import read_stacks

if {plain}:
    frames._compiled = None
over = time.monotonic() + 3
main = threading.get_ident()
seen = set()

def read():
    while time.monotonic() < over:
        seen.update(len(stack) for stack in read_stacks((main,), limit=200).values())

def call(depth, left):
    return call(depth + 1, left - 1) + 1 if left else sum(range(300))  # nothing to collect

gc.callbacks.append(lambda *_: time.sleep(0.0002))  # as destructors let go of the lock
gc.set_threshold(3)
sys.setswitchinterval(1e-5)
thread = threading.Thread(target=read)
thread.start()
while time.monotonic() < over:
    call(0, 60)
thread.join()
assert gc.isenabled() and len(seen) > 5, seen
print("read")
"""


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_reading_beside_a_busy_collector_does_not_crash(plain: bool) -> None:
    """Of CPython 3.11: a frame object that is made may start a collection, and the frame ends."""
    command = [sys.executable, "-X", "faulthandler", "-c", _READS.format(plain=plain)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "read\n"), ended.stderr[-2000:]
