"""How ranks arrive at collectives: waits and bandwidth, stragglers, and lateness per step."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import numpy as np
import polars as pl

from haiprof.base.intervals import covered_lengths, union
from haiprof.base.medians import MAD_TO_SIGMA
from haiprof.base.statistics import student_quantile
from haiprof.base.units import duration_text, ratio_text
from haiprof.base.version import PACKAGE
from haiprof.trace_analysis.collectives import (
    SYNCHRONISING,
    WHOLE_JOB,
    clock_offsets,
    host_offsets,
    on_one_clock,
)
from haiprof.trace_format.frame_columns import Columns, types_of

_GROUP = ("process_group", "group_ranks")


def with_time_elsewhere(kernels: pl.DataFrame) -> pl.DataFrame:
    """With how long each rank was in collectives of its other groups before each one."""
    texts = (pl.col(name).fill_null("") for name in _GROUP)
    group = pl.concat_str(*texts, separator="|").rank("dense").cast(pl.Int64)
    placed = kernels.with_columns(group=group).with_row_index("place")
    found = np.zeros(len(kernels), dtype=np.int64)
    for own in placed.sort("start_ns").partition_by("rank"):
        columns = ("place", "start_ns", "end_ns", "group")
        place, starts, ends, groups = (own[name].to_numpy() for name in columns)
        for group in np.unique(groups):
            mine = groups == group
            others = union(starts[~mine], ends[~mine])
            left = np.append(starts[0], np.maximum.accumulate(ends[mine])[:-1])
            elsewhere = covered_lengths(others, np.minimum(left, starts[mine]), starts[mine])
            found[place[mine]] = elsewhere
    return kernels.with_columns(pl.Series("elsewhere_ns", found, dtype=pl.Int64))


def excess_elsewhere() -> pl.Expr:
    """How much longer than the others' each rank's time elsewhere was."""
    return above_others("elsewhere_ns").clip(0)


def above_others(column: str) -> pl.Expr:
    """A value of each rank less the median of the other ranks' in the same collective."""
    values = pl.col(column).sort().over("collective", mapping_strategy="join")
    place = pl.col(column).rank("ordinal").over("collective").cast(pl.Int64) - 1
    others = pl.len().over("collective").cast(pl.Int64) - 1
    apart = (
        pl.col(column) - values.list.get(at + (place <= at).cast(pl.Int64), null_on_oob=True)
        for at in ((others - 1) // 2, others // 2)  # in the middle, its own left out
    )
    return sum(apart, start=pl.lit(0)) / 2


# Bus bandwidth over algorithm bandwidth, for n ranks. Source: nccl-tests, doc/PERFORMANCE.md.
_BUS_FACTOR = {
    "all_reduce": 2 * (pl.col("group_size") - 1) / pl.col("group_size"),
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
        (pl.col("group_size") - 1) / pl.col("group_size"),
    ),
    **dict.fromkeys(("broadcast", "reduce"), pl.lit(1.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How a GPU reaches the others of its node."""

    pattern: str  # of the device's name in traces, where that tells the link
    bytes_per_s: float  # each way
    source: str


LINKS = msgspec.json.decode(
    (PACKAGE / "trace_analysis" / "links.json").read_bytes(), type=tuple[Link, ...]
)
"""The first whose pattern is found counts. NCCL's sums in the switch (NVLS) can exceed them."""

WAITS = ("wait_ns", "transfer_ns")


def collective_waits(kernels: pl.DataFrame) -> pl.DataFrame:
    """What each rank did in each collective; `missing` says why times of it are null."""
    inside = with_time_elsewhere(kernels).filter(pl.col("collective").is_not_null())
    count = pl.col("rank").n_unique().over("collective").cast(pl.Int64)
    world = pl.when(count == pl.col("world_size")).then("world_size")
    known = inside.with_columns(
        rank_count=count,
        group_size=pl.coalesce(pl.col("group_size").max().over("collective"), world),
    )
    last = pl.col("start_ns").max().over("collective")
    lasts = (pl.col("start_ns") == last).sum().over("collective")
    ended = pl.col("end_ns").min().over("collective")
    why = (  # waiting and transfer cannot be separated
        pl.when(pl.col("group_size").is_null()).then(pl.lit("size of the group not recorded"))
        .when(pl.col("rank_count") < pl.col("group_size"))
        .then(pl.format("{} of {} ranks traced", "rank_count", "group_size"))
        .when(~pl.col("kind").is_in(SYNCHRONISING))
        .then(pl.lit("ranks may leave before others enter"))
        .when(ended < last).then(pl.lit("a rank ends before another starts: clocks differ"))
    )  # fmt: skip
    timed = known.with_columns(
        late_ns=pl.col("start_ns") - pl.col("start_ns").min().over("collective"),
        wait_ns=last - pl.col("start_ns"), transfer_ns=pl.col("end_ns") - last,
        arrived_last=(pl.col("start_ns") == last) & (lasts == 1), missing=why,
    )  # fmt: skip
    return timed.with_columns(
        pl.when(pl.col("missing").is_null()).then(pl.col(name)).alias(name)
        for name in (*WAITS, "arrived_last")
    ).sort("collective", "rank")


def arrivals(kernels: pl.DataFrame, hosts: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Each rank's part in each collective, and how far the ranks' clocks are apart.

    Ranks of one of the `hosts` (`rank`, `host`) have one clock.
    """
    clocks = host_offsets(clock_offsets(kernels), hosts)
    return collective_waits(on_one_clock(kernels, clocks)), clocks


def collectives(waits: pl.DataFrame) -> pl.DataFrame:
    """One row per collective: skew, transfer, bytes and bandwidth.

    Source: nccl-tests doc/PERFORMANCE.md. Bytes: of one rank's buffer (all-reduce, broadcast,
    reduce), of all ranks' parts together (all-gather, reduce-scatter, gather, scatter), of what
    a rank sends (all-to-all; the mean over ranks where they differ, which nccl-tests has not).
    Bus bandwidth is that times 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter,
    all-to-all, gather and scatter, 1 for broadcast and reduce. The time is the transfer's,
    since nccl-tests' ranks start together.
    """
    starts = pl.col("start_ns").sort()
    rows = waits.group_by("collective").agg(
        pl.col("step", "kind", "process_group", "part", "sequence", "dtype").first(),
        pl.col("group_size", "rank_count", "matched_by", "confidence", "missing").first(),
        # Launchers number the ranks of a node, and its devices, in one order.
        one_node=(pl.col("rank") - pl.col("device")).n_unique() == 1,
        start_ns=pl.col("start_ns").min(),
        start_skew_ns=pl.col("start_ns").max() - pl.col("start_ns").min(),
        last_rank=pl.col("rank").filter("arrived_last").first(),
        behind_second_ns=starts.last() - starts.slice(-2, 1).first(),
        transfer_ns=pl.col("transfer_ns").max(),
        bytes=_own_bytes().mean().round().cast(pl.Int64),
    )
    known = pl.when(pl.col("missing").is_null()).then("behind_second_ns")
    rated = rows.with_columns(known, *_bandwidths("transfer_ns"))
    return rated.select(pl.exclude("missing"), "missing").sort("collective")


def _bandwidths(time: str) -> tuple[pl.Expr, pl.Expr]:
    """Algorithm and bus bandwidth of `bytes` in a time; null where that is none."""
    rate = pl.when(pl.col(time) > 0).then(pl.col("bytes") / (pl.col(time) / 1e9))
    bus = pl.coalesce(
        pl.when(pl.col("kind") == kind).then(factor) for kind, factor in _BUS_FACTOR.items()
    )
    names = ("algorithm_bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s")
    return rate.alias(names[0]), (rate * bus).alias(names[1])


def rank_collectives(kernels: pl.DataFrame) -> pl.DataFrame:
    """What each rank's collectives moved, as its own trace tells it."""
    keys = ("rank", "process_group", "part", "kind", "dtype", "group_size")
    length = pl.col("end_ns") - pl.col("start_ns")
    sized = _own_bytes().is_not_null()
    grouped = kernels.group_by(keys).agg(
        collective_count=pl.len().cast(pl.Int64), sized_count=sized.sum().cast(pl.Int64),
        time_ns=length.sum(), bytes=pl.when(sized.any()).then(_own_bytes().sum()),
        sized_ns=length.filter(sized).sum(),
    )  # fmt: skip
    rated = grouped.with_columns(_bandwidths("sized_ns")).drop("sized_ns")
    return rated.sort("rank", -pl.col("time_ns"), "process_group", "kind", nulls_last=True)


def _own_bytes() -> pl.Expr:
    """Bytes of the collective as nccl-tests counts them, from one rank's counts."""
    sent, received = pl.col("in_count"), pl.col("out_count")
    size, ranks = pl.col("element_bytes"), pl.col("group_size")
    everything = {
        **dict.fromkeys(("all_reduce", "broadcast", "reduce"), pl.coalesce(sent, received)),
        "all_to_all": sent, "all_gather": pl.coalesce(received, sent * ranks),
        "reduce_scatter": pl.coalesce(sent, received * ranks), "gather": sent * ranks,
        "scatter": received * ranks,
    }  # fmt: skip
    return pl.coalesce(
        pl.when(pl.col("kind") == kind).then(count * size) for kind, count in everything.items()
    )


def process_groups(rows: pl.DataFrame, device_name: str | None) -> pl.DataFrame:
    """Bandwidth by process group and kind, and that of the link inside of a node of this device."""
    link = next((each for each in LINKS if re.search(each.pattern, device_name or "")), None)
    peak, source = (link.bytes_per_s, link.source) if link else (None, None)
    linked = pl.when("one_node")
    timed = pl.col("algorithm_bandwidth_bytes_per_s").is_not_null()
    keys = ("process_group", "part", "kind", "group_size")
    grouped = rows.group_by(keys).agg(
        collective_count=pl.len().cast(pl.Int64),
        timed_count=timed.sum().cast(pl.Int64),
        bytes=pl.when(timed.any()).then(pl.col("bytes").filter(timed).sum()),
        transfer_ns=pl.when(timed.any()).then(pl.col("transfer_ns").filter(timed).sum()),
        one_node=pl.col("one_node").filter(timed).all() & timed.any(),
    )
    rated = grouped.with_columns(
        _bandwidths("transfer_ns"),
        link_bytes_per_s=linked.then(pl.lit(peak, pl.Float64)),
        link_source=linked.then(pl.lit(source, pl.String)),
    )
    return rated.with_columns(
        link_ratio=pl.col("bus_bandwidth_bytes_per_s") / pl.col("link_bytes_per_s")
    ).drop("one_node").sort("process_group", "kind", "group_size")  # fmt: skip


def stragglers(waits: pl.DataFrame, *, by_step: bool = False) -> pl.DataFrame:
    """Who arrives last.

    The order is that of arrival at each collective, of every kind that all must enter. HTA's
    get_potential_stragglers drops a rank's kernels below 1 % of the step first, which are
    those of the rank that came last, and compares what is left (docs/hta-differences.md).
    """
    known = waits.filter(pl.col("missing").is_null())
    starts = pl.col("start_ns").sort().over("collective", mapping_strategy="join")
    second = starts.list.get(-2, null_on_oob=True)
    behind = pl.when("arrived_last").then(pl.col("start_ns") - second).otherwise(0)
    known = known.with_columns(behind=behind, passed_on=excess_elsewhere())
    passed = pl.min_horizontal("behind", pl.col("passed_on").round().cast(pl.Int64))
    own = pl.col("behind") - passed
    rows = known.group_by(["rank", "step"] if by_step else ["rank"]).agg(
        collective_count=pl.len().cast(pl.Int64),
        last_count=pl.col("arrived_last").sum().cast(pl.Int64),
        last_ratio=pl.col("arrived_last").mean(),
        held_up_ns=own.sum(),
        waited_ns=pl.col("wait_ns").sum(),
        collective_ns=(pl.col("end_ns") - pl.col("start_ns")).sum(),
        step_count=pl.col("step").drop_nulls().n_unique().cast(pl.Int64),
    )
    steps = pl.when(pl.col("step_count") > 0).then("step_count")
    return rows.with_columns(
        (pl.col(name) / steps).round().cast(pl.Int64).alias(f"{name}_per_step")
        for name in ("held_up_ns", "waited_ns")
    ).sort(["held_up_ns", "rank"], descending=[True, False])


CONFIDENCE = 0.95
MIN_FREEDOM = 3
"""With fewer degrees of freedom, (ranks - 1) (steps - 1), there is no interval: it would be wider
than three standard errors of one value, and the quantile itself is not exact."""
UNEQUAL_START_RATIO = 3
"""Ranks came apart to the window where the first collective's spread is this many others'."""
NEAR_RATIO = 0.25
"""Lateness in two groups that differs by no more is one and the same: a rank that is late a little
at each collective of the smaller is late by their sum in the larger. Own choice."""
LATENESS_COLUMNS: Columns = {
    "rank": (pl.Int64, "of the trace"),
    "process_group": (pl.String, "the group in which it is latest"),
    "part": (pl.String, "of the job that the group serves"),
    "late_ns": (pl.Int64, "per step, negative: earlier"),
    "low_ns": (pl.Int64, "of its 95 % interval; null: too few steps"),
    "high_ns": (pl.Int64, "of its 95 % interval"),
    "clock_ns": (pl.Int64, "of it that may be the clocks'"),
    "step_count": (pl.Int64, "steps"),
    "collective_count": (pl.Int64, "collectives"),
    "is_late": (pl.Boolean, "beyond chance"),
    "said": (pl.String, "the answer in words"),
}
LATENESS_SCHEMA = types_of(LATENESS_COLUMNS)


def arrival_lateness(waits: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """How much later than the others each rank begins its collectives, and how sure that is.

    Kernels of one group follow each other on a stream, so no time is counted twice. The
    interval is Student's t over the steps, by the rank's own deviation or that of all ranks of
    its group, whichever is larger, with Bonferroni's correction for the number of ranks,
    widened by what the clocks may be wrong by.

    Source: process arrival patterns of collectives, Faraj, Patarasuk and Yuan, "A study of
    process arrival patterns for MPI collective operations" (ICS 2007), with the median of the
    others in place of the mean of all, which a late rank itself moves.
    """
    # Without the first of each group, and in steps where there are any: `late`, arrivals less the
    # median of the others' in sum, by rank and step.
    found = _with_known_arrivals(waits).filter(~pl.col("is_first"))
    found = found.drop_nulls("step") if found["step"].count() else found
    apart = found.with_columns(late=above_others("start_ns"), passed_on=excess_elsewhere())
    passed = pl.min_horizontal(pl.col("late").clip(0), "passed_on")
    steps = apart.group_by("rank", *_GROUP, "step").agg(
        pl.col("part", "group_size").first(), (pl.col("late") - passed).sum(), count=pl.len()
    )
    if steps.is_empty():
        return pl.DataFrame(schema=LATENESS_SCHEMA)
    groups = steps.group_by("rank", *_GROUP).agg(
        pl.col("part", "group_size").first(), step_count=pl.len().cast(pl.Int64),
        mean=pl.col("late").mean(), variance=pl.col("late").var(),
        collective_count=pl.col("count").sum().cast(pl.Int64), per_step=pl.col("count").mean(),
    )  # fmt: skip
    # What each rank's clock may be wrong by: an offset that was not corrected, and its spread.
    left = pl.when("corrected").then(0).otherwise(pl.col("offset_ns").abs())
    spread = 2 * MAD_TO_SIGMA * pl.col("residual_ns") / pl.col("collective_count").sqrt()
    clocks = offsets.select("rank", clock=(left + spread).fill_nan(None).fill_null(0))
    known = _with_half_width(groups).join(clocks, on="rank", how="left").with_columns(
        clock=pl.col("per_step") * pl.col("clock")
    )  # fmt: skip
    mean, half = pl.col("mean"), pl.col("half") + pl.col("clock")
    times = {"late_ns": mean, "low_ns": mean - half, "high_ns": mean + half,
             "clock_ns": pl.col("clock")}  # fmt: skip
    rows = known.with_columns(
        **{name: value.round().cast(pl.Int64) for name, value in times.items()}
    ).with_columns(is_late=(pl.col("low_ns") > 0).fill_null(value=False))
    # One row per rank: of the groups where it is about as late the smallest.
    most = pl.col("mean").max().over("rank", "is_late")
    near = pl.col("mean") >= most - NEAR_RATIO * most.abs()
    latest = pl.col("is_late").not_()
    ordered = rows.sort(latest, ~near, "group_size", -pl.col("mean"), "rank", *_GROUP)
    first = ordered.unique("rank", keep="first", maintain_order=True)
    one = first.sort(latest, -pl.col("mean"), "rank", maintain_order=True)
    said = pl.lit("; ".join([_verdict(one), *_unequal_starts(waits)]))
    return one.with_columns(said=said).select(
        pl.col(name).cast(dtype) for name, dtype in LATENESS_SCHEMA.items()
    )


def who_is_late(lateness: pl.DataFrame, waits: pl.DataFrame) -> str:
    """The answer in words, or why there is none."""
    if not lateness.is_empty():
        return str(lateness["said"][0])
    why = waits["missing"].drop_nulls().mode().sort().to_list()
    first = f" ({why[0]})" if why else ""
    return f"who is late is not known: arrivals at fewer than two collectives compare{first}"


def _with_known_arrivals(waits: pl.DataFrame) -> pl.DataFrame:
    """Collectives whose arrivals are known, with whether each is the first of its group."""
    known = waits.filter(pl.col("missing").is_null())
    first = pl.col("collective").min().over(_GROUP)
    return known.with_columns(is_first=pl.col("collective") == first)


def _with_half_width(groups: pl.DataFrame) -> pl.DataFrame:
    """With `half`, half the width of the interval over steps; null where nothing tells."""
    larger = pl.max_horizontal("variance", pl.col("variance").mean().over(_GROUP))
    sized = groups.with_columns(
        freedom=(pl.len().over(_GROUP).cast(pl.Int64) - 1) * (pl.col("step_count") - 1),
        error=(larger / pl.col("step_count")).sqrt(),
    )
    tail = (1 - CONFIDENCE) / 2 / groups["rank"].n_unique()
    widths = [None if freedom < MIN_FREEDOM else student_quantile(1 - tail, freedom) * error
              for freedom, error in sized.select("freedom", "error").iter_rows()]  # fmt: skip
    return sized.with_columns(half=pl.Series(widths, dtype=pl.Float64))


def _verdict(rows: pl.DataFrame) -> str:
    """Who is late, in words."""
    most = rows.row(0, named=True)
    steps = f"{most['step_count']} step" + ("s" if most["step_count"] != 1 else "")
    rank = f"rank {most['rank']}"
    part = "" if most["part"] in (None, WHOLE_JOB) else f"{most['part']} "
    collectives = f"its {part}collectives"
    much = duration_text(max(most["late_ns"], 0))
    if most["low_ns"] is None:
        if most["late_ns"] <= 0:
            return f"no rank is later than the others in {steps}"
        near = rows[1:].filter(pl.col("late_ns") > most["late_ns"] / 2).head(2)
        pairs = near.select("rank", "late_ns").iter_rows()
        followers = ", ".join(f"rank {rank} {duration_text(late)}" for rank, late in pairs)
        return (
            f"who is late cannot be told from {steps}: in what was recorded "
            f"{rank} begins {collectives} latest, {much} later than the others"
            + (f" ({followers})" if followers else "")
        )
    low, high = (f"-{duration_text(-ns)}" if ns < 0 else duration_text(ns)
                 for ns in (most["low_ns"], most["high_ns"]))  # fmt: skip
    between = f"{ratio_text(CONFIDENCE)} interval {low} to {high}, {steps}"
    if most["is_late"]:
        late = int(rows["is_late"].sum())
        more = f"; {late - 1} more ranks are late too" if late > 1 else ""
        return (
            f"{rank} begins {collectives} {much} per step later than the others ({between}){more}"
        )
    return f"no rank is late beyond chance: the latest is {rank}, {much} per step ({between})"


def _unequal_starts(waits: pl.DataFrame) -> list[str]:
    """Why steps of the ranks differ in length where they came to the window at different times."""
    start, by_start = pl.col("start_ns"), pl.col("rank").sort_by("start_ns")
    spread = _with_known_arrivals(waits).group_by("collective").agg(
        pl.col("is_first").first(), spread=start.max() - start.min(), first=by_start.first(),
        last=by_start.last(),
    )  # fmt: skip
    begun = spread.filter("is_first").sort(-pl.col("spread")).row(0, named=True)
    usual = spread.filter(~pl.col("is_first"))["spread"].median()
    if usual is None or begun["spread"] <= UNEQUAL_START_RATIO * float(str(usual)):
        return []
    return [
        f"ranks came to the first collective {duration_text(begun['spread'])} apart, rank "
        f"{begun['first']} first and rank {begun['last']} last: that comes from before the traces "
        "and does not count, but the first step of the early ranks is that much longer"
    ]
