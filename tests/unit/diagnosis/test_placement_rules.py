"""Each rule about cores and NUMA nodes on a run that has its cause, and on healthy ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.finding import Finding
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import CGROUP, HOST, PROCESS
from tests.unit.analysis.recorded import row_of, write_records
from tests.unit.diagnosis.stories import START_NS, write_story

STEPS_MS = (0.2, 5.0, 10.0, 2.0)
RULES = ("cpu_throttled", "shared_cores", "too_few_cores", "numa_placement")
PAGES = {"0": 500}


@dataclass(frozen=True, kw_only=True)
class RankStory:
    """How one rank used its cores."""

    cpus: str = "0-1"
    busy: float = 1.0
    wait: float | None = 0.02
    threads: int = 8
    processes: int = 1
    placement: Mapping[str, Any] = field(default_factory=dict)


def judged(
    root: Path,
    ranks: Sequence[RankStory],
    *,
    cores: int = 2,
    steps: int = 200,
    limit: tuple[float | None, float, float] | None = None,
) -> Verdict:
    """The verdict on a balanced run whose ranks were placed so.

    Args:
        root: The run directory.
        ranks: Each rank.
        cores: Of the node.
        steps: Of each rank.
        limit: Limit in cores, periods per second, share of them throttled.
    """
    write_story(root, lambda *_: STEPS_MS, ranks=len(ranks), steps=steps)
    node = RunPaths(root).node("node0")
    times = np.linspace(START_NS, START_NS + steps * 18_000_000, 40).astype(int).tolist()
    rows = [_process_row(time, rank, story) for time in times for rank, story in enumerate(ranks)]
    write_records(node.records("process"), PROCESS, rows)
    hosts = [row_of(HOST, time_ns=time, cpu_count=cores) for time in times]
    write_records(node.records("host"), HOST, hosts)
    if limit is not None:
        write_records(node.records("cgroup"), CGROUP, [_cgroup_row(t, *limit) for t in times])
    with node.events.open("a") as file:
        for rank, story in enumerate(ranks):
            file.write(json.dumps(_line(rank, story)) + "\n")
    return diagnose(Analyzer(root))


def _process_row(time: int, rank: int, story: RankStory) -> list[float]:
    waits = {} if story.wait is None else {"run_queue_wait_ns": int(story.wait * time)}
    return row_of(
        PROCESS, time_ns=time, pid=100 + rank, start_ticks=7, process_count=story.processes,
        cpu_ns=int(story.busy * time), cpu_main_ns=int(min(1.0, story.busy) * time), **waits,
    )  # fmt: skip


def _cgroup_row(time: int, cores: float | None, per_s: float, share: float) -> list[float]:
    periods = int(per_s * time / NS_PER_S)
    limits = {} if cores is None else {"cpu_limit_cores": cores}
    return row_of(
        CGROUP, time_ns=time, cgroup_index=0, cpu_period_count=periods,
        cpu_throttled_period_count=int(share * per_s * time / NS_PER_S), **limits,
    )  # fmt: skip


def _line(rank: int, story: RankStory) -> dict[str, Any]:
    return {
        "type": "placement", "pid": 100 + rank, "start_ticks": 7, "allowed_cpus": story.cpus,
        "thread_count": story.threads, "cpu_nodes": [0], "memory_nodes": PAGES, "gpu_uuid": None,
        "gpu_bus_id": None, "gpu_node": None, "gpu_cpus": None, "nics": [],
        **story.placement,
    }  # fmt: skip


def only(verdict: Verdict) -> Finding:
    (finding,) = verdict.findings
    return finding


def numbers(finding: Finding) -> dict[str, float | None]:
    return {evidence.name: evidence.value for evidence in finding.evidence}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


# -- nothing amiss ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks",
    [
        [RankStory(busy=1.9, wait=0.05, processes=3)],
        [RankStory(busy=0.99), RankStory(busy=0.98, wait=0.06)],
        # a noisy neighbour: they wait, but the cores are full of others' work
        [RankStory(busy=0.5, wait=0.45), RankStory(busy=0.5, wait=0.45)],
        [RankStory(busy=1.1, wait=0.4, processes=5)],
        # many threads, few of them at work
        [RankStory(busy=0.3, wait=0.01, threads=64, processes=9)],
    ],
    ids=["one", "two", "neighbour", "neighbour of one", "idle threads"],
)
def test_small_healthy_runs_are_balanced(root: Path, ranks: list[RankStory]) -> None:
    verdict = judged(root, ranks, limit=(None, 0.0, 0.0))
    assert verdict.findings == ()
    assert verdict.headline.startswith("nothing wrong found: ")
    assert {rule for rule, _ in verdict.abstained} & set(RULES) <= {"shared_cores"}


def test_run_without_placement_abstains_with_the_reason(root: Path) -> None:
    write_story(root, lambda *_: STEPS_MS, ranks=2)
    verdict = diagnose(Analyzer(root))
    reasons = dict(verdict.abstained)
    assert verdict.findings == ()
    assert reasons["numa_placement"] == "no placement of a rank was recorded"
    assert reasons["too_few_cores"] == reasons["shared_cores"] == reasons["numa_placement"]
    assert reasons["cpu_throttled"] == "no periods of a CPU limit were recorded"


def test_ranks_whose_waits_are_not_known_abstain(root: Path) -> None:
    verdict = judged(root, [RankStory(busy=1.0, wait=None, cpus="0")] * 2)
    reasons = dict(verdict.abstained)
    assert reasons["shared_cores"] == "no waiting for cores of a rank was recorded"


# -- cores --------------------------------------------------------------------------------------


def test_ranks_bound_to_the_same_core_are_named(root: Path) -> None:
    ranks = [RankStory(cpus="0", busy=0.5, wait=0.48), RankStory(cpus="0", busy=0.49, wait=0.45)]
    finding = only(judged(root, ranks, cores=64))
    assert (finding.rule, finding.severity) == ("shared_cores", "critical")
    assert finding.title == "ranks 0 and 1 share 1 core of 64, and wait for one 45 % of the time"
    assert numbers(finding)["cores they use"] == pytest.approx(0.99, rel=0.01)
    assert "--numa-binding=exclusive" in finding.remedy


def test_ranks_on_one_core_are_named_beside_a_neighbour_too(root: Path) -> None:
    ranks = [RankStory(cpus="0", busy=0.33, wait=0.67), RankStory(cpus="0", busy=0.33, wait=0.67)]
    finding = only(judged(root, ranks, cores=2))
    assert finding.title == "ranks 0 and 1 share 1 core of 2, and wait for one 67 % of the time"
    assert numbers(finding)["cores they could use at least"] == pytest.approx(2.0, rel=0.02)


def test_ranks_that_fill_the_whole_node_are_told_to_run_fewer_threads(root: Path) -> None:
    finding = only(judged(root, [RankStory(busy=0.97, wait=0.2, processes=5)] * 2))
    assert (finding.rule, finding.severity) == ("shared_cores", "warning")
    assert finding.title.startswith("ranks 0 and 1 share 2 cores, and wait for one")
    assert "OMP_NUM_THREADS" in finding.remedy


def test_ranks_on_cores_of_their_own_share_nothing(root: Path) -> None:
    ranks = [RankStory(cpus="0", busy=1.0, wait=0.05), RankStory(cpus="1", busy=1.0, wait=0.05)]
    assert judged(root, ranks).findings == ()


def test_only_one_rank_waiting_is_not_sharing(root: Path) -> None:
    ranks = [RankStory(busy=1.0, wait=0.01), RankStory(busy=1.0, wait=0.4)]
    assert judged(root, ranks).findings == ()


def test_rank_with_more_workers_than_cores_is_named(root: Path) -> None:
    ranks = [RankStory(cpus="0-1", busy=1.98, wait=0.35, processes=9)]
    finding = only(judged(root, ranks, cores=32))
    assert (finding.rule, finding.severity, finding.rank) == ("too_few_cores", "critical", 0)
    assert finding.title == (
        "too few cores: rank 0 may use 2 of 32, and none is free 35 % of the time"
    )
    assert numbers(finding)["processes of the rank, workers included"] == 9
    assert "--cpus-per-task" in finding.remedy


def test_bound_rank_whose_workers_may_be_in_the_way_is_less_sure(root: Path) -> None:
    ranks = [RankStory(cpus="0", busy=0.53, wait=0.6, processes=5)]
    finding = only(judged(root, ranks, cores=2))
    assert (finding.rule, finding.severity, finding.confidence) == ("too_few_cores", "warning", 0.5)
    assert finding.missing == ("whether something else runs on these cores",)


def test_few_steps_make_a_note(root: Path) -> None:
    ranks = [RankStory(busy=1.98, wait=0.35, processes=9)]
    assert only(judged(root, ranks, steps=12)).severity == "info"


# -- the limit of a cgroup ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "wait", "severity"),
    [(0.1, 0.4, None), (0.5, 0.05, "warning"), (0.9, 0.4, "critical"), (0.9, None, "warning")],
)
def test_throttled_follows_the_share_of_periods(
    root: Path, share: float, wait: float | None, severity: str | None
) -> None:
    ranks = [RankStory(cpus="0-31", busy=3.9, wait=wait, processes=9)]
    verdict = judged(root, ranks, cores=32, limit=(4.0, 10.0, share))
    assert [f.severity for f in verdict.findings] == [severity] * (severity is not None)
    if severity:
        finding = only(verdict)
        assert finding.rule == "cpu_throttled"
        assert "limit of 4 cores" in finding.title
        assert numbers(finding)["periods with a stop, of those in which the job ran"] == (
            pytest.approx(share, rel=0.05)
        )
        assert bool(finding.missing) is (wait is None)


def test_waiting_at_the_limit_is_named_once(root: Path) -> None:
    ranks = [RankStory(busy=1.6, wait=0.95, processes=5)]
    verdict = judged(root, ranks, limit=(1.6, 10.0, 0.9))
    assert [finding.rule for finding in verdict.findings] == ["cpu_throttled"]


def test_a_few_periods_say_nothing_about_throttling(root: Path) -> None:
    verdict = judged(root, [RankStory()], steps=30, limit=(4.0, 10.0, 1.0))
    assert verdict.findings == ()


# -- NUMA nodes ---------------------------------------------------------------------------------


def numa(root: Path, *placements: Mapping[str, Any]) -> Verdict:
    ranks = [
        RankStory(cpus=f"{n * 4}-{n * 4 + 3}", placement=each) for n, each in enumerate(placements)
    ]
    return judged(root, ranks, cores=64)


def test_cores_off_the_node_of_the_gpu_are_named(root: Path) -> None:
    good = {"cpu_nodes": [0], "gpu_node": 0, "memory_nodes": PAGES}
    bad = {"cpu_nodes": [0], "gpu_node": 1, "memory_nodes": PAGES}
    finding = only(numa(root, good, bad))
    assert (finding.rule, finding.severity, finding.rank) == ("numa_placement", "warning", 1)
    assert finding.title == "rank 1 runs on another NUMA node than its GPU"
    assert numbers(finding) == {
        "rank 1: cores on node 0, GPU on 1; pages away from its GPU": pytest.approx(1.0)
    }
    assert "--numa-binding=node" in finding.remedy


def test_memory_off_the_node_of_the_cores_is_named(root: Path) -> None:
    bad = {"cpu_nodes": [1], "memory_nodes": {"0": 400, "1": 100}}
    finding = only(numa(root, bad, bad))
    assert finding.title == (
        "ranks 0 and 1 have most of their memory on another NUMA node than their cores"
    )
    assert finding.severity == "warning"
    assert list(numbers(finding).values()) == [pytest.approx(0.8)] * 2


def test_unbound_rank_with_memory_away_from_its_gpu_is_information(root: Path) -> None:
    bad = {"cpu_nodes": [0, 1], "gpu_node": 1, "memory_nodes": {"0": 400, "1": 100}}
    finding = only(numa(root, bad))
    assert finding.severity == "info"
    assert finding.title.startswith("rank 0 is not bound, and has most of its memory")


def test_cores_on_a_node_without_adapter_are_information(root: Path) -> None:
    nics = [{"name": "mlx5_0", "node": 1}]
    finding = only(numa(root, {"cpu_nodes": [0], "nics": nics}))
    assert (finding.severity, finding.confidence) == ("info", 0.5)
    assert "network on 1" in finding.evidence[0].name


@pytest.mark.parametrize(
    "placement",
    [
        {"cpu_nodes": [0], "gpu_node": 0},
        {"cpu_nodes": [0, 1], "gpu_node": 0, "memory_nodes": {"0": 300, "1": 200}},
        {"cpu_nodes": [0, 1], "memory_nodes": {"0": 250, "1": 250}},
        {"cpu_nodes": [1], "memory_nodes": {"0": 30}},
        {"cpu_nodes": [0], "gpu_node": 0, "nics": [{"name": "mlx5_0", "node": 1}]},
        {"cpu_nodes": [0], "gpu_node": -1, "nics": [{"name": "eth0", "node": -1}]},
    ],
    ids=["one node", "near its GPU", "no GPU", "few pages", "as built", "firmware says nothing"],
)
def test_sound_placement_is_not_named(root: Path, placement: Mapping[str, Any]) -> None:
    verdict = numa(root, placement)
    assert verdict.findings == ()
    assert "numa_placement" not in dict(verdict.abstained)


def test_unknown_nodes_abstain(root: Path) -> None:
    verdict = numa(root, {"cpu_nodes": None, "gpu_node": 1})
    assert dict(verdict.abstained)["numa_placement"] == (
        "the NUMA nodes of the ranks' cores are not known"
    )
