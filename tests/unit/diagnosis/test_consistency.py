"""What holds of the verdict on any run: parts within their whole, one average, causes in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from haiprof.diagnosis.causes import CONTRADICTIONS, PHASE_RULES, STANDSTILL, in_order, severity_of
from haiprof.diagnosis.consistency import SHARE_OF_USUAL, impossible_findings, is_in_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS, NS_PER_S, ratio_text
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.finding import Evidence, Finding
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import HOST, PROCESS
from tests.unit.analysis.recorded import row_of, spans_from, write_rank, write_records, write_run
from tests.unit.diagnosis.stories import START_NS

OF_GPUS = ("GPU", "CUDA", "cuda", "NCCL", "kernel", "pin_memory", "nvidia")
"""No rank of these runs has one: what is advised does not speak of it."""
PHASES = (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER)
milliseconds = st.sampled_from([0.0, 0.3, 2.0, 9.0, 40.0])
runs = st.fixed_dictionaries(
    {
        "times": st.tuples(milliseconds, st.sampled_from([0.5, 5.0, 50.0]), milliseconds,
                           milliseconds),
        "gap": st.sampled_from([0.1, 3.0, 20.0]),
        "steps": st.integers(3, 150),
        "ranks": st.integers(1, 3),
        "noise": st.sampled_from([0.01, 0.3]),
        "slow_rank": st.sampled_from([0.0, 8.0]),
        "spike": st.sampled_from([0.0, 60.0, 900.0]),
        "spike_every": st.integers(2, 40),
        "growth": st.sampled_from([0.0, 0.2]),
        "pause": st.sampled_from([0, 4, 300]),
        "pause_kind": st.sampled_from([schema.GC, schema.SAVE]),
        "pause_every": st.integers(1, 60),
        "evaluation": st.sampled_from([0.0, 400.0]),
        "wait": st.sampled_from([0.0, 0.2, 0.9]),
        "cores": st.sampled_from([0.2, 1.0, 2.0]),
        "node": st.sampled_from([0.5, 2.0]),
    }
)  # fmt: skip


def write(root: Path, story: dict[str, Any]) -> Verdict:
    """A run of that story, judged."""
    run, dice = write_run(root), np.random.default_rng(3)
    end = START_NS
    for rank in range(story["ranks"]):
        rows, now = [], START_NS
        for step in range(story["steps"]):
            times = np.array(story["times"])
            times[1] += story["growth"] * step + (story["slow_rank"] if rank == 1 else 0.0)
            if step % story["spike_every"] == 1:
                times[2] += story["spike"]
            times *= np.exp(story["noise"] * dice.standard_normal(4))
            for kind, ms in zip(PHASES, times.tolist(), strict=True):
                if ms > 0:
                    rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
                    now += int((ms + story["gap"] / 4) * NS_PER_MS) + 1
            if story["pause"] and step % story["pause_every"] == 0:
                length = int(story["pause"] * NS_PER_MS)
                tag = 2 if story["pause_kind"] == schema.GC else 0
                rows.append((story["pause_kind"], tag, now, now + length))
                now += length + 1
            if story["evaluation"] and step % 50 == 20:
                rows.append((schema.EVAL, 0, now, now + int(story["evaluation"] * NS_PER_MS)))
                now += int((story["evaluation"] + 1) * NS_PER_MS)
        write_rank(run, spans_from(rows), rank=rank, world_size=story["ranks"])
        end = max(end, now)
    count_cores(run, story, end)
    return diagnose(Analyzer(root))


def count_cores(run: RunPaths, story: dict[str, Any], end: int) -> None:
    times = [
        START_NS - NS_PER_S + int(k * NS_PER_S / 2) for k in range(2 + (end - START_NS) // 5**9)
    ]
    times = times[:60]
    seconds = [(time - START_NS) / NS_PER_S + 2 for time in times]
    own = {
        "cpu_ns": story["cores"], "cpu_main_ns": min(story["cores"], 1.0),
        "run_queue_wait_ns": story["wait"],
    }  # fmt: skip
    rows = [
        row_of(PROCESS, time_ns=time, pid=100 + rank, start_ticks=7, process_count=1,
               memory_rss_bytes=1 << 30, **{n: int(v * s * NS_PER_S) for n, v in own.items()})
        for time, s in zip(times, seconds, strict=True)
        for rank in range(story["ranks"])
    ]  # fmt: skip
    write_records(run.node("node0").records("process"), PROCESS, rows)
    rows = [
        row_of(HOST, time_ns=time, cpu_count=2, cpu_user_ns=int(story["node"] * s * NS_PER_S),
               cpu_idle_ns=int((2 - story["node"]) * s * NS_PER_S))
        for time, s in zip(times, seconds, strict=True)
    ]  # fmt: skip
    write_records(run.node("node0").records("host"), HOST, rows)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=runs)
def test_verdict_holds_together(
    tmp_path_factory: pytest.TempPathFactory, story: dict[str, Any]
) -> None:
    verdict = write(tmp_path_factory.mktemp("any") / "run", story)
    findings, split = verdict.findings, verdict.split
    whole = sum(value or 0.0 for value in split.values())
    assert impossible_findings(findings, split) == {}
    assert not any("left out" in why for _, why in verdict.abstained), verdict.abstained
    assert is_in_order(findings)
    assert verdict.step_ns in (None, whole)
    assert sum(f.lost_ratio or 0.0 for f in findings if is_part_of_the_bar(f)) <= 1 + 1e-6
    assert not any(word in f"{f.title} {f.remedy}" for f in findings for word in OF_GPUS)
    rules = [finding.rule for finding in findings]
    for one, other in CONTRADICTIONS:
        about = {f.rank for f in findings if f.rule in (one, other)}
        assert not {one, other} <= set(rules) or (len(about) == 1 and None not in about)
    assert len(rules) == len(set(rules))
    for finding in findings:
        assert finding.is_one_event <= (finding.severity == "info" or bool(finding.explained_by))
        cause = next((f for f in findings if f.rule == finding.explained_by), None)
        if cause is not None and cause.lost_ratio is not None and finding.lost_ratio is not None:
            assert cause.lost_ratio >= finding.lost_ratio / 2
        if finding.rule in ("dataloader_bound", "optimizer_bound", "outside_the_model"):
            share = (split[PHASE_RULES[finding.rule]] or 0.0) / whole
            assert f" {ratio_text(share)} of " in finding.title


def is_part_of_the_bar(finding: Finding) -> bool:
    """Whether it costs a part of one phase, by the same clock as the bar."""
    return finding.rule in PHASE_RULES


def a_finding(**more: Any) -> Finding:
    fields = {"rule": "a", "severity": "warning", "title": "", "evidence": (), "remedy": "",
              "confidence": 0.9}  # fmt: skip
    return Finding(**{**fields, **more})


@pytest.mark.parametrize(
    ("lost", "confidence", "severity"),
    [(0.3, 0.9, "critical"), (0.3, 0.5, "warning"), (0.1, 0.9, "warning"), (0.3, 0.2, "info"),
     (0.02, 0.9, "info"), (None, 0.9, "warning")],
)  # fmt: skip
def test_severity_follows_time_and_certainty(
    lost: float | None, confidence: float, severity: str
) -> None:
    assert severity_of(a_finding(lost_ratio=lost, confidence=confidence)) == severity


@given(
    others=st.lists(
        st.builds(
            a_finding, rule=st.sampled_from("bcd"), lost_ratio=st.sampled_from([None, 0.01, 1.0]),
            explains=st.sampled_from([(), (STANDSTILL,), ("b", "c")]),
            confidence=st.sampled_from([0.2, 0.9]),
        ),
        unique_by=lambda f: f.rule,
    ),
    severity=st.sampled_from(["critical", "warning"]),
)  # fmt: skip
def test_a_hang_outranks_everything(others: list[Finding], severity: str) -> None:
    ordered = in_order([*others, a_finding(rule=STANDSTILL, severity=severity)])
    assert (ordered[0].rule, ordered[0].explained_by) == (STANDSTILL, None)
    assert is_in_order(ordered)
    assert not others or not is_in_order([*ordered[1:], ordered[0]])


def test_what_is_milder_is_noticed_above_what_is_graver() -> None:
    """Unless it is right behind its own cause."""
    cause, grave = a_finding(rule="a", severity="critical"), a_finding(rule="d")
    mild = [a_finding(rule=r, severity="info", explained_by="a") for r in ("b", "c")]
    assert is_in_order([cause, mild[0], grave, mild[1]])
    assert not is_in_order([cause, *mild, grave])
    assert not is_in_order([cause, grave, a_finding(rule="e", severity="critical")])


def test_one_event_is_a_note_however_long_it_took() -> None:
    assert severity_of(a_finding(lost_ratio=0.9, is_one_event=True)) == "info"


def test_share_of_another_step_than_the_bars_is_noticed() -> None:
    late = Evidence(name="lateness per step", value=30.0, unit="ns")
    for value, is_so in ((0.3, True), (0.4, False)):
        share = Evidence(name=SHARE_OF_USUAL, value=value, unit="ratio")
        found = impossible_findings([a_finding(evidence=(late, share))], {"backward": 100.0})
        assert (found == {}) is is_so, found


def test_part_above_its_whole_is_noticed() -> None:
    split = {"dataloader": 10.0, "forward": 90.0}
    share = Evidence(name="share", value=1.2, unit="ratio")
    assert "a" in impossible_findings([a_finding(evidence=(share,))], split)
    assert "a" in impossible_findings([a_finding(lost_ratio=1.1)], split)
    late = a_finding(rule="dataloader_bound", lost_ratio=0.3)
    assert impossible_findings([late], split) == {
        "dataloader_bound": "it would cost more than all of dataloader"
    }
