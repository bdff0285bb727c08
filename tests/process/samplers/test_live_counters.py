"""Counters of real processes: ranks with threads and children, kernel events, placement."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO

import pytest

from haiprof.agent.node_agent import find_unreported
from haiprof.agent.samplers.memory_traffic import RemoteMemorySampler
from haiprof.agent.samplers.registry import software
from haiprof.agent.samplers.table import Node
from haiprof.linux.memory import PageSample
from haiprof.linux.perf_events import EXCLUDE_KERNEL, INHERIT, TYPE_SOFTWARE, Event, paranoid
from haiprof.linux.procfs import read_process
from haiprof.linux.readings import Unavailable
from haiprof.run_format.layout import RunPaths
from tests.process.live import within
from tests.unit.samplers.test_loop import NODE, count, loop_for
from tests.unit.samplers.test_perf_events import ROOT
from tests.unit.samplers.test_placement import needs_move_pages
from tests.unit.samplers.test_process import report
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
    sampler = RemoteMemorySampler(Node(run=RunPaths(tmp_path), host=HOST, pid=job.pid))
    sampler.events = {"instruction_count": faults, "cycle_count": none, "local_dram_bytes": none,
                      "remote_dram_bytes": none}  # fmt: skip
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


def test_loop_samples_a_rank_soon_after_it_reports(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as rank:
        stop = threading.Event()
        loop = loop_for(run, ("process",), interval_s=60)
        thread = threading.Thread(target=loop.run, args=(stop,))
        thread.start()
        time.sleep(0.3)
        reading = read_process(Path("/"), rank.pid)
        assert reading is not None
        report(run, 0, rank.pid, reading.start_ticks, host=NODE)
        assert within(60, lambda: count(run, "process")) == 1
        stop.set()
        thread.join(10)
        rank.kill()


def test_software_names_torch_without_importing_it() -> None:
    code = (
        "import sys; from haiprof.agent.samplers.registry import software; "
        "found = software().torch; "
        "assert 'torch' not in sys.modules; print(found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    try:
        expected: str | None = metadata.version("torch")
    except metadata.PackageNotFoundError:
        expected = None
    assert done.stdout.strip() == str(expected)
    assert software().python == platform.python_version()


def test_unreported_live_isolated_python_is_found(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_stub.so"
    library.write_bytes(b"\0" * 4096)
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-uI", "-c", code, str(library)]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as job:
        assert job.stdout is not None
        job.stdout.readline()
        (one,) = find_unreported(job.pid, (), tmp_path)
        assert one.pid == job.pid
        assert "-I" in one.reason
        assert find_unreported(job.pid, (job.pid,), tmp_path) == []
        job.kill()


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


_AS_NOBODY = """
import os, sys
from pathlib import Path
from haiprof.linux import perf_events as perf
os.setgid(65534); os.setuid(65534)
bits = {"user": perf.EXCLUDE_KERNEL, "kernel": 0}
for name, bit, pid, cpu in (("user", bits["user"], 0, -1), ("cpu", bits["kernel"], -1, 0)):
    event = perf.Event(name=name, type=perf.TYPE_SOFTWARE, config=1, bits=bit)
    try:
        perf.ScaledSum(perf.Kernel(), event, []).open(pid=pid, cpu=cpu)
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
