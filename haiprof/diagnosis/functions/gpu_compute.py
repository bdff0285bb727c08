"""P5, GPU compute: utilization over the ranks, the major kernels, and the rank that is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.functions.distance import FUNCTION, differs, with_distance
from haiprof.diagnosis.functions.report import (
    ABNORMAL,
    FUNCTIONS,
    RANKS,
    FunctionReport,
    over_ranks,
    spread_of,
    too_few_ranks,
)
from haiprof.diagnosis.thresholds import (
    ABNORMAL_RATIO,
    EXPLAINED_RATIO,
    PER_BLOCK_RATIO,
    SAME_COUNT_RATIO,
)
from haiprof.trace_analysis.kernel_names import GPU_COMPUTE, short_kernel_name, split_geometry

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

TITLE = "GPU compute"
_PACE, _WORK, _USE = "pace_ratio", "work_ratio", "utilization_ratio"
_NO_GPU = "no GPU event in any trace: `--trace` records them where the job uses a GPU"
_NO_SM = (
    "SM activity: Kineto records only estimates from the launch (occupancy, blocks per SM); "
    "`haiprof overview` shows GPM's counters, `--burst` those of Nsight Systems"
)


def gpu_compute_report(patterns: Patterns) -> FunctionReport:
    """What the GPUs compute.

    Args:
        patterns: Of all ranks.

    Returns:
        `facts`: `utilization` (share of the window in which a computing kernel ran; min, median
        and max over ranks), `abnormal_utilization` and `slow` (ranks). Tables: `ranks`, with
        `pace_ratio`, how long the rank's kernels take for one of the ranks' median pace, and
        `work_ratio`, the same if time went by blocks alone: a rank whose kernels have as many more
        blocks as they take longer has larger inputs, and no slow GPU (`has_more_work`);
        `functions`, kernels with `median_ns` (median of the ranks' medians), `bottleneck_ratio`
        (mean over all ranks); `abnormal`, kernels that are slow on a rank: `others_median_ns`,
        `slower_ratio`, `excess_ns` (what the rank would save at the others' pace).

        Source: PerfTracker (seed 001), GPU Compute. Its utilization is a hardware counter's.
    """
    functions = patterns.functions.filter(pl.col("kind") == GPU_COMPUTE)
    ranks = _ranks(patterns, functions)
    slow = ranks.filter(pl.col("is_slow"))["rank"].to_list()
    more = ranks.filter(pl.col("has_more_work"))["rank"].to_list()
    odd = ranks.filter(pl.col("is_odd"))["rank"].to_list()
    abnormal = _slow_kernels(functions.filter(~pl.col("rank").is_in(more)), slow)
    missing = () if functions.height else (_NO_GPU,)
    return FunctionReport(
        kind=GPU_COMPUTE,
        title=TITLE,
        tables={
            ABNORMAL: abnormal,
            FUNCTIONS: _kernels(functions, len(patterns.ranks)),
            RANKS: ranks,
        },
        facts={
            "utilization": spread_of(patterns.totals[_USE]),
            "abnormal_utilization": odd,
            "slow": slow,
            "more_work": more,
        },
        meaning=(*_meaning(ranks, abnormal), *_use_text(ranks)),
        missing=missing or (*too_few_ranks(patterns.totals.height), _NO_SM),
    )


def _ranks(patterns: Patterns, functions: pl.DataFrame) -> pl.DataFrame:
    """`is_slow`: its kernels take longer than the others'. `is_odd`: its utilization differs."""
    columns = ("rank", "window_ns", _USE, "sm_efficiency_ratio", "occupancy_ratio", "gpu_name")
    found = patterns.totals.select(*columns, "has_gpu").join(
        _paces(functions), on="rank", how="left", maintain_order="left"
    )
    seen = found.filter("has_gpu").with_columns(type=pl.lit(""), name=pl.lit(""))
    for column, flag in ((_PACE, "is_slow"), (_USE, "is_odd")):
        judged = with_distance(seen, FUNCTION, (column,))
        off = differs(column, high=True)
        off = off if flag == "is_slow" else off | differs(column, high=False)
        flags = judged.select("rank", (pl.col("is_far") & off).alias(flag))
        found = found.join(flags, on="rank", how="left", maintain_order="left")
    more = pl.col("is_slow") & (pl.col(_WORK) - 1 >= EXPLAINED_RATIO * (pl.col(_PACE) - 1))
    found = found.with_columns(has_more_work=more.fill_null(value=False)).with_columns(
        is_slow=pl.col("is_slow") & ~pl.col("has_more_work")
    )
    return found.drop("has_gpu").sort(pl.col("is_slow").fill_null(value=False), "rank",
                                      descending=[True, False])  # fmt: skip


def _paces(functions: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `pace_ratio`: its kernels at its own pace over the same at the ranks' median pace.

    And `work_ratio`, the same with the pace that the blocks of its launches would make.
    """
    usual = pl.col("median_ns").median().over("type", "name")
    blocks = pl.col("median_block_count")
    work = (blocks / blocks.median().over("type", "name")).fill_null(1.0)
    common = pl.len().over("type", "name") > 1
    same = functions.with_columns(usual=usual, work=work).filter(common & _same_work())
    paid, due = pl.col("count") * pl.col("median_ns"), pl.col("count") * pl.col("usual")
    whole = due.sum()
    return same.group_by("rank").agg(
        pl.when(whole > 0).then(paid.sum() / whole).alias(_PACE),
        pl.when(whole > 0).then((due * pl.col("work")).sum() / whole).alias(_WORK),
    )


def _same_work() -> pl.Expr:
    """Where a kernel ran about as often as on the other ranks."""
    usual = pl.col("count").median().over("type", "name")
    return (pl.col("count") - usual).abs() <= SAME_COUNT_RATIO * usual


def _slow_kernels(functions: pl.DataFrame, slow: list[int]) -> pl.DataFrame:
    """Kernels that are slow on a rank; small ones only where the rank is slow in all."""
    judged = with_distance(
        functions.filter(_same_work()), FUNCTION, ("bottleneck_ratio", "median_ns")
    )
    weighs = (pl.col("share_ratio") >= ABNORMAL_RATIO) | pl.col("rank").is_in(slow)
    above = pl.col("median_ns") - pl.col("median_ns_median")
    return (
        judged.filter(pl.col("is_far") & differs("median_ns", high=True) & weighs)
        .select(
            "rank", "name", "count", "median_ns", "bottleneck_ratio",
            others_median_ns="median_ns_median",
            slower_ratio=above / pl.col("median_ns_median"),
            excess_ns=(above * pl.col("count")).round().cast(pl.Int64),
        )
        .sort(-pl.col("excess_ns"), "rank", "name")
    )  # fmt: skip


def _kernels(functions: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """Kernels over all ranks, the one that bounds most first."""
    found = functions.group_by("name").agg(
        pl.len().cast(pl.Int64).alias("rank_count"),
        pl.col("count").sum(),
        pl.col("median_ns", "occupancy_ratio").median(),
        over_ranks("bottleneck_ratio", ranks),
    )
    return found.sort(-pl.col("bottleneck_ratio"), "name")


def _meaning(ranks: pl.DataFrame, abnormal: pl.DataFrame) -> list[str]:
    lines = []
    for rank, pace, work in ranks.filter("has_more_work").select("rank", _PACE, _WORK).rows():
        rest = pace / work
        lines.append(
            f"rank {rank} has more work: its kernels have {work:.2f} times the blocks of the "
            f"others', and take {pace:.2f} times their time. Its inputs are larger (longer "
            "sequences, more tokens for its experts, a larger batch): balance them; "
            + (
                f"a block takes {rest:.2f} times as long, as in attention over longer sequences, "
                "or on a slower GPU: look at its clock, too"
                if rest > PER_BLOCK_RATIO
                else "its GPU is not slow by this"
            )
        )
    for rank, pace in ranks.filter(pl.col("is_slow")).select("rank", _PACE).rows():
        lines.append(
            f"rank {rank} computes slowly: its kernels take {pace:.2f} times the others' time. "
            f"Look at its GPU's clock, power cap, temperature and neighbours"
        )
    known = ranks.filter(pl.col("is_slow"))["rank"].implode()
    for rank, name, own, usual in (
        abnormal.filter(~pl.col("rank").is_in(known))
        .select("rank", "name", "median_ns", "others_median_ns")
        .rows()[:3]
    ):
        plain, geometry = split_geometry(name)
        lines.append(
            f"rank {rank}: {short_kernel_name(plain)}{geometry} takes {duration_text(own)}, "
            f"elsewhere {duration_text(usual)}; if only this kernel is slow there, compare its "
            "shapes"
        )
    odd = ranks.filter(pl.col("is_odd"))
    for rank, use in odd.select("rank", _USE).rows():
        lines.append(f"rank {rank} uses its GPU {ratio_text(use)} of the time, unlike the others")
    return lines


def _use_text(ranks: pl.DataFrame) -> list[str]:
    found = spread_of(ranks[_USE])
    if found["median"] is None:
        return []
    low, middle, high = (ratio_text(value) for value in found.values())
    if ranks.height == 1:
        return [f"a computing kernel runs {middle} of the time"]
    return [f"a computing kernel runs {middle} of the time ({low} to {high} over the ranks)"]
