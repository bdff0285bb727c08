"""Process counters of real processes: psutil, the processes' own accounting, and another user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from haiprof.agent.samplers.ranks import ProcessSampler
from haiprof.agent.samplers.table import Node
from haiprof.base.units import NS_PER_S
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import PROCESS
from tests.unit.samplers.records import Row, rows

HOST = "node1"
COUNTERS = [column.name for column in PROCESS.metrics if column.kind == "counter"]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def sampled(sampler: ProcessSampler) -> list[Row]:
    return rows(PROCESS, sampler.sample())


WORKERS = """
import os, sys, time
def work(path):
    data = open(path, "rb").read()
    with open(path + str(os.getpid()), "wb") as out:
        out.write(data)
    end = time.process_time() + 0.15
    while time.process_time() < end:
        pass
def fork(path):
    pid = os.fork()
    if not pid:
        work(path)
        time.sleep(60)
        os._exit(0)
    return pid
path = sys.argv[1]
workers = [fork(path), fork(path)]
work(path)
print("ready", flush=True)
sys.stdin.readline()
for pid in workers:
    os.kill(pid, 15)
    os.waitpid(pid, 0)
print("waited", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    source = tmp_path / "data"
    source.write_bytes(b"x" * 3_000_000)
    command = [sys.executable, "-c", WORKERS, str(source)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.timeout(60)
def test_process_live_children_agree_with_psutil(run: RunPaths, job: subprocess.Popen[str]) -> None:
    assert job.stdout is not None
    assert job.stdin is not None
    assert job.stdout.readline() == "ready\n"
    children = psutil.Process(job.pid).children(recursive=True)
    _until_idle([psutil.Process(job.pid), *children])
    sampler = ProcessSampler(Node(run=run, host=HOST, pid=job.pid))
    sampler.open()
    (row,) = sampled(sampler)
    everyone = [psutil.Process(job.pid), *children]
    cpu_s = sum(sum(process.cpu_times()[:2]) for process in everyone)
    assert row["process_count"] == 3
    assert number(row["cpu_ns"]) / 1e9 == pytest.approx(cpu_s, abs=0.02)
    assert number(row["cpu_ns"]) >= 0.4e9
    assert row["read_bytes"] == sum(p.io_counters().read_chars for p in everyone)
    assert row["write_bytes"] == sum(p.io_counters().write_chars for p in everyone)
    assert number(row["write_bytes"]) >= 9_000_000
    assert row["memory_rss_bytes"] == sum(p.memory_info().rss for p in everyone)
    assert row["thread_count"] == 3
    job.stdin.write("\n")
    job.stdin.flush()
    assert job.stdout.readline() == "waited\n"
    (after,) = sampled(sampler)
    assert after["process_count"] == 1
    for column in ("cpu_ns", "read_bytes", "write_bytes"):
        assert number(row[column]) <= number(after[column]), column
    assert number(after["write_bytes"]) == number(row["write_bytes"]) + len("waited\n")
    assert number(after["cpu_ns"]) <= number(row["cpu_ns"]) + 0.1e9


def number(value: float | None) -> float:
    assert value is not None
    return value


def _until_idle(processes: list[psutil.Process]) -> None:
    """Waits until the children have done their work and sleep."""
    last = None
    for _ in range(200):
        now = [process.cpu_times()[:2] for process in processes]
        writes = [process.io_counters().write_chars for process in processes]
        if now == last and min(writes) >= 3_000_000:
            return
        last = now
        processes[0].cpu_percent(interval=0.1)


KNOWN_WORK = """
import json, mmap, os, resource, sys, time
path, size = sys.argv[1], int(sys.argv[2])
def work():
    with open(path, "rb", buffering=0) as source, open(os.devnull, "wb", buffering=0) as sink:
        for _ in range(2):
            source.seek(0)
            while piece := source.read(1 << 20):
                pass
        for _ in range(size >> 16):
            sink.write(bytes(1 << 16))
    pages = mmap.mmap(-1, 8192 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(pages), mmap.PAGESIZE):
        pages[at] = 1
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass
def usage(who):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime, used.ru_minflt, used.ru_majflt, used.ru_nvcsw
def totals():
    mine, theirs = usage(resource.RUSAGE_SELF), usage(resource.RUSAGE_CHILDREN)
    return [a + b for a, b in zip(mine[:3], theirs[:3])] + [mine[3]]
before = totals()
print("ready", flush=True)
sys.stdin.readline()
worker = os.fork()
if not worker:
    work()
    os._exit(0)
work()
os.waitpid(worker, 0)
for _ in range(200):
    time.sleep(0.001)
print(json.dumps([after - first for after, first in zip(totals(), before)]), flush=True)
sys.stdin.readline()
"""


@pytest.mark.timeout(120)
def test_process_live_known_work_is_right_within_2_percent(run: RunPaths, tmp_path: Path) -> None:
    """One process and a worker that each read 2 x 16 MiB, write 16 MiB and burn 1.5 s."""
    size = 16 << 20
    source = tmp_path / "data"
    source.write_bytes(bytes(size))
    command = [sys.executable, "-c", KNOWN_WORK, str(source), str(size)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        sampler = ProcessSampler(Node(run=run, host=HOST, pid=rank.pid))
        sampler.open()
        (before,) = sampled(sampler)
        rank.stdin.write("\n")
        rank.stdin.flush()
        cpu_s, minor_faults, major_faults, voluntary = json.loads(rank.stdout.readline())
        (after,) = sampled(sampler)
        rank.kill()
        sampler.close()
    grown = {name: number(after[name]) - number(before[name]) for name in COUNTERS}
    assert grown["cpu_ns"] / NS_PER_S == pytest.approx(cpu_s, rel=0.02)
    assert grown["cpu_ns"] >= 3 * NS_PER_S * 0.98
    assert grown["read_bytes"] == pytest.approx(4 * size, rel=0.02)
    assert grown["write_bytes"] == pytest.approx(2 * size, rel=0.02)
    assert grown["page_fault_count"] == pytest.approx(minor_faults + major_faults, rel=0.02)
    assert grown["page_fault_count"] >= 2 * 8192
    assert grown["major_page_fault_count"] == major_faults
    assert grown["context_switch_count"] - grown["involuntary_context_switch_count"] == (
        pytest.approx(voluntary, rel=0.02)
    )
    assert grown["context_switch_count"] >= 200
    assert 0 <= grown["run_queue_wait_ns"] < number(after["time_ns"]) - number(before["time_ns"])


ALWAYS_BUSY = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
child = os.fork()  # two that share one CPU
if child:
    print("ready", flush=True)
while True:
    pass
"""


def test_process_live_thread_that_shares_its_cpu_runs_or_waits_all_the_time(run: RunPaths) -> None:
    command = [sys.executable, "-c", ALWAYS_BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        psutil.Process(rank.pid).cpu_percent(interval=0.5)
        children = psutil.Process(rank.pid).children()
        sampler = ProcessSampler(Node(run=run, host=HOST, pid=rank.pid))
        sampler.open()
        (before,) = sampled(sampler)
        psutil.Process(rank.pid).cpu_percent(interval=1)
        (after,) = sampled(sampler)
        for process in (*children, rank):
            process.kill()
        sampler.close()
    names = ("time_ns", "cpu_main_ns", "run_queue_wait_ns")
    elapsed, ran, waited = (number(after[name]) - number(before[name]) for name in names)
    assert ran + waited == pytest.approx(elapsed, rel=0.05)
    assert waited >= 0.4 * elapsed


AS_NOBODY = """
import encodings.ascii, json, os, sys
from dataclasses import asdict
from haiprof.agent.samplers.ranks import PlacementSampler, ProcessSampler
from haiprof.agent.samplers.table import Node
os.setgid(65534)
os.setuid(65534)
found = []
for kind in (ProcessSampler, PlacementSampler):
    sampler = kind(Node(host="node1", pid=int(sys.argv[1])))
    sampler.open()
    found += map(asdict, sampler.states())
print(json.dumps(found))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_process_live_other_user_is_told_what_is_denied_and_what_helps() -> None:
    with subprocess.Popen(["sleep", "60"]) as job:
        command = [sys.executable, "-c", AS_NOBODY, str(job.pid)]
        root = Path(__file__).parents[3]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
        job.kill()
    states = {state["metric"]: state for state in json.loads(done.stdout)}
    denied = {name for name, state in states.items() if state["status"] == "denied"}
    assert denied == {
        "read_bytes",
        "write_bytes",
        "storage_read_bytes",
        "storage_write_bytes",
        "sampled_page_count",
        "local_page_ratio",
    }
    assert {states[name]["remedy"] for name in denied} == {"run haiprof as the user of the job"}
    assert {states[name]["value"] for name in denied} == {None}
    assert states["context_switch_count"]["status"] == "available"
    assert states["allowed_cpu_count"]["status"] == "available"
