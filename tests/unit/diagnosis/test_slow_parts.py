"""Recorded ranks that wait for a stage, a shard, a machine, one rank, a sender, or seldom."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.parallelism import find_layout
from haiprof.run_analysis.run_files import open_run
from haiprof.run_analysis.run_frames import RunFrames
from tests.unit.diagnosis.stories import ledger_of, saved_ns

RUNS = Path(__file__).parents[2] / "data/runs"
RUN = RUNS / "eight_ranks"  # DP x PP x TP
STEPS = 60  # of each fault
FAULTS = ("stage", "shard", "machine", "rank", "none")


def judge(fault: str) -> Verdict:
    first = FAULTS.index(fault) * STEPS
    inside = pl.col("step").is_between(first + 1, first + STEPS - 2)
    steps = RunFrames(RUN).steps().filter(inside)
    ends = (steps["start_ns"] + steps["step_ns"]).to_list()
    return diagnose(RunFrames(RUN, between=(min(steps["start_ns"]), max(ends))))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stage", "pipeline stage 1 of 0-1 (ranks 2, 3, 6 and 7) holds the job up: its ranks need"),
        ("shard", "data shard 1 of 0-1 (ranks 4-7) holds the job up: its ranks need"),
        ("machine", "machine node1 (ranks 2-5) holds the job up: its ranks need"),
        ("rank", "rank 5 (PP 0, TP 1, DP 1) holds the job up: it needs"),
    ],
)
def test_part_that_is_slow_is_named_as_what_it_is(fault: str, said: str) -> None:
    verdict = judge(fault)
    assert verdict.headline.startswith(said)
    first = verdict.findings[0]
    assert 15e6 < saved_ns(first) < 30e6, "the sleep of 20 ms"
    assert first.code_lines[0].function == "Part.forward"
    assert not any("collectives between the phases" in each.title for each in verdict.findings)


def test_no_part_is_named_where_none_is_slow() -> None:
    assert "slow_part" not in [finding.rule for finding in judge("none").findings]


def test_ranks_have_coordinates() -> None:
    layout = find_layout(open_run(RUN))
    assert layout is not None
    assert layout.names([5]) == "rank 5 (PP 0, TP 1, DP 1)"
    assert layout.names([1, 4]) == "ranks 1 and 4"


def test_who_waits_for_a_sender_is_told_what_that_does() -> None:
    """Ranks that train nothing run a loop of their own: their steps are not judged."""
    verdict = diagnose(RunFrames(RUNS / "actor_learner"))
    assert verdict.headline.startswith("waiting for rank 1 to send")
    assert "search" in verdict.findings[0].remedy
    assert (verdict.step_count, verdict.ranks) == (150, (0,))
    assert "rank 1: no optimizer seen: the steps are those of the others" in verdict.notes
    assert not any("other settings" in each.title for each in verdict.findings)


def test_work_that_another_rank_needs_to_do_is_no_lost_wait() -> None:
    """The server waits half of its time for gradients that are made meanwhile."""
    verdict = diagnose(RunFrames(RUNS / "parameter_server"))
    assert "clip_rows (train.py:" in verdict.headline
    ledger = ledger_of(verdict)
    waits = [a for a in ledger.accounts if a.activity == "wait: link"]
    assert sum(a.gain_ns for a in waits) < 0.1 * ledger.mean_ns
    assert sum(a.ns_per_step for a in waits if a.needed) > 0.1 * ledger.mean_ns
    assert not any("straggler" in each.title for each in verdict.findings)


def test_a_stage_with_more_layers_gains_by_what_others_take_over() -> None:
    verdict = diagnose(RunFrames(RUNS / "uneven_stages"))
    assert verdict.headline.startswith("rank 0 holds the job up: it needs 45.3 ms longer")
    assert saved_ns(verdict.findings[0]) == pytest.approx(45.3e6 / 2, rel=0.01)


def test_stages_that_work_one_after_the_other_need_microbatches() -> None:
    """torch.distributed.pipelining waits in its own Python; half of the time, as of two stages."""
    verdict = diagnose(RunFrames(RUNS / "gpipe"))
    assert "48 % of the step a rank waits for what others compute meanwhile" in verdict.headline
    ledger = ledger_of(verdict)
    waits = [a for a in ledger.accounts if a.activity.startswith("wait: ")]
    assert sum(a.ns_per_step for a in waits) == pytest.approx(0.5 * ledger.mean_ns, rel=0.05)
    assert sum(a.gain_ns for a in waits) < 0.1 * ledger.mean_ns


def test_what_ranks_do_where_they_meet_is_a_part_of_all_steps() -> None:
    """They meet in each 20th step, for longer than a usual step takes."""
    verdict = diagnose(RunFrames(RUNS / "averaged_weights"))
    first, ledger = verdict.findings[0], ledger_of(verdict)
    assert "average (train.py:39" in first.title
    assert first.remedy.startswith("exchange tensors")
    in_all = sum(a.ns_per_step for a in ledger.accounts if a.function == "average")
    assert saved_ns(first) < 1.2 * in_all < 0.8 * ledger.mean_ns
