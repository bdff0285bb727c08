"""Where the memory of a real process lies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from haiprof.linux.memory import PageSample
from tests.unit.samplers.test_placement import needs_move_pages

CHILD = """
import mmap
whole = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
whole.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, 32 << 20, mmap.PAGESIZE):
    whole[at] = 1
print("ready", flush=True)
input()
"""


def test_placement_live_sample_of_a_child_sees_what_is_in_memory() -> None:
    needs_move_pages()
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        pages = PageSample(child.pid)
        count = sum(pages.pages_by_node().values())
        assert 0.45 * 512 <= count <= 0.65 * 512  # half of 64 MiB, and the interpreter's own
        child.kill()
        child.wait()
        with pytest.raises(ProcessLookupError):
            pages.pages_by_node()
