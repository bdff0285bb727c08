"""Rules on whole runs: each on a run that has its cause, on one that has not, and without data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.compare.compared_run import open_compared_run
from haiprof.diagnosis.compare.counters import load_of
from haiprof.diagnosis.document import as_document
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.finding import Finding
from haiprof.diagnosis.rule_inputs import gather_inputs
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import CGROUP, GPU, HOST, PROCESS
from tests.unit.analysis.recorded import row_of, spans_from, write_rank, write_records, write_run
from tests.unit.analysis.sampled import write_stacks
from tests.unit.diagnosis.stories import START_NS, PhaseTimes, verdict_of, write_beside, write_story

BALANCED = (0.2, 5.0, 10.0, 2.0)
STEP_NS = 20 * NS_PER_MS
FETCH = ("/x/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def rules(verdict: Verdict) -> list[str]:
    return [f.rule for f in verdict.findings]


def found(verdict: Verdict, rule: str) -> Finding:
    (finding,) = [f for f in verdict.findings if f.rule == rule]
    return finding


def note(root: Path, rank: int, /, **line: object) -> None:
    with (root / "ranks" / str(rank) / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def report(root: Path, rank: int, **facts: object) -> None:
    path = root / "ranks" / str(rank) / "rank.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def counters(
    root: Path,
    of: Callable[[float], Mapping[str, float]],
    *,
    seconds: float = 40.0,
    ranks: int = 1,
    host: Callable[[float], Mapping[str, float]] | None = None,
) -> None:
    """Process counters of each rank (and of the host) twice a second, as functions of time."""
    times = np.arange(START_NS - NS_PER_S, START_NS + seconds * NS_PER_S, NS_PER_S / 2)
    rows = [
        row_of(PROCESS, time_ns=int(t), pid=100 + r, start_ticks=7, process_count=1,
               **of((t - START_NS) / NS_PER_S))
        for t in times
        for r in range(ranks)
    ]  # fmt: skip
    node = RunPaths(root).node("node0")
    write_records(node.records("process"), PROCESS, rows)
    if host is not None:
        rows = [row_of(HOST, time_ns=int(t), **host((t - START_NS) / NS_PER_S)) for t in times]
        write_records(node.records("host"), HOST, rows)


def limited(root: Path, limit_bytes: float) -> None:
    """Memory of a rank that grows by 20 MB a second, and the limit of its control group."""
    counters(root, lambda t: {"memory_rss_bytes": int(1e9 + 2e7 * t)})
    times = [START_NS + second * NS_PER_S for second in range(20)]
    rows = [
        row_of(CGROUP, time_ns=t, cgroup_index=0, memory_limit_bytes=int(limit_bytes))
        for t in times
    ]
    node = RunPaths(root).node("node0")
    write_records(node.records("cgroup"), CGROUP, rows, entities=[{"key": [0], "name": "own"}])


def placed(root: Path, rank: int = 0, cpus: str = "0-1") -> None:
    line = {
        "type": "placement", "pid": 100 + rank, "start_ticks": 7, "allowed_cpus": cpus,
        "thread_count": 4, "cpu_nodes": [0], "memory_nodes": {"0": 500}, "gpu_node": None,
        "nics": [],
    }  # fmt: skip
    with (root / "nodes" / "node0" / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def judged(root: Path) -> Verdict:
    return diagnose(Analyzer(root))


def write_line(
    root: Path, rows: list[tuple[int, int, int, int]], lines: list[dict[str, Any]] | None = None
) -> None:
    write_rank(write_run(root), spans_from(rows), lines=lines or [])


def plain_steps(count: int = 100, extra: Callable[[int, int], list[tuple[int, int]]] | None = None,
                kind: int = schema.GC) -> list[tuple[int, int, int, int]]:  # fmt: skip
    """Steps of 18 ms; `extra(step, now)` gives spans (start, length) of a kind after the step."""
    rows, now = [], START_NS
    for step in range(count):
        for phase, ms in zip(
            (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER), BALANCED, strict=True
        ):
            rows.append((phase, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.1) * NS_PER_MS)
        for start, length in extra(step, now) if extra else []:
            rows.append((kind, 2 if kind == schema.GC else 0, start, start + length))
            now = start + length + 1000
    return rows


# -- phases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backward_ms", "fires"), [(90.0, True), (12.0, False)])
def test_backward_bound_follows_the_ratio(root: Path, backward_ms: float, fires: bool) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.2, 5.0, backward_ms, 2.0))
    assert ("backward_bound" in rules(verdict)) is fires


def test_backward_of_several_ranks_without_collectives_abstains(root: Path) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.2, 5.0, 90.0, 2.0), ranks=2)
    assert "backward_bound" in dict(verdict.abstained)


@pytest.mark.parametrize(("optimizer_ms", "fires"), [(30.0, True), (6.0, False)])
def test_optimizer_bound_follows_the_ratio(root: Path, optimizer_ms: float, fires: bool) -> None:
    verdict = verdict_of(root, lambda rank, step: (0.2, 5.0, 10.0, optimizer_ms))
    assert ("optimizer_bound" in rules(verdict)) is fires


def test_slow_first_batch_is_named_with_its_length(root: Path) -> None:
    times = lambda rank, step: (0.2 if step else 5_000.0, *BALANCED[1:])  # noqa: E731
    finding = found(verdict_of(root, times), "first_batch")
    assert finding.evidence[0].value == pytest.approx(5_000 * NS_PER_MS, rel=0.1)


# -- why batches are late -------------------------------------------------------------------------


def loader_story(
    root: Path, workers: int, *, main: float, all_cores: float, **more: float
) -> Finding:
    write_story(root, lambda rank, step: (30.0, *BALANCED[1:]), steps=200)
    note(root, 0, type="dataloader", workers=workers, batch_size=8, persistent=False)
    counters(root, lambda t: {"cpu_main_ns": int(main * (t + 2) * NS_PER_S),
                              "cpu_ns": int(all_cores * (t + 2) * NS_PER_S)})  # fmt: skip
    placed(root, cpus="0-3")
    return found(judged(root), "dataloader_bound")


@pytest.mark.parametrize(
    ("workers", "main", "all_cores", "cause"),
    [
        (0, 0.35, 0.35, "storage"),
        (0, 1.0, 1.0, "no_workers"),
        (1, 0.4, 1.4, "few_workers"),
        (2, 0.4, 0.5, "storage"),
        (3, 0.6, 3.6, "cores_full"),
        (3, 0.2, 3.2, "few_workers"),
    ],
)
def test_reason_for_late_batches(
    root: Path, workers: int, main: float, all_cores: float, cause: str
) -> None:
    finding = loader_story(root, workers, main=main, all_cores=all_cores)
    assert finding.cause == cause
    more = "num_workers=" in finding.remedy
    assert more is (cause in ("few_workers", "no_workers") or (cause == "storage" and workers == 0))


def test_late_batches_of_an_unknown_loader_have_no_reason(root: Path) -> None:
    finding = found(verdict_of(root, lambda *_: (30.0, *BALANCED[1:])), "dataloader_bound")
    assert finding.cause is None
    assert finding.missing


def test_restarted_workers_are_told_by_the_starts_of_epochs(root: Path) -> None:
    rows, now = [], START_NS
    for step in range(120):
        first = step % 10 == 0
        if first:
            rows.append((schema.DATA_ITER, 0, now, now + 60 * NS_PER_MS))
            now += 61 * NS_PER_MS
        for kind, ms in zip(
            (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER),
            (100.0 if first else 0.2, *BALANCED[1:]),
            strict=True,
        ):
            rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.1) * NS_PER_MS)
    write_line(root, rows, [{"type": "dataloader", "workers": 2, "persistent": False}])
    finding = found(judged(root), "dataloader_bound")
    assert finding.cause == "epoch_restart"
    assert "persistent_workers=True" in finding.remedy


@pytest.mark.parametrize("usual_ms", [0.2, 14.0])
def test_few_slow_samples_are_told_from_what_every_batch_costs(root: Path, usual_ms: float) -> None:
    times = lambda rank, step: (usual_ms if step % 15 else 400.0, *BALANCED[1:])  # noqa: E731
    write_story(root, times, steps=300)
    note(root, 0, type="dataloader", workers=2)
    assert found(judged(root), "dataloader_bound").cause == "slow_samples"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bursts_of_workers_are_no_slow_samples(root: Path, workers: int) -> None:
    times = lambda rank, step: (0.2 if step % workers else 40.0 * workers, *BALANCED[1:])  # noqa: E731
    write_story(root, times, steps=300)
    note(root, 0, type="dataloader", workers=workers)
    assert found(judged(root), "dataloader_bound").cause != "slow_samples"


# -- interruptions --------------------------------------------------------------------------------


def test_collector_storms_are_named_before_the_time_outside(root: Path) -> None:
    write_line(root, plain_steps(extra=lambda step, now: [(now, 12 * NS_PER_MS)]))
    verdict = judged(root)
    assert rules(verdict)[:2] == ["garbage_collection", "outside_the_model"]
    assert verdict.findings[1].explained_by == "garbage_collection"


def test_ranks_that_collect_at_the_same_time_are_named_before_the_time_outside(
    root: Path,
) -> None:
    """The step loses it once, however many collect; outside of the phases it is on each rank."""
    run = write_run(root)
    rows = plain_steps(extra=lambda step, now: [(now, 12 * NS_PER_MS)])
    for rank in range(2):
        write_rank(run, spans_from(rows), rank=rank, world_size=2)
    verdict = judged(root)
    assert rules(verdict)[:2] == ["garbage_collection", "outside_the_model"]
    assert verdict.findings[1].explained_by == "garbage_collection"


def test_rare_short_pauses_are_left_alone(root: Path) -> None:
    extra = lambda step, now: [(now, NS_PER_MS)] if step % 10 == 0 else []  # noqa: E731
    write_line(root, plain_steps(extra=extra))
    assert judged(root).findings == ()


@pytest.mark.parametrize(("length_ms", "fires"), [(200, True), (5, False)])
def test_checkpoint_stalls_follow_the_share(root: Path, length_ms: int, fires: bool) -> None:
    extra = lambda step, now: [(now, length_ms * NS_PER_MS)] if step % 10 == 9 else []  # noqa: E731
    write_line(root, plain_steps(extra=extra, kind=schema.SAVE))
    verdict = judged(root)
    assert (rules(verdict)[:1] == ["checkpoint_stalls"]) is fires
    assert all(f.explained_by == "checkpoint_stalls" for f in verdict.findings[1:])


def test_jitter_names_the_phase(root: Path) -> None:
    times = lambda rank, step: (0.2, 5.0 if step % 17 else 90.0, *BALANCED[2:])  # noqa: E731
    finding = found(verdict_of(root, times, steps=200), "jitter")
    assert finding.cause == "forward"


def test_what_only_some_steps_do_between_the_phases_is_jitter_first(root: Path) -> None:
    gap_ms = lambda step: 80.0 if step % 20 == 0 else 0.2  # noqa: E731
    write_story(root, lambda *_: BALANCED, steps=300, gap_ms=gap_ms)
    first, second = judged(root).findings[:2]
    assert (first.rule, first.cause) == ("jitter", "other")
    assert (second.rule, second.explained_by) == ("outside_the_model", "jitter")


def test_loader_that_stalls_while_all_else_is_slower_too_is_jitter(root: Path) -> None:
    """Caches are cold after a wait: forward and backward take longer, and are not the cause."""
    times = lambda _, step: (900.0, 20.0, 20.0, 2.0) if step % 20 == 15 else BALANCED  # noqa: E731
    assert found(verdict_of(root, times, steps=100), "jitter").cause == "dataloader"


def test_one_long_interruption_is_no_jitter(root: Path) -> None:
    times = lambda rank, step: (0.2, 5.0 if step != 150 else 5_000.0, *BALANCED[2:])  # noqa: E731
    assert "jitter" not in rules(verdict_of(root, times, steps=200))


def test_recompiling_is_named_before_forward(root: Path) -> None:
    write_story(root, lambda rank, step: (0.2, 30.0, 10.0, 2.0), steps=300)
    mono = json.loads((root / "ranks" / "0" / "rank.json").read_text())["clock"]["mono_ns"]
    assert mono
    for second in range(1, 13):
        note(root, 0, type="compile", time_ns=START_NS + second * NS_PER_S, count=20 * second,
             spent_ns=int(0.5 * second * NS_PER_S))  # fmt: skip
    verdict = judged(root)
    assert rules(verdict)[:2] == ["recompiles", "forward_bound"]
    assert verdict.findings[0].evidence[0].value == pytest.approx(0.5, rel=0.15)


def test_compiling_at_the_beginning_is_left_alone(root: Path) -> None:
    write_story(root, lambda *_: BALANCED, steps=300)
    note(root, 0, type="compile", time_ns=START_NS + NS_PER_S // 20, count=3, spent_ns=10**9)
    verdict = judged(root)
    assert verdict.findings == ()
    assert "recompiles" in verdict.checked


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rss", "fires"),
    [
        (lambda t: 1e9 + 2e7 * t, True),
        (lambda t: 1e9, False),
        (lambda t: 1e9 + min(4e8, 2e8 * t), False),  # a cache that fills
        (lambda t: 1e9 + 5e5 * t, False),  # too little
    ],
)
def test_memory_creep(root: Path, rss: Callable[[float], float], fires: bool) -> None:
    write_story(root, lambda *_: BALANCED, steps=1200)
    counters(root, lambda t: {"memory_rss_bytes": int(rss(t))})
    assert ("memory_creep" in rules(judged(root))) is fires


def test_memory_that_each_step_keeps_creeps_also_where_steps_become_slower(root: Path) -> None:
    step_s, slower = sum(BALANCED) / 1e3, 4

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        data, forward, backward, optimizer = BALANCED
        times = 1 if step < 400 else slower
        return data * times, forward * times, backward * times, optimizer * times

    def kept_bytes(seconds: float) -> int:
        fast = min(seconds / step_s, 400.0)
        return int(1e9 + 1e6 * (fast + max(seconds / step_s - 400, 0.0) / slower))

    write_story(root, times, steps=700)
    counters(root, lambda t: {"memory_rss_bytes": kept_bytes(t)})
    assert "memory_creep" in rules(judged(root))


@pytest.mark.parametrize(("limit", "severity"), [(2e9, "critical"), (2e11, "warning")])
def test_memory_that_ends_the_job_within_the_hour_is_grave(
    root: Path, limit: float, severity: str
) -> None:
    write_story(root, lambda *_: BALANCED, steps=1200)
    limited(root, limit)
    assert found(judged(root), "memory_creep").severity == severity


def test_memory_that_grows_is_said_with_the_time_until_its_limit(root: Path) -> None:
    write_story(root, lambda *_: BALANCED, steps=1200)
    limited(root, 2e9)
    (creep,) = [f for f in judged(root).findings if f.rule == "memory_creep"]
    until = {e.name: e.value for e in creep.evidence}["until its limit, if it goes on so"]
    last = {e.name: e.value for e in creep.evidence}["at the end"]
    assert until is not None
    assert last is not None
    assert until / NS_PER_S == pytest.approx((2e9 - last) / 2e7, rel=0.1)
    assert "its limit is " in creep.title


@pytest.mark.parametrize(
    ("held_gib", "peak_gib", "said"),
    [
        (lambda step: 40.0, 60.0, None),
        (lambda step: 40.0, 77.0, "nearly full on rank 0: 96 %"),
        (lambda step: 10.0 if step < 1 else 40.0, 60.0, None),  # the optimizer's state
        (lambda step: 10 + min(step, 120) / 4, 60.0, None),  # a cache that fills
        (lambda step: 10 + step / 8, 0.0, "GPU memory grows by 128 MiB per step on rank 0"),
        (lambda step: 40 + step / 400, 0.0, None),  # too little
    ],
)
def test_gpu_memory_limit(
    root: Path, held_gib: Callable[[int], float], peak_gib: float, said: str | None
) -> None:
    write_story(root, lambda *_: BALANCED, steps=1200)
    for step in range(0, 400, 10):
        held = held_gib(step)
        sizes = {"allocated": held, "peak": max(peak_gib, held + 5), "reserved": 70, "limit": 80}
        note(root, 0, type="gpu_memory", time_ns=START_NS + step * NS_PER_S // 100, step=step,
             **{f"{name}_bytes": int(size * 2**30) for name, size in sizes.items()})  # fmt: skip
    found = [f for f in judged(root).findings if f.rule == "gpu_memory_limit"]
    assert [said in f.title for f in found if said] == [True] * (said is not None)
    assert len(found) == (said is not None)
    if said and "grows" in said:
        left = {e.name: e.value for e in found[0].evidence}
        steps = (80 - (10 + 390 / 8 + 5)) * 8
        assert left["steps until then, if it goes on so"] == pytest.approx(steps, rel=0.05)


def test_memory_creep_abstains_without_samples(root: Path) -> None:
    assert "memory_creep" in dict(verdict_of(root, lambda *_: BALANCED).abstained)


@pytest.mark.parametrize(("pressure", "fires"), [(0.3, True), (0.02, False)])
def test_memory_pressure(root: Path, pressure: float, fires: bool) -> None:
    write_story(root, lambda *_: BALANCED, steps=600)
    counters(root, lambda t: {}, host=lambda t: {
        "pressure_memory_some_ns": int(pressure * (t + 2) * NS_PER_S)})  # fmt: skip
    assert ("memory_pressure" in rules(judged(root))) is fires


@pytest.mark.parametrize(("retries", "fires"), [(40, True), (1, False)])
def test_allocator_retries(root: Path, retries: int, fires: bool) -> None:
    write_story(root, lambda *_: BALANCED)
    for place, count in enumerate((0, retries)):
        note(root, 0, type="allocator", time_ns=START_NS + place * 10 * NS_PER_S,
             retry_count=count, oom_count=0)  # fmt: skip
    assert ("allocator_retries" in rules(judged(root))) is fires


# -- cores ----------------------------------------------------------------------------------------


def neighbours(
    root: Path, *, wait: float, node: float, since: float = -2.0,
    times: tuple[float, float, float, float] = BALANCED, main: float = 0.5,
    worker: float = 0.0, sampled: bool = True, shape: PhaseTimes | None = None,
) -> Verdict:  # fmt: skip
    """Others come at a time in s; until then the rank's half core is all that is used.

    With a loader's worker it uses so much of a core, and always loads.
    """
    write_story(root, shape or (lambda *_: times), steps=800)
    if worker:
        note(root, 0, type="dataloader", time_ns=START_NS, workers=1)
    if worker and sampled:
        stacks = [(START_NS + i * 50_000_000, (FETCH,)) for i in range(200)]
        write_stacks(RunPaths(root).rank(0).worker_stacks(0), stacks, worker=0, pid=9)

    def host(t: float) -> dict[str, float]:
        busy = 0.5 * (t + 2) + (node - 0.5) * max(t - since, 0.0)
        return {"cpu_count": 2, "cpu_user_ns": int(busy * NS_PER_S),
                "cpu_idle_ns": int((2 * (t + 2) - busy) * NS_PER_S)}  # fmt: skip

    counters(
        root,
        lambda t: {"cpu_ns": int((main + worker) * (t + 2) * NS_PER_S),
                   "cpu_main_ns": int(main * (t + 2) * NS_PER_S),
                   "run_queue_wait_ns": int(wait * max(t - since, 0.0) * NS_PER_S)},
        host=host,
    )  # fmt: skip
    placed(root)
    return judged(root)


@pytest.mark.parametrize(
    ("main", "wait", "worker", "sampled", "is_own"),
    [
        (0.5, 0.4, 0.55, True, False),  # on cores of its own it would be ready in time
        (0.2, 0.2, 0.5, True, True),  # its CPU time alone is longer than the rest of the step
        (0.2, 0.2, 0.5, False, True),
        (0.5, 0.4, 0.05, True, True),  # it waits for something else: it would have got a core
        (0.5, 0.4, 0.05, False, False),  # nobody knows whether it loads all the time
    ],
)
def test_neighbours_explain_of_a_loaders_wait_what_its_workers_lost_to_them(
    root: Path, main: float, wait: float, worker: float, sampled: bool, is_own: bool
) -> None:
    """In all of them training waits 57 % of the step for a worker that always loads."""
    verdict = neighbours(
        root, wait=wait, node=2.0, times=(20.0, 4.0, 8.0, 2.0), main=main, worker=worker,
        sampled=sampled,
    )  # fmt: skip
    finding = found(verdict, "dataloader_bound")
    assert finding.explained_by == (None if is_own else "busy_neighbours")


@pytest.mark.parametrize(("wait", "cause"), [(0.6, "all_phases"), (0.02, "backward")])
def test_few_spikes_beside_neighbours_are_of_no_phase(root: Path, wait: float, cause: str) -> None:
    """Five in backward, half of the step: waiting for a core hits it as often by chance."""

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        return (0.2, 5.0, 1500.0 if step % 100 == 99 and step < 600 else 10.0, 2.0)

    assert found(neighbours(root, wait=wait, node=2.0, shape=times), "jitter").cause == cause


@pytest.mark.parametrize("wait", [0.6, 0.0])
def test_drift_since_cores_are_missing_is_mended_with_cores_first(root: Path, wait: float) -> None:
    """Steps of 18 ms become 38 ms after 7 s, all in backward."""
    times = lambda rank, step: (0.2, 5.0, 10.0 if step < 390 else 30.0, 2.0)  # noqa: E731
    finding = found(
        neighbours(root, wait=wait, node=2.0, shape=times, since=7.0), "step_time_drift"
    )
    assert finding.remedy.startswith("give the job cores") is (wait > 0)
    assert "in backward" in finding.remedy


def test_neighbours_that_take_the_cores_are_named(root: Path) -> None:
    verdict = neighbours(root, wait=0.5, node=2.0)
    finding = found(verdict, "busy_neighbours")
    assert {e.name: e.value for e in finding.evidence}[
        "cores used by others on its node"
    ] == pytest.approx(1.5, abs=0.05)


def test_neighbours_that_come_late_are_named_with_what_they_cost_in_all(root: Path) -> None:
    finding = found(neighbours(root, wait=0.6, node=2.0, since=9.0), "busy_neighbours")
    wait = {e.name: e.value for e in finding.evidence}["rank 0: could run and got no core"]
    assert wait == pytest.approx(0.22, abs=0.07)  # 0.6 in less than half of the run


@pytest.mark.parametrize(("wait", "node"), [(0.02, 2.0), (0.4, 0.6)])
def test_busy_neighbours_need_waiting_and_somebody_else(
    root: Path, wait: float, node: float
) -> None:
    assert "busy_neighbours" not in rules(neighbours(root, wait=wait, node=node))


def stolen(root: Path, times: PhaseTimes, *, steal: float, later: float | None = None) -> Verdict:
    """A main thread that always runs on one of two cores; steal in cores, from 8 s on `later`."""
    write_story(root, times, steps=800)
    then = steal if later is None else later

    def host(t: float) -> dict[str, float]:
        taken = steal * (t + 2) + (then - steal) * max(t - 8, 0.0)
        idle = 1.0 * (t + 2)
        return {
            "cpu_count": 2,
            "cpu_user_ns": int((2 * (t + 2) - idle - taken) * NS_PER_S),
            "cpu_steal_ns": int(taken * NS_PER_S),
            "cpu_idle_ns": int(idle * NS_PER_S),
        }

    always = lambda t: dict.fromkeys(("cpu_ns", "cpu_main_ns"), int((t + 2) * NS_PER_S))  # noqa: E731
    counters(root, always, host=host)
    placed(root)
    return judged(root)


@pytest.mark.parametrize(("steal", "fires", "noted"), [(0.4, True, False), (0.1, False, True),
                                                       (0.0, False, False)])  # fmt: skip
def test_cores_that_the_hypervisor_takes_are_named(
    root: Path, steal: float, fires: bool, noted: bool
) -> None:
    verdict = stolen(root, lambda *_: BALANCED, steal=steal)
    assert rules(verdict) == (["cpu_stolen"] if fires else [])
    assert any("hypervisor" in note for note in verdict.notes) is noted
    if fires:
        value = found(verdict, "cpu_stolen").evidence[0].value
        assert value == pytest.approx(steal, abs=0.02)


@pytest.mark.parametrize("steal", [0.0, 0.15])
def test_what_steal_may_explain_is_no_finding(root: Path, steal: float) -> None:
    verdict = stolen(root, lambda *_: (2.5, *BALANCED[1:]), steal=steal)
    assert ("dataloader_bound" in rules(verdict)) is (steal == 0)
    assert ("hypervisor" in dict(verdict.abstained).get("dataloader_bound", "")) is (steal > 0)


@pytest.mark.parametrize("later", [0.0, 0.25])
def test_drift_that_steal_explains_is_no_finding(root: Path, later: float) -> None:
    slower = (0.26, 6.5, 13.0, 2.6)  # each phase by 30 %
    times = lambda rank, step: slower if step * 18 > 8000 else BALANCED  # noqa: E731
    verdict = stolen(root, times, steal=0.0, later=later)
    assert ("step_time_drift" in rules(verdict)) is (later == 0)


@pytest.mark.parametrize(
    ("threads", "cores", "fires"),
    [(2, 1.0, True), (2, 1.8, False), (1, 1.0, False), (2, 0.5, False)],
)
def test_host_bound(root: Path, threads: int, cores: float, fires: bool) -> None:
    write_story(root, lambda *_: BALANCED, steps=800)
    report(root, 0, operator_threads=threads)
    counters(root, lambda t: {"cpu_ns": int(cores * (t + 2) * NS_PER_S),
                              "cpu_main_ns": int(cores * (t + 2) * NS_PER_S)})  # fmt: skip
    placed(root)
    verdict = judged(root)
    assert ("host_bound" in rules(verdict)) is fires
    assert ("spin" in dict(verdict.abstained).get("host_bound", "")) is (cores == 1.8)


# -- ranks ----------------------------------------------------------------------------------------


def test_uneven_data_is_told_from_a_slow_rank(root: Path) -> None:
    times = lambda rank, step: (  # noqa: E731
        (0.2, 9.0, 10.0, 2.0) if (step * 7 // 3) % 4 == rank else (0.2, 5.0, 14.0, 2.0)
    )
    finding = verdict_of(root, times, ranks=4).findings[0]
    assert (finding.rule, finding.cause) == ("data_imbalance", "forward")


def test_two_ranks_that_take_turns_are_uneven_data(root: Path) -> None:
    times = lambda rank, step: (  # noqa: E731
        (0.2, 12.0, 10.0, 2.0) if step % 2 == rank else (0.2, 5.0, 17.0, 2.0)
    )
    assert rules(verdict_of(root, times, ranks=2)) == ["data_imbalance"]


def test_rank_that_becomes_slow_in_the_middle_is_named_with_its_first_step(root: Path) -> None:
    """In the first part now one rank and now the other is late by a little, as always."""

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        if step >= 251:
            return (0.2, 5.0, 10.0, 14.0) if rank == 1 else (0.2, 5.0, 22.0, 2.0)
        return (0.2, 5.0, 10.0, 2.0)

    verdict = verdict_of(root, times, ranks=2, steps=600)
    assert "data_imbalance" not in rules(verdict)
    finding = found(verdict, "ranks_uneven")
    assert finding.title.startswith("rank 1 is slow from step 251 on: 12")
    assert (finding.rank, finding.cause) == (1, "optimizer")
    assert 0.2 < (finding.lost_ratio or 0.0) < 0.36  # 12 of 39 ms in three fifths of the steps


@pytest.mark.parametrize("ranks", [2, 4])
def test_turns_that_go_on_are_no_rank_that_became_slow(ranks: int, root: Path) -> None:
    """By chance one of them is late more often in a part of the run."""
    late = np.random.default_rng(5).integers(0, ranks, 600)
    late[480:500] = 1

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        return (0.2, 12.0, 10.0, 2.0) if late[step] == rank else (0.2, 5.0, 17.0, 2.0)

    assert rules(verdict_of(root, times, ranks=ranks, steps=600)) == ["data_imbalance"]


@pytest.mark.parametrize(
    ("times", "order"),
    [
        (lambda _, step: (0.2, 2.0 + 0.2 * step, 6.0, 2.0), ["step_time_drift", "forward_bound"]),
        (lambda _, step: (0.2, 22.0 + 0.1 * step, 6.0, 2.0), ["forward_bound", "step_time_drift"]),
    ],
)
def test_growth_comes_before_what_it_makes_long(
    root: Path, times: Callable[[int, int], tuple[float, float, float, float]], order: list[str]
) -> None:
    """A forward that was short at first; and one that always was long and grew by a third."""
    assert rules(verdict_of(root, times, steps=150)) == order


@pytest.mark.parametrize(
    ("sizes", "explained"),
    [
        (lambda step: 3000 if step % 2 else 1000, None),  # a rank's batches differ by so much
        (lambda step: 1000, "busy_neighbours"),
        (lambda step: 1000 + step, "busy_neighbours"),  # by less than what is seen
    ],
)
def test_batches_that_differ_are_no_neighbours_doing(
    root: Path, sizes: Callable[[int], int], explained: str | None
) -> None:
    """Both ranks wait for cores too; which one is late follows from what it was given."""
    verdict = uneven_beside_others(
        root, lambda rank, step: (0.2, 12.0 if step % 2 == rank else 5.0, 17.0, 2.0), sizes
    )
    finding = found(verdict, "data_imbalance")
    assert finding.explained_by == explained
    assert ("the size of each rank's batches" in finding.missing) is (explained is not None)


def test_steps_that_are_large_for_all_ranks_are_no_uneven_data(root: Path) -> None:
    """Tasks that alternate, the same one on both ranks; who is late, others decide."""
    random = np.random.default_rng(3)
    extra = random.exponential(9.0, (2, 800))

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        return (0.2, (36.0 if step % 2 else 6.0) + extra[rank, step], 14.0, 2.0)

    verdict = uneven_beside_others(root, times, lambda step: 3000 if step % 2 else 1000)
    assert found(verdict, "data_imbalance").explained_by == "busy_neighbours"


def uneven_beside_others(root: Path, times: PhaseTimes, sizes: Callable[[int], int]) -> Verdict:
    """Two ranks beside a process that keeps both cores busy; the sizes of their inputs by step."""
    write_story(root, times, steps=800, ranks=2)
    for rank in range(2):
        for step in range(0, 800, 33):
            at = START_NS + step * 35 * NS_PER_MS
            note(root, rank, type="input_size", time_ns=at, step=step, root=1,
                 number_count=sizes(step + rank))  # fmt: skip
    counters(
        root,
        lambda t: {"cpu_ns": int(0.5 * (t + 2) * NS_PER_S),
                   "cpu_main_ns": int(0.5 * (t + 2) * NS_PER_S),
                   "run_queue_wait_ns": int(0.4 * (t + 2) * NS_PER_S)},
        ranks=2,
        host=lambda t: {"cpu_count": 2, "cpu_user_ns": int(2 * (t + 2) * NS_PER_S),
                        "cpu_idle_ns": 0},
    )  # fmt: skip
    for rank in range(2):
        placed(root, rank)
    return judged(root)


def test_slow_rank_is_not_called_uneven_data(root: Path) -> None:
    times = lambda rank, step: (0.2, 9.0, 10.0, 2.0) if rank == 1 else (0.2, 5.0, 14.0, 2.0)  # noqa: E731
    assert rules(verdict_of(root, times, ranks=4)) == ["ranks_uneven"]


def test_slow_rank_is_told_as_a_share_of_the_step_that_the_bar_shows(root: Path) -> None:
    """Two stalls of a second make the mean step longer than the usual one."""

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        slow_ms = 10.0 * rank
        return (0.2, 5.0 + slow_ms, 1000.0 if step in (30, 40) else 20.0 - slow_ms, 2.0)

    verdict = verdict_of(root, times, ranks=2, noise=0.0, steps=100)
    finding = found(verdict, "ranks_uneven")
    assert finding.lost_ratio == pytest.approx(10.0 / 28.0, abs=0.01)
    assert finding.lost_ratio == pytest.approx(10.0 * NS_PER_MS / (verdict.step_ns or 1), abs=1e-3)


def test_two_slow_ranks_are_both_named_and_no_uneven_data(root: Path) -> None:
    times = lambda rank, step: (  # noqa: E731
        (0.2, 9.0 if rank == 1 else 8.9, 10.0, 2.0) if rank in (1, 4) else (0.2, 5.0, 14.0, 2.0)
    )
    (finding,) = verdict_of(root, times, ranks=6).findings
    assert finding.rule == "ranks_uneven"
    assert finding.rank in (1, 4)
    assert f"so is rank {5 - int(finding.rank or 0)}" in finding.title


def test_slow_rank_is_joined_to_its_throttled_gpu(root: Path) -> None:
    times = lambda rank, step: (0.2, 9.0, 10.0, 2.0) if rank == 1 else (0.2, 5.0, 14.0, 2.0)  # noqa: E731
    write_story(root, times, ranks=4, gpu=0.9, steps=200)
    samples = range(START_NS, START_NS + 4 * NS_PER_S, NS_PER_S // 4)
    rows = [
        row_of(GPU, time_ns=t, gpu=r, utilization_ratio=0.9,
               throttle_hw_thermal_ns=int((0.6 if r == 1 else 0.01) * t))
        for t in samples
        for r in range(4)
    ]  # fmt: skip
    gpus = [{"key": [r], "name": f"gpu {r}", "uuid": f"GPU-{r}"} for r in range(4)]
    path = RunPaths(root).node("node0").records("gpu")
    path.unlink()
    write_records(path, GPU, rows, entities=gpus)
    finding = found(judged(root), "ranks_uneven")
    assert (finding.rank, finding.cause) == (1, "throttled")
    assert "temperature" in finding.title


# -- all together ---------------------------------------------------------------------------------


def test_same_run_gives_the_same_verdict(root: Path) -> None:
    times = lambda rank, step: (3.0, 9.0 + rank, 10.0 if step < 60 else 14.0, 2.0)  # noqa: E731
    first = verdict_of(root, times, ranks=3, steps=120, cores=1.0)
    assert json.dumps(as_document(first)) == json.dumps(as_document(judged(root)))


def test_every_rule_is_a_finding_checked_or_abstained(root: Path) -> None:
    from haiprof.diagnosis.rules import RULES

    verdict = verdict_of(root, lambda *_: (30.0, *BALANCED[1:]))
    told = [*rules(verdict), *verdict.checked, *dict(verdict.abstained)]
    assert sorted(told) == sorted(rule.__name__ for rule in RULES)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    forward=st.floats(3.0, 30.0),
    ratio=st.floats(1.2, 3.5),
    optimizer=st.floats(0.05, 0.6),
    loader=st.floats(0.0, 0.05),
    ranks=st.integers(1, 4),
    steps=st.integers(40, 200),
    noise=st.floats(0.0, 0.08),
)
def test_healthy_runs_give_no_finding(
    tmp_path_factory: pytest.TempPathFactory, forward: float, ratio: float, optimizer: float,
    loader: float, ranks: int, steps: int, noise: float,
) -> None:  # fmt: skip
    times = (forward * loader, forward, forward * ratio, forward * optimizer)
    root = tmp_path_factory.mktemp("healthy") / "run"
    verdict = verdict_of(root, lambda *_: times, ranks=ranks, steps=steps, noise=noise)
    assert verdict.findings == ()


# -- one event, kinds of step, several processes --------------------------------------------------


def test_a_single_collection_is_told_as_one_and_is_a_note(root: Path) -> None:
    extra = lambda step, now: [(now, 700 * NS_PER_MS)] if step == 60 else []  # noqa: E731
    write_line(root, plain_steps(extra=extra))
    (finding,) = judged(root).findings
    assert (finding.rule, finding.severity) == ("garbage_collection", "info")
    assert finding.title.startswith("one garbage collection took 700 ms")


@pytest.mark.parametrize("every", [2, 5, 7])
def test_steps_of_two_sizes_are_no_jitter(root: Path, every: int) -> None:
    times = lambda _, step: (0.2, 15.0, 30.0, 2.0) if step % every == 0 else BALANCED  # noqa: E731
    assert verdict_of(root, times, steps=200).findings == ()


def test_larger_steps_whose_forward_grows_more_than_backward_are_no_jitter(root: Path) -> None:
    times = lambda _, step: (0.2, 36.0, 42.0, 2.0) if step % 5 == 0 else (0.2, 6.0, 12.0, 2.0)  # noqa: E731
    assert verdict_of(root, times, steps=200).findings == ()


def test_a_drift_beside_a_single_collection_is_a_note(root: Path) -> None:
    """It came once: what follows is the machine's, where nothing else changed."""

    def gap_ns(step: int, now: int) -> list[tuple[int, int]]:
        return [(now, 20 * NS_PER_MS)] if step == 120 else []

    rows, shift = [], 0
    for kind, depth, start, end in plain_steps(count=240, extra=gap_ns):
        is_late = start >= START_NS + 120 * 18 * NS_PER_MS
        longer = int(0.27 * (end - start)) if is_late and kind != schema.GC else 0
        rows.append((kind, depth, start + shift, end + shift + longer))
        shift += longer
    write_line(root, rows)
    drift = found(judged(root), "step_time_drift")
    assert "a garbage collection came then too" in drift.title
    assert drift.severity == "info"


@pytest.mark.parametrize(
    ("longer", "pauses", "severity"),
    [
        (lambda step: 6.0 * (step >= 100), (), "warning"),
        (lambda step: 16.0 * (step >= 100), (99,), "critical"),  # which is no small drift
        (lambda step: 6.0 * (step >= 100), (99,), "info"),  # all that came with it came once
        (lambda step: 6.0 * (step >= 100), range(3, 200, 4), "warning"),  # and this always comes
        (lambda step: min(1.5 * step, 42.0) - 6.0, (), "info"),  # an optimizer's history fills
    ],
)
def test_a_small_drift_of_one_phase_needs_more_than_a_few_steps_or_one_collection(
    root: Path, longer: Callable[[int], float], pauses: Sequence[int], severity: str
) -> None:
    rows, now, count = [], START_NS, 200 if longer(0) == 0 else 90
    for step in range(count):
        own = 10.0 + longer(step) + 0.3 * (step % 3)
        for kind, ms in ((schema.FORWARD, 4.0), (schema.BACKWARD, 8.0), (schema.OPTIMIZER, own)):
            rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.2) * NS_PER_MS)
        if step in pauses:
            rows.append((schema.GC, 2, now, now + NS_PER_MS // 5))
            now += NS_PER_MS // 4
    write_line(root, rows)
    drift = found(judged(root), "step_time_drift")
    assert (drift.cause, drift.severity) == ("sudden", severity)


def test_collections_do_not_explain_what_costs_far_more(root: Path) -> None:
    write_line(root, plain_steps(extra=lambda step, now: [(now, 2 * NS_PER_MS)]))
    write_story(root.parent / "slow", lambda *_: (0.2, 40.0, 5.0, 1.0), steps=100)
    (small,) = [f for f in judged(root).findings if f.rule == "garbage_collection"]
    (large,) = judged(root.parent / "slow").findings
    assert (large.rule, small.is_cause_of(large)) == ("forward_bound", False)


def evaluating(root: Path, ranks: tuple[int, ...]) -> Verdict:
    """Two ranks of 60 steps; some of them evaluate for 300 ms every 20 steps."""
    run = write_run(root)
    for rank in (0, 1):
        rows, now = [], START_NS
        for step in range(60):
            for kind, ms in zip((schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER), BALANCED[1:],
                                strict=True):  # fmt: skip
                rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
                now += int((ms + 0.1) * NS_PER_MS)
            if step % 20 == 10 and rank in ranks:
                rows.append((schema.EVAL, 0, now, now + 300 * NS_PER_MS))
                now += 301 * NS_PER_MS
        write_rank(run, spans_from(rows), rank=rank, world_size=2)
    return judged(root)


def test_rank_that_evaluates_alone_is_named_as_that(root: Path) -> None:
    finding = found(evaluating(root, (0,)), "evaluation_heavy")
    assert finding.rank == 0
    assert finding.title.startswith("rank 0 evaluates alone while the others wait")


def test_ranks_that_evaluate_together_are_not_told_apart(root: Path) -> None:
    assert found(evaluating(root, (0, 1)), "evaluation_heavy").rank is None


@pytest.mark.parametrize(("gap_ms", "said"), [(-800, "at the same time"), (500, "started 2 times")])
def test_processes_side_by_side_are_told_from_restarts(root: Path, gap_ms: int, said: str) -> None:
    run, rows = write_run(root), plain_steps(60)
    later = rows[-1][3] - START_NS + gap_ms * NS_PER_MS
    write_rank(run, spans_from(rows))
    again = [(kind, tag, begin + later, end + later) for kind, tag, begin, end in rows]
    write_rank(run, spans_from(again), attempt=1)
    verdict = judged(root)
    assert any(said in note for note in verdict.notes), verdict.notes
    assert verdict.step_count == 60


@pytest.mark.parametrize(
    ("cores", "cause"),
    [
        ([(0.1, 0.2), (0.5, 0.4)], "forward"),
        ([(0.5, 0.12), (0.5, 0.25)], "waits_for_cores"),
        ([(0.4, 0.12), (0.6, 0.25)], "forward"),
    ],
)
def test_rank_that_works_more_is_not_called_starved(
    root: Path, cores: list[tuple[float, float]], cause: str
) -> None:
    """Rank 1's forward takes a fifth of the step longer. Each runs and waits for a core so long.

    First rank 1 gets a core in more of the cases than rank 0. Then it runs as long, and waits for
    longer; and then it runs for longer, too.
    """
    times = lambda rank, step: (0.2, 9.0, 10.0, 2.0) if rank == 1 else (0.2, 5.0, 14.0, 2.0)  # noqa: E731
    write_story(root, times, ranks=2, steps=200)
    rows = [
        row_of(PROCESS, time_ns=int(t), pid=100 + r, start_ticks=7, process_count=1,
               cpu_main_ns=int(run * (t - START_NS + NS_PER_S)),
               cpu_ns=int(run * (t - START_NS + NS_PER_S)),
               run_queue_wait_ns=int(wait * (t - START_NS + NS_PER_S)))
        for t in np.arange(START_NS - NS_PER_S, START_NS + 6 * NS_PER_S, NS_PER_S / 2)
        for r, (run, wait) in enumerate(cores)
    ]  # fmt: skip
    write_records(RunPaths(root).node("node0").records("process"), PROCESS, rows)
    assert found(judged(root), "ranks_uneven").cause == cause


@pytest.mark.parametrize(("faults", "is_named"), [(100_000, True), (5_000, False)])
def test_memory_that_is_faulted_in_again_is_named_where_steps_became_slower(
    root: Path, faults: int, is_named: bool
) -> None:
    """All phases take half as long again from step 400 on, and page faults began there."""

    def slower(_: int, step: int) -> tuple[float, float, float, float]:
        return tuple(ms * (1.5 if step > 400 else 1) for ms in BALANCED)  # type: ignore[return-value]

    write_story(root, slower, steps=800)
    began = 400 * (sum(BALANCED) + 0.8) / 1000
    counters(root, lambda t: {"page_fault_count": int(1000 * (t + 2) + faults * max(t - began, 0)),
                              "cpu_ns": int((t + 2) * NS_PER_S),
                              "cpu_main_ns": int((t + 2) * NS_PER_S)})  # fmt: skip
    drift = found(judged(root), "step_time_drift")
    assert ("page faults began" in drift.title) is is_named
    assert ("MALLOC_TRIM_THRESHOLD_" in drift.remedy) is is_named


@pytest.mark.parametrize(
    ("sizes", "cause"),
    [((1000, 1000), "page_faults"), ((1000, 3000), "forward"), ((None, None), "forward")],
)
def test_a_rank_is_slow_by_page_faults_only_where_it_is_given_the_same(
    root: Path, sizes: tuple[int | None, int | None], cause: str
) -> None:
    """Rank 1's forward takes 4 ms more, with twice the page faults."""
    write_story(
        root, lambda rank, _: (0.2, 5.0 + 4 * rank, 14.0 - 4 * rank, 2.0), steps=800, ranks=2
    )
    for rank, size in enumerate(sizes):
        if size is not None:
            note(root, rank, type="input_size", time_ns=START_NS, root=1, number_count=size)
    rows = [
        row_of(PROCESS, time_ns=int(START_NS + t * NS_PER_S), pid=100 + rank, start_ticks=7,
               process_count=1, page_fault_count=int(50_000 * (1 + rank) * (t + 2)))
        for t in np.arange(-1, 25, 0.5)
        for rank in range(2)
    ]  # fmt: skip
    write_records(RunPaths(root).node("node0").records("process"), PROCESS, rows)
    finding = found(judged(root), "ranks_uneven")
    assert (finding.rank, finding.cause) == (1, cause)
    assert ("LD_PRELOAD" in finding.remedy) is (cause == "page_faults")


def test_counters_of_a_job_beside_it_are_none_of_this_one(root: Path) -> None:
    """That of the first attempt waits for cores; of the judged one nothing is known."""
    neighbours(root, wait=0.5, node=1.9)
    assert gather_inputs(Analyzer(root)).core_waits.keys() == {0}
    write_beside(root, 10.0, steps=600)
    inputs = gather_inputs(Analyzer(root))
    assert set(inputs.ranks["attempt"]) == {1}
    assert inputs.core_waits == {}


@pytest.mark.parametrize(("before_s", "is_known"), [(1.0, True), (5.0, False)])
def test_samples_of_a_start_up_are_not_compared_with_training(
    root: Path, before_s: float, is_known: bool
) -> None:
    write_story(root, lambda *_: BALANCED, steps=200)
    times = START_NS - int(before_s * NS_PER_S) + np.arange(16) * (NS_PER_S // 4)
    rows = [
        row_of(PROCESS, time_ns=int(t), pid=100, start_ticks=7, process_count=1,
               cpu_main_ns=int(0.5 * (t - int(times[0]))))
        for t in times
    ]  # fmt: skip
    write_records(RunPaths(root).node("node0").records("process"), PROCESS, rows)
    assert (load_of(open_compared_run(root)).main_cores is not None) is is_known
