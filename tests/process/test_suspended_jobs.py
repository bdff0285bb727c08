"""Signals to jobs that consist of several processes: torchrun's ranks, and Slurm's job step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.run_format.manifest import newest_run
from tests.process.jobs import REPOSITORY, environment
from tests.process.live import within
from tests.security.launched import LIMIT_S, Launched

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys, torch, torch.distributed as dist, time
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, go_on = dist.get_rank(), torch.ones(1)
if rank == 0:
    os.write(1, f"ready {os.getpid()}\\n".encode())  # at once: python -u prints in pieces
    beats = open("beats", "ab", buffering=0)
while go_on.item():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if rank == 0:
        beats.write(b".")
        go_on.fill_(not os.path.exists("end"))
    dist.broadcast(go_on, 0)
    time.sleep(0.05)
print("done", flush=True)
dist.destroy_process_group()
"""


def ranks(folder: Path) -> Launched:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    job = [torchrun, "--standalone", "--nproc-per-node", "2", "train.py"]
    return Launched(folder, job=job, options=["--quiet"])


def recorded(one: Launched) -> None:
    """Waits until both ranks write."""
    within(LIMIT_S, lambda: len(list(one.logs.glob("*/ranks/*/phases.rec"))) == 2)


@pytest.mark.parametrize(
    "sequence", [["SIGSTOP"], pytest.param(["SIGTSTP", "SIGSTOP"], marks=pytest.mark.proof)]
)
def test_torchrun_goes_on_after_a_stop(tmp_path: Path, sequence: list[str]) -> None:
    with ranks(tmp_path) as one:
        recorded(one)
        for name in sequence:
            os.killpg(one.process.pid, getattr(signal, name))
        one.stand_still(one.process.pid)
        time.sleep(1.2)
        os.killpg(one.process.pid, signal.SIGCONT)
        one.goes_on()
        one.end()
        assert one.status() == 0, one.err
        assert one.out.count("done") == 2


@pytest.mark.proof
def test_torchrun_outlives_a_killed_launcher_and_is_recorded_to_its_end(tmp_path: Path) -> None:
    with ranks(tmp_path) as one:
        recorded(one)
        one.process.kill()
        one.process.wait()
        one.goes_on()
        one.end()
        one.leaves_nothing()
        assert one.out.count("done") == 2
    analyzer = Analyzer(newest_run(one.logs))
    assert analyzer.ranks()["recording_ended"].to_list() == ["exit", "exit"]


@pytest.mark.proof
@pytest.mark.usefixtures("slurm")
def test_slurm_suspends_resumes_requeues_and_cancels(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "count.py").write_text(
        "import sys, time\nprint('ready', flush=True)\n"
        "for step in range(150):\n    time.sleep(0.02)\nprint('done', flush=True)\nsys.exit(3)\n"
    )

    def ask(*words: str) -> str:
        done = subprocess.run(
            words, cwd=folder, env=environment({"PYTHONPATH": str(REPOSITORY)}), check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    def submit(out: str) -> str:
        haiprof = f"exec {sys.executable} -m haiprof --quiet --log-dir {folder}/logs count.py"
        number = ask("sbatch", "--parsable", "--requeue", "-o", out, "-e", "err", "--wrap", haiprof)
        within(
            LIMIT_S, lambda: (folder / out).exists() and "ready" in (folder / out).read_text(), out
        )
        return number

    def left() -> list[int]:
        mark = f"SLURM_SUBMIT_DIR={folder}".encode()
        return [pid for pid in _pids() if mark in _environ(pid)]

    number = submit("suspended")
    ask("scontrol", "suspend", number)
    time.sleep(1.2)
    ask("scontrol", "resume", number)
    within(LIMIT_S, lambda: not ask("squeue", "-h", "-j", number), "the end of the job")
    assert "ExitCode=3:0" in ask("scontrol", "show", "job", number)
    assert (folder / "suspended").read_text().endswith("done\n")
    for word, command in (("requeued", ("scontrol", "requeue")), ("cancelled", ("scancel",))):
        number = submit(word)
        ask(*command, number)
        within(LIMIT_S, lambda: not left(), f"the end of the {word} job")
        assert "done" not in (folder / word).read_text()
        (death,) = Analyzer(folder / "logs").deaths()
        assert (death.cause, death.certain) == (word, True), death
        ask("scancel", number)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
