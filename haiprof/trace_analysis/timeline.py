"""One step on a time line: what runs on each stream of the device, its idle gaps, and the host."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, complement, intersection, union
from haiprof.trace_analysis.device_ledger import step_windows
from haiprof.trace_analysis.device_time import with_kind
from haiprof.trace_analysis.host_activity import ACTIVITIES, OUTSIDE, read_host, split
from haiprof.trace_format.kineto.rank_trace import Trace

IDLE_LANE, HOST_LANE = "GPU idle", "host"
_LANE_LIMIT = 6
_PIECES = 600
"""Of the step: what is shorter is not seen."""
NAMED_RATIO = 0.04
"""Of the step: a shorter bar has no room for a name."""
SCHEMA = {
    "lane": pl.String, "kind": pl.String, "name": pl.String, "start_ns": pl.Int64,
    "dur_ns": pl.Int64, "is_one": pl.Boolean,
}  # fmt: skip


def timeline(trace: Trace, steps: tuple[int, int] | None = None) -> pl.DataFrame:
    """The step of a median length: streams with most work first, gaps, and the training thread.

    Returns:
        One row per bar: `lane` (`stream 7`, `GPU idle`, `host`), `kind` (of device work, `idle`, or
        the host's activity), `name` of the longest event in it, `start_ns` since the step began,
        `dur_ns`, `is_one` (one event, not many short ones); and of the step `step` (null without
        profiler steps), `step_ns`, `idle_ns`, and the longest gap's `gap_ns`, `gap_start_ns`.
    """
    windows = step_windows(trace)
    if steps is not None:
        windows = windows.filter(pl.col("number").is_between(*steps, closed="left"))
    if trace.gpu.is_empty() or windows.is_empty():
        raise MissingDataError(f"{trace.path}: no GPU event in it")
    lengths = (windows["end_ns"] - windows["start_ns"]).arg_sort()
    row = windows.row(int(lengths[(len(lengths) - 1) // 2]), named=True)
    start, end = row["start_ns"], row["end_ns"]
    several = trace.gpu["device"].n_unique() > 1
    lane = pl.format("GPU {} · stream {}", "device", "stream") if several else pl.format(
        "stream {}", "stream"
    )  # fmt: skip
    begin = pl.max_horizontal("ts_ns", start)
    events = with_kind(trace.gpu).select(
        lane=lane, kind="kind", name=pl.col("name").cast(pl.String), start_ns=begin,
        dur_ns=pl.min_horizontal(pl.col("ts_ns") + pl.col("dur_ns"), end) - begin,
    ).filter(pl.col("dur_ns") > 0)  # fmt: skip
    busiest = events.group_by("lane").agg(pl.col("dur_ns").sum()).sort("dur_ns", descending=True)
    shown = events.filter(pl.col("lane").is_in(busiest["lane"].head(_LANE_LIMIT).implode()))
    busy = union(events["start_ns"].to_numpy(), (events["start_ns"] + events["dur_ns"]).to_numpy())
    whole = Intervals(np.array([start]), np.array([end]))
    gaps = intersection(complement(busy), whole)
    lengths_ns = gaps.ends - gaps.starts
    idle = pl.DataFrame({"start_ns": gaps.starts, "dur_ns": lengths_ns}).with_columns(
        lane=pl.lit(IDLE_LANE), kind=pl.lit("idle"), name=pl.lit("idle")
    )
    longest: tuple[int | None, int | None] = (None, None)
    if len(lengths_ns):
        at = int(lengths_ns.argmax())
        longest = int(lengths_ns[at]), int(gaps.starts[at]) - start
    parts = [
        _draw(part, start, end)
        for part in (*shown.partition_by("lane"), idle, _host_events(trace, whole))
    ]
    order = {name: at for at, name in enumerate([*busiest["lane"], IDLE_LANE, HOST_LANE])}
    rows = pl.concat(parts).sort(pl.col("lane").replace_strict(order), "start_ns")
    return rows.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items()).with_columns(
        start_ns=pl.col("start_ns") - start,
        step=pl.lit(row["number"], pl.Int64), step_ns=pl.lit(end - start, pl.Int64),
        idle_ns=pl.lit(int(lengths_ns.sum()), pl.Int64),
        gap_ns=pl.lit(longest[0], pl.Int64), gap_start_ns=pl.lit(longest[1], pl.Int64),
    )  # fmt: skip


def _host_events(trace: Trace, window: Intervals) -> pl.DataFrame:
    """What the training thread did: pieces between two of its events' edges."""
    host = read_host(trace)
    moments = host.main_moments
    cut = split(window.starts, window.ends, moments.edges)
    rows = moments.rows[cut.segment + 1]
    kind = np.where(rows >= 0, np.append(host.activity, 0)[rows], ACTIVITIES.index(OUTSIDE))
    return pl.DataFrame({
        "lane": [HOST_LANE] * len(rows), "kind": [ACTIVITIES[each] for each in kind],
        "name": host.name_at(rows), "start_ns": cut.starts, "dur_ns": cut.ends - cut.starts,
    }, schema=dict(list(SCHEMA.items())[:5]))  # fmt: skip


def _draw(lane: pl.DataFrame, start: int, end: int) -> pl.DataFrame:
    """Bars of one lane as they can be seen; events long enough for a name stay alone."""
    edges = np.linspace(start, end, _PIECES + 1).round().astype(np.int64)
    begins, lengths = lane["start_ns"].to_numpy(), lane["dur_ns"].to_numpy()
    own = np.where(lengths >= NAMED_RATIO * (end - start), np.arange(len(lengths)), -1)
    cut = split(begins, begins + lengths, edges)
    inside = np.flatnonzero((cut.segment >= 0) & (cut.segment < _PIECES) & (cut.ends > cut.starts))
    of, piece = cut.of[inside], cut.segment[inside]
    pieces = lane[of].select("lane", "kind", "name", longest="dur_ns").with_columns(
        piece=pl.Series(piece), own=pl.Series(own[of]),
        ns=pl.Series((cut.ends - cut.starts)[inside]),
        start_ns=pl.Series(edges[piece]), end_ns=pl.Series(edges[piece + 1]),
    )  # fmt: skip
    summed = pieces.sort("longest", descending=True).group_by("piece", "kind", "own").agg(
        pl.col("lane", "name", "longest", "start_ns", "end_ns").first(), pl.col("ns").sum()
    )  # fmt: skip
    is_busy = 2 * pl.col("ns").sum().over("piece") >= pl.col("end_ns") - pl.col("start_ns")
    shown = summed.filter(is_busy).sort("piece", -pl.col("ns"), "kind", "own")
    shown = shown.unique("piece", keep="first", maintain_order=True)
    same = [pl.col(name) == pl.col(name).shift(1) for name in ("kind", "own")]
    follows = pl.all_horizontal(pl.col("start_ns") == pl.col("end_ns").shift(1), *same)
    bars = shown.with_columns(bar=(~follows.fill_null(value=False)).cum_sum())
    return bars.sort("longest", descending=True).group_by("bar").agg(
        pl.col("lane", "kind", "name").first(), pl.col("start_ns").min(),
        dur_ns=pl.col("end_ns").max() - pl.col("start_ns").min(),
        is_one=pl.col("own").first() >= 0,
    ).select(list(SCHEMA))  # fmt: skip
