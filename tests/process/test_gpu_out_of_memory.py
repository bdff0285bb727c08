"""Jobs that run out of GPU memory, on a simulated GPU: explained, and ending as they do alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.before_death import GpuMemoryAtEnd
from haiprof.trace_format.memory_snapshot import read_memory_snapshot, sum_by_line
from tests.conftest import Once
from tests.process.jobs import SIMULATED_GPU, Job, run_job

pytestmark = pytest.mark.slow

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
    script = folder / "train.py"
    folder.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    return run_job(("python", str(script), how), folder=folder / "job", haiprof=True,
                   options=options)  # fmt: skip


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
def test_leak_is_told_from_one_large_batch(tmp_path: Path) -> None:
    _, memory = at_end(run(tmp_path, "leak"))
    assert memory.growth_bytes_per_step == pytest.approx(20 * MIB, rel=0.2)
    assert "it grew from step to step" in memory.reasons[0]
    assert not memory.failed.is_larger


@pytest.mark.proof
def test_fragmentation_is_said_where_the_request_would_have_fitted(tmp_path: Path) -> None:
    found, memory = at_end(run(tmp_path, "fragments"))
    assert memory.failed.fragmented
    assert "fragmentation" in memory.reasons[0]
    assert found.death is not None
    assert "expandable_segments" in found.death.remedy


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


def test_job_says_and_ends_as_without_haiprof(tmp_path: Path, large_batch: Job) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ("python", str(script), "batch")
    bare, job = run_job(command, folder=tmp_path / "bare", haiprof=False), large_batch
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
