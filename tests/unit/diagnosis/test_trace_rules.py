"""Rules that work on traces: each on a window that has its cause, and on one that has not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from haiprof import Analyzer, TraceAnalysis
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs
from haiprof.diagnosis.run_facts import RULES
from haiprof.diagnosis.traced_window import NO_GPU, NO_TRACES, TracedWindow
from haiprof.diagnosis.verdict import Abstention, Finding, Judgement, Verdict
from haiprof.diagnosis.window_facts import (
    exposed_communication,
    launch_bound,
    pageable_copies,
    slow_kernels,
    slow_link,
    small_batches,
    synchronising_calls,
    tensor_cores_unused,
)
from tests.unit.analysis.trace.shared import event, rank_file, traces
from tests.unit.diagnosis.stories import write_story
from tests.unit.diagnosis.trace_stories import ALL_TO_ALL, Story, write_ranks

TRACE_RULES = (
    slow_kernels, slow_link, exposed_communication, synchronising_calls, pageable_copies,
    launch_bound, tensor_cores_unused, small_batches,
)  # fmt: skip
HEALTHY = Story(copy=20, transfer=100)
STEP_MS = (0.2, 5.0, 10.0, 2.0)
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_story(tmp_path / "run", lambda rank, step: STEP_MS, ranks=8)


def traced(run: Path, story: Story, *, odd: dict[int, Story] | None = None, ranks: int = 8) -> Path:
    write_ranks(run / "traces", lambda rank: (odd or {}).get(rank, story), ranks=ranks,
                collective=ALL_TO_ALL)  # fmt: skip
    return run


def verdict(run: Path) -> Verdict:
    """With what the traced window says alone: opportunities have tests of their own."""
    said = diagnose(Analyzer(run))
    return replace(
        said,
        findings=tuple(f for f in said.findings if f.scope == "window" or f.rule == "host_bound"),
    )


def of_window(run: Path) -> list[Finding]:
    """What the window alone proves."""
    return [finding for finding in verdict(run).findings if finding.scope == "window"]


def found(run: Path) -> list[str]:
    return [finding.rule for finding in of_window(run)]


def one(run: Path) -> Finding:
    (finding,) = of_window(run)
    return finding


def test_a_healthy_window_has_no_finding_and_nothing_is_left_unjudged(run: Path) -> None:
    said = verdict(traced(run, HEALTHY))
    assert of_window(run) == []
    names = {rule.__name__ for rule in TRACE_RULES}
    # The hand-written kernels have no estimate of SM use, but of occupancy.
    assert not names & {rule for rule, _ in said.abstained}


def test_without_traces_every_rule_abstains_and_says_what_records_them(run: Path) -> None:
    abstained = dict(verdict(run).abstained)
    assert {rule.__name__: NO_TRACES for rule in TRACE_RULES}.items() <= abstained.items()
    assert "--trace" in NO_TRACES


def test_large_traces_are_left_alone_where_a_limit_is_given(run: Path) -> None:
    said = diagnose(Analyzer(traced(run, HEALTHY)), trace_limit_bytes=1000)
    assert "haiprof verdict" in dict(said.abstained)["slow_kernels"]


def test_damaged_traces_are_a_reason_to_abstain_not_an_error(run: Path) -> None:
    (run / "traces").mkdir()
    (run / "traces" / "a.json").write_text("{")
    assert "a.json" in dict(verdict(run).abstained)["slow_kernels"]


def test_slow_kernels_name_the_rank_and_its_pace(run: Path) -> None:
    said = of_window(traced(run, HEALTHY, odd={3: replace(HEALTHY, gemm=560, relu=84)}))
    by_rule = {finding.rule: finding for finding in said}
    finding = by_rule["slow_kernels"]
    assert (finding.rank, finding.scope, finding.severity) == (3, "window", "warning")
    assert finding.evidence[0].value == pytest.approx(1.4, abs=0.02)
    assert set(by_rule) <= {"slow_kernels", "exposed_communication"}


def test_slow_link_names_the_rank_and_both_bandwidths(run: Path) -> None:
    finding = one(traced(run, HEALTHY, odd={5: replace(HEALTHY, transfer=260)}))
    assert (finding.rule, finding.rank) == ("slow_link", 5)
    own, usual = (evidence.value for evidence in finding.evidence[:2])
    assert own is not None
    assert usual is not None
    assert own / usual == pytest.approx(100 / 260, rel=0.05)


def test_slow_copies_name_the_bus(run: Path) -> None:
    finding = one(traced(run, HEALTHY, odd={2: replace(HEALTHY, copy=200)}))
    assert (finding.rule, finding.rank) == ("slow_link", 2)
    assert "PCIe" in finding.remedy


@pytest.mark.parametrize(("us", "severity"), [(100, None), (500, "warning"), (2000, "critical")])
def test_exposed_communication_follows_the_share(
    run: Path, us: float, severity: str | None
) -> None:
    said = of_window(traced(run, replace(HEALTHY, transfer=us)))
    assert [finding.severity for finding in said] == [severity] * (severity is not None)
    if severity:
        assert said[0].rule == "exposed_communication"
        step_us = 30 + 8 + 20 + 8 * 460 + us
        assert said[0].evidence[0].value == pytest.approx(us / step_us, rel=0.05)
        assert "no_sync" in said[0].remedy


def test_communication_that_only_waits_is_no_slow_transfer(run: Path) -> None:
    late = replace(HEALTHY, gemm_count=14)
    said = verdict(traced(run, HEALTHY, odd={6: late})).findings
    talk = next(finding for finding in said if finding.rule == "exposed_communication")
    assert "waiting for late ranks" in talk.title


def test_pageable_copies_name_operator_and_remedy(run: Path) -> None:
    finding = one(traced(run, replace(HEALTHY, copy=150, copy_name=PAGEABLE)))
    assert finding.rule == "pageable_copies"
    assert "aten::to at train.py(10): step" in finding.remedy
    assert "pin_memory=True" in finding.remedy
    assert finding.missing == ()


def test_pinned_copies_of_the_same_length_are_none(run: Path) -> None:
    assert "pageable_copies" not in found(traced(run, replace(HEALTHY, copy=150)))


def test_synchronising_calls_name_the_call_and_its_line(run: Path) -> None:
    finding = one(traced(run, replace(HEALTHY, sync=True)))
    assert finding.rule == "synchronising_calls"
    assert "aten::item at train.py(10): step" in finding.remedy
    assert finding.evidence[0].value == pytest.approx(1500 / 5300, abs=0.12)


def test_tensor_cores_unused_on_a_gpu_that_has_them(run: Path) -> None:
    finding = one(traced(run, replace(HEALTHY, gemm_name="ampere_sgemm_128x64_nn")))
    assert finding.rule == "tensor_cores_unused"
    assert "set_float32_matmul_precision" in finding.remedy
    assert finding.evidence[0].value == pytest.approx(400 / 460, abs=0.02)


def test_window_without_a_matrix_product_is_judged(run: Path) -> None:
    element = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>(int)"
    assert "tensor_cores_unused" not in found(traced(run, replace(HEALTHY, gemm_name=element)))


def test_a_run_s_own_cause_comes_before_that_of_a_window(tmp_path: Path) -> None:
    run = write_story(tmp_path / "run", lambda rank, step: (2.5, 5.0, 10.0, 2.0), ranks=8)
    said = diagnose(Analyzer(traced(run, replace(HEALTHY, copy=150, copy_name=PAGEABLE)))).findings
    assert said[0].rule == "dataloader_bound"
    assert [finding.rule for finding in said if finding.scope == "window"] == ["pageable_copies"]


def judged(inputs: RuleInputs, name: str) -> dict[str, Judgement]:
    patterns = TraceAnalysis(traces(name)).patterns()
    known = replace(inputs, traces=TracedWindow(patterns=patterns, why=""))
    return {rule.__name__: rule(known) for rule in TRACE_RULES}


REAL = {
    "dlrm_v100_8ranks": {"exposed_communication", "launch_bound", "small_batches"},
    "tl_h100_qwen05_mem_stack": set(),
    "tl_mi300_ddp_resnet18": {"synchronising_calls"},
    "tl_b200_r0of8_nccl": {"launch_bound", "small_batches"},
    "tb_resnet50_nw0_v100": {"pageable_copies", "tensor_cores_unused"},
}


@pytest.mark.parametrize("name", REAL)
def test_real_traces_have_the_causes_that_are_in_them(run: Path, name: str) -> None:
    said = judged(gather_inputs(Analyzer(run)), name)
    fired = {rule for rule, judgement in said.items() if isinstance(judgement, Finding)}
    assert fired == REAL[name]


def test_every_trace_rule_is_asked_after_those_of_the_whole_run() -> None:
    assert RULES[-len(TRACE_RULES) :] == TRACE_RULES


def test_no_rule_names_a_rank_among_three(run: Path) -> None:
    odd = {2: replace(HEALTHY, gemm=900, copy=300)}
    abstained = verdict(traced(run, HEALTHY, odd=odd, ranks=3)).abstained
    assert {"slow_kernels", "slow_link"} <= {rule for rule, _ in abstained}


def test_abstentions_say_what_is_missing_on_one_rank(run: Path) -> None:
    said = judged(gather_inputs(Analyzer(run)), "tl_h100_qwen05_mem_stack")
    assert isinstance(said["slow_kernels"], Abstention)
    assert said["exposed_communication"] == Abstention(
        rule="exposed_communication", why="no communication kernel in the traces"
    )


def test_traces_of_a_job_without_a_gpu_give_one_reason_for_all(run: Path) -> None:
    (run / "traces").mkdir()
    rank_file(run / "traces", 0, [event("aten::mm", "cpu_op", 0, 10)], 1)
    abstained = dict(verdict(run).abstained)
    assert {abstained[rule.__name__] for rule in TRACE_RULES} == {NO_GPU}


@pytest.mark.parametrize(
    ("long_us", "every_us", "fires"),
    [(5.0, 9.0, True), (5.0, 400.0, False), (60.0, 70.0, False)],
    ids=["one short one after another", "far apart", "long ones"],
)
def test_host_bound_by_the_operators_of_a_trace(
    run: Path, long_us: float, every_us: float, fires: bool
) -> None:
    (run / "traces").mkdir()
    events = [event("aten::mul", "cpu_op", n * every_us, long_us) for n in range(200)]
    inner = [event("aten::empty", "cpu_op", n * every_us + 1, 0.5) for n in range(200)]
    rank_file(run / "traces", 0, [*events, *inner], 1)
    judged = [f for f in verdict(run).findings if f.rule == "host_bound"]
    assert bool(judged) is fires
    if fires:
        (share,) = [e.value for e in judged[0].evidence if e.unit == "ratio"]
        assert share == pytest.approx(1.0, abs=0.01)
