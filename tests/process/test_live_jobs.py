"""Running jobs as their owner sees them, and as others must not: listed, asked, left in peace."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from haiprof import Analyzer, TraceAnalysis
from haiprof.base.options import ENV_ACTIVE
from haiprof.linux.procfs import has_mapped
from tests.process.live import LiveJob, torchrun, within

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("live jobs")]

NAME = "live_train.py"
# It trains until the file `stop` is there; rank 1 of the first round dies where there is `die`.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# A store of its own for each round: in torchrun's, gloo finds addresses of the round before.
store = "file://" + os.path.abspath("store-" + os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
step = 0
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    step += 1
    if step == 20 and rank == 0:
        print("TRAINS", flush=True)
    if rank == 1 and first and os.path.exists("die"):
        os._exit(3)
    stop = torch.tensor([float(os.path.exists("stop"))])
    dist.all_reduce(stop)
    if stop:
        break
    time.sleep(0.05)
if rank == 0:
    print("ENDS", flush=True)
dist.barrier()
time.sleep(0.2)  # as examples/two_ranks_slow_one.py
dist.destroy_process_group()
"""


def script(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(SCRIPT)
    return str(folder / NAME)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    folder = tmp_path_factory.mktemp("live")
    with LiveJob(folder, torchrun(2, script(folder)), "--quiet") as live:
        live.reported(2)
        within(60, lambda: live.listed()["cpu_cores"])
        yield live


def test_ps_and_top_tell_ranks_steps_and_their_split(job: LiveJob) -> None:
    listed = job.listed()
    assert (listed["ranks"], listed["world_size"], listed["recording"]) == (2, 2, True)
    assert listed["pid"] == job.process.pid
    assert listed["step"] > 0
    assert 20e6 < listed["step_ns"] < 500e6
    assert sum(share or 0 for share in listed["split"].values()) == pytest.approx(1, abs=0.01)
    assert listed["cpu_cores"] > 0
    (shown,) = job.ask("top", job.pid)["jobs"]
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert {rank["pid"] for rank in shown["ranks"]} == set(job.pids().values())
    assert all(rank["step"] > 0 and not rank["stopped"] for rank in shown["ranks"])


def test_all_ranks_trace_the_same_steps_twice_in_one_run(job: LiveJob) -> None:
    for window, count in ((0, 5), (1, 3)):
        found = job.ask("trace-now", job.pid, "--steps", str(count))
        assert (found["window"], found["aligned"]) == (window, True)
        assert [rank["state"] for rank in found["ranks"]] == ["done", "done"]
        first, after = found["ranks"][0]["steps"]
        assert after - first == count
        analysis = TraceAnalysis(Path(found["run"]), window=window)
        assert sorted(analysis.traces) == [0, 1]
        for trace in analysis.traces.values():
            assert trace.steps["step"].to_list() == list(range(first, after))
    windows = Analyzer(job.logs).windows()
    assert windows["trigger"].unique().to_list() == ["request"]
    assert job.process.poll() is None
    listed = within(60, lambda: now if (now := job.listed())["step"] > after else None)
    assert listed["path"] == found["run"]
    assert (listed["ranks"], listed["world_size"]) == (2, 2)


def test_control_threads_sleep_while_nothing_is_asked(job: LiveJob) -> None:
    """Of all threads of a rank those that haiprof has started are not woken for two seconds."""

    def wakes(pid: int) -> dict[str, int]:
        counts = {}
        for thread in Path(f"/proc/{pid}/task").iterdir():
            text = (thread / "status").read_text()
            counts[thread.name] = sum(
                int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line
            )
        return counts

    pid = job.pids()[0]
    before = wakes(pid)
    time.sleep(2)  # the time for which is looked
    after = wakes(pid)
    grown = {name: after[name] - before[name] for name in before if name in after}
    asleep = [name for name, count in grown.items() if count == 0]
    assert asleep, f"no thread of rank 0 slept: {grown}"
    waits = {(Path(f"/proc/{pid}/task/{name}/wchan")).read_text() for name in asleep}
    assert any("unix" in wait or "packets" in wait or wait in ("", "0") for wait in waits), waits


def test_everything_that_is_open_is_its_owners_alone(job: LiveJob) -> None:
    job.ask("trace-now", job.pid, "--steps", "2")
    root = job.run.control
    assert root.stat().st_mode & 0o077 == 0
    sockets = [path for path in root.rglob("*") if stat.S_ISSOCK(path.stat().st_mode)]
    assert sockets, "the ranks' socket"
    inside = [path for path in root.rglob("*") if path.is_dir()]
    assert inside
    for path in inside:
        assert path.stat().st_mode & 0o077 == 0, path
    family = {str(job.process.pid), *map(str, job.pids().values())}
    said = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=False).stdout
    own = [line for line in said.splitlines() if f"pid={job.process.pid}," in line]
    assert own == [], f"the launcher opens no port: {own} of {family}"


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    if os.getuid() or not shutil.which("useradd"):
        pytest.skip("another user takes root, and useradd")
    name = "haiprof-stranger"
    subprocess.run(["useradd", "--no-create-home", name], check=True)
    try:
        yield name
    finally:
        subprocess.run(["userdel", name], check=False)


def test_job_of_another_user_is_refused_by_every_command(job: LiveJob, stranger: str) -> None:
    """A run directory of theirs whose launcher lives, and a process of theirs in that run."""
    copy = job.logs.parent / "theirs" / job.run.root.name
    shutil.copytree(job.run.root, copy, ignore=lambda *_: ["control"])
    for path in (copy, *copy.rglob("*")):
        shutil.chown(path, stranger, stranger)
    process = subprocess.Popen(
        ["sleep", "100"], user=stranger, env={ENV_ACTIVE: str(copy), "KINETO_USE_DAEMON": "1"}
    )
    try:
        jobs = job.ask("ps", "--log-dir", str(copy.parent))["jobs"]
        assert (str(copy), stranger) in [(one["path"], one["user"]) for one in jobs], "to root"
        for words in (
            ("snapshot", str(copy)), ("trace-now", str(copy)), ("attach", str(copy)),
            ("snapshot", str(process.pid)), ("trace-now", str(process.pid)),
            ("attach", str(process.pid)), ("attach", str(process.pid), "--inject"),
        ):  # fmt: skip
            said = job.ask_any(*words)
            assert said["status"] not in (0, 1), words
            assert "another user" in said["talk"] or "no running job" in said["talk"], said
        assert not (copy / "control").exists()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.proof
def test_restarted_ranks_are_the_ones_that_answer(tmp_path: Path) -> None:
    command = torchrun(2, "--max-restarts", "1", script(tmp_path))
    with LiveJob(tmp_path, command, "--quiet", "--hang-limit", "10") as job:
        first = job.reported(2)
        (tmp_path / "die").touch()
        again = within(120, lambda: p if len(p := job.pids()) == 2 and p != first else None)
        within(90, lambda: not set(job.pids().values()) & set(first.values()))
        within(60, lambda: (now := job.listed())["ranks"] == 2 and now["step"])
        found = job.ask("trace-now", job.pid, "--steps", "3")
        assert [rank["state"] for rank in found["ranks"]] == ["done", "done"]
        seen = job.ask("snapshot", job.pid)
        assert (seen["moves"], seen["suspects"]) == (True, [])
        assert {rank["pid"] for rank in seen["ranks"]} == set(job.pids().values())
        assert again
        assert job.hangs() == []


def test_job_that_has_ended_is_named_with_what_to_do(job: LiveJob) -> None:
    """The last test of this job."""
    pid, run = job.pid, str(job.run.root)
    (job.folder / "stop").touch()
    assert job.end().endswith("ENDS\n")
    for name, hint in ((run, "haiprof verdict"), (pid, "no process"), (NAME, "")):
        for command in (("attach", name, "--time", "1"), ("snapshot", name)):
            said = job.ask(*command, status=3)["talk"]
            assert "Traceback" not in said
            assert hint in said or "no running job" in said, said


@pytest.mark.proof
@pytest.mark.skipif(
    sys.version_info < (3, 14) and importlib.util.find_spec("hypno") is None,
    reason="hypno is not installed",
)
def test_hook_waits_for_two_ranks_that_still_import_torch(tmp_path: Path) -> None:
    path = script(tmp_path)
    begin = "import sys; print('UP', flush=True)\n"
    Path(path).write_text(begin + Path(path).read_text())
    with LiveJob(tmp_path, torchrun(2, path), haiprof=False, said="UP") as job:
        within(90, lambda: _loading_torch(job) == 2)
        found = job.ask_any("attach", job.pid, "--inject", "--time", "2")
        assert (found["how"], found["ranks"], found["refused"]) == ("injected", [0, 1], {})
        (tmp_path / "stop").touch()
        assert job.end().endswith("ENDS\n")
        assert job.process.returncode == 0


def _loading_torch(job: LiveJob) -> int:
    """How many ranks have loaded torch at least in part; torchrun has before it starts them."""
    ranks = psutil.Process(int(job.pid)).children(recursive=True)
    return sum(has_mapped(rank.pid, b"libtorch") for rank in ranks)
