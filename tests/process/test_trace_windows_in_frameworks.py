"""Trace windows in real jobs: the steps asked for, on every rank, and the job as it was."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import Job, rank_events, run_job, succeeded
from tests.process.loops import LOOPS, OF_TWO_RANKS, PRELUDE, loop_command, marked

pytestmark = pytest.mark.slow

FIRST, AFTER = 1, 4
NEAR_US = 200_000  # a busy machine may stop the job between the mark and the span


def traced_loop(name: str, folder: Path, *options: str, source: str = "") -> Job:
    script = folder / f"loop_{name}.py"
    script.write_text(source or LOOPS[name])
    command = loop_command(script, ranks=2 if name in OF_TWO_RANKS else 1)
    job = run_job(command, folder=folder / "job", haiprof=True, options=("--quiet", *options))
    return succeeded(job)


def traces(job: Job) -> dict[int, dict[str, Any]]:
    assert job.log_dir is not None
    paths = job.log_dir.glob("*/traces/*.pt.trace.json.gz")
    contents = [json.loads(gzip.decompress(path.read_bytes())) for path in paths]
    return {content["haiprof"]["rank"]: content for content in contents}


def step_marks(trace: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(number, start, end) in us of Unix time."""
    base_us = trace["baseTimeNanoseconds"] / 1e3
    return sorted(
        (int(e["name"].partition("#")[2]), base_us + e["ts"], base_us + e["ts"] + e["dur"])
        for e in trace["traceEvents"]
        if e.get("name", "").startswith("ProfilerStep#") and e.get("cat") == "user_annotation"
    )


@pytest.mark.parametrize("name", marked(LOOPS, but=("in_turn", "ddp")))
def test_window_holds_the_steps_that_analysis_numbers_so(
    name: str, tmp_path: Path, run_loop: Any
) -> None:
    bare = run_loop(name, haiprof=False)
    job = traced_loop(name, tmp_path, "--steps", f"{FIRST}:{AFTER}")
    assert job.stdout == bare.stdout  # losses and weights, bit for bit
    assert "profiler" not in job.stderr.lower()
    ranks = 2 if name in OF_TWO_RANKS else 1
    lines = rank_events(job, "trace_window")
    assert [(line["state"], line["steps"]) for line in lines] == [
        ("recorded", [FIRST, AFTER])
    ] * ranks
    found = traces(job)
    assert sorted(found) == list(range(ranks))
    steps = job.analyzer().steps()
    for rank, trace in found.items():
        marks = step_marks(trace)
        assert [number for number, _, _ in marks] == list(range(FIRST, AFTER))
        starts = dict(steps.filter(steps["rank"] == rank).select("step", "start_ns").iter_rows())
        for number, start_us, _ in marks:
            assert abs(start_us - starts[number] / 1e3) < NEAR_US


@pytest.mark.proof
def test_ranks_agree_on_a_window_in_seconds(tmp_path: Path) -> None:
    source = LOOPS["ddp"].replace("batches(6,", "batches(3000,")
    job = traced_loop(
        "ddp", tmp_path, "--trace", "--warmup", "0.5", "--trace-steps", "5", source=source
    )
    lines = rank_events(job, "trace_window")
    assert [line["state"] for line in lines] == ["recorded", "recorded"]
    assert lines[0]["steps"] == lines[1]["steps"]
    for trace in traces(job).values():
        assert len(step_marks(trace)) == 5


@pytest.mark.proof
def test_distributed_trace_names_its_groups(tmp_path: Path) -> None:
    job = traced_loop("ddp", tmp_path, "--steps", "1:4")
    for rank, trace in traces(job).items():
        info = trace["distributedInfo"]
        assert (info["rank"], info["world_size"], info["backend"]) == (rank, 2, "gloo")
        assert info["pg_config"]


_USER_PROFILER = (
    PRELUDE
    + """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
from torch.profiler import ProfilerActivity, profile, schedule
seen = []
def ready(p):
    seen.append(sum(e.name == "aten::addmm" for e in p.events()))
with profile(activities=[ProfilerActivity.CPU], on_trace_ready=ready,
             schedule=schedule(wait=WAIT, warmup=2, active=2, repeat=1)) as prof:
    for batch in batches(12):
        train_step(model, optimizer, batch)
        prof.step()
print(seen)
finish(model)
"""
)


@pytest.mark.parametrize(
    ("wait", "state"),
    [
        (0, "recorded"),
        *(pytest.param(*case, marks=pytest.mark.proof) for case in ((3, "refused"), (6, "cut"))),
    ],
)
def test_user_profiler_is_whole_whenever_it_comes(wait: int, state: str, tmp_path: Path) -> None:
    source = _USER_PROFILER.replace("WAIT", str(wait))
    job = traced_loop("user", tmp_path, "--steps", "5:8", source=source)
    assert "[4]" in job.stdout
    [line] = rank_events(job, "trace_window")
    assert line["state"] == state
    assert len(traces(job)) == (state != "refused")


_KILLED = (
    PRELUDE
    + """
import signal
model = net()
optimizer = torch.optim.AdamW(model.parameters())
for number, batch in enumerate(batches(12)):
    train_step(model, optimizer, batch)
    if number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.proof
def test_job_killed_inside_leaves_nothing_half(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    job = run_job(
        ["python", str(script)], folder=tmp_path / "job", haiprof=True,
        options=("--quiet", "--steps", "4:10"),
    )  # fmt: skip
    assert job.returncode != 0
    assert job.log_dir is not None
    assert traces(job) == {}
    assert not list(job.log_dir.glob("*/traces/.parts/rank*"))


@pytest.mark.proof
def test_job_that_raises_inside_keeps_what_was_recorded(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        _KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)")
    )
    job = run_job(
        ["python", str(script)], folder=tmp_path / "job", haiprof=True,
        options=("--quiet", "--steps", "4:10"),
    )  # fmt: skip
    assert job.returncode == 3
    [line] = rank_events(job, "trace_window")
    assert (line["state"], line["steps"]) == ("cut", [4, 7])
    assert [number for number, _, _ in step_marks(traces(job)[0])][:3] == [4, 5, 6]


_GRAPHS = (
    PRELUDE
    + """
import torch._dynamo
from torch._dynamo.utils import counters
compiled = torch.compile(model := net(), backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches(14):
    train_step(compiled, optimizer, batch)
print(dict(counters["stats"]), dict(counters["graph_break"]), dict(counters["frames"]))
finish(model)
"""
)


@pytest.mark.proof
def test_compiled_model_has_the_same_graphs_and_breaks(tmp_path: Path) -> None:
    script = tmp_path / "graphs.py"
    script.write_text(_GRAPHS)
    bare = succeeded(run_job(["python", str(script)], folder=tmp_path / "bare", haiprof=False))
    job = traced_loop("graphs", tmp_path, "--steps", "4:7", "--repeat", "2", "--repeat-every", "4",
                      source=_GRAPHS)  # fmt: skip
    assert job.stdout == bare.stdout
    assert [line["state"] for line in rank_events(job, "trace_window")] == ["recorded"] * 2
