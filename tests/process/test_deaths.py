"""Real jobs that die: named with their line, and dying as they do without haiprof."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from haiprof.run_analysis.deaths import Death
from tests.process.jobs import PYTHON, REPOSITORY, TWO_RANKS, Job, run_job
from tests.sampling import first_of

pytestmark = pytest.mark.slow

ENDS = """
import faulthandler, os, signal, sys, threading
import torch
from torch import nn
how = sys.argv[1]
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
if how == "hook":
    def own(kind, error, traceback):
        print("own hook:", kind.__name__, error, file=sys.stderr)
    sys.excepthook = own
if how in ("raise", "thread_hook"):
    def own(arguments):
        print("own:", arguments.thread.name, arguments.exc_type.__name__, file=sys.stderr)
    threading.excepthook = own
def end_a_thread():
    thread = threading.Thread(target=lambda: 1 / 0, name="reader")
    thread.start()
    thread.join()
def step(number):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if number == 2 and how == "raise":
        end_a_thread()  # which ends nothing else, and explains nothing
    if number < 3:
        return
    if how in ("segv", "file"):
        faulthandler.enable(open("faults", "w") if how == "file" else sys.stderr)
        import ctypes
        ctypes.string_at(0)
    if how == "terminate":
        import ctypes
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    if how == "exit":
        sys.exit(3)
    if how in ("thread", "thread_hook"):
        end_a_thread()
        return
    try:
        {}["label"]
    except KeyError as error:
        raise RuntimeError("no label in sample 9") from error
for number in range(5):
    step(number)
"""
WITH_CORE = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
with open("/proc/self/coredump_filter", "w") as file:
    file.write("0")  # no memory in it: a small one
child = os.posix_spawn(sys.executable, [sys.executable, sys.argv[1], "segv"], os.environ)
status = os.waitpid(child, 0)[1]
print(os.WTERMSIG(status), os.WCOREDUMP(status))
"""
CAUSES = {
    "raise": "exception", "hook": "exception", "exit": "exit", "segv": "crash", "file": "crash",
    "terminate": "crash",
}  # fmt: skip


def died(job: Job) -> Death | None:
    return next((death for death in job.analyzer().deaths()), None)


def comparable(text: str) -> str:
    """Without what faulthandler says of the threads that there are, ours among them."""
    before, current, after = text.partition("Current thread")
    text = before.partition("\nThread 0x")[0].rstrip() + current + after
    return re.sub(r"0x[0-9a-f]+", "0x", text).strip()


@pytest.mark.parametrize(
    "how",
    first_of(
        ["raise", "hook", "exit", "segv", "file", "terminate", "thread", "thread_hook"],
        *("raise", "file", "terminate"),
    ),
)
def test_job_dies_as_it_does_without_haiprof_and_is_explained(tmp_path: Path, how: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = ("python", str(script), how)
    bare = run_job(command, folder=tmp_path / "bare", haiprof=False)
    job = run_job(command, folder=tmp_path / "own", haiprof=True, options=("--quiet",))
    said = "".join(
        line for line in job.stderr.splitlines(keepends=True) if not line.startswith("haiprof:")
    )
    assert job.returncode == bare.returncode
    assert (job.stdout, comparable(said)) == (bare.stdout, comparable(bare.stderr))
    if how == "file":
        assert "Segmentation fault" in (job.folder / "faults").read_text()
        faults = [comparable((each.folder / "faults").read_text()) for each in (bare, job)]
        assert faults[0] == faults[1]
    if how in ("raise", "thread_hook"):
        assert "own: reader ZeroDivisionError" in job.stderr
    death = died(job)
    if how.startswith("thread"):
        assert death is None, "an exception in a thread ends no process"
        return
    assert death is not None
    assert death.cause == CAUSES[how], death.headline
    assert death.ranks == (0,) or how in ("segv", "file", "terminate"), (
        "who crashes at once has not reported in yet"
    )
    if how == "terminate":
        assert "terminate called without an active exception" in bare.stderr
        assert "it aborted itself (SIGABRT): std::terminate: terminate called" in death.headline
    if how in ("raise", "hook"):
        assert death.headline.startswith("rank 0 died: RuntimeError: no label in sample 9 (ends.py")
        assert death.source == 'raise RuntimeError("no label in sample 9") from error'


OUT_OF_MEMORY = """
import resource, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
kept = []
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 28)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
def grow(way):
    while True:
        kept.append(torch.ones(1 << 20) if way == "torch" else bytearray(1 << 20))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
grow(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("way", "said"), [("torch", "DefaultCPUAllocator"), ("python", "MemoryError")]
)
def test_out_of_address_space_is_told_as_out_of_memory(tmp_path: Path, way: str, said: str) -> None:
    script = tmp_path / "oom.py"
    script.write_text(OUT_OF_MEMORY)
    job = run_job(("python", str(script), way), folder=tmp_path / "own", haiprof=True)
    assert said in job.stderr.partition("haiprof: rank")[0]
    death = died(job)
    assert death is not None
    assert death.cause == "out_of_memory", death.headline
    assert "oom.py:" in death.headline
    assert "sys.exit" not in death.headline


@pytest.mark.proof
def test_core_of_a_crash_is_dumped_as_it_is_without_haiprof(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "with_core.py").write_text(WITH_CORE)
    command = ("python", str(tmp_path / "with_core.py"), str(tmp_path / "ends.py"))
    bare = run_job(command, folder=tmp_path / "bare", haiprof=False)
    job = run_job(command, folder=tmp_path / "own", haiprof=True, options=("--quiet",))
    assert bare.stdout.startswith("11 ")
    assert job.stdout == bare.stdout
    cores = [len(list(each.folder.glob("core*"))) for each in (bare, job)]
    assert cores[0] == cores[1], "where the kernel puts them into the working directory"


def test_exception_of_native_code_is_printed_as_ever_and_named(tmp_path: Path) -> None:
    script = str(REPOSITORY / "benchmarks/dying_job.py")
    words = (*TWO_RANKS, script, "size")
    bare = run_job(words, folder=tmp_path / "bare", haiprof=False)
    job = run_job(words, folder=tmp_path / "own", haiprof=True, options=("--quiet",))
    assert job.returncode == bare.returncode
    printed = [
        {
            line
            for line in each.stderr.splitlines()
            if "terminate called" in line or "what()" in line
        }
        for each in (bare, job)
    ]
    assert len(printed[0]) >= 2, "gloo's check fails in native code"
    assert printed[0] == printed[1]
    death = died(job)
    assert death is not None
    assert death.cause == "mismatch"
    assert "bytes where it waited for" in death.headline


def test_rank_below_torchrun_that_is_killed_is_named_and_not_its_victim(tmp_path: Path) -> None:
    words = ("torchrun", "--standalone", "--nproc-per-node", "2")
    script = str(REPOSITORY / "benchmarks/dying_job.py")
    job = run_job((*words, script, "kill"), folder=tmp_path / "job", haiprof=True)
    assert job.returncode == 1
    death = died(job)
    assert death is not None
    assert (death.cause, death.ranks) == ("killed", (1,))
    assert {fate.rank: fate.role for fate in death.fates}[0] in ("victim", "stopped")
    lines = [line for line in job.stderr.splitlines() if line.startswith("haiprof:")]
    assert "rank 1 died first: killed (SIGKILL)" in lines[-1], "the cause is the last line"


PRINTS = """
import os, sys, time
import torch
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=.1)
def allocate():
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
for number in range(20):
    parameter.sum().backward()
    optimizer.step()
    time.sleep(.1)
print("license server lost", file=sys.stderr, flush=True)
os._exit(3) if sys.argv[1] == "exit" else allocate()
"""


@pytest.mark.parametrize(
    ("command", "cause", "said"),
    [
        (
            "python -I",
            "out_of_memory",
            "prints.py:7 in allocate); known by its last lines on stderr",
        ),
        ("python", "exit", "why is not known; its last line on stderr: license server lost"),
    ],
)
def test_last_lines_on_stderr_tell_of_a_death_that_nothing_else_tells_of(
    tmp_path: Path, command: str, cause: str, said: str
) -> None:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    line = f"exec {command.replace('python', PYTHON)} {script} {cause} 2> printed"
    bare, job = (
        run_job(["sh", "-c", line], folder=tmp_path / name, haiprof=name == "haiprof")
        for name in ("bare", "haiprof")
    )
    death = died(job)
    assert death is not None
    assert death.cause == cause
    assert not death.certain
    assert said in death.headline
    assert job.returncode == bare.returncode
    printed = [(each.folder / "printed").read_bytes() for each in (bare, job)]
    assert printed[0] == printed[1]
