"""Rules that work on traces: each on a window that has its cause, and on one that has not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.run_facts import slow_kernels, slow_link
from haiprof.diagnosis.traced_window import NO_GPU, NO_TRACES
from haiprof.diagnosis.verdict import Finding
from tests.unit.analysis.trace.shared import event, rank_file
from tests.unit.diagnosis.stories import judged, write_story
from tests.unit.diagnosis.trace_stories import ALL_TO_ALL, Story, write_ranks

TRACE_RULES = (slow_kernels, slow_link)
HEALTHY = Story(copy=20, transfer=100)
STEP_MS = (0.2, 5.0, 10.0, 2.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_story(tmp_path / "run", lambda rank, step: STEP_MS, ranks=8)


def traced(run: Path, story: Story, *, odd: dict[int, Story] | None = None, ranks: int = 8) -> Path:
    write_ranks(run / "traces", lambda rank: (odd or {}).get(rank, story), ranks=ranks,
                collective=ALL_TO_ALL)  # fmt: skip
    return run


def of_window(run: Path) -> list[Finding]:
    """What the window alone proves."""
    return [finding for finding in judged(run).findings if finding.scope == "window"]


def one(run: Path) -> Finding:
    (finding,) = of_window(run)
    return finding


def reasons(run: Path) -> dict[str, str]:
    """Why rules on traces abstain."""
    abstained = dict(judged(run).abstained)
    return {rule.__name__: abstained[rule.__name__] for rule in TRACE_RULES
            if rule.__name__ in abstained}  # fmt: skip


def test_a_healthy_window_has_no_finding_and_nothing_is_left_unjudged(run: Path) -> None:
    assert of_window(traced(run, HEALTHY)) == []
    assert reasons(run) == {}  # the hand-written kernels have no estimate of SM use


def test_without_traces_every_rule_abstains_and_says_what_records_them(run: Path) -> None:
    assert reasons(run) == {rule.__name__: NO_TRACES for rule in TRACE_RULES}
    assert "--trace" in NO_TRACES


def test_large_traces_are_left_alone_where_a_limit_is_given(run: Path) -> None:
    said = diagnose(Analyzer(traced(run, HEALTHY)), trace_limit_bytes=1000)
    assert "haiprof verdict" in dict(said.abstained)["slow_kernels"]


def test_damaged_traces_are_a_reason_to_abstain_not_an_error(run: Path) -> None:
    (run / "traces").mkdir()
    (run / "traces" / "a.json").write_text("{")
    assert "a.json" in reasons(run)["slow_kernels"]


def test_slow_kernels_name_the_rank_and_its_pace(run: Path) -> None:
    finding = one(traced(run, HEALTHY, odd={3: replace(HEALTHY, gemm=560, relu=84)}))
    assert (finding.rule, finding.rank, finding.severity) == ("slow_kernels", 3, "warning")
    assert finding.evidence[0].value == pytest.approx(1.4, abs=0.02)


def test_slow_link_names_the_rank_and_both_bandwidths(run: Path) -> None:
    finding = one(traced(run, HEALTHY, odd={5: replace(HEALTHY, transfer=260)}))
    assert (finding.rule, finding.rank) == ("slow_link", 5)
    own, usual = (evidence.value for evidence in finding.evidence[:2])
    assert own is not None
    assert usual is not None
    assert own / usual == pytest.approx(100 / 260, rel=0.05)


@pytest.mark.proof
def test_slow_copies_name_the_bus(run: Path) -> None:
    finding = one(traced(run, HEALTHY, odd={2: replace(HEALTHY, copy=200)}))
    assert (finding.rule, finding.rank) == ("slow_link", 2)
    assert "PCIe" in finding.remedy


def test_no_rule_names_a_rank_among_three(run: Path) -> None:
    odd = {2: replace(HEALTHY, gemm=900, copy=300)}
    assert len(reasons(traced(run, HEALTHY, odd=odd, ranks=3))) == 2


def test_traces_of_a_job_without_a_gpu_give_one_reason_for_all(run: Path) -> None:
    (run / "traces").mkdir()
    rank_file(run / "traces", 0, [event("aten::mm", "cpu_op", 0, 10)], 1)
    assert reasons(run) == {rule.__name__: NO_GPU for rule in TRACE_RULES}
