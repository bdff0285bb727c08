"""Jobs that are traced while they run: the files, the verdict's line, what opens them."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import haiprof
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs
from tests.process.jobs import Job, environment, haiprof_command, run_command, run_job, succeeded
from tests.process.live import plain_ranks
from tests.process.loops import PRELUDE

pytestmark = pytest.mark.slow

# As torch_tb_profiler.consts.WORKER_PATTERN (0.4.3) wants them.
TENSORBOARD = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")
PACED = (
    PRELUDE
    + """
import time
model = net()
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches({count}):
    train_step(model, optimizer, batch)
    time.sleep({seconds})
"""
)
RANKS = (
    PRELUDE
    + """
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches(40):
    train_step(model, optimizer, batch)
leave_group()
"""
)


def traced(folder: Path, source: str, *options: str, ranks: int = 1) -> tuple[Job, RunPaths]:
    script = folder / "train.py"
    script.write_text(source)
    command = ["python", str(script)]
    if ranks > 1:
        command = plain_ranks(ranks, str(script))
    job = succeeded(run_job(command, folder=folder / "job", haiprof=True, options=options))
    assert job.log_dir is not None
    (run,) = find_runs(job.log_dir)
    return job, RunPaths(run)


def words(job: Job) -> str:
    """What the launcher said, in one line without the card's frame."""
    return " ".join(job.stderr.replace("│", " ").split())


def names(run: RunPaths) -> list[str]:
    return sorted(path.name for path in run.traces.iterdir() if not path.name.startswith("."))


def test_two_ranks_trace_the_same_steps(tmp_path: Path) -> None:
    job, run = traced(tmp_path, RANKS, "--steps", "20:25", "--execution-trace", ranks=2)
    assert [name.partition("_")[0] for name in names(run)] == ["rank0", "rank0", "rank1", "rank1"]
    traces = [name for name in names(run) if ".pt.trace." in name]
    assert all(TENSORBOARD.match(name) for name in traces)
    assert not run.trace_parts.exists()
    analysis = haiprof.TraceAnalysis(run.root)
    assert list(analysis.files) == [0, 1]
    for trace in analysis.traces.values():
        assert trace.steps["step"].to_list() == [20, 21, 22, 23, 24]
        assert trace.metadata["haiprof"]["run"] == run.root.name
    assert "steps 20 to 24 on ranks 0 and 1: 4 files" in words(job)
    windows = haiprof.Analyzer(run.root).windows()
    assert windows["state"].to_list() == ["recorded", "recorded"]
    assert (windows["stall_ns"] > 0).all()


@pytest.mark.proof
def test_recording_of_some_seconds_waits_for_its_traces(tmp_path: Path) -> None:
    options = ("--trace", "--warmup", "0.5", "--time", "1")
    job, run = traced(tmp_path, PACED.format(count=240, seconds=0.02), *options)
    (name,) = names(run)
    said = words(job)
    assert said.count("traced steps") == 1, said  # one verdict, which has seen the window
    assert said.index("runs on without haiprof") < said.index("traced steps")
    (row,) = haiprof.Analyzer(run.root).windows().to_dicts()
    assert row["state"] == "recorded"
    assert 0.5e9 < row["end_ns"] - row["start_ns"] < 5e9
    assert Path(row["path"]).name == name


def load(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def inside(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    """Whether an event lies within a range of the same thread, to a tenth of a microsecond."""
    ends = event["ts"] + event["dur"], outer["ts"] + outer["dur"]
    same = (event["pid"], event["tid"]) == (outer["pid"], outer["tid"])
    return bool(same and event["ts"] > outer["ts"] - 0.1 and ends[0] < ends[1] + 0.1)


@pytest.mark.parametrize("source", ["loop", "no_loader"])
def test_traced_steps_have_forward_and_backward_around_their_operators(
    source: str, tmp_path: Path
) -> None:
    without = PACED.replace("batches({count})", "list(batches({count}))")
    text = (PACED if source == "loop" else without).format(count=40, seconds=0)
    _, run = traced(tmp_path, text, "--steps", "20:24", "--trace-modules")
    (path,) = run.traces.glob("*.gz")
    events = [event for event in load(path) if event.get("ph") == "X"]

    def named(start: str) -> list[dict[str, Any]]:
        return [event for event in events if event["name"].startswith(start)]

    steps = sorted(named("ProfilerStep#"), key=lambda event: event["ts"])
    assert [step["name"] for step in steps] == [f"ProfilerStep#{n}" for n in range(20, 24)]
    for name, operators in (("forward", "aten::linear"), ("backward", "autograd::engine::eval")):
        ranges = [event for event in events if event["name"] == name]
        assert all(event["cat"] == "user_annotation" for event in ranges)
        for step in steps:
            assert sum(inside(event, step) for event in ranges) == 1, name
        assert len(ranges) == len(steps)
        work = [event for event in named(operators) if event["cat"] == "cpu_op"]
        assert len(work) >= len(steps)
        assert all(sum(inside(event, each) for each in ranges) == 1 for event in work)

    trace = haiprof.TraceAnalysis(run.root).traces[0]
    assert not trace.annotations["name"].cast(str).is_in(["forward", "backward"]).any()
    assert trace.phase_ranges.height == 8
    done = run_command(["modules", str(run.root), "--json"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"forward' not in done.stdout
    assert run_command(["merge", str(run.root)], folder=tmp_path).returncode == 0
    for name in ("forward", "backward"):
        merged = [e for e in load(run.root / "merged.json.gz") if e["name"] == name]
        assert len(merged) == len({(event["ts"], event["dur"]) for event in merged}) >= 4
        assert len({event["pid"] for event in merged}) == 1


def test_job_that_ends_inside_the_window_keeps_what_was_recorded(tmp_path: Path) -> None:
    job, run = traced(tmp_path, PACED.format(count=23, seconds=0), "--steps", "20:30")
    assert len(names(run)) == 1
    assert "the job ended inside the window" in words(job)
    (trace,) = haiprof.TraceAnalysis(run.root).traces.values()
    assert trace.steps["step"].to_list() == [20, 21, 22]


def test_job_that_ends_before_the_window_says_so(tmp_path: Path) -> None:
    job, run = traced(tmp_path, PACED.format(count=12, seconds=0), "--steps", "100:105")
    assert names(run) == []
    assert "not traced: the job ended" in words(job)


@pytest.mark.proof
def test_several_windows_are_told_apart(tmp_path: Path) -> None:
    options = ("--trace-steps", "2", "--trace", "--repeat", "2", "--repeat-every", "8")
    _, run = traced(tmp_path, PACED.format(count=40, seconds=0), *options)
    assert len(names(run)) == 2
    first, last = (haiprof.TraceAnalysis(run.root, window=w).traces[0] for w in (0, 1))
    assert (first.steps["step"].to_list(), last.steps["step"].to_list()) == ([10, 11], [18, 19])
    done = run_command(["trace-report", str(run.root), "--window", "0", "--json"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == [0]


@pytest.mark.proof
def test_terminated_job_keeps_the_window_that_was_recorded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PACED.format(count=100_000, seconds=0.01))
    words = haiprof_command(
        [sys.executable, str(script)], log_dir=tmp_path / "logs", options=("--steps", "5:8")
    )
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("logs/*/traces/rank0*.pt.trace.json.gz")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGTERM
    assert "traced" in said
    (run,) = find_runs(tmp_path / "logs")
    assert list(haiprof.TraceAnalysis(run).files) == [0]


MLP = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(60):
    loss = model(torch.randn(128, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MLP_FLOPS = 2 * 128 * (64 * 256 * 2 + 256 * 32 * 3)
"""Of a step: each product once forward and twice backward, but the input has no gradient."""


def test_a_step_traced_with_shapes_gives_the_mfu_of_all_steps(tmp_path: Path) -> None:
    _, run = traced(tmp_path, MLP, "--steps", "30:32", "--trace-shapes")
    peak = {"HAIPROF_PEAK": "fp32=0.5"}

    def answer(*words: str, **more: str) -> str:
        return run_command([*words, str(run.root)], folder=tmp_path, extra_environment=more).stdout

    found = json.loads(answer("verdict", "--json", **peak))
    assert found["work"]["model_flops"] == pytest.approx(MLP_FLOPS, rel=0.01)
    assert found["work"]["flops_per_s"] == pytest.approx(MLP_FLOPS / found["step_ns"] * 1e9)
    assert found["work"]["mfu_ratio"] == pytest.approx(found["work"]["flops_per_s"] / 0.5e12)
    # The card of a narrow terminal is in several lines.
    card, overview = (
        re.sub(r"[\s│]+", " ", answer(name, **peak)) for name in ("verdict", "overview")
    )
    (said,) = set(re.findall(r"14.7 MFLOP a step, [\d.]+ .FLOP/s, MFU [\d.]+ %", card + overview))
    assert said in card
    assert said in overview
    bare = json.loads(answer("verdict", "--json"))
    assert bare["work"]["mfu_ratio"] is None
    assert "no peak is known" in bare["work"]["reason"]
