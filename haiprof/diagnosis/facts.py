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
from haiprof.analysis.step_frame import STEP_PHASES
from haiprof.diagnosis.thresholds import BLOCK_COUNT, DEVICE_COVERAGE_RATIO, warm_up_steps
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
    """Median share of time in which the rank's main thread could run and got no core."""
    process_counts: Mapping[int, float]
    """Median number of processes of the rank, its children included."""
    placements: Mapping[int, Placement]
    """Where each rank ran, where that was recorded."""
    node_cpus: Mapping[str, NodeCpu]
    """By host; those that have ranks with steps."""
    training_ns: float
    """Time in training steps of the rank that has most of it."""
    save_ns: float
    """Time in checkpoint saves while judged steps ran, all ranks together."""
    sharded: bool
    """Whether a module is sharded over the ranks (FSDP), which makes them wait in forward too."""

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that have steps."""
        return tuple(self.steps["rank"].unique().sort().to_list())

    def of_rank(self, rank: int) -> pl.DataFrame:
        """Steps of one rank, in order."""
        return self.steps.filter(pl.col("rank") == rank)


def gather_facts(analyzer: Analyzer) -> Facts:
    """Facts from the frames of a run."""
    steps = analyzer.steps()
    last = steps.filter(pl.col("attempt") == pl.col("attempt").max().over("rank"))
    judged = [
        frame.slice(warm_up_steps(frame.height))
        for frame in last.partition_by("rank", maintain_order=True)
    ]
    warm = pl.concat([last.clear(), *judged])
    counters = analyzer.counters()
    return Facts(
        steps=warm,
        step_count=steps.height,
        first_steps=last.filter(pl.col("step") == 0),
        ranks=analyzer.ranks(),
        gpu_use=_medians(counters, warm, "gpu", "utilization_ratio"),
        main_cores=_medians(counters, warm, "process", "cpu_main_cores"),
        busy_cores=_medians(counters, warm, "process", "cpu_cores"),
        core_waits=_medians(counters, warm, "process", "run_queue_wait_ratio"),
        process_counts=_medians(counters, warm, "process", "process_count"),
        placements=placements(analyzer.files),
        node_cpus=_node_cpus(counters, _windows(warm, analyzer.ranks())),
        training_ns=_largest_sum(last),
        save_ns=_save_ns(analyzer.phases(), warm),
        sharded=_is_sharded(analyzer),
    )


def _largest_sum(steps: pl.DataFrame) -> float:
    sums = steps.group_by("rank").agg(pl.col("step_ns").sum())["step_ns"]
    return float(max(sums.to_list(), default=0))


def _save_ns(phases: pl.DataFrame, steps: pl.DataFrame) -> float:
    """Saves that began in one of the steps' spans of time."""
    if not steps.height:
        return 0.0
    begin = steps["start_ns"].min()
    saves = phases.filter((pl.col("phase") == SAVE_PHASE) & (pl.col("start_ns") >= pl.lit(begin)))
    return float(saves["duration_ns"].sum())


def _is_sharded(analyzer: Analyzer) -> bool:
    """By the roots' class names: FSDP2 renames the class, FSDP1 wraps it."""
    names = [name for rank in analyzer.files.ranks for name in rank.names("root").values()]
    return any(name.startswith(_SHARDED_NAMES) for name in names)


def _medians(
    counters: pl.DataFrame, steps: pl.DataFrame, source: str, metric: str
) -> dict[int, float]:
    """Median of a rank's metric while its judged steps ran."""
    ends = pl.col("start_ns") + pl.col("step_ns")
    window = steps.group_by("rank").agg(begin=pl.col("start_ns").min(), end=ends.max())
    chosen = counters.filter((pl.col("source") == source) & (pl.col("metric") == metric))
    inside = chosen.join(window, on="rank").filter(
        pl.col("time_ns").is_between(pl.col("begin"), pl.col("end"))
    )
    rows = inside.group_by("rank").agg(pl.col("value").median()).sort("rank").rows()
    return {rank: float(value) for rank, value in rows if value is not None}


def _windows(steps: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """Per host: begin and end of its ranks' judged steps."""
    hosts = ranks.select("rank", "attempt", "host").drop_nulls()
    ends = pl.col("start_ns") + pl.col("step_ns")
    joined = steps.join(hosts, on=["rank", "attempt"])
    return joined.group_by("host").agg(begin=pl.col("start_ns").min(), end=ends.max())


def _node_cpus(counters: pl.DataFrame, windows: pl.DataFrame) -> dict[str, NodeCpu]:
    """Counters of the host and of the job's cgroup in these windows."""
    chosen = counters.filter(pl.col("source").is_in(["host", "cgroup"]))
    inside = chosen.join(windows, on="host").filter(
        pl.col("time_ns").is_between(pl.col("begin"), pl.col("end"))
    )
    means = inside.group_by("host", "entity", "metric").agg(pl.col("value").mean()).rows()
    by_entity: dict[str, dict[str | None, dict[str, float | None]]] = {}
    for host, entity, metric, value in means:
        by_entity.setdefault(host, {}).setdefault(entity, {})[metric] = value
    return {
        host: _node_cpu(list(by_entity.get(host, {}).values()), (end - begin) / NS_PER_S)
        for host, begin, end in windows.rows()
    }


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
    )


def _stops(means: Mapping[str, float | None]) -> tuple[float, float]:
    """Orders cgroups by how often they stop the job, then by how long they have counted."""
    return _throttled_ratio(means) or 0.0, means.get("cpu_period_count_per_s") or 0.0


def _throttled_ratio(means: Mapping[str, float | None]) -> float | None:
    periods = means.get("cpu_period_count_per_s")
    throttled = means.get("cpu_throttled_period_count_per_s")
    return throttled / periods if periods and throttled is not None else None


def median(values: pl.Series) -> float | None:
    """Median without nulls; null where nothing is left."""
    value = values.median()
    return float(value) if isinstance(value, (int, float)) else None


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
    low, high = steps["step_ns"].quantile(0.25, "lower"), steps["step_ns"].quantile(0.75, "higher")
    middle = steps.filter(pl.col("step_ns").is_between(pl.lit(low), pl.lit(high)))
    means = {phase: middle[f"{phase}_host_ns"].mean() for phase in STEP_PHASES}
    return {p: float(v) if isinstance(v, (int, float)) else None for p, v in means.items()}
