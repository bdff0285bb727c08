"""Jobs that never train have steps: they are recorded, judged, attached to and traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof import Analyzer, TraceAnalysis
from haiprof.run_analysis.steps import WORDS
from tests.process.jobs import Job, succeeded
from tests.process.live import LiveJob, plain_ranks, within
from tests.sampling import first_of

pytestmark = pytest.mark.slow

STEPS = 40
_HEAD = f"""
import sys, time
import torch
endless = sys.argv[1:] == ["endless"]
steps = 1_000_000 if endless else {STEPS}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
def done(step):
    if endless and step == 20:
        print("TRAINS", flush=True)
    time.sleep(0.01)
"""
_LOADER = """
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 4 * steps
    def __getitem__(self, index): return torch.full((16,), index / 100)
"""
LOOPS = {
    "fetch": _HEAD + _LOADER + """
model.eval()
with torch.no_grad():
    for step, batch in enumerate(DataLoader(Data(), batch_size=4)):
        model(batch)
        done(step)
""",
    "module": _HEAD + """
with torch.inference_mode():
    for step in range(steps):
        model(torch.randn(4, 16))
        done(step)
""",
    "rollout": _HEAD + """
actor, critic, state = torch.nn.Linear(16, 4), torch.nn.Linear(16, 1), torch.zeros(1, 16)
with torch.no_grad():
    for step in range(steps):
        action, value = actor(state).argmax(), critic(state)
        state = torch.randn(1, 16) + action
        done(step)
""",
    "backward": _HEAD + """
for step in range(steps):
    model(torch.randn(4, 16)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    done(step)
""",
    "mark": "import haiprof\n" + _HEAD + """
for step in range(steps):
    torch.randn(64, 64) @ torch.randn(64, 64)
    done(step)
    haiprof.step()
""",
    "mark-over-optimizer": _HEAD + """
import haiprof
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(steps):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    done(step)
    haiprof.step()
""",
    "collective": _HEAD + """
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(steps):
    total = torch.matmul(torch.randn(64, 64), torch.randn(64, 64)).sum()
    dist.all_reduce(total)
    if dist.get_rank() == 0 or not endless:
        done(step)
    dist.barrier()
""",
}  # fmt: skip
BOUNDARY = {"rollout": "module", "mark-over-optimizer": "mark"}
RANKS = {"collective": 2}


def command(name: str, folder: Path, *words: str) -> list[str]:
    script = folder / f"{name}.py"
    script.write_text(LOOPS[name])
    job = [str(script), *words]
    return plain_ranks(RANKS[name], *job) if name in RANKS else ["python", *job]


@pytest.mark.parametrize("name", first_of(LOOPS, "mark", "collective"))
def test_every_job_has_the_steps_that_its_author_would_count(
    name: str, tmp_path: Path, job_cache: Callable[..., Job]
) -> None:
    ranks, boundary = RANKS.get(name, 1), BOUNDARY.get(name, name)
    job = succeeded(job_cache(*command(name, tmp_path), haiprof=True))
    analyzer = job.analyzer()
    steps = analyzer.steps()
    assert steps.group_by("rank").len().sort("rank").rows() == [(r, STEPS) for r in range(ranks)]
    assert set(steps["boundary"].to_list()) == {boundary}
    assert (steps["step_ns"] > 0).all()
    assert (steps["other_host_ns"] >= 0).all()
    verdict = analyzer.verdict()
    assert verdict.step_count == STEPS * ranks
    if boundary in WORDS:
        assert verdict.notes[0] == WORDS[boundary]
    if boundary in WORDS and name != "mark-over-optimizer":
        said = str(verdict.notes) + str(verdict.not_measured)
        assert not {"backward_bound", "optimizer_bound"} & {f.rule for f in verdict.findings}
        assert "no call of the autograd engine" not in said


@pytest.mark.parametrize(
    "name", first_of(["module", "fetch", "collective", "backward", "mark"], "mark")
)
def test_job_is_traced_and_judged_while_it_runs(name: str, tmp_path: Path) -> None:
    ranks = RANKS.get(name, 1)
    with LiveJob(tmp_path, command(name, tmp_path, "endless"), "--quiet") as job:
        job.reported(ranks)
        found = job.ask("trace-now", job.pid, "--steps", "3")
        assert [rank["state"] for rank in found["ranks"]] == ["done"] * ranks
        first, after = found["ranks"][0]["steps"]
        assert after - first == 3
        assert all(rank["steps"] == [first, after] for rank in found["ranks"])
        traces = TraceAnalysis(Path(found["run"]), window=found["window"]).traces
        for trace in traces.values():
            assert trace.steps["step"].to_list() == list(range(first, after))

        def traced() -> bool | None:
            """Whether the run has the same numbers: its files follow within a second or two."""
            steps = Analyzer(Path(found["run"])).steps().filter("traced")
            return set(range(first, after)) <= set(steps["step"].to_list()) or None

        assert within(60, traced)
        judged = job.ask("attach", job.pid, "--time", "2")
        assert judged["verdict"]["step_count"] > 0
        assert job.listed()["step"] >= after
