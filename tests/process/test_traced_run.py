"""Jobs that are traced while they run: the files, the verdict's line, what opens them."""

from __future__ import annotations

import gzip
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import haiprof
import haiprof.cli
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs
from tests.process.jobs import Job, rank_events, ranks_training, run_command, run_job, succeeded
from tests.process.live import LiveJob, plain_ranks, within
from tests.process.loops import LOOPS, OF_TWO_RANKS, PRELUDE, loop_command, marked
from tests.sampling import first_of

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


@pytest.mark.proof
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


RUNNING = (
    PRELUDE
    + """
def prepare(batch):
    for _ in range(40):
        batch[0].sum()
def train(model, optimizer):
    for batch in batches(40):
        prepare(batch)
        optimizer.zero_grad()
        for _ in range(20):
            sum(range(2000))
        train_step(model, optimizer, batch)
train(net(), torch.optim.AdamW(net().parameters()))
"""
)


def test_function_that_ran_when_tracing_began_has_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = traced(tmp_path, RUNNING, "--steps", "20:25", "--trace-stacks")
    assert haiprof.cli.main(["verdict", str(run.traces), "--all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "train.py train" in said
    assert not re.search(r"train\.py:\d+ train\b", said), said
    line = RUNNING[: RUNNING.index("def prepare")].count("\n") + 1
    assert f"train.py:{line} prepare" in said
    functions = haiprof.TraceAnalysis(run.traces).python_functions()["name"].to_list()
    assert [name for name in functions if name.endswith(": train")] == ["train.py(?): train"]


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


@pytest.mark.proof
@pytest.mark.parametrize(
    ("count", "recorded", "said"),
    [(23, [20, 21, 22], "the job ended inside the window"), (12, [], "not traced: the job ended")],
)
def test_job_that_ends_before_its_window_does_keeps_what_was_recorded(
    tmp_path: Path, count: int, recorded: list[int], said: str
) -> None:
    job, run = traced(tmp_path, PACED.format(count=count, seconds=0), "--steps", "20:30")
    assert len(names(run)) == bool(recorded)
    assert said in words(job)
    for trace in haiprof.TraceAnalysis(run.root).traces.values() if recorded else ():
        assert trace.steps["step"].to_list() == recorded


MLP = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32))
optimizer = torch.optim.AdamW(model.parameters())
for x in DataLoader(torch.randn(60 * 128, 64), batch_size=128):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


MLP_FLOPS = 2 * 128 * (64 * 256 * 2 + 256 * 32 * 3)
"""Of a step: each product once forward and twice backward, but the input has no gradient."""


@pytest.mark.parametrize(
    "batches", first_of(["DataLoader(", "list(DataLoader("], "DataLoader("), ids=["loader", "list"]
)
def test_traced_steps_have_ranges_around_their_operators_and_an_mfu(
    batches: str, tmp_path: Path
) -> None:
    text = MLP.replace("DataLoader(torch", f"{batches}torch")
    text = text.replace("=128):", "=128)):") if batches.startswith("list") else text
    _, run = traced(tmp_path, text, "--steps", "20:24", "--trace-modules", "--trace-shapes")
    check_ranges(run, tmp_path)
    check_mfu(run, tmp_path)


def check_ranges(run: RunPaths, folder: Path) -> None:
    """Forward and backward, in the trace and in what is made of it."""
    (path,) = run.traces.glob("*.gz")
    events = [event for event in load(path) if event.get("ph") == "X"]

    def named(start: str) -> list[dict[str, Any]]:
        return [event for event in events if event["name"].startswith(start)]

    steps = sorted(named("ProfilerStep#"), key=lambda event: event["ts"])
    assert [step["name"] for step in steps][:4] == [f"ProfilerStep#{n}" for n in range(20, 24)]
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
    done = run_command(["modules", str(run.root), "--json"], folder=folder)
    assert done.returncode == 0, done.stderr
    assert '"forward' not in done.stdout
    assert run_command(["merge", str(run.root)], folder=folder).returncode == 0
    for name in ("forward", "backward"):
        merged = [e for e in load(run.root / "merged.json.gz") if e["name"] == name]
        assert len(merged) == len({(event["ts"], event["dur"]) for event in merged}) >= 4
        assert len({event["pid"] for event in merged}) == 1


def check_mfu(run: RunPaths, folder: Path) -> None:
    peak = {"HAIPROF_PEAK": "fp32=0.5"}

    def answer(*words: str, **more: str) -> str:
        return run_command([*words, str(run.root)], folder=folder, extra_environment=more).stdout

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
    named = json.loads(answer("verdict", "--json", "--peak", "fp32=0.5"))
    assert named["work"]["mfu_ratio"] == found["work"]["mfu_ratio"]
    bare = json.loads(answer("verdict", "--json"))
    assert bare["work"]["mfu_ratio"] is None
    assert "no peak is known" in bare["work"]["reason"]


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


@pytest.mark.parametrize("name", marked(LOOPS, but=("ddp",)))
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


GAN = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
models = [DistributedDataParallel(torch.nn.Linear(8, 8)) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=.01) for model in models]
for step in range(1_000_000):
    with torch.profiler.record_function(f"job_step_{step}"):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    if step == 40 and dist.get_rank() == 0:
        print("TRAINS", flush=True)
    time.sleep(0.004)
"""


def started(folder: Path, *options: str, source: str) -> LiveJob:
    """The job, whose ranks have both reported in."""
    script = folder / "train.py"
    script.write_text(source)
    job = LiveJob(folder, plain_ranks(2, str(script)), "--quiet", *options)
    job.reported(2)
    return job


def job_steps(path: str) -> list[str]:
    """Steps in a trace, as the job itself numbers them."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return sorted({e["name"] for e in events if str(e.get("name")).startswith("job_step_")})


@pytest.mark.proof
def test_job_that_becomes_faster_than_it_said_is_asked_again(tmp_path: Path) -> None:
    source = ranks_training(each='os.path.exists("hurry") or time.sleep(0.05)')
    with started(tmp_path, source=source) as job, ThreadPoolExecutor(1) as pool:
        run = RunPaths(next((tmp_path / "logs").iterdir()))
        asking = pool.submit(job.ask, "trace-now", job.pid, "--steps", "3")
        within(60, lambda: any(run.control_requests.glob("*")))
        (tmp_path / "hurry").touch()
        found = asking.result()
    assert [rank["state"] for rank in found["ranks"]] == ["done", "done"], found
    assert found["aligned"]


@pytest.mark.proof
def test_ranks_that_record_again_trace_the_same_steps(tmp_path: Path) -> None:
    with started(tmp_path, "--time", "0.3", source=GAN) as job:
        within(60, lambda: not job.listed()["recording"])
        words = ("--time", "5", "--trace", "--steps", "3")
        trace = job.ask("attach", job.pid, *words)["trace"]
        assert [rank["state"] for rank in trace["ranks"]] == ["done", "done"], trace
        assert trace["aligned"]
        first, second = (job_steps(rank["path"]) for rank in trace["ranks"])
        assert first == second
        assert len(first) == 3


@pytest.mark.proof
def test_job_whose_recording_has_ended_refuses(tmp_path: Path) -> None:
    with started(tmp_path, "--time", "0.1", source=ranks_training()) as job:
        within(60, lambda: not job.listed()["recording"])
        found = job.ask("trace-now", job.pid, status=1)
        assert {rank["state"] for rank in found["ranks"]} == {"refused"}
        assert "recording has ended" in found["ranks"][0]["reason"]
