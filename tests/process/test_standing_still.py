"""Hangs where no step is recorded: before the first one, and after the recording."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest

from haiprof import Analyzer
from tests.process.jobs import ranks_training
from tests.process.live import LiveJob, plain_ranks, within

pytestmark = pytest.mark.slow
needs_spy = pytest.mark.skipif(
    shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None,
    reason="py-spy is not installed: a process that has not begun is not seen into",
)

BEFORE = """
import os, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
def prepare():
    if rank == 1:
        time.sleep(1000)
print("UP", flush=True)
prepare()
dist.init_process_group("gloo")
"""

LATER = ranks_training(
    before="def lose_the_data(): time.sleep(1000)",
    first='if os.path.exists("lose") and rank == 1: lose_the_data()', each="time.sleep(0.02)",
)  # fmt: skip


def script(folder: Path, text: str) -> str:
    path = folder / "standing.py"
    path.write_text(text)
    return str(path)


@needs_spy
def test_rank_that_keeps_the_others_in_init_is_named(tmp_path: Path) -> None:
    command = plain_ranks(2, script(tmp_path, BEFORE))
    with LiveJob(tmp_path, command, "--hang-limit", "2", said="UP") as job:
        hang = job.first_hang(within_s=45)
        assert (hang.trigger, hang.step, hang.state) == ("hang", None, "done")
        assert "no first step for" in hang.reason
        (suspect,) = hang.suspects
        assert (suspect.rank, suspect.certain) == (1, False)
        assert "does not wait in torch.distributed" in suspect.reason
        assert "prepare" in suspect.doing
        assert job.process.poll() is None, "looking at a job does not end it"


@pytest.mark.proof
def test_hang_after_the_recording_is_noticed_and_looked_at(tmp_path: Path) -> None:
    command = plain_ranks(2, script(tmp_path, LATER))
    with LiveJob(tmp_path, command, "--hang-limit", "2", "--time", "1") as job:
        within(60, lambda: "recorded 1 s" in job.stderr)
        attached = job.ask("attach", job.pid, "--time", "12")
        assert attached["how"] == "resumed"
        assert job.hangs() == [], "it trains, though nothing is recorded"
        (tmp_path / "lose").touch()
        hang = job.first_hang(within_s=45)
        assert (hang.trigger, hang.step, hang.state) == ("hang", None, "done")
        assert "no optimizer step for" in hang.reason
        assert [suspect.rank for suspect in hang.suspects] == [1]
        assert "lose_the_data" in hang.suspects[0].doing
        assert hang.moves is False


@pytest.mark.proof
@pytest.mark.parametrize("options", [(), pytest.param(("--time", "1"), marks=pytest.mark.proof)])
def test_suspended_job_is_called_so_and_no_hang(tmp_path: Path, options: tuple[str, ...]) -> None:
    command = plain_ranks(2, script(tmp_path, LATER))
    with LiveJob(tmp_path, command, "--hang-limit", "3", "--quiet", *options) as job:
        pids = job.reported(2)
        began_ns = within(60, lambda: (now := job.listed())["step"] and now["elapsed_ns"])
        job.signal(signal.SIGSTOP, *pids)
        # Twice the limit without a step: nothing but time shows that this is no hang.
        within(60, lambda: job.listed()["elapsed_ns"] > began_ns + 6e9)
        listed = job.listed()
        assert (listed["suspended"], listed["stopped"]) == (True, [0, 1])
        seen = job.ask("snapshot", job.pid)
        assert (seen["suspended"], seen["suspects"]) == (True, [])
        job.signal(signal.SIGCONT, *pids)
        (note,) = within(
            60, lambda: [n for n in Analyzer(job.run.root).notes() if "suspended" in n]
        )
        assert job.hangs() == []
        assert "its ranks were stopped by a signal" in note
        assert not job.listed()["suspended"]
