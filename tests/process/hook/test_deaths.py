"""A training process that is killed at a known step: every step that it ended is in the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.run_analysis.run_files import open_run
from tests.process.jobs import PYTHON, environment, haiprof_command, run_script
from tests.sampling import variants

pytestmark = pytest.mark.slow

LOOP = """
import ctypes, os, signal, sys, time
import torch
if os.environ.get("PLAIN"):  # as where nothing was compiled
    import haiprof.in_job.recorder, haiprof.in_job.spans
    haiprof.in_job.recorder.make_spans = haiprof.in_job.spans.SpanBuffer
way = sys.argv[1]
count = os.open(f"{sys.argv[2]}/count-{os.environ.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT, 0o600)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
until = time.monotonic() + 1.5  # the agent has let us in, and the thread has drained before
steps = 0
while steps < 700 or time.monotonic() < until:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    os.write(count, b"x")
    steps += 1
    time.sleep(2e-4)  # a ring holds the spans of two seconds then: none is lost on a busy machine
if way == "exit":
    os._exit(3)
if way == "null":
    ctypes.string_at(0)
class Dies(torch.nn.Linear):
    def forward(self, x):
        os.kill(os.getpid(), getattr(signal, way))
        time.sleep(60)
Dies(4, 1)(torch.ones(2, 4))
"""


@dataclass(frozen=True)
class Death:
    """A job that has died."""

    logs: Path
    returncode: int
    steps: dict[int, int]
    """By rank, as the job itself counted them."""

    def events(self, line_type: str) -> list[Mapping[str, Any]]:
        return [line for rank in open_run(self.logs).ranks for line in rank.of_type(line_type)]

    def recorded(self) -> dict[int, int]:

        optimizer = Analyzer(self.logs).phases().filter(phase="optimizer")
        return dict(optimizer.group_by("rank").len().rows())


def die(folder: Path, way: str, **variables: str) -> Death:
    script = folder / "train.py"
    script.write_text(LOOP)
    command = [PYTHON, str(script), way, str(folder)]
    done = subprocess.run(
        haiprof_command(command, log_dir=folder / "logs", options=["--quiet"]),
        env=environment(variables), capture_output=True, timeout=120,
    )  # fmt: skip
    counts = {int(f.name[6:]): f.stat().st_size for f in folder.glob("count-*")}
    return Death(folder / "logs", done.returncode, counts)


@pytest.mark.parametrize(
    ("way", "status"),
    [("SIGKILL", 137), *variants(("exit", 3), ("SIGSEGV", 139), ("SIGTERM", 143), ("null", 139))],
)
def test_no_step_is_lost(tmp_path: Path, way: str, status: int) -> None:
    death = die(tmp_path, way)
    assert death.returncode == status or death.returncode == 128 - status
    assert death.recorded() == death.steps
    (end,) = death.events("unclean_end")
    assert not death.events("record_end")
    assert (end["lost_span_count"], end["optimizer_steps"]) == (0, death.steps[0])
    assert list(end["open_ns"] or ()) == ([] if way in ("exit", "null") else ["forward"])


@pytest.mark.proof
def test_no_step_is_lost_without_the_compiled_recorder(tmp_path: Path) -> None:
    death = die(tmp_path, "SIGKILL", PLAIN="1")
    assert death.recorded() == death.steps


CHILDREN = """
import atexit, multiprocessing, os, signal, sys
import torch
def die():
    os.kill(os.getpid(), signal.SIGKILL)
child = multiprocessing.get_context("fork").Process(target=die)
child.start()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
atexit.register(lambda: print(child.exitcode))
raise ConnectionResetError("reset")
"""


def test_ended_children_are_noted_and_left_to_the_job(tmp_path: Path) -> None:
    job = run_script(tmp_path, CHILDREN)
    assert job.stdout.strip() == str(-signal.SIGKILL)
    (noted,) = job.logs.glob("*/uncaught/*.json")
    (child,) = json.loads(noted.read_text())["ended"][0]["children"]
    assert child[1:] == [os.CLD_KILLED, signal.SIGKILL]


CRASHES = """
import ctypes, faulthandler, os, signal, sys, threading, time
import torch
way = sys.argv[1]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def crash():
    ctypes.string_at(0)
def fork():
    if not (pid := os.fork()):
        crash()
    print(os.waitpid(pid, 0)[1])
    crash()
def recurse(_):
    return sorted([1], key=recurse)
def handle():
    signal.signal(signal.SIGABRT, lambda *_: os._exit(9))
    os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(9)
def crash_beside():
    threading.Thread(target=crash).start()
    time.sleep(9)
def crash_noted():
    faulthandler.enable(all_threads=False)
    crash()
def send():
    os.kill(os.getpid(), signal.SIGBUS)
    time.sleep(9)
until = time.monotonic() + 1.5
while time.monotonic() < until:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(1e-3)
sys.setrecursionlimit(1 << 30)
print("trained", flush=True)
{"crash": crash, "fork": fork, "recurse": lambda: recurse(0), "handle": handle, "send": send,
 "beside": crash_beside, "noted": crash_noted, "abort": os.abort}[way]()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="CPython 3.10 keeps frames otherwise")
@pytest.mark.parametrize(
    ("way", "function", "certain"),
    [
        ("crash", "crash", True),
        *variants(  # of "beside" another line may be told: the thread runs by itself
            ("beside", "crash_beside", False), ("fork", "crash", True),
            ("recurse", "recurse", True), ("send", "send", True), ("noted", "crash", True),
            ("abort", "<module>", True), ("handle", None, True),
        ),
    ],
)  # fmt: skip
def test_a_crash_ends_the_job_as_without_haiprof_and_has_its_line(
    tmp_path: Path, way: str, function: str | None, certain: bool
) -> None:
    bare, under = (run_script(tmp_path, CRASHES, way, haiprof=haiprof) for haiprof in (False, True))
    assert (under.returncode == bare.returncode) or (under.returncode == 128 - bare.returncode)
    assert under.stdout == bare.stdout
    assert [line for line in bare.stderr.splitlines() if line not in under.stderr] == []
    (death,) = under.analyzer().deaths()
    assert death.cause == ("crash" if function else "exit")
    if certain:
        assert (death.line or "").rpartition(" in ")[2] == (function or "")
        assert len(list(under.logs.glob("*/uncaught/*.crash"))) == (1 if function else 0)


WORKER = """
import os, signal, time
import torch
from torch.utils.data import DataLoader, Dataset
import torch.utils.data._utils.signal_handling as handling
handling._set_SIGCHLD_handler = lambda: None  # torch asks its workers itself, and reaps them
class Samples(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, number):
        if number == 1500:
            time.sleep(1)  # who takes batches has taken those before: he gets them from the worker
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)
if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Samples(), batch_size=8, num_workers=1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""


@pytest.mark.proof
def test_a_worker_that_torch_has_reaped_is_told_with_its_signal(tmp_path: Path) -> None:
    job = run_script(tmp_path, WORKER)
    assert "exited unexpectedly" in job.stderr
    (death,) = job.analyzer().deaths()
    assert death.cause == "killed"
    assert "was ended by SIGKILL" in death.what
