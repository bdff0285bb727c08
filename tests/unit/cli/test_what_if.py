"""`haiprof trace what-if` as a user sees it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import polars as pl
import pytest

from haiprof.cli.trace_causes import parse_change
from haiprof.trace_analysis.what_if.replay import RANK, Change
from tests.commands import Run
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, step, traces

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A step of 1000 us: 500 of the loader, 100 in launches, 300 of the CPU; kernels hide."""
    events = [
        step(1, 0, 1000),
        event(LOADER, "user_annotation", 50, 500),
        event("aten::mm", "cpu_op", 600, 200),
        launch(1, 610, 100),
        kernel("void gemm<float>(int)", 720, 40, correlation=1),
    ]
    rank_file(tmp_path, 0, events, world_size=1)
    return tmp_path


def test_what_if_says_first_how_well_it_reproduces_and_then_what_helps_most(
    trace: Path, run: Run
) -> None:
    _, out, err = run("what-if", trace)
    lines = [line.split() for line in out.splitlines()]
    assert err == ""
    assert " ".join(lines[0]) == (
        "step 1.00 ms measured, 1.00 ms replayed from its dependencies (0.0 %)"
    )
    best = next(line for line in lines if line[:1] == ["loader"])
    assert best == ["loader", "2x", "750", "µs", "25", "%"]
    order = [line[0] for line in lines if "2x" in line]
    assert order[0] == "loader"
    assert {"launches", "kernel", "operator"} <= set(order)
    assert max(map(len, out.splitlines())) <= 100
    out = run("what-if", trace, "--faster", "kernel=conv:2x").out
    assert "kernel conv 2x: it met nothing in these steps" in out


def test_what_if_answers_what_was_asked_in_its_order(trace: Path, run: Run) -> None:
    asked = ("launches", "loader:5x", "kernel=gemm:2x", "operator=aten::mm:2x")
    words = [word for text in asked for word in ("--faster", text)]
    found = run("what-if", trace, *words, "--json").data
    assert (found["measured_step_ns"], found["error_ratio"]) == (1_000_000, 0.0)
    assert found["explained_step_ns"] == 1_000_000
    assert [(row["change"], row["predicted_step_ns"] // 1000) for row in found["predictions"]] == [
        ("launches takes no time", 900),
        ("loader 5x", 600),
        ("kernel gemm 2x", 1000),
        ("operator aten::mm 2x", 900),
    ]


@pytest.mark.parametrize(("asked", "shown", "count"), [
    ("collective=all_reduce:2x", "collective all_reduce 2x", 73),
    ("network:2x", "network 2x", 74),
    ("kernel=nccl:2x", "kernel nccl 2x", 1),
])  # fmt: skip
def test_what_if_says_what_one_rank_alone_cannot_change(
    asked: str, shown: str, count: int, run: Run
) -> None:
    found = run("what-if", traces("tl_b200_r0of8_nccl"), "--faster", asked, "--json").data
    assert (found["predictions"][0]["held_count"], found["unmatched_count"]) == (count, 74)
    many = "collectives" if count > 1 else "collective"
    said = f"{shown}: it met {count} {many} that cannot be changed from one rank's trace"
    assert said in found["notes"][-1]


@pytest.mark.parametrize(("words", "status", "message"), [
    (["{}", "--faster", "gpu:2x"], 2, "--faster gpu:2x: not understood"),
    (["{}", "--faster", "kernel:2x"], 2, "not understood"),
    (["{}", "--faster", "kernel=(:2x"], 2, "no regular expression"),
    (["{}", "--faster", "loader:0x"], 2, "0.0 times"),
    (["{}", "--faster", "loader:..x"], 2, "no number"),
    (["{}", "--faster", "rank=7"], 2, "rank 7 has no trace"),
    (["{}", "--faster", "rank=0:2x"], 2, "rank=0:2x: not understood"),
    (["{}", "--faster", "ranks"], 2, "no other rank"),
    (["{}", "--steps", "7"], 5, "no step from 7"),
    (["/nowhere"], 4, "/nowhere"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
def test_what_if_error_is_one_line(
    trace: Path, words: list[str], status: int, message: str, run: Run
) -> None:
    told = (word.replace("{}", str(trace)) for word in words)
    _, out, err = run("what-if", *told, status=status)
    assert out == ""
    assert message in err.splitlines()[0]


@pytest.mark.parametrize(("text", "change"), [
    ("kernel=gemm:2x", Change(kind="kernel", name="gemm", speedup=2)),
    ("kernel=gemm", Change(kind="kernel", name="gemm")),
    ("operator=aten::mm:1.5x", Change(kind="operator", name="aten::mm", speedup=1.5)),
    ("operator=aten::2", Change(kind="operator", name="aten::2")),
    ("network:1e3x", Change(kind="network", speedup=1000)),
    ("rank=3", Change(kind=RANK, rank=3)),
    ("ranks", Change(kind=RANK)),
])  # fmt: skip
def test_change_is_read_as_it_is_written(text: str, change: Change) -> None:
    assert parse_change(text) == change


def test_change_without_speed_takes_no_time() -> None:
    assert parse_change("loader").speedup == math.inf


def test_tables_of_published_jobs_give_their_slowdowns(run: Run) -> None:
    folder = traces("straggler_whatif")
    found = run("what-if", folder, "--json").data["jobs"]
    jobs = {Path(job["path"]).stem[-2:]: job for job in found}
    assert set(jobs) == {"AR", "ST"}
    said = json.loads((folder / "result-ST.json").read_text())
    assert jobs["ST"]["slowdown_ratio"] == pytest.approx(said["blocking_slowdown"], rel=0.01)
    out = run("what-if", folder).out
    assert max(map(len, out.splitlines())) <= 100
    assert "M_W" in out


def test_table_that_is_none_is_one_line(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "job.parquet"
    path.write_bytes(b"PAR1 no such thing")
    run("what-if", path, status=4)
    columns = {"dp_rank": [0], "stage": [0], "rank": [0], "step": [0], "optype": ["gc"],
               "start_ts": [math.nan], "duration": [1.0], "seq_id": [0]}  # fmt: skip
    pl.DataFrame(columns).write_parquet(path)
    run("what-if", path, status=4)
    pl.DataFrame(columns | {"start_ts": [0.0], "duration": [-1.0]}).write_parquet(path)
    assert "negative" in run("what-if", path, status=4).err
    pl.DataFrame({"a": [1]}).write_parquet(path)
    run("what-if", path, status=5)
    assert "replayed whole" in run("what-if", path, "--faster", "loader", status=2).err


def test_host_time_outside_of_all_events_is_told_before_small_gains(
    tmp_path: Path, run: Run
) -> None:
    """A job that sleeps for most of its step: a faster operator hardly helps."""
    rank_file(tmp_path, 0, [step(1, 0, 1000), event("aten::mm", "cpu_op", 100, 50)], world_size=1)
    said = run("what-if", tmp_path).said
    assert "95 % of the step is host time outside of all recorded" in said
    rank_file(tmp_path, 0, [
        step(1, 0, 1000), event("aten::mm", "cpu_op", 100, 50),
        event("train.py(3): augment", "python_function", 160, 800),
    ], world_size=1)  # fmt: skip
    said = run("what-if", tmp_path).said
    assert "95 % of the step is host time outside of all operators" in said
    assert "record Python stacks" not in said


def test_change_that_makes_nothing_faster_is_no_shorter_and_steps_are_told_apart(run: Run) -> None:
    said = run("what-if", traces("tb_resnet50_nw0_v100"))[1]
    assert re.search(r"^  kernel .* 178 ms +no shorter", said, re.MULTILINE), said
    said = run("what-if", traces("tl_h100_qwen05_mem_stack")).said
    assert "step 49.4 ms measured" in said
    assert "the verdict's step is 35.2 ms, the device's own" in said
