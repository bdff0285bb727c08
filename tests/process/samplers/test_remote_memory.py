"""Counters of a real rank with threads and children."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from haiprof.agent.samplers.remote_memory import RemoteMemorySampler
from haiprof.linux.perf_events import (
    EXCLUDE_KERNEL,
    INHERIT,
    TYPE_SOFTWARE,
    Event,
)
from haiprof.linux.readings import Unavailable
from haiprof.run_format.layout import RunPaths
from tests.unit.samplers.test_remote_memory import HOST, sampled

# Faults in pages from a thread that is there already, one that is not yet, and a child process.
_JOB = """
import mmap, subprocess, sys, threading
def touch():
    memory = mmap.mmap(-1, 5000 * mmap.PAGESIZE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(5000):
        memory[page * mmap.PAGESIZE] = 1
go = threading.Event()
early = threading.Thread(target=lambda: (go.wait(), touch()))
early.start()
print("ready", flush=True)
for line in sys.stdin:
    if line == "early\\n":
        go.set(); early.join()
    if line == "late\\n":
        late = threading.Thread(target=touch); late.start(); late.join()
    if line == "child\\n":
        subprocess.run([sys.executable, "-Sc", "bytearray(1 << 25)"])
    print("done", flush=True)
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _JOB]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert pipe(process.stdout).readline() == "ready\n"
        yield process
        pipe(process.stdin).close()


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def does(job: subprocess.Popen[str], what: str) -> None:
    pipe(job.stdin).write(f"{what}\n")
    pipe(job.stdin).flush()
    assert pipe(job.stdout).readline() == "done\n"


def test_live_rank_is_counted_over_old_and_new_threads_and_children(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    bits = EXCLUDE_KERNEL | INHERIT
    faults = Event(name="page-faults", type=TYPE_SOFTWARE, config=2, bits=bits)
    none = Unavailable("not asked for")
    events: dict[str, Event | Unavailable] = {
        "instruction_count": faults,
        "cycle_count": none,
        "local_dram_bytes": none,
        "remote_dram_bytes": none,
    }
    sampler = RemoteMemorySampler(RunPaths(tmp_path), HOST, pid=job.pid, events=events)
    if any(each.status == "denied" for each in sampler.open()):
        pytest.skip("perf_event_open is refused here")
    counts = [sampled(sampler)[0]["instruction_count"] or 0]
    for what in ("early", "late", "child"):
        does(job, what)
        counts.append(sampled(sampler)[0]["instruction_count"] or 0)
    sampler.close()
    early, late, child = (b - a for a, b in itertools.pairwise(counts))
    assert 5000 <= early < 10_000
    assert 5000 <= late < 10_000
    assert child > 1000
