"""Real jobs that die, of GPU memory too: named with their line, and dying as without haiprof."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.before_death import GpuMemoryAtEnd
from haiprof.run_analysis.deaths import Death
from haiprof.trace_format.memory_snapshot import read_memory_snapshot, sum_by_line
from tests.conftest import Once
from tests.process.jobs import (
    PYTHON,
    REPOSITORY,
    SIMULATED_GPU,
    TWO_RANKS,
    Job,
    run_job,
    run_script,
)
from tests.sampling import first_of, variants

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
CAUSES = {
    "raise": "exception", "hook": "exception", "exit": "exit", "segv": "crash", "file": "crash",
    "terminate": "crash",
}  # fmt: skip


def died(job: Job) -> Death | None:
    return next((death for death in job.analyzer().deaths()), None)


def comparable(text: str) -> str:
    """Without what faulthandler says of the threads that there are, ours among them.

    Nor whether one of them was collecting garbage: that is chance.
    """
    before, current, after = text.partition("Current thread")
    text = before.partition("\nThread 0x")[0].rstrip() + current + after
    text = text.replace("  Garbage-collecting\n", "")
    return re.sub(r"0x[0-9a-f]+", "0x", text).strip()


@pytest.mark.parametrize("how", first_of(
    ["raise", "hook", "exit", "segv", "file", "terminate", "thread", "thread_hook"], "raise"
))  # fmt: skip
def test_job_dies_as_it_does_without_haiprof_and_is_explained(tmp_path: Path, how: str) -> None:
    bare, job = (run_script(tmp_path, ENDS, how, haiprof=haiprof) for haiprof in (False, True))
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
    if how == "exit":
        assert death.source == "sys.exit(3)"
        assert "it exited with status 3 (sys.exit) at train.py:" in death.headline
    if how in ("raise", "hook"):
        assert death.headline.startswith("rank 0 died: RuntimeError: no label in sample 9 (train.")
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


@pytest.mark.proof
@pytest.mark.parametrize(
    ("way", "said"), [("torch", "DefaultCPUAllocator"), ("python", "MemoryError")]
)
def test_out_of_address_space_is_told_as_out_of_memory(tmp_path: Path, way: str, said: str) -> None:
    job = run_script(tmp_path, OUT_OF_MEMORY, way, options=())
    assert said in job.stderr.partition("haiprof: rank")[0]
    death = died(job)
    assert death is not None
    assert death.cause == "out_of_memory", death.headline
    assert "train.py:" in death.headline
    assert "sys.exit" not in death.headline


def test_limit_of_the_address_space_is_told(tmp_path: Path) -> None:
    (tmp_path / "oom.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=.1)\nkept = []\n"
        "for step in range(400):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n    optimizer.step()\n"
        "    if step > 200:\n        kept.append(torch.empty(1 << 28))\n"
    )
    words = ("bash", "-c", f"ulimit -v 8000000; exec {PYTHON} {tmp_path / 'oom.py'}")
    job = run_job(words, folder=tmp_path / "own", haiprof=True, options=("--quiet",))
    death = died(job)
    assert death is not None
    assert death.cause == "out_of_memory"
    assert death.remedy.startswith("raise the limit of its address space (ulimit -v)")
    (memory,) = job.analyzer().verdict().memory_at_end
    assert "MiB resident" in memory.text
    assert "limit of its address space 7.63 GiB (ulimit -v: what it has mapped" in memory.text


def test_exit_of_a_process_without_torch_is_not_called_more_than_is_known(tmp_path: Path) -> None:
    words = ("python", "-c", "import sys; sys.exit(3)")
    death = died(run_job(words, folder=tmp_path / "own", haiprof=True, options=("--quiet",)))
    assert death is not None
    assert death.headline.endswith("it ended with exit status 3; why is not known")


@pytest.mark.proof
def test_exception_of_native_code_is_printed_as_ever_and_named(tmp_path: Path) -> None:
    script = str(REPOSITORY / "tests/process/dying_job.py")
    words = (*TWO_RANKS, script, "size")
    bare = run_job(words, folder=tmp_path / "bare", haiprof=False)
    job = run_job(words, folder=tmp_path / "own", haiprof=True, options=("--quiet",))
    assert job.returncode == bare.returncode
    printed = [
        {n for n in each.stderr.splitlines() if re.search(r"terminate called|what\(\)", n)}
        for each in (bare, job)
    ]
    assert len(printed[0]) >= 2, "gloo's check fails in native code"
    assert printed[0] == printed[1]
    death = died(job)
    assert death is not None
    assert death.cause == "mismatch"
    assert "bytes where it waited for" in death.headline


@pytest.mark.proof
def test_rank_below_torchrun_that_is_killed_is_named_and_not_its_victim(tmp_path: Path) -> None:
    words = ("torchrun", "--standalone", "--nproc-per-node", "2")
    script = str(REPOSITORY / "tests/process/dying_job.py")
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
        ("python -I", "out_of_memory",
         "prints.py:7 in allocate); known by its last lines on stderr"),
        *variants(("python", "exit",
                   "why is not known; its last line on stderr: license server lost")),
    ],
)  # fmt: skip
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


MIB = 1 << 20
SCRIPT = f"""{SIMULATED_GPU}how = sys.argv[1]
torch.cuda.set_per_process_memory_fraction(256 / (80 << 10))  # 256 MiB
take = simulated.allocate
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        activations = take(x.numel() << 19)  # 4 MiB a sample
        return self.linear(x)
told = []
if how == "own":
    torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: told.append(numbers))
    torch.cuda.memory._record_memory_history(max_entries=7)
weights = take(32 << 20)
net, kept = Net(), []
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
if how == "fragments":
    pieces = [take(3 << 20) for _ in range(60)]
    del pieces[::2]
for step in range(40):
    size = 512 if how in ("batch", "caught", "own") and step == 30 else 8
    if how == "leak" and step > 3:
        kept.append(take(20 << 20))
    if how == "fragments" and step == 20:
        big = take(40 << 20)
    try:
        net(torch.ones(max(size // 8, 1), 8)).sum().backward()
    except torch.OutOfMemoryError:
        if how != "caught":
            print("told", told, file=sys.stderr)
            raise
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


def run(folder: Path, how: str, *options: str) -> Job:
    return run_script(folder, SCRIPT, how, options=options)


@pytest.fixture(scope="module")
def large_batch(once: Once) -> Job:
    """Died of one, with the history of its allocations."""
    options = ("--memory-history", "on", "--quiet")
    job: Job = once(("out of memory", "batch"), lambda folder: run(folder, "batch", *options))
    return job


def verdict(job: Job) -> Verdict:
    from haiprof.diagnosis.engine import diagnose

    return diagnose(job.analyzer())


def at_end(job: Job) -> tuple[Verdict, GpuMemoryAtEnd]:
    found = verdict(job)
    (memory,) = found.gpu_memory_at_end
    return found, memory


def test_large_batch_is_told_with_its_shape_and_what_had_fitted(large_batch: Job) -> None:
    found, memory = at_end(large_batch)
    assert found.death is not None
    assert (found.death.cause, found.death.ranks) == ("out_of_memory", (0,))
    assert found.headline.startswith(
        "rank 0 died: out of GPU memory in forward, in Net at step 30 (train.py:"
    )
    assert "the batch was 64 x 8, the largest before 1 x 8 with a peak of 36.0 MiB" in (
        found.headline
    )
    assert memory.growth_bytes_per_step is None
    assert any(reason.startswith("one large batch") for reason in memory.reasons)
    assert memory.failed.fits_ratio is not None
    assert memory.by_line[0][0] is not None, "the history names the line that holds most"
    assert memory.by_line[0][1] == 32 * MIB


@pytest.mark.proof
def test_caught_failure_ends_nothing_and_is_kept(tmp_path: Path) -> None:
    job = run(tmp_path, "caught")
    assert (job.returncode, job.stdout) == (0, "done\n")
    found = verdict(job)
    assert found.death is None
    (caught,) = [f for f in found.findings if f.rule == "gpu_memory_limit"]
    assert caught.title.startswith("rank 0 ran out of GPU memory in forward, in Net at step 30")
    assert caught.title.endswith("it went on")
    assert len(list((job.analyzer().run.root / "memory").glob("*.json"))) == 1


@pytest.mark.proof
def test_observer_and_history_of_the_job_remain(tmp_path: Path) -> None:
    job = run(tmp_path, "own")
    assert "told [(0, " in job.stderr
    _, memory = at_end(job)
    assert memory.snapshot is None, "the history is the job's own"
    assert memory.failed.free_cached_bytes is None
    assert memory.failed.allocated_bytes is not None


@pytest.mark.proof
def test_job_says_and_ends_as_without_haiprof(tmp_path: Path, large_batch: Job) -> None:
    bare, job = run_script(tmp_path, SCRIPT, "batch", haiprof=False), large_batch
    said = [line for line in job.stderr.splitlines() if not line.startswith("haiprof:")]
    last = bare.stderr.splitlines()[-1]
    assert (job.returncode, job.stdout, said[-1]) == (bare.returncode, bare.stdout, last)
    assert "CUDA out of memory" in last


def test_snapshot_opens_in_pytorchs_own_viewer(large_batch: Job) -> None:
    from torch.cuda import _memory_viz as viz

    memory_viz: Any = viz  # which has no types

    _, memory = at_end(large_batch)
    assert memory.snapshot is not None
    content: dict[str, Any] = pickle.loads(Path(memory.snapshot).read_bytes())
    assert "tried to allocate" in memory_viz.trace(content).lower() or memory_viz.segsum(content)
    assert "snapshot.pickle" in memory_viz.trace_plot(content)
    read = read_memory_snapshot(Path(memory.snapshot))
    seen = memory_viz.segsum(content)
    assert f"segments: {read.segments.height}" in seen
    used = sum(b["size"] for s in content["segments"] for b in s["blocks"]
               if b["state"] == "active_allocated")  # fmt: skip
    assert sum_by_line(read)["size_bytes"].sum() == used
    actions = [entry["action"] for entry in content["device_traces"][0]]
    assert read.events["action"].to_list() == actions
