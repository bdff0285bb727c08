"""Reports on GPU functions (PerfTracker's P5 to P7), and which rank differs from the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.units import duration_text, ranks_text, rate_text, ratio_text
from haiprof.diagnosis.thresholds import (
    ABNORMAL_RATIO,
    FAR_MAD_FACTOR,
    FAR_MIN_RANKS,
    SAME_COUNT_RATIO,
)
from haiprof.run_analysis.run_files import number
from haiprof.trace_analysis import kernel_names

if TYPE_CHECKING:
    from haiprof.trace_analysis.function_patterns import Patterns

EXPLAINED_RATIO = 0.50
"""A cause explains what costs at most twice as much as it does itself: of a smaller one most of
the other remains. Own choice."""
FAR_MIN_DIFFERENCE_RATIO = 0.10
"""And it must differ by a tenth, which MADs of nearly equal ranks do not see to: TraceML's
straggler warning (rank-straggler-policy.md)."""
PER_BLOCK_RATIO = 1.15
"""How much longer a block may take on a rank with more of them than elsewhere. Own choice."""

RANKS, FUNCTIONS, ABNORMAL = "ranks", "functions", "abnormal"
LONG, SLOW = "above 1 %", "slower than elsewhere"
SLOW_LINK, UNSTEADY = "slow link", "unsteady link"
UNKNOWN, NETWORK, ONE_HOST = "unknown", "network", "within one host"
BETA = "bottleneck_ratio"
_FUNCTION = ("type", "name")
"""What makes rows of `Patterns.functions` of one kind the same function."""
_FEW_RANKS = 8
_PACE, _WORK, _USE = "pace_ratio", "work_ratio", "utilization_ratio"
_RATE, _SPREAD = "bandwidth_bytes_per_s", "bandwidth_std_bytes_per_s"
_NO_GPU = "no GPU event in any trace: `--trace` records them where the job uses a GPU"
_NO_COMMUNICATION = "no communication kernel in any trace"
_NO_SM = (
    "SM activity: Kineto records only estimates from the launch (occupancy, blocks per SM); "
    "`haiprof verdict overview` shows GPM's counters, `--burst` those of Nsight Systems"
)
_NO_LINK = (
    "NVLink or PCIe: a trace does not name the link of a collective; `nvidia-smi topo -m` does, "
    "and `haiprof verdict overview` shows the bytes of both"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReport:
    """What is known of one kind of function."""

    kind: str  # One of `priority.PRIORITY`
    title: str
    tables: Mapping[str, pl.DataFrame]
    """By name: `abnormal` first where there is something, then `functions`, and `ranks`."""
    facts: Mapping[str, Any]  # Single numbers, for scripts
    meaning: tuple[str, ...]  # What it says, in words, the abnormal first
    missing: tuple[str, ...]  # What could not be said, and what would record it

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys; a table is a list of rows."""
        return {
            "kind": self.kind, **self.facts,
            **{name: table.to_dicts() for name, table in self.tables.items()},
            "meaning": list(self.meaning), "missing": list(self.missing),
        }  # fmt: skip


def with_distance(rows: pl.DataFrame, *features: str, **scales: str) -> pl.DataFrame:
    """How far each rank is from the others that ran the same function.

    `rows` has one row per function and rank; of features that are null on some ranks the median
    counts there. `scales` names of a feature the column whose largest value is its measure, where
    that is not its own: a deviation is small or large against the mean.

    Added are `rank_count`; `<feature>_median` and `<feature>_mad` over the ranks; `distance`, the
    mean Manhattan distance to the other ranks, each feature by its largest value; `limit`, the
    median of the distances plus k MADs, or the least difference that is worth a word; and `is_far`,
    null where too few ranks ran it to say.

    Source: EROICA (arXiv 2506.08528), which compares with 100 ranks by chance; here with all, so
    that the same traces give the same answer.
    """
    over = list(_FUNCTION)
    medians = {f"{name}_median": pl.col(name).median().over(over) for name in features}
    counted = rows.with_columns(rank_count=pl.len().over(over).cast(pl.Int64), **medians)
    mads = {
        f"{name}_mad": (pl.col(name) - pl.col(f"{name}_median")).abs().median().over(over)
        for name in features
    }
    parts = {f"_{name}": _own_distance(name, scales.get(name, name), over) for name in features}
    far = counted.with_columns(**mads, **parts).with_columns(distance=pl.sum_horizontal(*parts))
    middle = pl.col("distance").median().over(over)
    mad = (pl.col("distance") - middle).abs().median().over(over)
    limit = pl.max_horizontal(middle + FAR_MAD_FACTOR * mad, pl.lit(FAR_MIN_DIFFERENCE_RATIO))
    enough = pl.col("rank_count") >= FAR_MIN_RANKS
    is_far = pl.when(enough).then(pl.col("distance") > pl.col("limit"))
    return far.with_columns(limit=limit).with_columns(is_far=is_far).drop(*parts)


def _own_distance(name: str, scale: str, over: list[str]) -> pl.Expr:
    """Mean distance in one feature, in O(n log n): sums on both sides of the sorted value."""
    known = pl.col(name).cast(pl.Float64).fill_null(pl.col(f"{name}_median")).fill_null(0.0)
    largest = pl.col(scale).cast(pl.Float64).abs().max().over(over).fill_null(0.0)
    value = pl.when(largest > 0).then(known / largest).otherwise(0.0)
    place = pl.int_range(pl.len()).over(over, order_by=value)
    below = value.cum_sum().over(over, order_by=value)
    count = pl.len().over(over).cast(pl.Int64)
    apart = value * (2 * place + 2 - count) + value.sum().over(over) - 2 * below
    return pl.when(count > 1).then(apart.clip(0) / (count - 1)).otherwise(0.0)


def differs(name: str, *, high: bool) -> pl.Expr:
    """Whether a feature is off the ranks' median to one side: by a tenth of it, and by many MADs.

    The largest of n values by chance grows as the square root of log n (extreme values of the
    normal distribution): so do the MADs, from 5 at 8 ranks to 9 at 1,000.
    """
    middle = pl.col(f"{name}_median")
    above = pl.col(name) - middle
    many = (pl.col("rank_count").log() / math.log(_FEW_RANKS)).clip(1.0).sqrt()
    least = pl.max_horizontal(
        FAR_MIN_DIFFERENCE_RATIO * middle.abs(), FAR_MAD_FACTOR * many * pl.col(f"{name}_mad")
    )
    return (above if high else -above) > least


def by_function(
    functions: pl.DataFrame, *columns: pl.Expr, keys: Sequence[str] = ("name",),
    order: Sequence[pl.Expr] = (),
) -> pl.DataFrame:  # fmt: skip
    """Functions over all ranks with these columns, the one that bounds most first."""
    found = functions.sort("rank").group_by(keys).agg(
        pl.len().cast(pl.Int64).alias("rank_count"), pl.col("count").sum(), *columns
    )  # fmt: skip
    return found.sort(-pl.col(BETA), *order, *keys, nulls_last=True)


def over_ranks(name: str, patterns: Patterns) -> pl.Expr:
    """Mean of a share over all ranks that have a trace; one without the function counts as 0."""
    return pl.col(name).sum() / max(len(patterns.ranks), 1)


def spread_of(values: pl.Series) -> dict[str, float | None]:
    """`min`, `median`, `max`; None where nothing is known."""
    found = {"min": values.min(), "median": values.median(), "max": values.max()}
    return {n: float(v) if isinstance(v, (int, float)) else None for n, v in found.items()}


def sorted_ranks(rows: pl.DataFrame) -> list[int]:
    """Ranks that have rows."""
    return sorted(set(rows["rank"].to_list()))


def too_few_ranks(patterns: Patterns) -> tuple[str, ...]:
    """Why no rank is called abnormal; nothing where there are enough."""
    count = patterns.totals.height
    if count >= FAR_MIN_RANKS:
        return ()
    ranks = "one rank" if count == 1 else f"{count} ranks"
    return (f"{ranks}: {FAR_MIN_RANKS} ranks are needed to say which one differs from the others",)


def gpu_compute_report(patterns: Patterns) -> FunctionReport:
    """What the GPUs compute: utilization over the ranks, major kernels, and the rank that is slow.

    Utilization is the share of the window in which a computing kernel ran; a rank whose kernels
    have as many more blocks as they take longer has larger inputs, and no slow GPU. `excess_ns` of
    a slow kernel is what the rank would save at the others' pace.

    Source: PerfTracker (seed 001), GPU Compute. Its utilization is a hardware counter's.
    """
    functions = patterns.functions.filter(pl.col("kind") == kernel_names.GPU_COMPUTE)
    ranks = _ranks(patterns, functions)
    slow, odd, more = (
        ranks.filter(pl.col(flag))["rank"].to_list()
        for flag in ("is_slow", "is_odd", "has_more_work")
    )
    abnormal = _slow_kernels(functions.filter(~pl.col("rank").is_in(more)), slow)
    kernels = by_function(
        functions, pl.col("median_ns", "occupancy_ratio").median(), over_ranks(BETA, patterns)
    )
    return FunctionReport(
        kind=kernel_names.GPU_COMPUTE,
        title="GPU compute",
        tables={ABNORMAL: abnormal, FUNCTIONS: kernels, RANKS: ranks},
        facts={
            "utilization": spread_of(patterns.totals[_USE]),
            "abnormal_utilization": odd,
            "slow": slow,
            "more_work": more,
        },
        meaning=tuple(_compute_lines(ranks, abnormal)),
        missing=(*too_few_ranks(patterns), _NO_SM) if functions.height else (_NO_GPU,),
    )


def _ranks(patterns: Patterns, functions: pl.DataFrame) -> pl.DataFrame:
    """`is_slow`: its kernels take longer than the others'. `is_odd`: its utilization differs."""
    columns = ("rank", "window_ns", _USE, "sm_efficiency_ratio", "occupancy_ratio", "gpu_name")
    # `rank`, `pace_ratio`: its kernels at its own pace over the same at the ranks' median pace. And
    # `work_ratio`, the same with the pace that the blocks of its launches would make.
    usual = pl.col("median_ns").median().over(_FUNCTION)
    blocks = pl.col("median_block_count")
    work = (blocks / blocks.median().over(_FUNCTION)).fill_null(1.0)
    common = pl.len().over(_FUNCTION) > 1
    same = functions.with_columns(usual=usual, work=work).filter(common & _same_work())
    paid, due = pl.col("count") * pl.col("median_ns"), pl.col("count") * pl.col("usual")
    parts = {_PACE: paid, _WORK: due * pl.col("work")}
    ratios = {
        name: pl.when(due.sum() > 0).then(own.sum() / due.sum()) for name, own in parts.items()
    }
    found = _join_rank(
        patterns.totals.select(*columns, "has_gpu"), same.group_by("rank").agg(**ratios)
    )
    seen = found.filter("has_gpu").with_columns(type=pl.lit(""), name=pl.lit(""))
    other = differs(_USE, high=True) | differs(_USE, high=False)
    for column, flag, off in (
        (_PACE, "is_slow", differs(_PACE, high=True)), (_USE, "is_odd", other),
    ):  # fmt: skip
        judged = with_distance(seen, column)
        found = _join_rank(found, judged.select("rank", (pl.col("is_far") & off).alias(flag)))
    slow = pl.col("is_slow")
    more = (slow & (pl.col(_WORK) - 1 >= EXPLAINED_RATIO * (pl.col(_PACE) - 1))).fill_null(
        value=False
    )
    found = found.with_columns(has_more_work=more, is_slow=slow & ~more).drop("has_gpu")
    return found.sort(slow.fill_null(value=False), "rank", descending=[True, False])


def _join_rank(rows: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    return rows.join(more, on="rank", how="left", maintain_order="left")


def _same_work() -> pl.Expr:
    """Where a kernel ran about as often as on the other ranks."""
    usual = pl.col("count").median().over(_FUNCTION)
    return (pl.col("count") - usual).abs() <= SAME_COUNT_RATIO * usual


def _slow_kernels(functions: pl.DataFrame, slow: list[int]) -> pl.DataFrame:
    """Kernels that are slow on a rank; small ones only where the rank is slow in all."""
    judged = with_distance(functions.filter(_same_work()), BETA, "median_ns")
    weighs = (pl.col("share_ratio") >= ABNORMAL_RATIO) | pl.col("rank").is_in(slow)
    above = pl.col("median_ns") - pl.col("median_ns_median")
    return (
        judged.filter(pl.col("is_far") & differs("median_ns", high=True) & weighs)
        .select(
            "rank", "name", "count", "median_ns", BETA,
            others_median_ns="median_ns_median",
            slower_ratio=above / pl.col("median_ns_median"),
            excess_ns=(above * pl.col("count")).round().cast(pl.Int64),
        )
        .sort(-pl.col("excess_ns"), "rank", "name")
    )  # fmt: skip


def _compute_lines(ranks: pl.DataFrame, abnormal: pl.DataFrame) -> Iterable[str]:
    for rank, pace, work in ranks.filter("has_more_work").select("rank", _PACE, _WORK).rows():
        by_gpu = "its GPU is not slow by this"
        if pace / work > PER_BLOCK_RATIO:
            by_gpu = f"a block takes {pace / work:.2f} times as long, as in attention over longer "
            by_gpu += "sequences, or on a slower GPU: look at its clock, too"
        yield (
            f"rank {rank} has more work: its kernels have {work:.2f} times the blocks of the "
            f"others', and take {pace:.2f} times their time. Its inputs are larger (longer "
            f"sequences, more tokens for its experts, a larger batch): balance them; {by_gpu}"
        )
    slow = dict(ranks.filter("is_slow").select("rank", _PACE).rows())
    for rank, pace in slow.items():
        yield (
            f"rank {rank} computes slowly: its kernels take {pace:.2f} times the others' time. "
            "Look at its GPU's clock, power cap, temperature and neighbours"
        )
    for row in abnormal.filter(~pl.col("rank").is_in(list(slow))).head(3).to_dicts():
        plain, geometry = kernel_names.split_geometry(row["name"])
        yield (
            f"rank {row['rank']}: {kernel_names.short_kernel_name(plain)}{geometry} takes "
            f"{duration_text(row['median_ns'])}, elsewhere {duration_text(row['others_median_ns'])}"
            "; if only this kernel is slow there, compare its shapes"
        )
    for rank, use in ranks.filter(pl.col("is_odd")).select("rank", _USE).rows():
        yield f"rank {rank} uses its GPU {ratio_text(use)} of the time, unlike the others"
    spread = spread_of(ranks[_USE])
    if spread["median"] is not None:
        low, middle, high = (ratio_text(value) for value in spread.values())
        between = f" ({low} to {high} over the ranks)" if ranks.height > 1 else ""
        yield f"a computing kernel runs {middle} of the time{between}"


def memory_report(patterns: Patterns) -> FunctionReport:
    """Copies and sets on GPUs that computation does not hide: above 1 %, or slower than elsewhere.

    Source: PerfTracker (seed 001), GPU memory operations.
    """
    functions = patterns.functions.filter(pl.col("kind") == kernel_names.MEMORY)
    abnormal = _abnormal_operations(functions)
    operations = by_function(
        functions, pl.col("median_ns").median(), over_ranks(BETA, patterns), pl.col(_RATE).mean()
    )
    return FunctionReport(
        kind=kernel_names.MEMORY,
        title="GPU memory operations",
        tables={ABNORMAL: abnormal, FUNCTIONS: operations},
        facts={"slow": sorted_ranks(abnormal.filter(pl.col("why") == SLOW))},
        meaning=tuple(_memory_lines(abnormal)),
        missing=too_few_ranks(patterns)
        if functions.height
        else ("no copy or set on a GPU in any trace",),
    )


def _abnormal_operations(functions: pl.DataFrame) -> pl.DataFrame:
    judged = with_distance(functions, BETA, "median_ns", _RATE)
    off = differs("median_ns", high=True) & differs(_RATE, high=False).fill_null(value=True)
    weighs = pl.col("share_ratio") >= ABNORMAL_RATIO
    slow = (pl.col("is_far") & off & weighs).fill_null(value=False)
    long = pl.col(BETA) > ABNORMAL_RATIO
    return (
        judged.with_columns(why=pl.when(slow).then(pl.lit(SLOW)).when(long).then(pl.lit(LONG)))
        .drop_nulls("why")
        .select(
            "rank", "name", "why", BETA, "count", "median_ns", _RATE,
            others_median_ns="median_ns_median",
            others_bandwidth_bytes_per_s=f"{_RATE}_median",
        )
        .sort(pl.col("why") == SLOW, BETA, "rank", "name", descending=[True, True, False, False])
    )  # fmt: skip


def _memory_lines(abnormal: pl.DataFrame) -> Iterable[str]:
    for row in abnormal.filter(pl.col("why") == SLOW).head(3).to_dicts():
        own, usual = row[_RATE], row[f"others_{_RATE}"]
        known = f"at {rate_text(own)}, elsewhere at {rate_text(usual)}" if own and usual else ""
        yield (
            f"rank {row['rank']}: {row['name']} runs {known or 'slowly'}. Look at its PCIe width "
            "and generation, its NUMA node, and who else uses the bus"
        )
    long = abnormal.filter(pl.col("why") == LONG).group_by("name", maintain_order=True)
    for (name, *_), rows in long:
        advice = next((do for sign, do in _OF_COPIES if sign in str(name)), "")
        yield (
            f"{name} costs {mean_text(rows)} of the time on {ranks_text(sorted_ranks(rows))}, "
            f"hidden by nothing{advice}"
        )


_AHEAD = ": copy ahead on a stream of its own"
_OF_COPIES = (
    ("Pageable", ": pin the memory (pin_memory=True) and copy with non_blocking=True"),
    ("HtoD", _AHEAD), ("DtoH", _AHEAD),
)  # fmt: skip


def mean_text(rows: pl.DataFrame) -> str:
    """The mean bottleneck ratio of some rows."""
    return ratio_text(number(rows[BETA].mean()))


def communication_report(patterns: Patterns) -> FunctionReport:
    """Communication by type: how long, how fast, and the rank whose link or arrival differs.

    `normal_rank` of a function is the nearest to all others; bandwidth is nccl-tests' bus bandwidth
    of the transfer alone. In a ring all ranks are as slow as the slowest link.

    Source: PerfTracker (seed 001), Communication; EROICA for what low throughput with a low or a
    high deviation (slow, unsteady) means.
    """
    functions = patterns.functions.filter(pl.col("kind") == kernel_names.COMMUNICATION)
    judged = with_distance(functions, BETA, _RATE, _SPREAD, **{_SPREAD: _RATE})
    abnormal = _abnormal_links(judged)
    link, why = _link_of(patterns)
    far = pl.when(pl.col("is_far").is_not_null().all()).then(pl.col("is_far").sum())
    types = by_function(
        judged, pl.col("rank").get(pl.col("distance").arg_min()).alias("normal_rank"),
        far.cast(pl.Int64).alias("different_count"), over_ranks(BETA, patterns),
        pl.col(_RATE, _SPREAD).mean(), pl.col("missing").drop_nulls().first(), keys=_FUNCTION,
    )  # fmt: skip
    columns = ("rank", "type", "count", BETA, "share_ratio", _RATE, _SPREAD, "wait_ns",
               "transfer_ns", "missing", "name")  # fmt: skip
    ranks = functions.select(columns).sort("type", "name", "rank")
    return FunctionReport(
        kind=kernel_names.COMMUNICATION,
        title="Communication",
        tables={ABNORMAL: abnormal, FUNCTIONS: types, RANKS: ranks},
        facts={
            "link": link,
            "link_why": why,
            "slow_links": sorted_ranks(abnormal),
            "late": sorted_ranks(patterns.lateness.filter("is_late")),
        },
        meaning=tuple(_communication_lines(abnormal, judged, patterns)),
        missing=tuple(_communication_gaps(patterns, functions, why)),
    )


def _link_of(patterns: Patterns) -> tuple[str, str | None]:
    """What carries the ranks' communication where that can be known, or why it cannot."""
    hosts = patterns.totals["host"]
    if hosts.null_count() or hosts.is_empty():
        return UNKNOWN, "the traces do not say on which hosts the ranks ran; haiprof's do"
    if hosts.n_unique() == 1:
        return ONE_HOST, _NO_LINK
    if hosts.n_unique() == len(hosts):
        return NETWORK, None
    return UNKNOWN, "several hosts with several ranks each: both the network and links within hosts"


def _abnormal_links(judged: pl.DataFrame) -> pl.DataFrame:
    slow, own = differs(_RATE, high=False), pl.col(_SPREAD) / pl.col(_RATE)
    usual = pl.col(f"{_SPREAD}_median") / pl.col(f"{_RATE}_median")
    unsteady = (own > 2 * usual).fill_null(value=False)
    why = pl.when(unsteady).then(pl.lit(UNSTEADY)).otherwise(pl.lit(SLOW_LINK))
    return (
        judged.filter(pl.col("is_far") & slow)
        .with_columns(why=why)
        .select(
            "rank", "type", "why", BETA, _RATE, _SPREAD, "wait_ns", "transfer_ns", "name",
            others_bottleneck_ratio=f"{BETA}_median",
            others_bandwidth_bytes_per_s=f"{_RATE}_median",
        )
        .sort(-pl.col(BETA), "rank", "type", "name")
    )  # fmt: skip


def _communication_lines(
    abnormal: pl.DataFrame, judged: pl.DataFrame, patterns: Patterns
) -> Iterable[str]:
    for row in abnormal.head(3).to_dicts():
        unsteady = row["why"] == UNSTEADY
        hint = "contention" if unsteady else "a link that came up narrow, or a bad cable"
        yield (
            f"rank {row['rank']}: its {row['type']} {'varies and ' * unsteady}is low at "
            f"{rate_text(row[_RATE])}, elsewhere {rate_text(row[f'others_{_RATE}'])}: {hint}"
        )
    if not judged.is_empty() and len(patterns.ranks) > 1:
        yield patterns.who_is_late
    wait, transfer = (int(judged[name].sum() or 0) for name in ("wait_ns", "transfer_ns"))
    if wait + transfer:
        share = ratio_text(wait / (wait + transfer))
        yield f"{share} of the time in collectives is waiting for the last rank"


def _communication_gaps(
    patterns: Patterns, functions: pl.DataFrame, why: str | None
) -> Iterable[str]:
    if functions.is_empty():
        yield f"{_NO_COMMUNICATION} (collectives on the CPU are among the operators)"
        return
    yield from too_few_ranks(patterns)
    for reason in functions["missing"].drop_nulls().unique().sort().to_list():
        yield f"throughput: {reason}"
    if patterns.moved_clocks:
        yield (
            f"the clock of {ranks_text(list(patterns.moved_clocks))} was taken to be another "
            "host's: a link that is always slow would look the same"
        )
    if why:
        yield f"link: {why}"
