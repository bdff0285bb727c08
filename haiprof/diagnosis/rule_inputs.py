"""What a diagnosis looks at: steps after warm-up, counters of that time, and what ranks noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from haiprof.base.units import NS_PER_S, ranks_text
from haiprof.diagnosis.thresholds import SHORT_RUN_S, UNTRACED_MIN_RATIO, warm_up_steps
from haiprof.diagnosis.traced_window import TracedWindow, traced_window
from haiprof.diagnosis.verdict import Finding
from haiprof.run_analysis import counter_summaries, step_frame
from haiprof.run_analysis.code_samples import CodeSamples
from haiprof.run_analysis.gpu_memory import GpuMemorySeries, gpu_memory_series
from haiprof.run_analysis.parallelism import Layout, find_layout
from haiprof.run_analysis.printed_lines import Output, printed_output
from haiprof.run_analysis.ranks import Blocks
from haiprof.run_analysis.reactions import Reaction, reactions
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, number
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.settings import Placement, RankSettings, placements, sharing_groups

_SIZE_SCHEMA = {
    "rank": pl.Int64, "root": pl.Int64, "time_ns": pl.Int64, "number_count": pl.Int64
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCpu:
    """What one host gave its ranks of its CPUs while their judged steps ran."""

    core_count: int | None  # CPUs online
    limit_cores: float | None
    """The tightest limit of the cgroup and those above it; None without one, or not known."""
    throttled_ratio: float | None  # Share of those in which something had to stop; None without any
    stolen_ratio: float | None
    """Of the time in which the CPUs had work, what the hypervisor kept; None where not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInputs:
    """A run as the rules see it."""

    analyzer: RunFrames  # What all of it is read from
    steps: pl.DataFrame
    """Steps of each rank's last attempt without its first ones; columns of `step_frame`."""
    step_count: int
    """Steps of all ranks, of the last attempt of each, the first ones included; of a part of the
    run those that began in it."""
    first_steps: pl.DataFrame  # The first step of each rank's last attempt
    ranks: pl.DataFrame  # Columns of `rank_frame`; of a rank that is judged, the attempt that is
    gpu_use: Mapping[int, float]  # Mean GPU utilization in [0, 1] by rank, where known
    main_cores: Mapping[int, float]
    """Median CPU cores used by the process of the rank, without its children, where known."""
    busy_cores: Mapping[int, float]  # The same with its children: DataLoader workers
    core_waits: Mapping[int, float]
    """Share of time in which the rank's main thread was ready to run but had no CPU core."""
    placements: Mapping[int, Placement]  # Where each rank ran, where that was recorded
    node_cpus: Mapping[str, NodeCpu]  # By host; those that have ranks with steps
    stolen: Mapping[int, float]
    """Share of time that the hypervisor took from the rank's main thread, as far as known.

    That is steal's share of its node's work, in the time in which the thread had a core. Linux
    counts stolen time as time of the thread, unless built with CONFIG_PARAVIRT_TIME_ACCOUNTING
    (`update_rq_clock_task`, kernel/sched/core.c): then more was lost.
    """
    trained_ns: Mapping[int, float]  # Time in training steps of each rank, the first ones included
    counted: counter_summaries.CounterAverages  # More counters of ranks and nodes
    mounts: tuple[counter_summaries.MountRequests, ...]
    """Requests of NFS mounts meanwhile; those of which most were under way come first."""
    pauses: pl.DataFrame
    """Collector pauses and checkpoint saves while judged steps ran; columns of `phase_frame`."""
    loading: pl.DataFrame  # What starts of epochs cost; columns of `run_analysis.ranks`
    settings: Mapping[int, RankSettings]  # What each rank was run with, where that was recorded
    loader_workers: Mapping[int, int]
    """Workers of the loader that each rank iterated first, where known."""
    batch_sizes: Mapping[int, int]  # Of the same loaders
    iterable: frozenset[int]  # Ranks whose first loader has an IterableDataset
    input_sizes: pl.DataFrame
    """`rank`, `root` (which module), `time_ns` (Unix time), `number_count`: numbers in what it was
    called with from then on, looked at once a second; only those that changed have a row."""
    allocator: Mapping[int, tuple[int, int, int]]
    """(retries of the GPU's allocator, its failures, ns in which they were counted), of `world`."""
    gpu_memory: Mapping[int, GpuMemorySeries]
    """What the GPU's allocator held where steps of `world` began."""
    blocks: Mapping[int, Blocks]
    """Sums of folded steps that are judged, by rank; `steps` has those that are whole."""
    traces: TracedWindow  # What the run's traces say of a window of steps, or why they say nothing
    reactions: tuple[Reaction, ...]
    """What haiprof did by itself: hangs and slower steps that were noticed while the job ran."""
    output: Output  # What the job printed, where it printed into files
    layout: Layout | None  # Its stages and shards; None where no process groups tell of any
    marked_by: str | None
    """What marks a step where that is no training (`steps.WORDS`); None elsewhere."""
    untrained: tuple[int, ...]
    """Ranks that train nothing, beside others that do: their steps are not judged."""

    by_rank: Mapping[int, pl.DataFrame]  # Steps of each rank, in order

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """`rank 3`; where the job's layout is known, the stage or shard that they are, or its."""
        return ranks_text(ranks) if self.layout is None else self.layout.names(ranks)

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that have steps."""
        return tuple(self.by_rank)

    @property
    def hosts(self) -> dict[int, str]:
        """The last host of each rank, where it is known."""
        return {r: host for r, host in self.ranks[["rank", "host"]].rows() if host is not None}

    def load_samples(self, rank: int) -> CodeSamples:
        """Sampled stacks of a rank while its judged steps ran."""
        begin, end = (
            counter_summaries.training_spans([self.by_rank[rank]]).select("begin", "end").row(0)
        )
        samples = self.analyzer.code_samples({rank})
        return samples.take((samples.time_ns >= begin) & (samples.time_ns <= end))

    def worker_cores(self, rank: int) -> float | None:
        """CPU cores used by a rank's child processes; None where not known."""
        main, busy = self.main_cores.get(rank), self.busy_cores.get(rank)
        return None if main is None or busy is None else max(busy - main, 0.0)

    @property
    def core_groups(self) -> list[tuple[Placement, ...]]:
        """Ranks whose cores overlap, together: `sharing_groups` of those that have steps."""
        return sharing_groups(self.placements[r] for r in self.world if r in self.placements)

    @property
    def is_short(self) -> bool:
        """Whether the judged steps took less time than it takes to know anything of the cores."""
        begins = [own["start_ns"][0] for own in self.by_rank.values()]
        ends = [own["start_ns"][-1] + own["step_ns"][-1] for own in self.by_rank.values()]
        return bool(ends) and max(ends) - min(begins) < SHORT_RUN_S * NS_PER_S

    @property
    def uses_gpu(self) -> bool:
        """Whether a rank has a GPU: what is advised must not speak of hardware that is not used."""
        return bool(self.gpu_use) or "cuda" in self.ranks["device"].to_list()


Rule = Callable[[RuleInputs], Finding | str | None]
"""Looks for a fact: a finding, why that cannot be told, or None where nothing is amiss."""


def gather_inputs(
    analyzer: RunFrames, *, trace_limit_bytes: int | None = None, since_ns: int | None = None
) -> RuleInputs:
    """Gathers what rules judge by from the frames of a run, and from its traces up to a size."""
    none, parts = pl.DataFrame(schema=step_frame.STEP_SCHEMA), analyzer.steps_by_rank()
    # Where some ranks train, those that do not (an actor that plays for a learner, a parameter
    # server) run another loop, whose steps are no measure of the job's.
    marks = {r: step_frame.untrained_boundary(part) for r, part in parts.items()}
    is_trained = None in marks.values()
    untrained = tuple(r for r, mark in marks.items() if mark and is_trained)
    parts = {rank: part for rank, part in parts.items() if rank not in untrained}
    since = None if since_ns is None else pl.col("start_ns") >= since_ns
    attempts = {rank: int(part["attempt"][0]) for rank, part in parts.items()}
    folded = analyzer.blocks(attempts)
    own = parts if since is None else {rank: part.filter(since) for rank, part in parts.items()}
    warm = {rank for rank in own if since is None and rank not in folded}
    judged = {r: (judged_steps if r in warm else untraced_steps)(part) for r, part in own.items()}
    by_rank = {rank: part for rank, part in judged.items() if part.height}
    spans = counter_summaries.training_spans(by_rank.values())
    windows = counter_summaries.host_windows(spans, analyzer.ranks())
    pauses = analyzer.pauses().join(spans, on=["rank", "attempt"])  # that began while steps ran
    inside = pl.col("start_ns").is_between(pl.col("begin"), pl.col("end"))
    # Counters of other attempts are another job's.
    ours = tuple(files for rank, files in analyzer.judged_files().items() if rank in by_rank)
    ours_alone = replace(analyzer.files, ranks=ours)
    counted = counter_summaries.average_counters(ours_alone, spans.drop("attempt"), windows)
    main_cores = counted.of("cpu_main_cores")
    node_cpus = {h: _node_cpu(list(counted.nodes.get(h, {}).values())) for h in windows["host"]}
    ranks = analyzer.ranks()
    unjudged = ranks.join(spans, on="rank", how="anti")
    return RuleInputs(
        analyzer=analyzer, steps=pl.concat([none, *by_rank.values()]), by_rank=by_rank,
        step_count=sum(part.height for part in own.values())
        + sum(int(each.count[each.start_ns >= (since_ns or 0)].sum()) for each in folded.values()),
        first_steps=analyzer.first_steps(attempts),
        blocks={rank: _judged_blocks(each, since_ns) for rank, each in folded.items()},
        ranks=pl.concat([_of_judged(ranks, spans), unjudged]).sort("rank", "attempt"),
        gpu_use=counted.of("utilization_ratio"), main_cores=main_cores,
        busy_cores=counted.of("cpu_cores"), core_waits=counted.of("run_queue_wait_ratio"),
        counted=counted, mounts=counter_summaries.mount_requests(ours_alone, windows),
        placements=placements(analyzer.files), node_cpus=node_cpus,
        stolen=_steal_ratios(analyzer.ranks(), main_cores, node_cpus),
        trained_ns={
            rank: float(part["step_ns"].sum())
            + (float(folded[rank].step_ns.sum()) if rank in folded else 0.0)
            for rank, part in parts.items()
        },
        pauses=pauses.filter(inside).drop("begin", "end"),
        loading=_of_judged(analyzer.loading(), spans),
        settings={r: own for r, own in analyzer.settings().items() if r not in untrained},
        **_read_events(analyzer.files, dict(spans.select("rank", "attempt").rows())),
        traces=traced_window(analyzer.run, limit_bytes=trace_limit_bytes),
        reactions=tuple(reactions(analyzer.files)), output=printed_output(analyzer.files),
        layout=find_layout(analyzer.files),
        marked_by=None if is_trained else step_frame.untrained_boundary(analyzer.steps()),
        untrained=untrained,
    )  # fmt: skip


def _judged_blocks(blocks: Blocks, since_ns: int | None) -> Blocks:
    """Those after the first steps, without traced ones: blocks are cut there."""
    warm = warm_up_steps(int(blocks.first_step[-1] + blocks.count[-1])) if since_ns is None else 0
    judged = (blocks.first_step >= warm) & ~blocks.traced
    return blocks.take(judged & (blocks.start_ns >= (since_ns or 0)))


def judged_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Steps of one attempt of one rank without its first, slower ones and without traced ones."""
    return untraced_steps(steps.slice(warm_up_steps(steps.height)))


def untraced_steps(settled: pl.DataFrame) -> pl.DataFrame:
    """Steps without the traced ones; where nearly every one was traced, all of them."""
    if not settled["traced"].any():
        return settled  # a slice, which copies nothing
    untraced = settled.filter(~pl.col("traced").fill_null(value=False))
    return untraced if untraced.height > UNTRACED_MIN_RATIO * settled.height else settled


def _of_judged(frame: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Rows of the attempts whose steps are judged: a job beside it has others."""
    return frame.join(spans.select("rank", "attempt"), on=["rank", "attempt"], how="semi")


def _steal_ratios(
    ranks: pl.DataFrame, main_cores: Mapping[int, float], node_cpus: Mapping[str, NodeCpu]
) -> dict[int, float]:
    """By rank, where its node's steal and its own CPU use are known."""
    found = {}
    for rank, host in ranks.select("rank", "host").drop_nulls().rows():
        node, main = node_cpus.get(host), main_cores.get(rank)
        if node is not None and node.stolen_ratio is not None and main is not None:
            found[rank] = node.stolen_ratio * min(main, 1.0)
    return found


def _node_cpu(entities: Sequence[Mapping[str, float | None]]) -> NodeCpu:
    """From the means by metric of the node, of its cgroup and of those above that have a limit."""
    # Periods are of one cgroup: of the one that stops the job most often, and has counted longest.
    counts = [count for means in entities if (count := means.get("cpu_count")) is not None]
    limits = [limit for means in entities if (limit := means.get("cpu_limit_cores")) is not None]
    counted = [means for means in entities if means.get("cpu_period_count_per_s") is not None]
    most = max(
        counted,
        key=lambda means: (_throttled_ratio(means) or 0.0, means["cpu_period_count_per_s"] or 0.0),
        default={},
    )
    limit = most.get("cpu_limit_cores")
    stolen = (
        steal / (steal + work) if steal else 0.0
        for means in entities
        if (steal := means.get("cpu_steal_ratio")) is not None
        and (work := means.get("cpu_utilization_ratio")) is not None
    )
    return NodeCpu(
        core_count=round(counts[0]) if counts else None,
        limit_cores=min(limits, default=None) if limit is None else limit,
        throttled_ratio=_throttled_ratio(most),
        stolen_ratio=next(stolen, None),
    )


def _throttled_ratio(means: Mapping[str, float | None]) -> float | None:
    periods = means.get("cpu_period_count_per_s")
    throttled = means.get("cpu_throttled_period_count_per_s")
    return throttled / periods if periods and throttled is not None else None


def _read_events(files: RunFiles, judged: Mapping[int, int]) -> dict[str, Any]:
    """What ranks noted in the attempt that is judged; of other ranks in the last one."""
    last = {
        rank.rank: rank
        for rank in sorted(files.ranks, key=lambda r: (r.rank, r.attempt))
        if judged.get(rank.rank, rank.attempt) == rank.attempt
    }
    loaders = {n: line for n, rank in last.items() for line in rank.of_type("dataloader")[:1]}
    workers, batches = (
        {n: count for n, line in loaders.items() if (count := integer(line.get(name))) is not None}
        for name in ("workers", "batch_size")
    )
    sizes = [row for number, rank in last.items() for row in _input_sizes(number, rank)]
    grown = {n: found for n, rank in last.items() if n in judged and (found := _allocator(rank))}
    return {
        "batch_sizes": {n: size for n, size in batches.items() if size},
        "loader_workers": workers,
        "iterable": frozenset(n for n, line in loaders.items() if line.get("iterable") is True),
        "input_sizes": pl.DataFrame(sizes, schema=_SIZE_SCHEMA, orient="row"),
        "allocator": grown,
        "gpu_memory": {n: own for n, own in gpu_memory_series(files).items() if n in judged},
    }


def _input_sizes(number: int, rank: RankFiles) -> list[tuple[int, int, int, int]]:
    rows, offset = [], rank.clock_offset_ns
    for line in rank.of_type("input_size"):
        root, time, count = (integer(line.get(n)) for n in ("root", "time_ns", "number_count"))
        if root is None or time is None or not count or count < 0 or offset is None:
            continue
        if (wall := integer(time + offset)) is not None:
            rows.append((number, root, wall, count))
    return rows


def _allocator(rank: RankFiles) -> tuple[int, int, int] | None:
    """Growth from the first line to the last: what came before them was warm-up."""
    lines = rank.of_type("allocator")
    if len(lines) < 2:
        return None
    names = ("retry_count", "oom_count", "time_ns")
    first, last = ([integer(line.get(name)) for name in names] for line in (lines[0], lines[-1]))
    grown = [b - a for a, b in zip(first, last, strict=True) if a is not None and b is not None]
    return (grown[0], grown[1], grown[2]) if len(grown) == len(names) else None


def typical_rank(inputs: RuleInputs) -> int:
    """The rank whose own work per step is the lower middle of all: one slow rank is none."""
    # Own is what lies outside of backward, where ranks wait for each other. Source: the median over
    # ranks is TraceML's typical rank; of an even number the slow one of two is not typical.
    work = {
        rank: float(int(steps["step_ns"].sum()) - int(steps["backward_host_ns"].sum() or 0))
        / steps.height
        for rank, steps in inputs.by_rank.items()
    }
    return sorted(work, key=lambda rank: (work[rank], rank))[(len(work) - 1) // 2]


def usual_split(steps: pl.DataFrame, *, clock: str = "host") -> dict[str, float | None]:
    """Mean time per phase in ns of some steps of one rank, without what lies between steps."""
    # What is paid at every Nth step counts in full; None: a phase has no value on that clock.
    return {phase: number(steps[f"{phase}_{clock}_ns"].mean()) for phase in step_frame.STEP_PHASES}
