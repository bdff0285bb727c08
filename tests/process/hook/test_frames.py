"""Stacks of a running thread are read again and again without harm."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from haiprof.in_job.frames import StackTree

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


_LOOP = """
import sys
places = []
class Items:
    def __iter__(self):
        return self
    def __next__(self):
        places.append((sys._getframe(1).f_code, sys._getframe(1).f_lasti))
        if len(places) > 1:
            raise StopIteration
for item in Items():
    first = item
    second = item
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no columns")
def test_expression_of_a_loop_is_its_head(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(_LOOP)
    os.utime(script, (0, 0))  # sources that changed since the process began are not read
    tree = StackTree()
    tree.find(runpy.run_path(str(script))["places"][:1])
    assert tree.take_definitions()["frames"][0][4] == "for item in Items()"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no columns")
def test_statements_of_one_line_are_told_apart(tmp_path: Path) -> None:
    script = tmp_path / "line.py"
    script.write_text(
        "import sys; places = []\n"
        "def note(*_): places.append((sys._getframe(1).f_code, sys._getframe(1).f_lasti))\n"
        "note('; ä'); x = (note(1), 2); note(sum([1]))\n"
    )
    os.utime(script, (0, 0))
    tree = StackTree()
    for place in runpy.run_path(str(script))["places"]:
        tree.find([place])
    frames = tree.take_definitions()["frames"]
    assert [frame[4:] for frame in frames] == [
        ("note('; ä')",), ("note(1)", 1), ("note(sum([1]))", 2)
    ]  # fmt: skip
