"""What the rules look at: the steps after warm-up, and each rank's counters in that time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.analysis.analyzer import Analyzer
from haiprof.analysis.phases import SAVE_PHASE
from haiprof.analysis.placement import Placement, placements
from haiprof.analysis.reactions import Reaction, reactions
from haiprof.analysis.records import median as median
from haiprof.analysis.step_frame import STEP_PHASES
from haiprof.diagnosis.counted import Counted, count
from haiprof.diagnosis.thresholds import (
    BLOCK_COUNT,
    DEVICE_COVERAGE_RATIO,
    UNTRACED_MIN_RATIO,
    warm_up_steps,
)
from haiprof.diagnosis.told import Told, told
from haiprof.diagnosis.traced_window import TracedWindow, traced_window
from haiprof.units import NS_PER_S

Floats = npt.NDArray[np.float64]
_SHARDED_NAMES = ("FSDP", "FullyShardedDataParallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCpu:
    """What one host gave its ranks of its CPUs while their judged steps ran."""

    core_count: int | None
    """CPUs online."""
    limit_cores: float | None
    """The tightest limit of the cgroup and those above it; null without one, or not known."""
    period_count: float | None
    """Periods of that limit in which something ran; null where they are not counted."""
    throttled_ratio: float | None
    """Share of those in which something had to stop; null without any."""
    stolen_ratio: float | None
    """Of the time in which the CPUs had work, what the hypervisor kept; null where not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A run as the rules see it."""

    steps: pl.DataFrame
    """Steps of each rank's last attempt without its first ones; columns of `step_frame`."""
    step_count: int
    """Steps of all ranks and attempts, the first ones included."""
    first_steps: pl.DataFrame
    """The first step of each rank's last attempt."""
    ranks: pl.DataFrame
    """Columns of `rank_frame`."""
    gpu_use: Mapping[int, float]
    """Median GPU utilization in [0, 1] by rank, where known."""
    main_cores: Mapping[int, float]
    """Median CPU cores used by the process of the rank, without its children, where known."""
    busy_cores: Mapping[int, float]
    """The same with its children: DataLoader workers."""
    core_waits: Mapping[int, float]
    """Share of time in which the rank's main thread could run and got no core."""
    process_counts: Mapping[int, float]
    """Median number of processes of the rank, its children included."""
    placements: Mapping[int, Placement]
    """Where each rank ran, where that was recorded."""
    node_cpus: Mapping[str, NodeCpu]
    """By host; those that have ranks with steps."""
    stolen: Mapping[int, float]
    """Share of time that the hypervisor took from the rank's main thread, as far as known.

    That is steal's share of its node's work, in the time in which the thread had a core. Linux
    counts stolen time as time of the thread, unless built with CONFIG_PARAVIRT_TIME_ACCOUNTING
    (`update_rq_clock_task`, kernel/sched/core.c): then more was lost.
    """
    training_ns: float
    """Time in training steps of the rank that has most of it."""
    save_ns: float
    """Time in checkpoint saves while judged steps ran, all ranks together."""
    counted: Counted
    """More counters of ranks and nodes."""
    pauses: pl.DataFrame
    """Collector pauses and checkpoint saves while judged steps ran; columns of `phase_frame`."""
    loading: pl.DataFrame
    """What starts of epochs cost; columns of `analysis.loading`."""
    told: Told
    """What ranks said of their loaders, compilations and allocators."""
    backward_work: pl.DataFrame
    """What ranks themselves do in backward; columns of `analysis.backward_work`."""
    lateness: pl.DataFrame
    """How late ranks begin their collectives; columns of `analysis.lateness`."""
    traces: TracedWindow
    """What the run's traces say of a window of steps, or why they say nothing."""
    reactions: tuple[Reaction, ...]
    """What haiprof did by itself: hangs and slower steps that were noticed while the job ran."""
    sharded: bool
    """Whether a module is sharded over the ranks (FSDP), which makes them wait in forward too."""

    by_rank: Mapping[int, pl.DataFrame]
    """Steps of each rank, in order."""

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that have steps."""
        return tuple(self.by_rank)

    def of_rank(self, rank: int) -> pl.DataFrame:
        """Steps of one rank, in order."""
        return self.by_rank[rank]

    @property
    def window_ns(self) -> tuple[int, int]:
        """Unix time of the first judged step's begin and of the last one's end."""
        ends = self.steps["start_ns"] + self.steps["step_ns"]
        return int(str(self.steps["start_ns"].min())), int(str(ends.max()))


def gather_facts(
    analyzer: Analyzer, *, trace_limit_bytes: int | None = None, since_ns: int | None = None
) -> Facts:
    """Facts from the frames of a run, and from its traces up to a size."""
    steps = _needed(analyzer.steps())
    restarted = bool((steps["attempt"] > 0).any())
    parts = _by_rank(_last_attempts(steps) if restarted else steps)
    since = None if since_ns is None else pl.col("start_ns") >= since_ns
    judged = {
        rank: judged_steps(part) if since is None else part.filter(since)
        for rank, part in parts.items()
    }
    by_rank = {rank: part for rank, part in judged.items() if part.height}
    spans = _spans_of(by_rank)
    windows = _windows(spans, analyzer.ranks())
    pauses = _last_attempts(analyzer.pauses())
    counted = count(analyzer.files, spans.drop("attempt"), windows)
    main_cores, node_cpus = counted.of("cpu_main_cores"), _node_cpus(counted, windows)
    return Facts(
        steps=pl.concat([steps.clear(), *by_rank.values()]),
        by_rank=by_rank,
        step_count=steps.height,
        first_steps=pl.concat([steps.clear(), *(_first_step(part) for part in parts.values())]),
        ranks=analyzer.ranks(),
        gpu_use=counted.of("utilization_ratio"),
        main_cores=main_cores,
        busy_cores=counted.of("cpu_cores"),
        core_waits=counted.core_waits,
        process_counts=counted.of("process_count"),
        counted=counted,
        placements=placements(analyzer.files),
        node_cpus=node_cpus,
        stolen=_stolen(analyzer.ranks(), main_cores, node_cpus),
        training_ns=float(max((part["step_ns"].sum() for part in parts.values()), default=0)),
        save_ns=_save_ns(pauses, spans),
        pauses=_within(pauses, spans),
        loading=_last_attempts(analyzer.loading()),
        told=told(analyzer.files),
        backward_work=analyzer.backward_work(),
        lateness=analyzer.lateness(),
        traces=traced_window(analyzer.run, limit_bytes=trace_limit_bytes),
        reactions=tuple(reactions(analyzer.files)),
        sharded=_is_sharded(analyzer),
    )


def judged_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of one attempt of one rank without its first, slower ones and without traced ones.

    Where nearly every step was traced, all of them are judged.
    """
    settled = steps.slice(warm_up_steps(steps.height))
    if not settled["traced"].any():
        return settled  # a slice, which copies nothing
    untraced = settled.filter(~pl.col("traced").fill_null(value=False))
    return untraced if untraced.height > UNTRACED_MIN_RATIO * settled.height else settled


def _needed(steps: pl.DataFrame) -> pl.DataFrame:
    """Without columns that no rule reads."""
    return steps.drop("skipped", "boundary", "confidence", "optimizer_step_count")


def _first_step(steps: pl.DataFrame) -> pl.DataFrame:
    """Of one rank in order: its first step, where that is among them."""
    return steps.head(1 if steps.height and steps["step"][0] == 0 else 0)


def _by_rank(steps: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """Slices, which copy nothing: the steps stand rank by rank."""
    lengths = steps.select(pl.col("rank").rle()).unnest("rank")
    found, first = {}, 0
    for length, rank in lengths.rows():
        found[int(rank)] = steps.slice(first, length)
        first += length
    return dict(sorted(found.items()))


def _last_attempts(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(pl.col("attempt") == pl.col("attempt").max().over("rank"))


def _within(pauses: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Pauses that began while their rank's steps ran."""
    inside = pl.col("start_ns").is_between(pl.col("begin"), pl.col("end"))
    return pauses.join(spans.drop("attempt"), on="rank").filter(inside).drop("begin", "end")


def _save_ns(phases: pl.DataFrame, spans: pl.DataFrame) -> float:
    """Saves that began in one of the steps' spans of time."""
    if not spans.height:
        return 0.0
    begin = spans["begin"].min()
    saves = phases.filter((pl.col("phase") == SAVE_PHASE) & (pl.col("start_ns") >= pl.lit(begin)))
    return float(saves["duration_ns"].sum())


def _is_sharded(analyzer: Analyzer) -> bool:
    """By the roots' class names: FSDP2 renames the class, FSDP1 wraps it."""
    names = [name for rank in analyzer.files.ranks for name in rank.names("root").values()]
    return any(name.startswith(_SHARDED_NAMES) for name in names)


def _spans_of(by_rank: Mapping[int, pl.DataFrame]) -> pl.DataFrame:
    """`rank`, `attempt`, and `begin` and `end` of the rank's steps."""
    rows = [
        (
            rank,
            steps["attempt"][0],
            steps["start_ns"].min(),
            (steps["start_ns"] + steps["step_ns"]).max(),
        )
        for rank, steps in by_rank.items()
    ]
    return pl.DataFrame(
        rows, schema=dict.fromkeys(("rank", "attempt", "begin", "end"), pl.Int64), orient="row"
    )


def _windows(spans: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """Per host: begin and end of its ranks' judged steps."""
    hosts = ranks.select("rank", "attempt", "host").drop_nulls()
    known = spans.join(hosts, on=["rank", "attempt"])
    return known.group_by("host").agg(pl.col("begin").min(), pl.col("end").max()).sort("host")


def _node_cpus(counted: Counted, windows: pl.DataFrame) -> dict[str, NodeCpu]:
    """Counters of the host and of the job's cgroup in these windows."""
    return {
        host: _node_cpu(list(counted.nodes.get(host, {}).values()), (end - begin) / NS_PER_S)
        for host, begin, end in windows.rows()
    }


def _stolen(
    ranks: pl.DataFrame, main_cores: Mapping[int, float], node_cpus: Mapping[str, NodeCpu]
) -> dict[int, float]:
    """By rank, where its node's steal and its own CPU use are known."""
    found = {}
    for rank, host in ranks.select("rank", "host").drop_nulls().rows():
        node, main = node_cpus.get(host), main_cores.get(rank)
        if node is not None and node.stolen_ratio is not None and main is not None:
            found[rank] = node.stolen_ratio * min(main, 1.0)
    return found


def _stolen_ratio(entities: Sequence[Mapping[str, float | None]]) -> float | None:
    for means in entities:
        steal, work = means.get("cpu_steal_ratio"), means.get("cpu_utilization_ratio")
        if steal is not None and work is not None:
            return steal / (steal + work) if steal else 0.0
    return None


def _node_cpu(entities: Sequence[Mapping[str, float | None]], seconds: float) -> NodeCpu:
    """From the means by metric of the node, of its cgroup and of those above that have a limit.

    Periods are of one cgroup: of the one that stops the job most often.
    """
    counts = [count for means in entities if (count := means.get("cpu_count")) is not None]
    limits = [limit for means in entities if (limit := means.get("cpu_limit_cores")) is not None]
    counted = [means for means in entities if means.get("cpu_period_count_per_s") is not None]
    most = max(counted, key=_stops, default={})
    limit, periods = most.get("cpu_limit_cores"), most.get("cpu_period_count_per_s")
    return NodeCpu(
        core_count=round(counts[0]) if counts else None,
        limit_cores=min(limits, default=None) if limit is None else limit,
        period_count=None if periods is None else periods * seconds,
        throttled_ratio=_throttled_ratio(most),
        stolen_ratio=_stolen_ratio(entities),
    )


def _stops(means: Mapping[str, float | None]) -> tuple[float, float]:
    """Orders cgroups by how often they stop the job, then by how long they have counted."""
    return _throttled_ratio(means) or 0.0, means.get("cpu_period_count_per_s") or 0.0


def _throttled_ratio(means: Mapping[str, float | None]) -> float | None:
    periods = means.get("cpu_period_count_per_s")
    throttled = means.get("cpu_throttled_period_count_per_s")
    return throttled / periods if periods and throttled is not None else None


def own_backward_ns(facts: Facts, backward_ns: float, clock: str) -> float | None:
    """Of a rank's backward its own work per step, the typical rank's; null where not known.

    Args:
        facts: The run.
        backward_ns: Median time in backward per step.
        clock: `host` or `device`, of `backward_ns`.
    """
    if len(facts.world) < 2:
        return backward_ns
    known = facts.backward_work.sort("own_ns")["own_ns"]
    if known.is_empty() or clock != "host":
        return None
    return min(float(known[(len(known) - 1) // 2]) * _passes(facts), backward_ns)


def after_gradients_ns(facts: Facts) -> float:
    """Of a step's backward what comes after its last collective began, without waiting for ranks.

    0 where that is not known: for one rank it is part of its own work.
    """
    known = facts.backward_work["after_ns"].drop_nulls()
    return float(known[0]) * _passes(facts) if len(known) and len(facts.world) > 1 else 0.0


def _passes(facts: Facts) -> float:
    """Backward passes of a step."""
    return median(facts.steps["micro_step_count"]) or 1.0


def phase_medians(facts: Facts, *phases: str) -> tuple[str, tuple[float, ...]] | None:
    """Medians over the steps that have all of these phases; null where there are none.

    Returns:
        The clock, of all phases the same one (`common_clock`); and ns per phase, then per step.
    """
    clock = common_clock(facts.steps, phases)
    names = [f"{phase}_{clock}_ns" for phase in phases]
    steps = facts.steps.select(*names, "step_ns").drop_nulls(names)
    values = [median(steps[name]) for name in (*names, "step_ns")]
    known = tuple(value for value in values if value is not None)
    return (clock, known) if len(known) == len(values) and known[-1] else None


def median_share(facts: Facts, phase: str) -> float | None:
    """A phase's share of the step: the median over blocks of steps, then over ranks.

    Of an even number of ranks the lower middle counts: one slow rank of two is no typical rank.
    Source: the median over ranks is TraceML's typical rank.
    """
    shares = []
    for rank in facts.world:
        steps = facts.of_rank(rank)
        if not steps.height or steps[f"{phase}_host_ns"].null_count():
            continue
        blocks = min(BLOCK_COUNT, steps.height)
        edges = np.arange(blocks) * steps.height // blocks
        part, whole = (
            np.add.reduceat(steps[name].to_numpy().astype(np.float64), edges)
            for name in (f"{phase}_host_ns", "step_ns")
        )
        shares.append(float(np.median(part / np.maximum(whole, 1.0))))
    return sorted(shares)[(len(shares) - 1) // 2] if shares else None


def common_clock(steps: pl.DataFrame, phases: tuple[str, ...]) -> str:
    """`device` where nearly all steps have device times of all these phases, else `host`."""
    columns = [f"{phase}_device_ns" for phase in phases]
    known = steps.drop_nulls(columns).height if steps.height else 0
    return "device" if known and known >= DEVICE_COVERAGE_RATIO * steps.height else "host"


def middle_split(steps: pl.DataFrame) -> dict[str, float | None]:
    """Host time per phase in ns: the mean over the middle half of the steps by their length.

    Medians of phases do not add up to the median step; these nearly do.
    """
    steps = steps.select("step_ns", *(f"{phase}_host_ns" for phase in STEP_PHASES))
    low, high = steps["step_ns"].quantile(0.25, "lower"), steps["step_ns"].quantile(0.75, "higher")
    middle = steps.filter(pl.col("step_ns").is_between(pl.lit(low), pl.lit(high)))
    means = {phase: middle[f"{phase}_host_ns"].mean() for phase in STEP_PHASES}
    return {p: float(v) if isinstance(v, (int, float)) else None for p, v in means.items()}
