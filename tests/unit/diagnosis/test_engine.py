"""Each rule on a run that has its cause, and on one that has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.document import as_document
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.rules import RULES
from tests.unit.analysis.recorded import spans_of, write_rank, write_run
from tests.unit.diagnosis.stories import GAP_MS, verdict_of, write_story

BALANCED = (0.2, 5.0, 10.0, 2.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_balanced_run_has_no_finding(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: BALANCED, gpu=0.95, cores=1.0, ranks=2)
    assert verdict.findings == ()
    assert verdict.headline.startswith("nothing wrong found: ")
    assert verdict.step_count == 120
    assert verdict.ranks == (0, 1)
    assert verdict.split["backward"] == pytest.approx(10 * NS_PER_MS, rel=0.02)
    assert sum(v or 0 for v in verdict.split.values()) == pytest.approx(verdict.step_ns, rel=0.02)


@pytest.mark.parametrize(
    ("wait_ms", "severity"), [(1.0, None), (2.5, "warning"), (30.0, "critical")]
)
def test_dataloader_bound_follows_the_share(
    root: Path, wait_ms: float, severity: str | None
) -> None:
    verdict = verdict_of(root, lambda rank, step: (wait_ms, *BALANCED[1:]))
    assert [f.severity for f in verdict.findings] == [severity] * (severity is not None)
    if severity:
        assert verdict.findings[0].rule == "dataloader_bound"
        assert verdict.findings[0].evidence[1].value == pytest.approx(wait_ms * 1e6, rel=0.05)
        assert verdict.headline == verdict.findings[0].title


def test_dataloader_bound_sees_bursts_of_several_workers(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.1 if step % 4 else 40.0, *BALANCED[1:]))
    assert [f.rule for f in verdict.findings] == ["dataloader_bound", "jitter"]
    assert verdict.findings[1].explained_by == "dataloader_bound"


def test_dataloader_bound_is_not_moved_by_a_slow_first_batch(root: Path) -> None:
    times = lambda rank, step: (0.2 if step else 5_000.0, *BALANCED[1:])  # noqa: E731
    assert [f.rule for f in verdict_of(root, times).findings] == ["first_batch"]


def test_loop_without_loader_abstains(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.0, *BALANCED[1:]))
    assert ("dataloader_bound", "no torch DataLoader ran in a training step") in verdict.abstained
    assert ("dataloader", "no torch DataLoader ran in a training step") in verdict.not_measured
    assert verdict.split["dataloader"] is None


def test_forward_bound_without_gpu_gives_the_numbers_and_says_what_is_missing(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.2, 30.0, 10.0, 2.0), cores=0.7)
    (finding,) = verdict.findings
    assert finding.rule == "forward_bound"
    assert finding.title == "forward-bound: forward takes 70 % of the step, 3.0x backward"
    assert finding.missing == ("GPU utilization",)
    assert finding.confidence < 0.7
    assert ("GPU", "no NVML") in verdict.not_measured


def test_forward_bound_with_an_idle_gpu_and_a_busy_cpu_names_the_cause(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.2, 30.0, 10.0, 2.0), gpu=0.3, cores=0.98)
    (finding,) = verdict.findings
    assert finding.severity == "critical"
    assert finding.title.startswith("operators left on the CPU: forward is 3.0x backward")
    assert {e.name: e.value for e in finding.evidence}["GPU utilization"] == pytest.approx(0.3)


def test_forward_bound_with_a_busy_gpu_does_not_blame_the_cpu(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.2, 30.0, 10.0, 2.0), gpu=0.9, cores=0.98)
    assert [f.title.split(":")[0] for f in verdict.findings] == ["forward-bound"]


@pytest.mark.parametrize("gpu", [None, 0.9])
def test_copies_between_devices_are_advised_on_only_where_there_are_two(
    root: Path, gpu: float | None
) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.2, 30.0, 10.0, 2.0), gpu=gpu, cores=0.7)
    (finding,) = verdict.findings
    assert ("copies between devices" in finding.remedy) is (gpu is not None)
    assert "Python loops over elements, " in finding.remedy


@pytest.mark.parametrize(
    ("gpu", "cores", "wait_ms", "fires"),
    [(0.3, 1.0, 0.2, True), (0.8, 1.0, 0.2, False), (0.3, 0.4, 0.2, False), (0.3, 1.0, 9.0, False)],
)
def test_gpu_waits_for_host(
    root: Path, *, gpu: float, cores: float, wait_ms: float, fires: bool
) -> None:
    verdict = verdict_of(root, lambda rank, step: (wait_ms, *BALANCED[1:]), gpu=gpu, cores=cores)
    assert ("gpu_waits_for_host" in [f.rule for f in verdict.findings]) is fires


def test_gpu_waits_for_host_abstains_without_gpu(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: BALANCED, cores=1.0)
    assert ("gpu_waits_for_host", "no GPU utilization of a rank") in verdict.abstained


def test_drift_says_since_when_and_where(root: Path) -> None:
    times = lambda rank, step: (0.2, 5.0, 10.0 if step < 60 else 14.0, 2.0)  # noqa: E731
    (finding,) = verdict_of(root, times, steps=120).findings
    assert finding.rule == "step_time_drift"
    evidence = {e.name: e.value for e in finding.evidence}
    assert evidence["slower since step"] == pytest.approx(60, abs=6)
    assert evidence["growth of backward"] == pytest.approx(4 * NS_PER_MS, rel=0.1)
    assert "backward" in finding.title


@pytest.mark.parametrize(("ranks", "cause"), [(1, "sudden"), (2, "sudden_all_phases")])
def test_growth_of_backward_with_several_ranks_may_be_a_wait(
    root: Path, ranks: int, cause: str
) -> None:
    times = lambda rank, step: (0.2, 5.0, 10.0 if step < 60 else 14.0, 2.0)  # noqa: E731
    verdict = verdict_of(root, times, steps=120, ranks=ranks)
    (finding,) = [f for f in verdict.findings if f.rule == "step_time_drift"]
    assert finding.cause == cause
    assert ("a rank that became late" in finding.remedy) is (ranks > 1)


@pytest.mark.parametrize("noise", [0.02, 0.5])
def test_drift_does_not_fire_on_steady_steps(root: Path, noise: float) -> None:
    verdict = verdict_of(root, lambda rank, step: BALANCED, steps=200, noise=noise)
    assert "step_time_drift" not in [f.rule for f in verdict.findings]


def test_drift_does_not_fire_on_steps_that_become_faster(root: Path) -> None:
    times = lambda rank, step: (0.2, 5.0, 10.0 if step > 60 else 14.0, 2.0)  # noqa: E731
    assert verdict_of(root, times, steps=120).findings == ()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slow_rank_is_named_with_its_phase(root: Path, ranks: int) -> None:
    """The others wait inside backward, so that all steps are equally long."""
    times = lambda rank, step: (0.2, 9.0, 10.0, 2.0) if rank == 1 else (0.2, 5.0, 14.0, 2.0)  # noqa: E731
    verdict = verdict_of(root, times, ranks=ranks)
    (finding,) = verdict.findings
    assert finding.rule == "ranks_uneven"
    assert finding.rank == 1
    assert finding.title.endswith("in forward")
    assert finding.evidence[0].value == pytest.approx(4 * NS_PER_MS, rel=0.1)
    assert verdict.next_command == f"haiprof rank {root} 1"


def test_ranks_that_wait_inside_a_sharded_forward_are_not_called_slow(root: Path) -> None:
    """Rank 0 is slow in backward; rank 1 waits for it in the next forward."""
    times = lambda rank, step: (0.2, 9.0, 10.0, 2.0) if rank else (0.2, 5.0, 14.0, 2.0)  # noqa: E731
    write_story(root, times, ranks=2)
    for rank in (0, 1):
        path = root / "ranks" / str(rank) / "events.jsonl"
        path.write_bytes(path.read_bytes().replace(b'"GPT"', b'"FSDPGPT"'))
    assert "ranks_uneven" not in [f.rule for f in diagnose(Analyzer(root)).findings]


def test_one_rank_abstains_on_evenness(root: Path) -> None:
    assert ("ranks_uneven", "one rank") in verdict_of(root, lambda *_: BALANCED).abstained


def test_verdict_as_json_is_plain(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (30.0, *BALANCED[1:]))
    content = json.loads(json.dumps(as_document(verdict), allow_nan=False))
    assert content["findings"][0]["slug"] == "dataloader_bound"
    assert content["cost"]["hook_ns_per_step"] == pytest.approx(4_000)
    assert content["cost"]["agent_cpu_ratio"] == pytest.approx(0.005)
    assert content["next_command"] == f"haiprof rank {root} 0"


def test_verdict_of_a_run_without_ranks_says_why(root: Path) -> None:
    write_run(root)
    verdict = diagnose(Analyzer(root))
    assert verdict.headline.startswith("no training steps: no process of the job reported in")
    assert verdict.step_ns is None
    assert [rule for rule, _ in verdict.abstained] == [rule.__name__ for rule in RULES]


def test_verdict_of_an_evaluation_says_so(root: Path) -> None:
    write_rank(write_run(root), spans_of("D E END"))
    assert "only evaluated" in diagnose(Analyzer(root)).headline


def test_verdict_says_what_steps_are_without_an_optimizer(root: Path) -> None:
    write_rank(write_run(root), spans_of("D E " * 30 + "END"))
    verdict = diagnose(Analyzer(root))
    assert verdict.step_count == 30
    assert verdict.notes[0] == "steps begin with the loader's batches: no optimizer seen"
    assert not {"backward", "optimizer"} & {what for what, _ in verdict.not_measured}


def test_verdict_counts_pauses_and_saves(root: Path) -> None:
    write_rank(write_run(root), spans_of("D F(GC) B O SAVE D F B O E"))
    verdict = diagnose(Analyzer(root))
    assert {name: event.count for name, event in verdict.events.items()} == {"gc": 1, "save": 1}
    assert verdict.evaluation_ns == 100


def test_few_steps_are_judged_with_less_confidence(root: Path) -> None:
    few = diagnose(Analyzer(write_story(root, lambda *_: (300.0, *BALANCED[1:]), steps=5)))
    assert [f.severity for f in few.findings] == ["warning"]
    assert few.findings[0].missing
    assert GAP_MS < 1


def test_what_is_seen_in_less_than_a_second_is_a_note_and_says_so(root: Path) -> None:
    verdict = diagnose(Analyzer(write_story(root, lambda *_: (30.0, *BALANCED[1:]), steps=15)))
    assert {f.severity for f in verdict.findings} == {"info"}
    assert any("too short" in note for note in verdict.notes)


def test_time_outside_the_model_is_named(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.1, 2.0, 4.0, 1.0), gap_ms=5.0)
    assert verdict.headline.startswith("outside the model: ")
    assert verdict.findings[0].severity == "critical"
