"""A rank that the others wait for in collectives of the job's own, between the phases."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.finding import Finding
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import PhaseTimes, write_story
from tests.unit.diagnosis.test_blocking_collectives import BARRIER, DDP, LOGGED
from tests.unit.diagnosis.test_code_questions import MAIN, sample

SCRIPT = "/home/me/train.py"
WORK = (SCRIPT, 13, "main")
SYNC = (SCRIPT, 15, "main")
SHORT: PhaseTimes = lambda rank, step: (0.0, 0.5, 1.0, 0.5)  # noqa: E731
GAP_MS = 10.0
IN_SYNC: Stack = (SYNC, LOGGED, BARRIER)


def write_collectives(root: Path, late_ms: Sequence[float], *, after: str = "backward") -> None:
    """One all-reduce per step, which each rank begins so late after the begin of a phase."""
    phases = RunFrames(root).phases()
    for rank, late in enumerate(late_ms):
        begins = phases.filter((phases["rank"] == rank) & (phases["phase"] == after))
        entries = [
            {
                "collective_seq_id": n + 1, "process_group": ["0", "default_pg"],
                "profiling_name": "gloo:all_reduce", "input_sizes": [[64]],
                "input_dtypes": ["Float"], "time_created_ns": begin + int(late * NS_PER_MS),
                "state": "completed",
            }
            for n, begin in enumerate(begins["start_ns"].to_list())
        ]  # fmt: skip
        wall_ns = int(str(phases["start_ns"].max()))
        dump = {"wall_ns": wall_ns, "groups": {}, "traces": [{"entries": entries}]}
        path = RunPaths(root).rank(rank).collectives(wall_ns)
        path.write_bytes(gzip.compress(json.dumps(dump).encode()))


def judge(
    root: Path, outside: Sequence[Stack], late_ms: Sequence[float], times: PhaseTimes = SHORT
) -> tuple[Finding, ...]:
    """Ranks with these stacks between the phases; none is sampled where there are none."""
    write_story(root, times, ranks=len(late_ms), gap_ms=GAP_MS, noise=0.0)
    for rank, stack in enumerate(outside):

        def at(phase: str, step: int, stack: Stack = stack) -> Stack:
            return stack if phase == "other" else (MAIN,)

        write_stacks(RunPaths(root).rank(rank).stacks, sample(RunFrames(root), at, rank=rank))
    write_collectives(root, late_ms)
    return diagnose(Analyzer(root)).findings


def of_rule(findings: Sequence[Finding], rule: str) -> Finding:
    return next(each for each in findings if each.rule == rule)


def test_the_line_at_which_a_rank_works_is_named_not_the_function_in_which_all_wait(
    tmp_path: Path,
) -> None:
    """Rank 0 waits in the same function as rank 1 works, and as long."""
    findings = judge(tmp_path / "run", [IN_SYNC, (WORK,)], (2.0, 26.0))
    (line,) = of_rule(findings, "late_rank").code_lines
    assert (line.file, line.line, line.function) == WORK
    assert line.share == pytest.approx(1.0, abs=0.05)


def test_a_rank_that_waits_elsewhere_in_the_same_function_takes_nothing_off(tmp_path: Path) -> None:
    """Its wait ends in no collective that Python calls: it is inside of torch's own backward."""
    engine = ("/x/site-packages/torch/autograd/graph.py", 800, "_engine_run_backward")
    findings = judge(tmp_path / "run", [(SYNC, engine), (WORK,)], (2.0, 26.0))
    (line,) = of_rule(findings, "late_rank").code_lines
    assert line.line == WORK[1]
    assert line.share == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("sampled", [True, False])
def test_waiting_between_the_phases_is_the_late_ranks_doing(tmp_path: Path, sampled: bool) -> None:
    """Without samples the wait is in no phase either: all of them together are shorter."""
    stacks = [IN_SYNC, (WORK,)] if sampled else []
    findings = judge(tmp_path / "run", stacks, (2.0, 26.0))
    assert [f.rule for f in findings[:2]] == ["late_rank", "outside_the_model"]
    assert findings[1].explained_by == "late_rank"
    assert findings[0].title.startswith("rank 1 is slow between the phases: ")
    assert findings[0].remedy.endswith("begin at train.py:13 main") is sampled


def test_time_outside_that_is_no_waiting_has_another_cause(tmp_path: Path) -> None:
    """All ranks work there most of the time; the late one works a little longer."""
    findings = judge(tmp_path / "run", [(WORK,), (WORK,)], (2.0, 8.0))
    assert of_rule(findings, "outside_the_model").explained_by is None
    assert of_rule(findings, "late_rank").rank == 1


def test_a_rank_that_is_longer_in_a_phase_is_slow_there(tmp_path: Path) -> None:
    """Its collectives begin between the phases all the same, where rank 0 is one gap longer."""
    times: PhaseTimes = lambda rank, _: (0.0, 10.5, 1.0, 0.5) if rank else (0.001, 0.5, 1.0, 0.5)  # noqa: E731
    findings = judge(tmp_path / "run", [IN_SYNC, (MAIN,)], (2.0, 12.0), times)
    assert of_rule(findings, "late_rank").title.startswith("rank 1 is slow in forward: ")


def test_collectives_that_begin_in_backward_are_waited_for_in_backward(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_story(root, lambda *_: (0.0, 5.0, 30.0, 2.0), ranks=2, noise=0.0)
    write_collectives(root, (5.0, 25.0))
    late = of_rule(diagnose(Analyzer(root)).findings, "late_rank")
    assert late.title.startswith("rank 1 is slow inside backward: ")
    assert late.explains == ()


@pytest.mark.parametrize(("late", "explained"), [(3, True), (2, False)])
def test_the_least_time_in_collectives_is_waiting_where_the_late_rank_is_not_looked_at(
    tmp_path: Path, late: int, explained: bool
) -> None:
    """Of 16 ranks every second one is: where the late one is, its own time is no waiting."""
    seldom: Stack = (MAIN, DDP)
    stacks = [seldom if rank == late else IN_SYNC for rank in range(16)]
    late_ms = [26.0 if rank == late else 2.0 for rank in range(16)]
    findings = judge(tmp_path / "run", stacks, late_ms)
    blocking = [f for f in findings if f.rule == "blocking_collectives"]
    assert [f.explained_by for f in blocking] == (["late_rank"] if explained else [])
