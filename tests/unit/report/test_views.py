from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.diagnosis.verdict import Evidence, Finding
from haiprof.live.follow import JobNow, RankNow
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.lines import CodeLine
from haiprof.show.card import save_card_svg, save_verdict, verdict_card, view_text
from haiprof.show.rank_summary import one_rank_summary
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.summary import overview_summary
from haiprof.show.views.blocks import LabelTable
from haiprof.show.views.jobs import JOBS, RANK, RANKS, Selection, top_view
from haiprof.show.views.run import overview_view, rank_view
from tests.unit.diagnosis.stories import verdict_of
from tests.unit.report.fake_run import empty_run, two_rank_run
from tests.unit.report.fake_verdict import DRIFT, FORWARD_BOUND, fake_verdict

RUNS = Path(__file__).parents[2] / "data" / "runs"
DEATH = Death(
    headline="rank 0 died", cause="exception", ranks=(0,), certain=True, what="KeyError: 3",
    line="train.py:12", source=None, seen_at=None, traceback=(), message=None, died_ns=None,
    step=7, fates=(), clock="", remedy="fix the line that raised it",
)  # fmt: skip
WIDTHS = [60, 80, 104, 132, 200]


def overview_text(data: Any, width: int = 100) -> str:
    return view_text(overview_view(overview_summary(data), width=width), width=width)


def header(data: Any) -> RunHeader:
    return run_header(data.run, manifest_or_none(data.run))


def card_text(folder: Path, *findings: Finding, width: int = 100, everything: bool = True) -> str:
    run = header(empty_run(folder))
    card = verdict_card(fake_verdict(*findings), run, width=width, everything=everything)
    return view_text(card, width=width)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_card_is_short_unless_everything_is_asked_for(tmp_path: Path, width: int) -> None:
    short = card_text(tmp_path / "a", FORWARD_BOUND, width=width, everything=False)
    whole = card_text(tmp_path / "b", FORWARD_BOUND, width=width)
    assert len(short.splitlines()) <= {60: 20, 80: 17, 100: 15}[width]  # of every kind a row
    for words in ("not measured", "not evaluated", "own cost"):
        assert words not in short
    assert "own cost" in whole
    assert "move the preprocessing in" in short
    assert f"confidence {FORWARD_BOUND.confidence * 100:.0f} %" in short
    assert "--all" in short


def test_short_card_advises_what_counts_alone(tmp_path: Path) -> None:
    at = CodeLine(
        file="train.py", line=7, function="log", share=0.01, low=None, high=None, of="the step",
        sample_count=9, callees=(),
    )  # fmt: skip
    small = replace(DRIFT, severity="info", remedy="log less often", code_lines=(at,))
    for found, advised in ((small, False), (replace(small, severity="warning"), True)):
        folder = tmp_path / found.severity
        text = card_text(folder, FORWARD_BOUND, found, everything=False)
        assert found.title.split(",")[0] in text
        assert ("log less often" in text) == advised
    assert "log less often" in card_text(tmp_path / "alone", small, everything=False)


@pytest.mark.parametrize("width", [60, 72, 80, 100])
def test_mark_of_a_position_stays_on_the_line_of_its_name(tmp_path: Path, width: int) -> None:
    verdict = verdict_of(tmp_path / "run", lambda *_: (0.2, 5.0, 10.0, 2.0), ranks=2)
    card = verdict_card(verdict, header(empty_run(tmp_path / "b")), width=width)
    lines = [line.strip("│ ") for line in view_text(card, width=width).splitlines()]
    positions = [line for line in lines if "forward" in line or "backward" in line]
    assert positions
    assert not any(line.endswith(("█", "▓", "░", "▒", "·")) for line in positions)


def test_card_is_silent_about_what_a_job_on_cpus_cannot_have(tmp_path: Path) -> None:
    verdict = replace(
        fake_verdict(FORWARD_BOUND),
        not_measured=(("device time", "the ranks used no GPU"), ("GPU", "no driver"), ("x", "y")),
        abstained=(("slow_kernels", "no traces"), ("late_rank", "one rank"), ("z", "why not")),
    )
    card = verdict_card(verdict, header(empty_run(tmp_path)), everything=True)
    text = view_text(card, width=100)
    assert "why not" in text
    assert "x: y" in text
    for words in ("no GPU", "no driver", "one rank", "slow kernels"):
        assert words not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_views_fit_the_terminal(tmp_path: Path, width: int) -> None:
    data = two_rank_run(tmp_path, gpu=True)
    texts = [
        overview_text(data, width),
        view_text(rank_view(one_rank_summary(data, 0)), width=width),
        card_text(tmp_path, FORWARD_BOUND, DRIFT, width=width),
    ]
    for text in texts:
        assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_overview_numbers_are_whole_at_every_width(tmp_path: Path, width: int) -> None:
    text = overview_text(two_rank_run(tmp_path), width)
    for number in ("160 ms", "180 ms", "80.0 ms", "44 %", "1.50 GiB", "1.91 MiB/s", "200"):
        assert number in text


@pytest.mark.parametrize("width", [64, *WIDTHS[1:]])
def test_overview_cuts_no_time_of_three_digits(tmp_path: Path, width: int) -> None:
    shutil.copytree(RUNS / "two_ranks_one_slow", tmp_path / "run")
    text = overview_text(Analyzer(tmp_path / "run"), width)
    table = text.partition("Steps")[2].partition("Processes")[0]
    assert table.count(" ms") > 8
    assert "…" not in table


def test_overview_of_many_ranks_shows_the_slowest(tmp_path: Path) -> None:
    data = empty_run(tmp_path)
    for rank in range(300):
        data.add_rank(rank)
        data.add_step(rank, 0, data_start(), (0.0, 1.0 + (rank == 217), 1.0, 1.0, 1.0))
    text = overview_text(data)
    assert "rank 217, highest" in text
    assert "24 slowest of 300" in text
    assert len(text.splitlines()) < 110


def data_start() -> int:
    return 1_790_000_000_000_000_000


def test_rank_view_shows_phases_slow_steps_and_events(tmp_path: Path) -> None:
    text = view_text(rank_view(one_rank_summary(two_rank_run(tmp_path), 0)), width=100)
    for part in ("dataloader +296 ms", "2.85x", "garbage collection", "checkpoint save", "p95",
                 "after optimizer"):  # fmt: skip
        assert part in text
    data = empty_run(tmp_path)
    data.add_rank(0)
    assert "pid 4000" in view_text(rank_view(one_rank_summary(data, 0)), width=100)


def test_card_shows_cause_numbers_remedy_and_cost(tmp_path: Path) -> None:
    text = card_text(tmp_path, FORWARD_BOUND, DRIFT)
    for part in (
        FORWARD_BOUND.title,
        "139 ms",
        "31 %",
        "do:",
        "confidence\u00a085\u00a0%",
        "NVML: not supported",
        "9.40 µs per step",
        "next  haiprof verdict rank",
        DRIFT.title,
    ):
        assert part in text
    assert text.count(FORWARD_BOUND.title) == 1


def test_card_of_a_balanced_run_says_that_nothing_is_wrong(tmp_path: Path) -> None:
    balanced = (0.2, 5.0, 10.0, 2.0)
    verdict = verdict_of(tmp_path / "run", lambda *_: balanced, gpu=0.95, cores=1.0, ranks=2)
    text = view_text(verdict_card(verdict, header(empty_run(tmp_path))), width=100)
    assert "nothing stands out" in text
    assert "do:" not in text


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("everything", [False, True])
def test_next_command_can_be_copied_from_a_card_of_any_width(
    tmp_path: Path, width: int, everything: bool
) -> None:
    run = f"{tmp_path}/{'of a long name ' * 4}/train-1"
    command = f"haiprof verdict rank {shlex.quote(run)} 0"
    verdict = replace(fake_verdict(FORWARD_BOUND), run=run, next_command=command)
    of = header(empty_run(tmp_path))

    def lines(folder: Path | None) -> list[str]:
        card = verdict_card(verdict, of, width=width, everything=everything, folder=folder)
        return view_text(card, width=width).splitlines()

    whole = lines(None)
    assert whole[-1] == f"next: {command}"
    assert all(len(line) <= width for line in whole[:-1])
    assert any("haiprof verdict rank train-1 0 " in line for line in lines(Path(run).parent))


def test_card_as_text_shows_nothing_beside_it_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert FORWARD_BOUND.title in card_text(tmp_path, FORWARD_BOUND)
    assert capsys.readouterr().out == ""


def test_saved_verdict_is_json_and_the_card(tmp_path: Path) -> None:
    data = empty_run(tmp_path)
    save_verdict(fake_verdict(FORWARD_BOUND), header(data), data.run)
    assert '"slug": "forward_bound"' in data.run.verdict_json.read_text()
    assert FORWARD_BOUND.title in data.run.verdict_text.read_text()
    path = save_card_svg(fake_verdict(), header(empty_run(tmp_path)), tmp_path / "card.svg")
    text = path.read_text()
    assert text.startswith("<svg")
    assert "stands&#160;out" in text
    assert "url(http" not in text  # a picture asks no network


def test_card_lists_no_time_of_what_never_happened(tmp_path: Path) -> None:
    never = Evidence(name="checkpoint saves", value=0.0, unit="ns")
    finding = replace(FORWARD_BOUND, evidence=(never, *FORWARD_BOUND.evidence))
    for everything in (False, True):
        text = card_text(tmp_path, finding, everything=everything)
        assert "checkpoint saves" not in text
        assert "139 ms" in text


SPLIT: dict[str, float | None] = {
    "dataloader": 0.55, "forward": 0.12, "backward": 0.23, "optimizer": 0.05, "other": 0.05,
}  # fmt: skip
JOB_ID = "finetune-llama-20261123-020521-99747797a9be4abb"
VERDICT = "dataloader-bound: training waits for batches 55 % of a step, and the cores are full"


def rank(number: int) -> RankNow:
    return RankNow(
        rank=number, attempt=0, host="node-0012", pid=4_194_300, step=1_234_567, step_is_exact=True,
        step_ns=123.4e6, split=SPLIT, times_ns=tuple(range(100, 140)),
        slowest=((1234, 300_000_000, "dataloader"),), idle_ns=5, recording=True,
        counters={"cpu_cores": 112.3, "utilization_ratio": 0.97, "memory_rss_bytes": 2e10},
    )  # fmt: skip


@pytest.mark.parametrize("level", [JOBS, RANKS, RANK])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_truncated(level: str, width: int) -> None:
    ranks = tuple(rank(number) for number in (0, 1, 127))
    job = JobNow(
        id=JOB_ID, name="finetune-llama", path="/x", host="node-0012", pid=1,
        elapsed_ns=3_000 * 10**9, running=True, world_size=128, ranks=ranks, verdict=VERDICT,
    )  # fmt: skip
    view = top_view([job], Selection(level=level), height=24, width=width, colored=False)
    text = view_text(view, width=width)
    lines = text.splitlines()
    assert "…" not in text
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    whole = "".join(line.split("  ")[0].strip() for line in lines)
    assert JOB_ID in whole
    for known in (
        ("1234567", "123 ms", "97 %") if level != RANK else ("55 %", "67.9 ms", "18.6 GiB")
    ):
        assert known in text
    if level != JOBS:
        assert VERDICT in " ".join(text.split())


def test_long_list_says_which_part_of_it_is_shown() -> None:
    jobs = [
        JobNow(
            id=f"{JOB_ID}-{number}", name="finetune-llama", path="/x", host="node-0012", pid=1,
            elapsed_ns=10**9, running=True, world_size=1, ranks=(rank(0),), verdict=None,
        )
        for number in range(9)
    ]  # fmt: skip
    for width in (60, 80):
        view = top_view(jobs, Selection(job=8), height=24, width=width, colored=False)
        lines = view_text(view, width=width).splitlines()
        assert len(lines) <= 24
        assert lines[-1].rstrip().endswith("of 9")
        assert "jobs" in lines[-1]


def test_bytes_of_a_process_are_not_headed_as_calls(tmp_path: Path) -> None:
    text = overview_text(two_rank_run(tmp_path))
    assert "calls" not in text
    assert "read and written: files, cached ones too, pipes and sockets" in text


def test_a_path_that_fits_on_a_line_is_not_broken() -> None:
    path, label = f"/data/{'x' * 50}.json", "tables, of which, there are, several"
    table = LabelTable([(label, f"{path}: why"), ("other", "a reason")])
    shown = view_text(table, width=70).splitlines()
    assert shown[0].rstrip() == label
    assert shown[1].rstrip() == f"  {path}: why"
    wide = view_text(table, width=120).splitlines()
    assert wide[0].rstrip() == f"{label}  {path}: why"
    assert wide[1].split() == ["other", "a", "reason"]
    assert max(map(len, view_text(table, width=40).splitlines())) <= 40


def test_card_of_a_death_names_slow_lines_without_remedies(tmp_path: Path) -> None:
    at = CodeLine(file="train.py", line=9, function="pause", share=0.3, low=None, high=None,
                  of="the step", sample_count=9, callees=())  # fmt: skip
    slow = replace(FORWARD_BOUND, code_lines=(at,), remedy="remove the sleep")
    verdict = replace(fake_verdict(slow, slow), death=DEATH)
    text = view_text(verdict_card(verdict, header(empty_run(tmp_path))), width=100)
    assert slow.title in text
    assert "fix the line" in text
    assert "remove the sleep" not in text
