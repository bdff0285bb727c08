"""What was noticed while the job ran, and whether to start it again, as the verdict tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.__main__ import main
from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.restart_advice import Attempt, advise
from haiprof.diagnosis.rule_inputs import gather_inputs
from haiprof.diagnosis.run_notes import grown_phase, reacted_lines
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import append_line
from haiprof.show.text import moment_text
from haiprof.trace_analysis.sql import ask, sql_tables
from tests.unit.diagnosis.stories import START_NS, note, write_story

HANG = {
    "type": "reaction", "name": "reaction-hang-0", "trigger": "hang", "rank": 0, "step": 59,
    "reason": "no step for 320 s (limit 300 s)", "silent_ns": 320 * NS_PER_S,
    "limit_ns": 300 * NS_PER_S, "action": "snapshot",
}  # fmt: skip
SLOW = {
    "type": "reaction", "name": "reaction-slow-0", "trigger": "slow", "rank": 0, "step": 412,
    "reason": "", "before_ns": 41.0e6, "after_ns": 52.3e6, "action": "trace-now",
}  # fmt: skip
SUSPECT = {
    "rank": 1, "reason": "its process is stopped by a signal (SIGSTOP)", "doing": "a.py:3 in load",
    "certain": True,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_story(tmp_path / "run", lambda rank, step: (0.2, 5.0, 10.0, 2.0), ranks=2)


def judged(root: Path, *lines: dict[str, Any], at_end: bool = True) -> Verdict:
    """With these lines, noticed after the last step, or in the middle of the run."""
    steps = Analyzer(root).steps()
    start, end = steps["start_ns"].min(), (steps["start_ns"] + steps["step_ns"]).max()
    assert isinstance(start, int)
    assert isinstance(end, int)
    at = end + 1 if at_end else (start + end) // 2
    for line in lines:
        times = {"wall_ns": at, "since_wall_ns": at - 90 * NS_PER_S}
        append_line(RunPaths(root).node("node0").events, times | line)
    return diagnose(Analyzer(root))


def result(name: str, **more: object) -> dict[str, Any]:
    return {"type": "reaction_result", "name": name, "state": "done", **more}


def test_rank_that_held_the_job_up_is_the_first_finding(run: Path) -> None:
    done = result("reaction-hang-0", path="/s.json", moves=False, saving=[], suspects=[SUSPECT])
    found = judged(run, HANG, done)
    first = found.findings[0]
    assert (first.rule, first.rank, first.severity) == ("standstill", 1, "critical")
    assert "rank 1 held the job up" in first.title
    assert "kill -CONT" in first.remedy
    assert "no step for 320 s" in found.reactions[0]
    assert "a.py:3 in load" in found.reactions[0]


def test_ranks_that_contradict_each_other_are_not_told_apart(run: Path) -> None:
    reason = "collective 106 of group 0: rank 0 all_reduce, rank 1 broadcast (kind differs)"
    both = [{"rank": rank, "reason": reason, "doing": "", "certain": True} for rank in (0, 1)]
    found = judged(run, HANG, result("reaction-hang-0", moves=False, suspects=both))
    assert (found.findings[0].rule, found.findings[0].rank) == ("standstill", None)
    assert "same order" in found.findings[0].remedy
    assert "rank 1 broadcast" in found.reactions[0]


def test_hang_after_which_steps_went_on_is_no_more_than_a_warning(run: Path) -> None:
    done = result("reaction-hang-0", moves=False, suspects=[SUSPECT])
    (first,) = [f for f in judged(run, HANG, done, at_end=False).findings if f.rank == 1]
    assert first.severity == "warning"
    assert "until the next step ended" in [evidence.name for evidence in first.evidence]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"suspects": [], "saving": [0], "moves": False}, "rank 0 was saving a checkpoint"),
        ({"suspects": [], "moves": True}, "collectives went on"),
        ({"suspects": [], "moves": None}, "no rank differed"),
        ({"suspects": [], "all_at": "a.py:3 in load"}, "all were at a.py:3 in load"),
        ({"state": "failed", "reason": "the job ended before"}, "no snapshot: the job ended"),
    ],
)
def test_hang_without_a_named_rank_is_said_and_no_finding(
    run: Path, more: dict[str, object], said: str
) -> None:
    found = judged(run, HANG, result("reaction-hang-0", **more))
    assert "standstill" not in [f.rule for f in found.findings]
    assert said in found.reactions[0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([SLOW, result("reaction-slow-0", window=2, steps=[430, 435])], "430 to 434 were traced"),
        ([SLOW], "no trace of them: none was done by then"),
        ([{**SLOW, "action": "none"}], "ms) at "),
    ],
)
def test_slower_steps_are_said_with_both_times(
    run: Path, lines: list[dict[str, Any]], said: str
) -> None:
    (line,) = judged(run, *lines).reactions
    assert "step 412 on became 28 % slower on rank 0 (41.0 ms to 52.3 ms)" in line
    assert said in line
    assert "--react" not in line


@pytest.mark.parametrize(
    ("when", "window", "count"), [("growing", None, 0), ("growing", 2, 1), ("each step", None, 1)]
)
def test_slower_steps_that_a_growing_account_tells_are_not_told_again(
    run: Path, when: str, window: int | None, count: int
) -> None:
    slow: Any = SimpleNamespace(
        trigger="slow", action="none", before_ns=29.5e6, after_ns=40.7e6, window=window, step=96,
        rank=0, since_wall_ns=START_NS, state="none", suspects=(), steps=(), failure=None,
    )  # fmt: skip
    inputs = replace(gather_inputs(Analyzer(run)), reactions=(slow,))
    grown = SimpleNamespace(when=when, ns_per_step=16.3e6)
    ledger: Any = SimpleNamespace(accounts=(grown,), positions={})
    assert len(list(reacted_lines(inputs, ledger))) == count


@pytest.mark.parametrize(
    ("optimizer_ms", "uses_gpu", "grown_ms", "said"),
    [
        (30.0, False, 24.0, "optimizer, which torch.set_flush_denormal(True)"),
        (30.0, True, 24.0, "optimizer"),
        (30.0, True, 60.0, ""),  # the steps that are told of grew by more
        (12.0, False, 6.0, ""),
    ],
)
def test_the_phase_that_makes_most_of_slower_steps_is_named(
    optimizer_ms: float, uses_gpu: bool, grown_ms: float, said: str
) -> None:
    """Of 31 ms that steps take more from step 10 on; the rest is in all phases alike."""
    later = [step >= 10 for step in range(20)]
    whole = optimizer_ms - 10 + 4
    steps = pl.DataFrame({"step": range(20)}).with_columns(
        pl.Series("step_ns", [(50 + whole * each) * 1e6 for each in later]),
        pl.Series("optimizer_host_ns", [optimizer_ms * 1e6 if each else 1e7 for each in later]),
        *(pl.Series(f"{name}_host_ns", [(10 + each) * 1e6 for each in later])
          for name in ("dataloader", "forward", "backward", "other")),
    )  # fmt: skip
    inputs: Any = SimpleNamespace(by_rank={0: steps}, uses_gpu=uses_gpu)
    reaction: Any = SimpleNamespace(rank=0, step=10, before_ns=50e6, after_ns=(50 + grown_ms) * 1e6)
    mean_ns = (10 + optimizer_ms) / 2 * 1e6
    text = grown_phase(inputs, reaction, {"optimizer": mean_ns})
    assert text.startswith(f"most of it in {said}") if said else text == ""
    assert ("denormal" in text) == ("denormal" in said)
    assert not said or not grown_phase(inputs, reaction, {"optimizer": mean_ns / 4})  # a closure's


@pytest.mark.parametrize(
    ("larger", "said"),
    [(1.4, "; its inputs are 1.40 times as large from then on, on average"), (1.0, "")],
)
def test_slower_steps_of_larger_inputs_say_so(run: Path, larger: float, said: str) -> None:
    for at in range(8):
        count = round(1000 * (larger if at >= 4 else 1))
        note(run, 0, type="input_size", time_ns=START_NS + at * 10**8, root=1, number_count=count)
    since_ns = Analyzer(run).steps().row(0, named=True)["start_ns"] + 35 * 10**7
    (line,) = judged(run, {**SLOW, "since_wall_ns": since_ns}).reactions
    assert ("its inputs" in line) is bool(said)
    assert said in line


def test_damaged_lines_are_passed_over(run: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"type": "reaction"},
        {"type": "reaction", "trigger": "hang", "wall_ns": "x"},
        {**HANG, "rank": "x", "step": [], "silent_ns": None, "reason": 7},
        result("reaction-hang-0", suspects=[1, {"rank": "a"}, {}], saving="x", steps=[1]),
    ]
    found = judged(run, *bad)
    assert len(found.reactions) == 1
    assert "standstill" not in [f.rule for f in found.findings]


def test_reactions_are_a_frame_a_table_and_a_part_of_the_overview(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = result("reaction-hang-0", path="/s.json", moves=False, saving=[], suspects=[SUSPECT])
    traced = result("reaction-slow-0", window=0, rank_count=2, steps=[420, 425])
    judged(run, HANG, done, SLOW, traced)
    frame = Analyzer(run).reactions()
    assert frame["trigger"].to_list() == ["hang", "slow"]
    assert frame.select("suspect_rank", "suspect_certain", "suspect_count").row(0) == (1, True, 1)
    assert frame.select("first_step", "end_step", "before_step_ns").row(1) == (420, 425, 41.0e6)
    noticed = frame["noticed_ns"][0]
    assert Analyzer(run, between=(0, noticed - 1)).reactions().height == 0
    (asked,) = ask(sql_tables(run), "select outcome from reactions limit 1").rows()
    assert asked[0].startswith("rank 1 held the job up: its process is stopped")
    assert main(["overview", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "Noticed" in shown
    assert moment_text(frame["noticed_ns"][0]) in shown
    assert moment_text(frame["since_ns"][1]) in shown, "as the verdict says it"
    assert "steps 420 to 424 were traced" in shown


TWO = ("node-1", "node-2")


def death(cause: str, *hosts: str, **more: object) -> Attempt:
    known: dict[str, Any] = {
        **dict.fromkeys(("line", "growth_bytes_per_step", "died_ns")),
        **dict.fromkeys(("is_hardware", "is_program", "is_of_code", "is_nan", "has_saved"), False),
        "run": "job-7", "generation": 0, "step": 90, "has_trained": True,
        "headline": f"it died of {cause}",
    }  # fmt: skip
    return Attempt(cause=cause, hosts=hosts, **known | more)


AT = {"line": "train.py:88 in step"}
CASES = {
    "killed once": (TWO, [death("killed", "node-2")], "RESTART"),
    "killed there twice": (TWO, [death("killed", "node-2")] * 2, "RESTART WITHOUT node-2"),
    "killed there and elsewhere": (
        TWO, [death("killed", "node-1"), death("killed", "node-2")], "RESTART"),
    "hung where it had crashed": (
        TWO, [death("crash", "node-2"), death("hang", "node-2")], "RESTART WITHOUT node-2"),
    "no other node": (TWO[:1], [death("killed", "node-1")] * 2, "RESTART"),
    "node lost": (TWO, [death("node_lost", "node-2")], "RESTART WITHOUT node-2"),
    "only node lost": (TWO[:1], [death("node_lost", "node-1")], "RESTART"),
    "two nodes lost": ((*TWO, "node-3"), [death("node_lost", *TWO)],
                       "RESTART WITHOUT node-1,node-2"),
    "broken GPU": (TWO, [death("exception", "node-1", is_hardware=True, **AT)],
                   "RESTART WITHOUT node-1"),
    "same line": (TWO, [death("exception", "node-1", **AT), death("exception", "node-2", **AT)],
                  "STOP"),
    "same line, another death between": (
        TWO, [death("exception", **AT), death("killed"), death("exception", **AT)], "STOP"),
    "other lines": (TWO, [death("exception", line="a.py:1 in f"), death("exception", **AT)],
                    "RESTART"),
    "hung there at the same line": (
        TWO, [death("hang", "node-2", **AT)] * 2, "RESTART WITHOUT node-2"),
    "hung elsewhere at the same line": (
        TWO, [death("hang", "node-1", **AT), death("hang", "node-2", **AT)], "STOP"),
    "no memory at the same step": (TWO, [death("out_of_memory", step=s) for s in (90, 91)],
                                   "STOP"),
    "no memory later": (TWO, [death("out_of_memory", step=s) for s in (90, 200)], "RESTART"),
    "no memory at an unknown step": (TWO, [death("out_of_memory", step=None)] * 2, "RESTART"),
    "exit at the same step": (TWO, [death("exit", step=step) for step in (90, 91)], "STOP"),
    "exit at other steps": (TWO, [death("exit", step=step) for step in (90, 200)], "RESTART"),
    "early end twice": (TWO, [death("early_exit", "node-1"), death("early_exit", "node-2")],
                        "STOP"),
    "deadlock there twice": (TWO, [death("deadlock", "node-2", **AT)] * 2, "STOP"),
    "disk full": (TWO, [death("disk_full")], "STOP"),
    "cancelled": (TWO, [death("cancelled")], "STOP"),
    "preempted": (TWO, [death("preempted")] * 9, "RESTART"),
    "requeued": (TWO, [death("requeued")] * 9, "RESTART"),
    "time limit": (TWO, [death("time_limit")] * 9, "RESTART"),
    "never a step": (TWO, [death("launcher", has_trained=False)] * 3, "STOP"),
    "an error of the program": (TWO, [death("exception", is_program=True, **AT)], "STOP"),
    "a loss that is no number": (TWO, [death("exit", is_nan=True, **AT)], "STOP"),
    "memory that grew": (
        TWO, [death("out_of_memory", growth_bytes_per_step=2e6)], "STOP"),
    "memory that grew between saves": (
        TWO, [death("out_of_memory", growth_bytes_per_step=2e6, has_saved=True)], "RESTART"),
    "an error that data may have caused": (TWO, [death("exception", is_of_code=True)], "STOP"),
    "an exit that the program chose": (TWO, [death("exit", is_of_code=True, **AT)], "STOP"),
    "an error that the network may have caused": (TWO, [death("exception", **AT)], "RESTART"),
    "twice no step": (TWO, [death("launcher", has_trained=False)] * 2, "RESTART"),
}  # fmt: skip


def test_an_interrupt_before_is_no_death() -> None:
    found = advise([death("interrupted"), death("killed", "node-2")], frozenset(TWO))
    assert (found.action, found.text.partition(":")[0]) == ("RESTART", "its first death")


def test_restart_is_said_with_what_it_is_good_for() -> None:
    grew = advise(CASES["memory that grew between saves"][1], frozenset(TWO)).text
    assert grew == ("memory grew by 1.91 MiB a step: a restart goes on from the checkpoint, and "
                    "dies again after some 91 steps; for good, stop the growth")  # fmt: skip
    text = advise(CASES["exit at other steps"][1], frozenset(TWO)).text
    assert text.startswith("1 of 1 earlier deaths had the same cause: ")
    for cause in ("exception", "crash"):
        text = advise([death(cause, **AT)], frozenset(TWO)).text
        assert text == (
            "its first death: a restart may get past it if the machine, the network or the order "
            "of the data caused it; a second death at train.py:88 in step is a STOP"
        )


@pytest.mark.parametrize("case", CASES)
def test_advice_follows_from_all_deaths(case: str) -> None:
    hosts, attempts, expected = CASES[case]
    found = advise(attempts, frozenset(hosts))
    assert found.headline == expected
    status = {"RESTART": 10, "STOP": 12}.get(expected, 11)
    assert (found.exit_status, found.attempts) == (status, tuple(attempts))
