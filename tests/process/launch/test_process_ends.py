"""How processes end, seen from outside: by real ones."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from haiprof.linux.processes import WatchedProcess
from tests.process.live import within

ENDS = {
    "import sys; sys.exit(3)": (3, None),
    "import os; os._exit(0)": (0, None),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (None, signal.SIGKILL),
    "import ctypes; ctypes.string_at(0)": (None, signal.SIGSEGV),
}


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("code", ENDS)
def test_status_of_a_process_is_read_before_its_parent_asks_and_after(
    code: str, reaped: bool
) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
    watched = WatchedProcess(child.pid)
    try:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        if reaped:
            child.wait()
        else:
            within(30, lambda: watched.is_over())
        found = watched.read_exit()
        if found.source == "gone":
            pytest.skip("before Linux 6.15 nobody knows it once the parent has asked")
        assert (found.status, found.signal) == ENDS[code]
    finally:
        child.wait()
        watched.close()
