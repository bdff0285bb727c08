"""Kernel sequences: the kernels that an operator launches, in order, and how often."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.trace_analysis.attribution import GpuLaunches, with_operator
from haiprof.trace_analysis.temporal import Steps
from haiprof.trace_format.kineto.rank_trace import Trace

MIN_PATTERN_LENGTH = 3
TOP_K = 5
"""HTA's defaults for get_frequent_cuda_kernel_sequences."""

_CALL = ("operator", "operator_row")


def kernel_sequences(
    trace: Trace,
    *,
    operator: str,
    steps: Steps = None,
    min_pattern_length: int = MIN_PATTERN_LENGTH,
    top_k: int = TOP_K,
) -> pl.DataFrame:
    """The most frequent sequences of kernels under an operator.

    Source: HTA get_frequent_cuda_kernel_sequences: whole sequences of calls are counted, no
    parts of them. HTA looks only at matching operators of the least depth in the trace, and
    so misses those that stand deeper elsewhere.
    """
    calls = _calls(with_operator(trace, steps, annotations=True), operator)
    long_enough = calls.filter(pl.col("kernels").list.len() >= min_pattern_length)
    names = pl.concat_list("operator", "kernels").list.join("|")
    return (
        long_enough.with_columns(pattern=names)
        .group_by("pattern")
        .agg(
            count=pl.len().cast(pl.Int64),
            kernel_count=pl.col("kernels").first().list.len().cast(pl.Int64),
            gpu_duration_ns=pl.col("gpu_duration_ns").sum(),
            cpu_duration_ns=pl.col("cpu_duration_ns").sum(),
        )
        .sort("count", "pattern", descending=[True, False])
        .head(top_k)
    )


def operator_sequences(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """What each operator launches itself, and how long that takes to be launched and to begin.

    Source: HTA get_aten_op_kernels_and_delay, for all operators and not only those of ATen;
    HTA adds the rows of earlier ranks to those of later ones (D15).
    """
    owned = with_operator(trace, steps)
    known = (owned.row >= 0) & ~owned.by_id.to_numpy()
    row = owned.row[known]
    began = owned.tree.spans["ts_ns"].gather(row)
    first_delay = pl.col("call_ts_ns") - pl.col("began_ns")
    calls = (
        owned.gpu.filter(pl.Series(known))
        .with_columns(
            operator=owned.tree.spans["name"].gather(row).cast(pl.String),
            operator_row=pl.Series(row),
            began_ns=began,
            kernel=pl.col("name").cast(pl.String),
        )
        .sort("call_ts_ns", "ts_ns", "event")
        .group_by(_CALL, maintain_order=True)
        .agg(
            kernel_sequence=pl.col("kernel").str.join(" -> "),
            operator_delay=first_delay.first(),
            runtime_delay=(pl.col("ts_ns") - pl.col("call_ts_ns")).first().clip(0),
        )
    )
    return (
        calls.group_by("operator", "kernel_sequence")
        .agg(
            count=pl.len().cast(pl.Int64),
            operator_delay_mean_ns=pl.col("operator_delay").mean(),
            runtime_delay_mean_ns=pl.col("runtime_delay").mean(),
        )
        .sort("count", "operator", "kernel_sequence", descending=[True, False, False])
    )


def _calls(owned: GpuLaunches, operator: str) -> pl.DataFrame:
    """A row per outermost matching call with kernels.

    `operator`, `operator_row`, `kernels` in the order of their start, `gpu_duration_ns`,
    `cpu_duration_ns`.
    """
    spans = owned.tree.spans
    matching = spans["name"].cast(pl.String).str.contains(operator, literal=True).to_numpy()
    row = _outermost(owned.row, owned.tree.parent, matching)
    known = row >= 0
    kernels = owned.gpu.filter(pl.Series(known)).with_columns(operator_row=pl.Series(row[known]))
    calls = kernels.group_by("operator_row", maintain_order=True).agg(
        kernels=pl.col("name").cast(pl.String),
        gpu_duration_ns=pl.col("dur_ns").sum(),
    )
    rows = calls["operator_row"]
    return calls.with_columns(
        operator=spans["name"].gather(rows).cast(pl.String),
        cpu_duration_ns=spans["dur_ns"].gather(rows),
    )


def _outermost(
    row: npt.NDArray[np.int64], parent: npt.NDArray[np.int64], matching: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """The outermost matching row at or above each row; -1 where none matches."""
    found = np.full(len(row), -1, dtype=np.int64)
    at = np.flatnonzero(row >= 0)
    above = row[at]
    while len(at):
        hit = matching[above]
        found[at[hit]] = above[hit]
        above = parent[above]
        at, above = at[above >= 0], above[above >= 0]
    return found
