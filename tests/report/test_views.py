from __future__ import annotations

import time
from pathlib import Path

import pytest

from haiprof.diagnosis.finding import Finding
from haiprof.report.card import verdict_card
from haiprof.report.export import save_card_svg, save_verdict, view_text
from haiprof.report.overview_view import overview_view
from haiprof.report.rank_summary import one_rank_summary
from haiprof.report.rank_view import rank_view
from haiprof.report.run_header import RunHeader, manifest_or_none, run_header
from haiprof.report.summary import overview_summary
from tests.report.fake_run import FakeRun, empty_run, two_rank_run
from tests.report.fake_verdict import DRIFT, FORWARD_BOUND, fake_verdict

WIDTHS = [60, 80, 104, 132, 200]


def overview_text(data: FakeRun, width: int = 100) -> str:
    return view_text(overview_view(overview_summary(data), width=width), width=width)


def header(data: FakeRun) -> RunHeader:
    return run_header(data.run, manifest_or_none(data.run))


def card_text(folder: Path, *findings: Finding, width: int = 100) -> str:
    card = verdict_card(fake_verdict(*findings), header(empty_run(folder)), width=width)
    return view_text(card, width=width)


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


def test_overview_without_colour_has_no_escape(tmp_path: Path) -> None:
    assert "\x1b" not in overview_text(two_rank_run(tmp_path))


def test_overview_missing_gpu_says_why(tmp_path: Path) -> None:
    text = overview_text(two_rank_run(tmp_path))
    assert "Not measured" in text
    assert "GPU" in text


def test_overview_running_job_says_running(tmp_path: Path) -> None:
    data = empty_run(tmp_path, end_wall_ns=None, exit_status=None, start_wall_ns=time.time_ns())
    assert "running" in overview_text(data)


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


def test_overview_long_command_is_cut(tmp_path: Path) -> None:
    data = empty_run(tmp_path, command=["python", "train.py", "--x" * 200])
    assert "…" in overview_text(data, 60)


def test_rank_view_shows_phases_slow_steps_and_events(tmp_path: Path) -> None:
    text = view_text(rank_view(one_rank_summary(two_rank_run(tmp_path), 0)), width=100)
    for part in ("dataloader +296 ms", "2.85x", "garbage collection", "checkpoint save", "p95"):
        assert part in text


def test_rank_view_without_steps_still_shows_the_process(tmp_path: Path) -> None:
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
        "next  haiprof rank",
        "71 %",
        DRIFT.title,
    ):
        assert part in text
    assert text.count(FORWARD_BOUND.title) == 1


def test_card_without_finding_says_balanced(tmp_path: Path) -> None:
    assert "balanced" in card_text(tmp_path)


def test_card_survives_markup_in_names(tmp_path: Path) -> None:
    data = empty_run(tmp_path, name="[bold]job[/]")
    text = view_text(verdict_card(fake_verdict(FORWARD_BOUND), header(data)), width=100)
    assert "[bold]job[/]" in text


def test_saved_verdict_is_json_and_the_card(tmp_path: Path) -> None:
    data = empty_run(tmp_path)
    save_verdict(fake_verdict(FORWARD_BOUND), header(data), data.run)
    assert '"rule": "forward_bound"' in data.run.verdict_json.read_text()
    assert FORWARD_BOUND.title in data.run.verdict_text.read_text()


def test_card_svg_holds_the_card(tmp_path: Path) -> None:
    path = save_card_svg(fake_verdict(), header(empty_run(tmp_path)), tmp_path / "card.svg")
    assert path.read_text().startswith("<svg")
