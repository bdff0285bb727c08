"""Jobs that do to their processes, to torch and to the run directory what jobs do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from haiprof import Analyzer
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import newest_run
from tests.process.jobs import (
    Job,
    environment,
    haiprof_command,
    rank_events,
    run_script,
    succeeded,
)
from tests.process.live import within
from tests.process.loops import PRELUDE
from tests.sampling import first_of

pytestmark = pytest.mark.slow

QUIET = ("--quiet",)
TRAIN = (
    PRELUDE
    + """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
"""
)
STEPS = """
for batch in batches({count}):
    train_step(model, optimizer, batch)
"""
FINISH = "\nfinish(model)\n"


def both_ways(
    folder: Path, source: str, *arguments: str, options: tuple[str, ...] = QUIET
) -> tuple[Job, Job]:
    """The script bare and under haiprof."""
    bare = run_script(folder, source, *arguments, haiprof=False)
    return bare, run_script(folder, source, *arguments, options=options)


def assert_same_outcome(bare: Job, recorded: Job) -> None:
    assert recorded.returncode == bare.returncode, recorded.stderr
    assert recorded.stdout == bare.stdout


def last_error_line(job: Job) -> str:
    lines = [line for line in job.stderr.splitlines() if not line.startswith("haiprof")]
    return lines[-1] if lines else ""


def ranks_of(job: Job) -> list[tuple[int, int]]:
    assert job.log_dir is not None
    run = RunPaths(newest_run(job.log_dir))
    return [(rank, attempt) for rank, attempt, _ in run.rank_folders()]


# -- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", first_of(["os._exit(3)", "sys.exit(3)"], "os._exit(3)"))
def test_hook_that_raises_switches_itself_off(tmp_path: Path, leave: str) -> None:
    """After a fork in the middle, which leaves one rank."""
    fork = f"""
child = os.fork()
if child == 0:
    model(torch.ones(1, 16))
    {leave}
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    sabotage = """
if "haiprof.in_job.patches" in sys.modules:
    def broken(*args):
        raise RuntimeError("injected")
    sys.modules["haiprof.in_job.patches"]._ident = broken
"""
    steps = STEPS.format(count=5)
    source = TRAIN + steps + fork + steps + sabotage + steps + FINISH
    bare, recorded = both_ways(tmp_path, source)
    assert_same_outcome(bare, recorded)
    assert bare.returncode == 0
    assert bare.stdout.startswith("child ended with 3")
    assert ranks_of(recorded) == [(0, 0)]
    errors = rank_events(recorded, "hook_error")
    assert [("injected" in error["reason"]) for error in errors] == [True]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("context", "epochs"),
    [("fork", 2), ("spawn", 1)],  # a worker that is spawned imports torch anew
)
def test_loader_workers_stay_unrecorded(tmp_path: Path, context: str, epochs: int) -> None:
    source = (
        TRAIN
        + f"""
if __name__ == "__main__":
    for epoch in range({epochs}):
        loader = DataLoader(
            data(6), batch_size=4, num_workers=2, multiprocessing_context="{context}"
        )
        for batch in loader:
            train_step(model, optimizer, batch)
    finish(model)
"""
    )
    bare, recorded = both_ways(tmp_path, source)
    assert_same_outcome(bare, recorded)
    assert ranks_of(recorded) == [(0, 0)]
    assert recorded.analyzer().steps().height == 6 * epochs


# -- torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sabotage",
    first_of((
        "del nn.Module.__call__", "del torch.autograd._engine_run_backward",
        "import time; time.perf_counter_ns = None", "torch.is_grad_enabled = None",
        "torch.optim.optimizer._global_optimizer_pre_hooks.clear()",
        "import gc; gc.callbacks.clear()",
    ), "del nn.Module.__call__"),
)  # fmt: skip
def test_sabotaged_torch_fails_or_works_as_without_haiprof(tmp_path: Path, sabotage: str) -> None:
    source = TRAIN + STEPS.format(count=3) + sabotage + STEPS.format(count=3) + FINISH
    bare, recorded = both_ways(tmp_path, source)
    assert_same_outcome(bare, recorded)
    assert last_error_line(recorded) == last_error_line(bare)


def test_module_of_the_job_named_torch_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("VALUE = 3\n")
    bare, recorded = both_ways(tmp_path, "import torch\nprint(torch.VALUE, torch.__file__)\n")
    assert_same_outcome(bare, recorded)
    assert bare.returncode == 0


@pytest.mark.proof
def test_module_that_cannot_be_described_trains_on(tmp_path: Path) -> None:
    source = (
        PRELUDE
        + """
class Odd(nn.Sequential):
    def parameters(self, recurse=True):
        if sys._getframe(1).f_code.co_filename.endswith("roots.py"):
            raise RuntimeError("not for you")
        return super().parameters(recurse)

model = Odd(nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
"""
    )
    bare, recorded = both_ways(tmp_path, source + STEPS.format(count=5) + FINISH)
    assert_same_outcome(bare, recorded)
    assert bare.returncode == 0


# -- the run directory --------------------------------------------------------------------------

SLOW_STEPS = """
import time
for _ in range(30):
    train_step(model, optimizer, (torch.randn(4, 16), torch.randint(4, (4,))))
    time.sleep(0.1)
"""


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_never_reaches_the_job(tmp_path: Path, tiny_disk: Path) -> None:
    records = str(tiny_disk / "*/ranks/0/*.rec")
    fill = f"""
import glob, time
while not any(os.path.getsize(path) > 2000 for path in glob.glob({records!r})):
    time.sleep(0.05)
try:
    open({str(tiny_disk / "filler")!r}, "wb").write(b"x" * 10**6)
except OSError as error:
    print(error.strerror)
"""
    source = TRAIN + STEPS.format(count=40) + fill + SLOW_STEPS + FINISH
    job = succeeded(run_script(tmp_path, source, options=(), log_dir=tiny_disk))
    assert job.stdout.startswith("No space left on device")
    assert len(job.stdout.split()[-1]) == 64
    assert "Traceback" not in job.stderr
    assert Analyzer(tiny_disk).steps().height >= 5


def test_run_that_was_killed_outright_reads_like_any_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN + SLOW_STEPS.replace("range(30)", "range(10_000)"))
    command = haiprof_command(
        [sys.executable, str(script)], log_dir=tmp_path / "logs", options=QUIET
    )
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL)
    try:
        records = tmp_path / "logs"
        within(60, lambda: any(p.stat().st_size > 2000 for p in records.glob("*/ranks/0/*.rec")))
    finally:
        launcher = psutil.Process(process.pid)
        for victim in [launcher, *launcher.children(recursive=True)]:
            victim.kill()
        process.wait(timeout=90)
    analyzer = Analyzer(tmp_path / "logs")
    assert analyzer.steps().height >= 10
    assert analyzer.ranks()["recording_ended"].to_list() == [None]


# -- signals ------------------------------------------------------------------------------------


@pytest.mark.proof
def test_signal_that_the_job_holds_back_while_it_saves_does_not_end_it(tmp_path: Path) -> None:
    """A thread of haiprof's that takes signals would take the one that the job has blocked."""
    hold = """
import signal, time
time.sleep(1.5)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if os.fork() == 0:
    os.kill(os.getppid(), signal.SIGTERM)
    os._exit(0)
os.wait()
print("saved", [pending.name for pending in signal.sigpending()])
"""
    steps = STEPS.format(count=5)
    bare, recorded = both_ways(tmp_path, TRAIN + steps + hold + steps + FINISH)
    assert_same_outcome(bare, recorded)
    assert bare.stdout.startswith("saved ['SIGTERM']")
    assert recorded.analyzer().steps().height == 10
