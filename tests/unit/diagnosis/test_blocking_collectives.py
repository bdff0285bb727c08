"""Time in collectives counts where the job's own code calls them, and every rank waits in them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.finding import Finding
from haiprof.diagnosis.rules.blocking_collectives import RULE
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import HEARTBEAT, NULL_I64
from tests.unit.analysis.recorded import write_records
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import START_NS, write_story
from tests.unit.diagnosis.test_code_questions import MAIN, SITE, sample

SHARE = ("/home/me/train.py", 61, "share_metrics")
LOGGED = (f"{SITE}/torch/distributed/c10d_logger.py", 83, "_exception_logger.<locals>.wrapper")
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 4800, "barrier")
DDP = (f"{SITE}/torch/nn/parallel/distributed.py", 1600, "DistributedDataParallel._sync_buffers")
FSDP = (f"{SITE}/torch/distributed/fsdp/_runtime_utils.py", 500, "_wait")
OWN: Stack = (MAIN, SHARE, LOGGED, BARRIER)


def _at(outside: Stack, phase: str, step: int) -> Stack:
    return outside if phase == "other" else (MAIN,)


def judge(tmp_path: Path, *stacks: Stack) -> Finding | None:
    """The rule's finding where ranks 0 and 1 have these stacks outside of the four phases."""
    root = write_story(tmp_path / "run", lambda *_: (1.0, 4.0, 8.0, 2.0), ranks=2, gap_ms=2.0)
    for rank, stack in enumerate(stacks):
        found = sample(RunFrames(root), partial(_at, stack), rank=rank)
        write_stacks(RunPaths(root).rank(rank).stacks, found)
    verdict = diagnose(Analyzer(root))
    assert RULE not in dict(verdict.abstained)
    return next((each for each in verdict.findings if each.rule == RULE), None)


def test_a_barrier_in_each_step_is_named_with_its_line(tmp_path: Path) -> None:
    finding = judge(tmp_path, OWN, OWN)
    assert finding is not None
    line = finding.code_lines[0]
    assert (line.file, line.line, line.function) == SHARE
    assert line.callees == ("torch.distributed.distributed_c10d.barrier",)
    assert finding.lost_ratio == pytest.approx(line.share, abs=0.01)
    assert finding.remedy.endswith("begin at train.py:61 share_metrics")


def test_how_many_collectives_a_step_begins_is_told(tmp_path: Path) -> None:
    """Three per step of the world's group and one of another, read every 20 steps of 23 ms."""
    finding = judge(tmp_path, OWN, OWN)
    assert finding is not None
    assert finding.missing == ("how many collectives a step begins",)
    step_ns = 23 * NS_PER_MS
    for rank in range(2):
        rows = [
            (START_NS + step * step_ns, group, each * step, NULL_I64, NULL_I64)
            for step in range(0, 61, 10)
            for group, each in ((0, 3), (1, 1))
        ]
        write_records(RunPaths(tmp_path / "run").rank(rank).heartbeat, HEARTBEAT, rows)
    found = {f.rule: f for f in diagnose(Analyzer(tmp_path / "run")).findings}[RULE]
    counts = {e.name: e.value for e in found.evidence}
    assert counts["collectives per step, with those of gradients"] == pytest.approx(4, rel=0.03)
    assert found.missing == ()


@pytest.mark.parametrize("other", [(MAIN, SHARE), (MAIN, DDP, LOGGED, BARRIER)])
def test_waiting_for_one_rank_is_no_cost_of_the_collective(tmp_path: Path, other: Stack) -> None:
    assert judge(tmp_path, OWN, other) is None


@pytest.mark.parametrize("library", [DDP, FSDP])
def test_what_the_library_calls_is_not_the_jobs(
    tmp_path: Path, library: tuple[str, int, str]
) -> None:
    stack = (MAIN, library, LOGGED, BARRIER)
    assert judge(tmp_path, stack, stack) is None
