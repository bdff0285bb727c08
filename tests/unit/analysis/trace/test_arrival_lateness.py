"""Who is late: one rank and one number in every command, or none where chance may explain it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.diagnosis.function_reports import function_reports
from haiprof.show.views.causes import what_if_answers
from haiprof.show.views.trace_report import shown_tables
from haiprof.trace_analysis.report import standard_report
from haiprof.trace_analysis.what_if.replay_parts import rank_as_others
from tests.unit.analysis.trace.shared import Event, kernel, launch, rank_file, step, traces

STEPS, RANKS = 6, 4


def all_reduce(start_us: float, end_us: float, number: int) -> Event:
    said = {"Collective name": "allreduce", "Group size": RANKS, "Seq": number,
            "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]"}  # fmt: skip
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start_us, end_us - start_us, **said)


def write_ranks(
    folder: Path, late_us: Callable[[int, int], float], begin_us: Callable[[int], float] = float
) -> TraceAnalysis:
    """A collective per step at 1000 us, `late_us(rank, step)` later, from which all leave."""
    folder.mkdir(exist_ok=True)
    for rank in range(RANKS):
        events: list[Event] = []
        for number in range(STEPS):
            at = 10_000.0 * number
            begin = at + (begin_us(rank) if number == 0 else 0)
            end = at + 1_000 + max(late_us(other, number) for other in range(RANKS)) + 50
            if number == 0:
                end = max(end, 10_050)
            events += [
                step(number, begin, at + 10_000 - begin),
                launch(number, begin + 1),
                all_reduce(max(at + 1_000 + late_us(rank, number), begin), end, number),
            ]
        rank_file(folder, rank, events, RANKS)
    return TraceAnalysis(folder)


def answers_of_all_commands(path: Path) -> set[str]:
    """What trace-report, functions and what-if say about who is late."""
    report = standard_report(path)
    tables = [shown for shown in shown_tables(report) if shown.title.startswith("Who is late")]
    said = tables[0].legend if tables else report.missing["lateness"]
    talk = function_reports(TraceAnalysis(path).patterns(), "communication").reports[0]
    lines = [line for line in talk.meaning if line.startswith(("who is", "rank", "no rank"))]
    what_if = what_if_answers(path, [rank_as_others(0)])
    assert what_if.late is not None
    return {said, lines[0], what_if.late}


@pytest.mark.parametrize("name", ["dlrm_v100_8ranks", "hta_sampled_2ranks_ws128"])
def test_all_commands_answer_alike_on_real_ranks(name: str) -> None:
    assert len(answers_of_all_commands(traces(name))) == 1


def test_one_step_names_nobody_and_says_what_was_seen_in_it() -> None:
    found = TraceAnalysis(traces("dlrm_v100_8ranks")).arrival_lateness()
    assert not found["is_late"].any()
    assert found["low_ns"].null_count() == 8
    # 5, 4 and 7 are within 9 % of each other: three definitions named three of them.
    assert found["rank"].head(3).to_list() == [5, 4, 7]
    assert found["late_ns"].head(3).to_list() == [1_959_000, 1_835_000, 1_801_000]
    said = found["said"][0]
    assert "cannot be told from 1 step" in said
    assert "7.62 ms apart, rank 1 first and rank 7 last" in said  # unequal steps, and why


def test_a_late_rank_is_named_alike_everywhere_with_its_interval(tmp_path: Path) -> None:
    wobble = (0, 20, -20, 10, -10, 0)
    found = write_ranks(
        tmp_path / "t", lambda rank, number: 300 + wobble[number] if rank == 2 else 5 * rank
    )
    rows = found.arrival_lateness()
    first = rows.row(0, named=True)
    assert (first["rank"], first["is_late"], rows["is_late"].sum()) == (2, True, 1)
    assert first["late_ns"] == pytest.approx(295_000, abs=1_000)
    assert first["low_ns"] < first["late_ns"] < first["high_ns"] < 400_000
    (said,) = answers_of_all_commands(tmp_path / "t")
    assert said.startswith("rank 2 begins its collectives 295 µs per step later than the others")


def test_chance_names_nobody(tmp_path: Path) -> None:
    found = write_ranks(tmp_path, lambda rank, number: (rank * 7 + number * 5) % 11 * 30)
    rows = found.arrival_lateness()
    assert not rows["is_late"].any()
    assert rows["said"][0].startswith("no rank is late beyond chance")


def test_a_rank_whose_window_begins_later_is_not_called_late(tmp_path: Path) -> None:
    found = write_ranks(
        tmp_path, lambda rank, number: 5 * rank, lambda rank: 9_000 if rank == 3 else 0
    )
    rows = found.arrival_lateness()
    assert max(rows["late_ns"].to_list()) < 20_000
    assert "rank 3 last: that comes from before the traces" in rows["said"][0]


def test_ranks_of_which_others_lack_say_why_nobody_is_named() -> None:
    with pytest.raises(MissingDataError, match="size of the group not recorded"):
        TraceAnalysis(traces("hta_sampled_2ranks_ws128")).arrival_lateness()
