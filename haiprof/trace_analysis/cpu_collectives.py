"""Collectives on the CPU (gloo, MPI): who asked for each, when it ran, and who waited for it."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.intervals import covered_lengths, union
from haiprof.trace_format.kineto.rank_trace import Trace

BACKENDS = r"^(?:gloo|mpi|ucc):"
"""Spans of a backend's own threads, which PyTorch names `gloo:all_reduce`."""
CATEGORY = "cpu_collective"
WAIT = "wait for a collective"


def cpu_collectives(trace: Trace) -> pl.DataFrame:
    """The collectives that threads of a backend ran on the CPU.

    By start: `event`, `name`, `ts_ns`, `dur_ns`; `input_dims` and `input_types` as JSON where
    shapes were recorded; `launch_ns` and `launch_tid` of the operator
    `c10d::...` that asked for it, the last one before it began; `correlation`, a negative
    number that no call of a GPU has.
    """
    texts = pl.col("name", "input_dims", "input_types").cast(pl.String)
    tables = (trace.annotations, trace.ops)
    both = pl.concat([table.select("event", "ts_ns", "dur_ns", texts) for table in tables])
    ran = both.filter(pl.col("name").str.contains(BACKENDS)).sort("ts_ns", "event")
    asked = trace.ops.filter(pl.col("name").cast(pl.String).str.starts_with("c10d::"))
    calls = asked.select(launch_ns="ts_ns", launch_tid="tid").sort("launch_ns")
    found = ran.join_asof(calls, left_on="ts_ns", right_on="launch_ns", coalesce=False)
    number = -2 - pl.int_range(pl.len(), dtype=pl.Int64)
    return found.drop_nulls("launch_ns").with_columns(correlation=number)


def collective_waits(spans: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Pauses of the thread that asked for a collective in which the collective ended.

    `name`, `tid`, `ts_ns`, `end_ns` (when the last collective of the pause ended) and
    `kernel`. A thread in an operator does not wait; between operators it does, since
    `Work.wait()` and the end of a backward pass are no operators.
    """
    parts = [pl.DataFrame(schema={"name": pl.String, "tid": pl.Int64, "ts_ns": pl.Int64,
                                  "end_ns": pl.Int64, "kernel": pl.Int64})]  # fmt: skip
    for (tid,), rows in collectives.group_by("launch_tid"):
        own = spans.filter(pl.col("tid") == tid)
        begins, ends = own["ts_ns"].to_numpy(), own["end_ns"].to_numpy()
        busy = union(begins, ends)
        done = (rows["ts_ns"] + rows["dur_ns"]).to_numpy()
        at = np.searchsorted(busy.ends, done, side="right") - 1
        idle = (at >= 0) & (covered_lengths(busy, done, done + 1) == 0)
        waits = rows.with_columns(
            name=pl.lit(WAIT),
            tid=pl.lit(tid, pl.Int64),
            ts_ns=pl.Series(np.append(busy.ends, 0)[at], dtype=pl.Int64),
            end_ns=pl.Series(done),
        ).filter(pl.Series(idle))
        last = waits.sort("end_ns").unique("ts_ns", keep="last", maintain_order=True)
        parts.append(last.select("name", "tid", "ts_ns", "end_ns", "kernel"))
    return pl.concat(parts).sort("ts_ns")
