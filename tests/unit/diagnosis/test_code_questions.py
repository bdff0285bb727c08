"""Findings name the line of code: of the right phase, thread, rank and steps, with its share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.code_questions import CodeAnswers
from haiprof.diagnosis.document import as_document
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.finding import CodeLine, Finding
from haiprof.diagnosis.rule_inputs import gather_inputs
from haiprof.run_analysis.lines import function_times
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from tests.unit.analysis.recorded import WALL_OFFSET_NS, spans_from, write_rank, write_run
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import START_NS, PhaseTimes, write_beside, write_story
from tests.unit.diagnosis.test_run_rules import neighbours, plain_steps, write_line

SITE = "/opt/venv/lib/python3.11/site-packages"
MAIN = ("/home/me/train.py", 40, "main")
LOAD = ("/home/me/data.py", 12, "load_image")
OPEN = (f"{SITE}/PIL/Image.py", 3000, "open")
FETCH = (f"{SITE}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
BROADCAST = (f"{SITE}/torch/distributed/distributed_c10d.py", 2900, "broadcast")
LOG = ("/home/me/train.py", 70, "log_everything")
SOMETIMES = ("/home/me/train.py", 80, "sometimes")


def findings_of(root: Path) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(Analyzer(root)).findings}


def sample(
    run: RunFrames, at: Callable[[str, int], Stack], *, rank: int = 0
) -> list[tuple[int, Stack]]:
    """A sample in the middle of each span of a rank and of what follows it, by phase and step."""
    offset = run.files.ranks[0].report["clock"]
    wall = offset["wall_ns"] - offset["mono_ns"]
    found = []
    for row in run.phases().filter(run.phases()["rank"] == rank).iter_rows(named=True):
        middle = (row["start_ns"] - wall + row["duration_ns"] // 2) // 1000 * 1000
        found.append((middle, at(row["phase"], row["step"])))
        after = (row["start_ns"] - wall + row["duration_ns"] + 100_000) // 1000 * 1000
        found.append((after, at("other", row["step"])))
    return found


def story(
    tmp_path: Path, times: PhaseTimes, at: Callable[[str, int], Stack], **options: float | int
) -> Path:
    root = write_story(tmp_path / "run", times, **options)  # type: ignore[arg-type]
    write_stacks(RunPaths(root).rank(0).stacks, sample(RunFrames(root), at))
    return root


def test_a_loader_on_the_training_thread_is_named_with_its_share_of_the_step(
    tmp_path: Path,
) -> None:
    def at(phase: str, step: int) -> Stack:
        return (MAIN, FETCH, LOAD, OPEN) if phase == "dataloader" else (MAIN,)

    found = findings_of(story(tmp_path, lambda rank, step: (30.0, 4.0, 8.0, 2.0), at))
    line = found["dataloader_bound"].code_lines[0]
    assert (line.file, line.line, line.function) == LOAD
    assert line.share == pytest.approx(30 / 44.8, abs=0.02)
    assert line.callees == ("PIL.Image.open",)
    assert found["dataloader_bound"].remedy.endswith("begin at data.py:12 load_image")


def test_with_workers_their_lines_are_named_not_the_wait_for_them(tmp_path: Path) -> None:
    root = story(tmp_path, lambda rank, step: (30.0, 4.0, 8.0, 2.0), lambda p, s: (MAIN,))
    stacks: list[Stack] = [(FETCH, LOAD)] * 40 + [(MAIN,)] * 20
    samples = [(START_NS + 20_000_000 * (i + 10), stack) for i, stack in enumerate(stacks)]
    write_stacks(RunPaths(root).rank(0).worker_stacks(0), samples, worker=0, pid=9)
    line = findings_of(root)["dataloader_bound"].code_lines[0]
    assert (line.function, line.of, line.share) == ("load_image", "the workers' loading", 1.0)


def test_line_is_of_the_rank_that_works_not_of_the_one_that_waits_for_it(tmp_path: Path) -> None:
    root = write_story(tmp_path / "run", lambda *_: (0.2, 4.0, 8.0, 2.0), ranks=2, gap_ms=8.0)
    busy: dict[int, Stack] = {0: (MAIN, LOG), 1: (MAIN, SOMETIMES, BROADCAST)}
    for rank, stack in busy.items():

        def at(phase: str, step: int, stack: Stack = stack) -> Stack:
            return stack if phase == "other" else (MAIN,)

        write_stacks(RunPaths(root).rank(rank).stacks, sample(RunFrames(root), at, rank=rank))
    (found,) = findings_of(root)["outside_the_model"].code_lines
    assert found.function == "log_everything"


def test_lines_of_a_job_beside_it_are_no_lines_of_this_one(tmp_path: Path) -> None:
    """Two scripts that one shell script runs at once: both are rank 0, and know of no other."""
    root = story(
        tmp_path, lambda *_: (0.2, 4.0, 8.0, 2.0), lambda p, s: (MAIN, LOG), gap_ms=8.0, steps=200
    )
    write_beside(root, 30.0, steps=150)
    times = [START_NS + 20_000_000 * at for at in range(1, 200)]
    write_stacks(RunPaths(root).rank(0).stacks, [(time, (MAIN, LOAD)) for time in times])
    found = findings_of(root)
    assert set(found) == {"outside_the_model"}  # and no checkpoints of the other
    assert [line.function for line in found["outside_the_model"].code_lines] == ["log_everything"]


def test_slow_steps_are_compared_with_usual_ones(tmp_path: Path) -> None:
    """What runs in every step is no cause of jitter, however long it takes."""

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        return (1.0, 90.0 if step % 10 == 9 else 20.0, 8.0, 2.0)

    def at(phase: str, step: int) -> Stack:
        slow = phase == "forward" and step is not None and step % 10 == 9
        return (MAIN, SOMETIMES) if slow else (MAIN, LOG)

    found = findings_of(story(tmp_path, times, at, steps=200))
    lines = found["jitter"].code_lines
    assert [line.function for line in lines] == ["sometimes"]
    assert lines[0].of == "the extra time of slow steps in forward"


def test_lines_stand_in_the_document(tmp_path: Path) -> None:
    root = story(tmp_path, lambda rank, step: (30.0, 4.0, 8.0, 2.0), lambda p, s: (MAIN, LOG))
    content = json.loads(json.dumps(as_document(diagnose(Analyzer(root)))))
    lines = next(f for f in content["findings"] if f["slug"] == "dataloader_bound")["code_lines"]
    assert lines[0]["function"] == "log_everything"
    assert lines[0]["low"] <= lines[0]["share"] <= lines[0]["high"]


def test_without_samples_a_finding_is_as_it_was(tmp_path: Path) -> None:
    root = write_story(tmp_path / "run", lambda rank, step: (30.0, 4.0, 8.0, 2.0))
    found = findings_of(root)["dataloader_bound"]
    assert found.code_lines == ()
    assert "begin at" not in found.remedy


def test_a_line_is_described_in_one_sentence() -> None:
    line = CodeLine(
        file="/home/me/train.py", line=88, function="load_image", share=0.61, low=0.55, high=0.67,
        of="the step", sample_count=90, callees=("PIL.Image.open",),
    )  # fmt: skip
    assert line.describe() == (
        "train.py:88 load_image: 61 % of the step (55 to 67 %), in PIL.Image.open"
    )
    called = replace(line, low=None, callees=(), callers=("train.py:9 evaluate", "train.py:2 main"))
    assert called.describe() == (
        "train.py:88 load_image: 61 % of the step, called by train.py:9 evaluate < train.py:2 main"
    )


def test_a_name_cannot_steer_a_terminal() -> None:
    line = CodeLine(
        file="/tmp/\x1b[2Jx\n.py", line=1, function="f\u202e", share=0.5, low=None, high=None,
        of="the step", sample_count=9, callees=("a\x1b]0;b",),
    )  # fmt: skip
    assert line.describe().isprintable()


def test_recompiles_name_what_is_compiled_not_what_runs_compiled(tmp_path: Path) -> None:
    compiler = ("/x/site-packages/torch/_dynamo/convert_frame.py", 9, "__call__")
    root = story(
        tmp_path,
        lambda rank, step: (1.0, 30.0, 8.0, 2.0),
        lambda phase, step: (MAIN, LOG, compiler) if step < 9 else (MAIN, LOAD, OPEN),
    )
    analyzer = Analyzer(root)
    samples = analyzer.code_samples()
    inside = samples.take(samples.tree.within("/torch/_dynamo/convert_frame.py")[samples.stack])
    assert {time.function for time in function_times(inside)} == {LOG[2]}


def test_a_heavy_evaluation_names_who_calls_the_model_not_its_layers(tmp_path: Path) -> None:
    module = ("/x/site-packages/torch/nn/modules/module.py", 9, "Module._call_impl")
    layer, evaluate = ("/home/me/net.py", 5, "Net.forward"), ("/home/me/train.py", 30, "evaluate")
    root = story(
        tmp_path,
        lambda rank, step: (1.0, 30.0, 8.0, 2.0),
        lambda phase, step: (MAIN, evaluate, module, layer) if step % 2 else (MAIN, evaluate),
    )
    samples = Analyzer(root).code_samples()
    outside = samples.tree.ends_outside("/torch/nn/modules/module.py")[samples.stack]
    (time,) = function_times(replace(samples, stack=outside))
    assert (time.function, time.callers[0].function) == ("evaluate", "main")


@pytest.mark.parametrize("since", [3.0, -2.0])
@pytest.mark.parametrize(("line", "is_own"), [(LOG, True), (LOAD, False)])
def test_a_new_line_of_code_is_no_neighbours_doing(
    tmp_path: Path, line: tuple[str, int, str], is_own: bool, since: float
) -> None:
    """Forward takes four times as long from step 150 on; others come then, or were there before.

    It is in a line that was not there before; or in the one that always was most of forward.
    """

    def at(phase: str, step: int) -> Stack:
        return (MAIN, line if step >= 150 else LOAD) if phase == "forward" else (MAIN,)

    root = tmp_path / "run"
    neighbours(
        root, wait=0.4, node=1.9, since=since,
        shape=lambda _, step: (0.2, 20.0 if step >= 150 else 5.0, 10.0, 2.0),
    )  # fmt: skip
    write_stacks(RunPaths(root).rank(0).stacks, sample(RunFrames(root), at))
    drift = findings_of(root)["step_time_drift"]
    assert drift.explained_by == (None if is_own else "busy_neighbours")
    assert ("waiting for cores began" in drift.title) is (since > 0 and not is_own)


@pytest.mark.parametrize(
    ("phase", "times"),
    [
        ("forward", (0.2, 20.0, 30.0, 2.0)),  # forward is shorter than backward all the same
        ("backward", (0.2, 10.0, 40.0, 2.0)),  # four times forward: gradients may be dear
        ("optimizer", (0.2, 10.0, 20.0, 20.0)),
    ],
)
@pytest.mark.parametrize(("main", "waits"), [(0.5, True), (1.0, False)])
def test_own_code_that_waits_in_a_phase_is_found_where_the_process_is_idle(
    tmp_path: Path, phase: str, times: tuple[float, float, float, float], main: float, waits: bool
) -> None:
    """A busy process computes there: operators that the job's own line calls."""

    def at(of: str, step: int) -> Stack:
        return (MAIN, LOG) if of == phase else (MAIN, FETCH)

    root = tmp_path / "run"
    neighbours(root, wait=0.0, node=1.0, main=main, shape=lambda *_: times)
    write_stacks(RunPaths(root).rank(0).stacks, sample(RunFrames(root), at))
    found = findings_of(root)
    assert (f"{phase}_bound" in found) is waits
    if waits:
        finding = found[f"{phase}_bound"]
        assert finding.lost_ratio == pytest.approx(
            min(times[1:][("forward", "backward", "optimizer").index(phase)] / sum(times), 0.5),
            abs=0.08,
        )
        assert finding.code_lines[0].function == "log_everything"


def test_python_of_the_jobs_own_in_forward_is_not_where_torch_calls_it(tmp_path: Path) -> None:
    """Operators take more of forward than the hook: time of the line that calls the model."""
    linear = (f"{SITE}/torch/nn/modules/linear.py", 130, "Linear.forward")
    hook = ("/home/me/train.py", 4, "stats_hook")

    def at(phase: str, step: int) -> Stack:
        return (MAIN, linear, hook) if phase == "forward" and step % 3 == 0 else (MAIN, linear)

    root = story(tmp_path, lambda rank, step: (0.2, 30.0, 8.0, 2.0), at)
    finding = Finding(
        rule="forward_bound", cause="python", title="", evidence=(), remedy="see", confidence=0.8
    )
    analyzer = Analyzer(root)
    named = CodeAnswers(analyzer, gather_inputs(analyzer)).name_lines(finding)
    (line,) = named.code_lines
    assert (line.file, line.line, line.function) == hook
    assert line.share == pytest.approx(30 / 41 / 3, abs=0.04)
    assert (line.low or 0.0) < line.share < (line.high or 0.0)


@pytest.mark.parametrize("sample_count", [6, 0])
def test_the_line_of_a_collection_is_of_its_samples(tmp_path: Path, sample_count: int) -> None:
    """One collection of 0.7 s; all other samples are at another line of the same function."""
    collect = ("/home/me/train.py", 9, "main")
    pause = lambda step, now: [(now, 700 * NS_PER_MS)] if step == 60 else []  # noqa: E731
    write_line(tmp_path / "run", plain_steps(extra=pause))
    run = RunFrames(tmp_path / "run")
    (begin,) = run.pauses()["start_ns"].to_list()
    begin -= WALL_OFFSET_NS
    inside = [((begin // 1000 + 690_000 + i) * 1000, (collect,)) for i in range(sample_count)]
    around = [(at, stack) for at, stack in sample(run, lambda *_: (MAIN,)) if at < begin]
    write_stacks(RunPaths(tmp_path / "run").rank(0).stacks, [*around, *inside])
    finding = findings_of(tmp_path / "run")["garbage_collection"]
    lines = [(line.line, line.share, line.of) for line in finding.code_lines]
    assert lines == ([(collect[1], 1.0, "the collections")] if sample_count else [])
    assert ("begin at train.py:9 main" in finding.remedy) is bool(sample_count)


@pytest.mark.parametrize(("lock", "is_named"), [("h", True), ("0", False), ("-", False)])
def test_python_of_marked_steps_is_named_with_its_line_and_operators_are_not(
    tmp_path: Path, lock: str, is_named: bool
) -> None:
    """A loop of `haiprof.step()` without any phase: only what holds the interpreter is named."""
    root = tmp_path / "run"
    times = [START_NS + step * 20 * NS_PER_MS for step in range(100)]
    rows = [(schema.MARK, 0, time, time + 1_000) for time in times]
    write_rank(write_run(root), spans_from(rows))
    samples = [(time + 10 * NS_PER_MS, (MAIN, LOG)) for time in times]
    write_stacks(RunPaths(root).rank(0).stacks, samples, lock=lock * len(samples))
    found = findings_of(root)
    assert ("outside_the_model" in found) is is_named
    if is_named:
        assert found["outside_the_model"].code_lines[0].function == "log_everything"
        assert found["outside_the_model"].lost_ratio == pytest.approx(1.0)
