"""The device's computing time by operator, and how far each one is from the roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import union
from haiprof.trace_analysis.attribution import with_operator
from haiprof.trace_analysis.call_tree import roots
from haiprof.trace_analysis.device_ledger import not_covered
from haiprof.trace_analysis.device_time import (
    COMMUNICATION,
    COMPUTATION,
    LAUNCH,
    device_name,
    launch_columns,
    with_kind,
)
from haiprof.trace_analysis.host_activity import split
from haiprof.trace_analysis.kernel_names import short_kernel_name, work_kind
from haiprof.trace_analysis.operator_efficiency import (
    Peak,
    calls_with_work,
    nearest_rows,
    peak_of,
    with_tensor_cores,
)
from haiprof.trace_analysis.operator_work import (
    ATTENTION,
    CONVOLUTION,
    GEMM,
    MATRIX,
    MOE,
    OwnFormulas,
)
from haiprof.trace_analysis.step_time import step_windows
from haiprof.trace_format.kineto.rank_trace import Trace

REACHED = {
    GEMM: (0.45, 0.55), CONVOLUTION: (0.35, 0.5), ATTENTION: (0.3, 0.5), MOE: (0.3, 0.45),
}  # fmt: skip
"""What operators reach of the peak of computing: surely where they are large, and usually.

Source: AMD's own 708 of 1307 TFLOP/s for MI300X in bf16, 54 % (TraceLens,
Agent/Analysis/utils/arch/MI300X.json); FlashAttention-2 0.35 and FlashAttention-3 0.75 on H100,
FlashAttention-2 0.72 on A100 (arXiv 2407.08608, 2307.08691)."""
_REACHED_OTHERS = (0.3, 0.5)
REACHED_MEMORY = (0.5, 0.75)
"""The same of the memory's bandwidth; a copy on H100 or MI300X reaches 0.75 to 0.9."""
SHORT_NS = 10_000
"""Below it the begin and end of a kernel are a good part of it."""
_LEAST_NS = 5_000
"""No kernel is expected to take less."""

OPERATOR = ("operator", "shapes", "kind", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOperators:
    """The operators of one rank's devices."""

    rows: pl.DataFrame
    """`device`, `step`, `top` (the outermost operator, null for none), the columns of OPERATOR,
    `kernel` (the longest) and the columns of LAUNCH for it, `row_count`, `estimate` (`about` or `at
    least` where its bytes are not known), `compute_ratio` (of the time at the compute roof to that
    at the memory roof), and sums: calls, kernels, short kernels; `ns` of computing that neither
    another kernel nor communication covers; `short_ns`, that of short kernels; `known_ns`, what of
    it has known work, with its `flops` and `bytes`; `roof_ns`, `best_ns`, `reach_ns`, `sure_ns`:
    what it would take at the roofline, at that of the faster precision where one is allowed by a
    setting, at what is usually reached of that, and at what surely is; `tensor_ns` at TF32's peak
    of products of fp32 without tensor cores; null where that is not known."""
    device_name: str | None
    peak_source: str | None
    """None where the device's peak is not known."""


def rank_operators(
    trace: Trace, *, peaks: Mapping[str, float] | None = None, formulas: OwnFormulas | None = None
) -> RankOperators:
    """Computing time of each operator in each step; a question for a pool."""
    owned = with_operator(trace, captures=True)
    tree, device = owned.tree, device_name(trace)
    peak = peak_of(device, peaks)
    calls = calls_with_work(trace, tree, None, formulas)
    call = nearest_rows(tree, owned.row, calls["row"].to_numpy())
    row = pl.Series(np.where(call >= 0, call, owned.row))
    events = with_kind(owned.gpu).select(
        "device", "ts_ns", "dur_ns", "kind", *launch_columns(trace), row=row,
        kernel=pl.col("name").cast(pl.String),
        own=tree.names_at(row.to_numpy()),
        top=tree.names_at(np.append(roots(tree.parent), -1)[row.to_numpy()]),
    )  # fmt: skip
    computing = events.filter(kind=COMPUTATION)
    by_call = computing.sort("dur_ns", descending=True).group_by("row").agg(
        pl.col("kernel").first(), kernel_ns=pl.col("dur_ns").sum(), launched=pl.len()
    )  # fmt: skip
    known = with_tensor_cores(calls.drop("dur_ns").join(by_call, on="row"))
    pieces = pl.concat([
        _pieces(part, step_windows(trace)) for _, part in events.group_by("device")
    ] or [_pieces(events, step_windows(trace))])  # fmt: skip
    rows = _name(pieces.join(_with_roofline(known, peak), on="row", how="left"))
    return RankOperators(rows=rows, device_name=device, peak_source=peak.source if peak else None)


def _pieces(events: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Computing of one device that nothing else covers, by kernel and step."""
    starts = events["ts_ns"].to_numpy()
    ends = starts + events["dur_ns"].to_numpy()
    talks = (events["kind"] == COMMUNICATION).to_numpy()
    own = np.flatnonzero((events["kind"] == COMPUTATION).to_numpy())
    of, begins, finishes = not_covered(starts[own], ends[own], union(starts[talks], ends[talks]))
    edges = np.column_stack([steps["start_ns"], steps["end_ns"]]).ravel()
    cut = split(begins, finishes, edges)
    inside = np.flatnonzero((cut.segment >= 0) & (cut.segment % 2 == 0))
    at = own[of[cut.of[inside]]]
    kept = events[at].select("device", "row", "own", "top", "dur_ns", *LAUNCH, longest="kernel")
    return kept.with_columns(
        step=pl.Series(cut.segment[inside] // 2, dtype=pl.Int64),
        ns=pl.Series(cut.ends[inside] - cut.starts[inside], dtype=pl.Int64),
        event=pl.Series(at),
    )  # fmt: skip


def _with_roofline(calls: pl.DataFrame, peak: Peak | None) -> pl.DataFrame:
    """Calls with how long their computing takes at three shares of the roofline, in ns."""
    kind, flops = pl.col("kind"), pl.col("flops")
    nothing, is_open = pl.lit(None, dtype=pl.Float64), pl.col("least_bytes").is_not_null()
    if peak is None:
        return calls.with_columns(
            **dict.fromkeys(
                ("roof_ns", "best_ns", "reach_ns", "sure_ns", "tensor_ns", "compute_ratio"), nothing
            ),
            estimate=pl.when(is_open).then(pl.lit("about")),
        )
    # What the memory cannot have brought in that time was not read: the fewest bytes are known.
    is_least = is_open & (pl.col("bytes") / peak.bytes_per_s * 1e9 > pl.col("kernel_ns"))
    calls = calls.with_columns(
        bytes=pl.when(is_least)
        .then(pl.when(pl.col("least_bytes") > 0).then("least_bytes"))
        .otherwise("bytes"),
        estimate=pl.when(is_least).then(pl.lit("at least")).when(is_open).then(pl.lit("about")),
    )
    top = pl.col("precision").replace_strict(
        dict(peak.flops_per_s), default=None, return_dtype=pl.Float64
    )
    compute = pl.when(flops == 0).then(0.0).otherwise(flops / top * 1e9)
    memory = pl.col("bytes") / peak.bytes_per_s * 1e9
    is_known = compute.is_not_null() & memory.is_not_null() & memory.is_not_nan()
    least = pl.col("launched") * float(_LEAST_NS)
    shares = [
        kind.replace_strict({k: v[at] for k, v in REACHED.items()}, default=_REACHED_OTHERS[at])
        for at in (0, 1)
    ]
    # Products of fp32 that leave tensor cores idle are held against TF32, which is a setting.
    tensor = peak.flops_per_s.get("tf32", math.nan)
    is_bare = kind.is_in(MATRIX) & (pl.col("precision") == "fp32") & (tensor > 0)
    faster = pl.when(is_bare).then(flops / tensor * 1e9)
    best = pl.min_horizontal(compute, faster)
    times = {
        "roof_ns": pl.max_horizontal(compute, memory),
        "best_ns": pl.max_horizontal(best, memory),
        "reach_ns": pl.max_horizontal(best / shares[1], memory / REACHED_MEMORY[1], least),
        "sure_ns": pl.max_horizontal(best / shares[0], memory / REACHED_MEMORY[0], least),
        "tensor_ns": faster,
    }
    return calls.with_columns(
        **{name: pl.when(is_known).then(value) for name, value in times.items()},
        compute_ratio=pl.when(is_known & (memory > 0)).then(compute / memory),
    )


def _name(pieces: pl.DataFrame) -> pl.DataFrame:
    """Pieces summed by operator and step; what has no known work by its own operator or kernel."""
    bare = pieces.filter(pl.col("kind").is_null()).select("longest", "own").unique()
    kinds = [work_kind(kernel, own) for kernel, own in bare.iter_rows()]
    short = [own or short_kernel_name(kernel) for kernel, own in bare.iter_rows()]
    named = bare.with_columns(
        bare_kind=pl.Series(kinds, dtype=pl.String), bare_name=pl.Series(short, dtype=pl.String)
    )
    part = pl.col("ns") / pl.col("kernel_ns")
    rows = pieces.join(named, on=["longest", "own"], how="left", nulls_equal=True).select(
        "device", "step", "event", "row", "top",
        operator=pl.coalesce("name", "bare_name"), shapes="input_dims",
        kind=pl.coalesce("kind", "bare_kind"), precision="precision",
        kernel=pl.coalesce("kernel", "longest"), row_count="row_count", ns="ns",
        **{name: pl.col(name) for name in LAUNCH},
        estimate="estimate", compute_ratio="compute_ratio",
        is_short=pl.col("dur_ns") < SHORT_NS,
        known_ns=pl.when(pl.col("name").is_not_null()).then("ns"),
        flops=pl.col("flops") * part, bytes=pl.col("bytes") * part,
        roof_ns=pl.col("roof_ns") * part,
        tensor_ns=pl.col("tensor_ns") * part,
        best_ns=pl.min_horizontal(pl.col("best_ns") * part, "ns"),
        reach_ns=pl.min_horizontal(pl.col("reach_ns") * part, "ns"),
        sure_ns=pl.min_horizontal(pl.col("sure_ns") * part, "ns"),
    )  # fmt: skip
    keys = ["device", "step", "top", *OPERATOR]
    nullable = {
        name: pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum())
        for name in (
            "known_ns",
            "flops",
            "bytes",
            "roof_ns",
            "best_ns",
            "reach_ns",
            "sure_ns",
            "tensor_ns",
        )
    }
    return rows.sort("ns", descending=True).group_by(keys, maintain_order=True).agg(
        pl.col("kernel", "row_count", "estimate", "compute_ratio", *LAUNCH).first(),
        pl.col("ns").sum(),
        call_count=pl.col("row").filter(pl.col("row") >= 0).n_unique().cast(pl.Int64),
        kernel_count=pl.col("event").n_unique().cast(pl.Int64),
        short_count=pl.col("event").filter("is_short").n_unique().cast(pl.Int64),
        short_ns=pl.col("ns").filter("is_short").sum(),
        **nullable,
    )  # fmt: skip
