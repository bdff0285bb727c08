"""Counters of the kernel, on real threads, processes and users."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from haiprof.linux.perf_events import (
    paranoid,
)
from tests.unit.samplers.test_perf_events import PAGE_FAULTS, ROOT, live, touch


def test_live_counter_is_inherited_by_threads_and_processes_that_start_later() -> None:
    counted = live(PAGE_FAULTS)
    before = counted.read()
    thread = threading.Thread(target=touch, args=(3000,))
    thread.start()
    thread.join()
    with_thread = counted.read()
    subprocess.run([sys.executable, "-Sc", "bytearray(1 << 24)"], check=True)
    with_child = counted.read()
    counted.close()
    assert with_thread - before >= 3000
    assert with_child - with_thread >= 1000


_AS_NOBODY = """
import os, sys
from pathlib import Path
from haiprof.linux import perf_events as perf
os.setgid(65534); os.setuid(65534)
bits = {"user": perf.EXCLUDE_KERNEL, "kernel": 0}
for name, bit, pid, cpu in (("user", bits["user"], 0, -1), ("cpu", bits["kernel"], -1, 0)):
    event = perf.Event(name=name, type=perf.TYPE_SOFTWARE, config=1, bits=bit)
    try:
        perf.open_counter(perf.LinuxKernel(), event, perf.Share(), pid=pid, cpu=cpu)
        print(name, "available")
    except OSError as error:
        why = perf.refusal(error, event, Path("/"), allowing=0, virtual="")
        print(name, why.status, why.reason, why.remedy)
"""


def test_live_user_without_privileges_may_count_itself_but_no_cpu() -> None:
    if os.geteuid() != 0 or paranoid(ROOT) != 2:
        pytest.skip("needs root to become nobody, and kernel.perf_event_paranoid 2")
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY], capture_output=True, text=True, check=True
    )
    own, whole_cpu = done.stdout.splitlines()
    assert own == "user available"
    assert whole_cpu.startswith("cpu denied")
    assert "perf_event_paranoid is 2" in whole_cpu
    assert "perf_event_paranoid=0" in whole_cpu
