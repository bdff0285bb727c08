"""Runs of one job: recorded by haiprof, and bare with and without its fault, in turn.

The true gain is (faulty - fixed) / faulty of the mean step by the job's own clock (step_clock.py),
over as many of the last steps as the verdict judged, all runs of the same number of steps. It is
taken bare: a recorded run would hold haiprof's own cost twice, and pairs of processes in turn let
the machine's drift fall on both. Two pairs; a third where their gains differ by more than two
points. The job is its own control: nothing is told by how much a fault was meant to take.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CGROUPS = (Path("/sys/fs/cgroup/cpu/haiprof_faults"), Path("/sys/fs/cgroup/haiprof_faults"))
CLOCK = Path(__file__).with_name("step_clock.py")
LIMIT_S = 240
QUOTA_US, PERIOD_US = 50_000, 100_000
MOST_PAIRS = 5
WANTED_SPREAD = 0.04
WARM_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a job differs from the one that was drawn."""

    faulty: bool = True
    without: tuple[str, ...] = ()
    """Pieces of the job that are left out."""
    constants: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


AS_DRAWN, FIXED = Change(), Change(faulty=False)
KEPT_BATCHES = Change(environment={"FAULTS_WITHOUT": "input"})
KEPT_MEMORY = Change(
    environment={"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "4294967296"}
)
"""The same job if input cost nothing; if glibc kept the memory that it was given back."""


class Job(Protocol):
    """What can be run here: a drawn job or a foreign program."""

    ranks: int
    loaded: bool
    seconds: float
    beside: str
    under: str
    doing: tuple[str, ...]
    options: tuple[str, ...]
    link_bytes_per_s: float

    def write(self, folder: Path, change: Change) -> list[str]:
        """Writes the program into an empty folder; how it is started there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one run left."""

    status: int
    numbers: dict[str, Any]
    ends_s: list[list[float]]
    """When its steps ended, by process."""

    @property
    def steps(self) -> int:
        """Of the process that has most."""
        return max(map(len, self.ends_s), default=0)

    def mean_s(self, count: int) -> float:
        """The mean of the last steps, of the slowest process."""
        assert not self.status, self.numbers
        assert self.steps > 2, self.numbers
        means = []
        for ends in self.ends_s:
            last = min(count, len(ends) - 1)
            means.append((ends[-1] - ends[-1 - last]) / max(last, 1))
        return max(means)


def why_not(job: Job) -> str | None:
    """Why it cannot be run here."""
    if job.under == "quota" and make_quota() is None:
        return "no cgroup of the cpu controller can be made"
    if job.under == "link":
        made = subprocess.run(linked(1e8, ["true"]), capture_output=True, check=False)
        if made.returncode:
            return f"no network namespace with a slow link: {made.stderr.decode().strip()}"
    return None


def linked(bytes_per_s: float, line: list[str]) -> list[str]:
    """A command in a network of its own, whose loopback has this rate; 0: any."""
    slow = f"tc qdisc add dev lo root tbf rate {int(bytes_per_s * 8)}bit burst 64kb latency 400ms"
    up = "ip link set lo up mtu 16384" + (f" && {slow}" if bytes_per_s else "")
    return ["unshare", "-n", "sh", "-c", f'{up} && exec "$@"', "sh", *line]


def command(job: Job, line: list[str], *, faulty: bool) -> list[str]:
    """The command under what the kind runs it under."""
    if job.under == "link":
        return linked(job.link_bytes_per_s if faulty else 0, line)
    if job.under == "one_core" and faulty:
        return ["taskset", "-c", "1", *line]
    if job.under == "quota" and faulty:
        return ["sh", "-c", f'echo $$ > {make_quota()}/cgroup.procs; exec "$@"', "sh", *line]
    return line


def run(
    job: Job, folder: Path, change: Change, *, steps: int = 0, recorded: bool = False
) -> Ran:  # fmt: skip
    """Runs it once, in a folder that is made anew; with haiprof into its `logs`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    line = job.write(folder, change)
    shutil.copy(CLOCK, folder)
    if recorded:
        haiprof = [sys.executable, "-m", "haiprof", "run", "--quiet", "--log-dir"]
        line = [*haiprof, str(folder / "logs"), *job.options, "--", *line]
    environment = {
        "OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "lo",
        "FAULTS_TRUTH": str(folder), "FAULTS_STEPS": str(steps), "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **change.environment,
    }  # fmt: skip
    paths = [str(p) for p in (folder, folder / "stubs") if p.is_dir()]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    before, began = cpu_seconds(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as scratch,  # short: sockets are made in it
        neighbours(job, faulty=change.faulty),
        (folder / "output.txt").open("wb") as output,
    ):
        process = subprocess.Popen(
            command(job, line, faulty=change.faulty), env={**environment, "TMPDIR": scratch},
            stdout=output, stderr=output, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            end(process)
    took = time.monotonic() - began
    busy, children, stolen = (
        after - was for after, was in zip(cpu_seconds(), before, strict=True)
    )  # neighbours of ours are children too
    truths = [json.loads(p.read_text(encoding="ascii")) for p in folder.glob("truth-*.json")]
    return Ran(
        status=process.returncode,
        numbers={
            "status": process.returncode, "took_s": round(took, 1),
            "strangers_cores": round(max(busy - children, 0.0) / took, 2),
            "stolen_cores": round(stolen / took, 2),
        },
        ends_s=[truth["ends_s"] for truth in truths],
    )  # fmt: skip


def verdict(folder: Path) -> dict[str, Any]:
    """What `haiprof verdict --json` says of a recorded run."""
    line = [sys.executable, "-m", "haiprof", "verdict", str(folder / "logs"), "--json"]
    done = subprocess.run(line, capture_output=True, check=False)
    if not done.stdout:
        return {"failed": done.stderr.decode()[-300:]}
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def true_gain(
    job: Job, root: Path, change: Change, *, base: Change, steps: int, count: int
) -> dict[str, Any]:  # fmt: skip
    """By how much of its mean step a change makes a job faster, in alternating bare runs."""
    before, after, gains = [], [], []
    while len(gains) < 2 or (len(gains) < MOST_PAIRS and max(gains) - min(gains) > WANTED_SPREAD):
        try:
            before.append(run(job, root / "faulty", base, steps=steps).mean_s(count))
            after.append(run(job, root / "fixed", change, steps=steps).mean_s(count))
        except AssertionError as error:
            return {"broken": str(error)}
        gains.append(1 - after[-1] / before[-1])
    return {
        "gain": round(1 - sum(after) / sum(before), 4),
        "spread": round(max(gains) - min(gains), 4),
        "before_ms": [round(s * 1e3, 3) for s in before],
        "after_ms": [round(s * 1e3, 3) for s in after],
    }


@contextlib.contextmanager
def neighbours(job: Job, *, faulty: bool) -> Iterator[None]:
    """Busy processes beside the job, in sessions of their own as other people's are.

    Of one session they would share its part of the CPUs (sched_autogroup), and leave the job's.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(count: int) -> None:
        line = [sys.executable, "-c", "while True: pass"]
        started.extend(subprocess.Popen(line, start_new_session=True) for _ in range(count))

    timer = threading.Timer(5.0 + job.seconds / 2, start, args=(4,))
    if job.loaded:
        start(2)
    if faulty and job.beside == "late":
        timer.start()
    elif faulty and job.beside:
        start(4)
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():  # it starts them just now
            timer.join()
        for process in started:
            process.kill()
            process.wait()


def make_quota() -> Path | None:
    """A cgroup with half a core; None where this machine does not let us."""
    for cgroup in CGROUPS:
        with contextlib.suppress(OSError):
            cgroup.mkdir(exist_ok=True)
            (cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (cgroup / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
            return cgroup
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to end the job; then by force."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_seconds() -> tuple[float, float, float]:
    """CPU time of the machine, of the processes that this one has awaited, and what was stolen."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields]
    used, tick = os.times(), os.sysconf("SC_CLK_TCK")
    busy = sum(ticks[:3]) + sum(ticks[5:7])
    return busy / tick, used.children_user + used.children_system, ticks[7] / tick
