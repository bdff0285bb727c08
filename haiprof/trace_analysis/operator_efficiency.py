"""Efficiency of operators: achieved FLOP/s and bytes/s, and how near to the roofline."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.base.intervals import Ints, union
from haiprof.base.version import PACKAGE
from haiprof.trace_analysis.attribution import with_operator
from haiprof.trace_analysis.call_tree import CallTree, roots
from haiprof.trace_analysis.device_ledger import not_covered
from haiprof.trace_analysis.device_time import (
    COMMUNICATION,
    COMPUTATION,
    LAUNCH,
    Steps,
    device_name,
    launch_columns,
    step_window,
    traced_window,
    with_kind,
)
from haiprof.trace_analysis.host_activity import split
from haiprof.trace_analysis.kernel_names import (
    is_matrix_work,
    short_kernel_name,
    uses_tensor_cores,
    work_kind,
)
from haiprof.trace_analysis.operator_work import (
    ATTENTION,
    COMPOSED,
    CONVOLUTION,
    FORMULAS,
    GEMM,
    MATRIX,
    MOE,
    NEED_VALUES,
    OPTIMIZER,
    OwnFormulas,
    arguments_of,
    formula_of,
    triton_work,
    values_of,
    work_of,
)
from haiprof.trace_analysis.step_time import step_windows
from haiprof.trace_format.kineto.rank_trace import Trace, concrete_values

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One device."""

    name: str
    pattern: str  # of its name in traces
    flops_per_s: Mapping[str, float]
    """By precision, without sparsity; fp64 and fp32 outside matrix units."""
    bytes_per_s: float
    source: str


PEAKS = msgspec.json.decode(
    (PACKAGE / "trace_analysis" / "peaks.json").read_bytes(), type=tuple[Peak, ...]
)
"""The first whose pattern is found in the device's name counts. AMD's fp64 and fp32 are of matrix
cores, which products use; NVIDIA's are without tensor cores."""


def peak_of(device: str | None, overrides: Mapping[str, float] | None = None) -> Peak | None:
    """What a device can do; None where its name is not known and nothing was given."""
    known = next((peak for peak in PEAKS if device and re.search(peak.pattern, device)), None)
    if not overrides:
        return known
    known = known or Peak(name=device or "device", pattern="", flops_per_s={},
                          bytes_per_s=math.nan, source="")  # fmt: skip
    given = {name: value for name, value in overrides.items() if name != MEMORY}
    return replace(
        known,
        flops_per_s={**known.flops_per_s, **given},
        bytes_per_s=overrides.get(MEMORY, known.bytes_per_s),
        source="as given" + (f", else {known.source}" if known.source else ""),
    )


def parse_peak(text: str | None) -> dict[str, float] | None:
    """`bf16=989,memory=3.35` in TFLOP/s and TB/s, or a GPU's name, as FLOP/s and bytes/s."""
    if text is None:
        return None
    named = None if "=" in text else peak_of(text)
    if named is not None:
        return {**named.flops_per_s, MEMORY: named.bytes_per_s}
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in (*PRECISIONS, MEMORY) or not 0 < number < 1e9:
            raise UsageError(
                f"--peak {text}: expected TFLOP/s by precision and TB/s of memory, or a known GPU",
                hint="--peak bf16=989.4,memory=3.35, or --peak MI300X; "
                f"precisions: {', '.join(PRECISIONS)}",
            )
        found[name] = number * 1e12
    return found


_TRITON = "^triton_(?:poi|red|per)_"
_BACKWARD = "autograd::engine::evaluate_function"
_KNOWN_LEAST, _KNOWN_WHOLE = 0.5, 0.98
_WORK_SCHEMA = {
    "kind": pl.String, "flops": pl.Int64, "model_flops": pl.Int64, "bytes": pl.Int64,
    "precision": pl.String, "least_bytes": pl.Int64, "row_count": pl.Int64,
}  # fmt: skip
"""`bytes` are an estimate where `least_bytes` are fewer; `row_count` of matrix products."""


def operator_efficiency(
    trace: Trace, steps: Steps = None, *, peaks: Mapping[str, float] | None = None,
    formulas: OwnFormulas | None = None,
) -> pl.DataFrame:  # fmt: skip
    """Operators by name and shape: their work, what they achieved, and what is possible.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.
        peaks: FLOP/s by precision and bytes/s as `memory`; None takes the table's.
        formulas: Of one's own, by operator, as `operator_work.read_formulas` reads them.

    Returns:
        One row per operator, shapes and kernel: `operator`, `kind`, `shapes`, `precision`,
        `kernel`, `count`, `time_ns`, `flops`, `bytes`, `flops_per_s`, `bytes_per_s`,
        `flops_per_byte`, `bound`, `roofline_ratio`, `recomputed_ratio`.
    """
    calls, _ = _known_calls(trace, steps, formulas)
    keys = ["operator", "kind", "shapes", "precision", "kernel"]
    again = pl.col("flops").filter(pl.col("is_recomputed")).sum()
    is_timed, is_exact = pl.col("time_ns") > 0, pl.col("least_bytes").is_null()
    rows = calls.group_by(
        operator="name", kind="kind", shapes="input_dims", precision="precision", kernel="kernel"
    ).agg(
        count=pl.len().cast(pl.Int64),
        time_ns=pl.when(is_timed.any()).then(pl.col("time_ns").sum()),
        flops=pl.col("flops").sum(),
        bytes=pl.col("bytes").sum(),
        timed_flops=pl.col("flops").filter(is_timed).sum(),
        timed_bytes=pl.col("bytes").filter(is_timed).sum(),
        recomputed_ratio=again / pl.col("flops").sum(),
        known_size=(pl.col("bytes").is_not_null() & is_exact).all(),
    )
    seconds = pl.col("time_ns") / 1e9
    rows = rows.with_columns(
        pl.when("known_size").then(pl.col("bytes", "timed_bytes")),
        recomputed_ratio=pl.col("recomputed_ratio").fill_nan(None),
    ).with_columns(
        flops_per_s=pl.col("timed_flops") / seconds,
        bytes_per_s=pl.col("timed_bytes") / seconds,
        flops_per_byte=pl.when(pl.col("bytes") > 0).then(pl.col("flops") / pl.col("bytes")),
    )
    measured = ["count", "time_ns", "flops", "bytes", "flops_per_s", "bytes_per_s"]
    return (
        _with_roofline(rows, peak_of(device_name(trace), peaks))
        .select(*keys, *measured, "flops_per_byte", "bound", "roofline_ratio", "recomputed_ratio")
        .sort("time_ns", *keys, descending=[True, *[False] * len(keys)], nulls_last=True)
    )


def _with_roofline(rows: pl.DataFrame, peak: Peak | None) -> pl.DataFrame:
    if peak is None:
        return rows.with_columns(
            bound=pl.lit(None, dtype=pl.String), roofline_ratio=pl.lit(None, dtype=pl.Float64)
        )
    compute, memory, is_known = _ns_at_peak(peak, "timed_flops", "timed_bytes")
    bound = pl.when(compute > memory).then(pl.lit("compute")).otherwise(pl.lit("memory"))
    least, time = pl.max_horizontal(compute, memory), pl.col("time_ns")
    return rows.with_columns(
        bound=pl.when(is_known).then(bound),
        roofline_ratio=pl.when(is_known & (time > 0)).then(least / time),
    )


def _ns_at_peak(peak: Peak, flops: str, size: str) -> tuple[pl.Expr, pl.Expr, pl.Expr]:
    """How long computing and memory take at the peak, and whether both are known."""
    top = pl.col("precision").replace_strict(
        dict(peak.flops_per_s), default=None, return_dtype=pl.Float64
    )
    compute = pl.when(pl.col("flops") == 0).then(0.0).otherwise(pl.col(flops) / top * 1e9)
    memory = pl.col(size) / peak.bytes_per_s * 1e9
    return compute, memory, compute.is_not_null() & memory.is_not_null() & memory.is_not_nan()


def step_efficiency(
    trace: Trace, steps: Steps = None, *, peaks: Mapping[str, float] | None = None,
    formulas: OwnFormulas | None = None,
) -> pl.DataFrame:  # fmt: skip
    """MFU and HFU over profiler steps, and what share of the kernels they rest on.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.
        peaks: As in `efficiency`.
        formulas: As in `efficiency`.

    Returns:
        One row per rank: `device_name`, `step_count`, `wall_ns`, `model_flops`, `executed_flops`,
        `recomputed_flops`, `mfu_ratio`, `hfu_ratio`, `kernel_known_ratio`, `matrix_known_ratio`,
        `is_lower_bound`, `peak`, `reason`.

    Source: MFU and HFU as in PaLM (arXiv 2204.02311, appendix B); of causal attention only the
    half that is not masked counts.
    """
    calls, events = _known_calls(trace, steps, formulas)
    device = device_name(trace)
    peak = peak_of(device, peaks)
    matrix = calls.filter(pl.col("kind").is_in(MATRIX))
    is_known, ns = pl.col("row") >= 0, pl.col("dur_ns")
    of_known = pl.col("row").is_in(matrix["row"].implode())
    gpu_ns, known_ns, matrix_ns, matrix_known_ns = events.select(
        ns.sum(), ns.filter(is_known).sum().alias("known"),
        ns.filter("is_matrix").sum().alias("matrix"),
        ns.filter(pl.col("is_matrix") & of_known).sum().alias("matrix_known"),
    ).row(0)  # fmt: skip
    once = pl.when(pl.col("is_recomputed")).then(0).otherwise(pl.col("model_flops"))
    low, high, count = traced_window(trace, steps)
    model, executed = matrix.select(once.sum()).item(), matrix["flops"].sum()
    seconds, reason = _seconds_at_peak(matrix.with_columns(model_flops=once), peak, device)
    known = matrix_known_ns / matrix_ns if matrix_ns else None
    if known is not None and known < _KNOWN_LEAST:
        share = f"{100 * known:.0f} %"
        seconds, reason = None, f"the work of {share} of the matrix kernels' time is known"
    if matrix.is_empty() and known_ns < _KNOWN_WHOLE * gpu_ns:
        seconds, reason = None, "of no matrix product is the work known"
    wall_s = (high - low) / 1e9
    row = {
        "device_name": device, "step_count": count, "wall_ns": high - low, "model_flops": model,
        "executed_flops": executed, "recomputed_flops": executed - model,
        "mfu_ratio": seconds[0] / wall_s if seconds and wall_s else None,
        "hfu_ratio": seconds[1] / wall_s if seconds and wall_s else None,
        "kernel_known_ratio": known_ns / gpu_ns if gpu_ns else None, "matrix_known_ratio": known,
        "is_lower_bound": known is not None and known < _KNOWN_WHOLE,
        "peak": peak.source if peak else None, "reason": reason,
    }  # fmt: skip
    return pl.DataFrame([row], schema=STEP_SCHEMA)


STEP_SCHEMA = {
    "device_name": pl.String, "step_count": pl.Int64, "wall_ns": pl.Int64,
    "model_flops": pl.Int64, "executed_flops": pl.Int64, "recomputed_flops": pl.Int64,
    "mfu_ratio": pl.Float64, "hfu_ratio": pl.Float64, "kernel_known_ratio": pl.Float64,
    "matrix_known_ratio": pl.Float64, "is_lower_bound": pl.Boolean, "peak": pl.String,
    "reason": pl.String,
}  # fmt: skip


def _seconds_at_peak(
    matrix: pl.DataFrame, peak: Peak | None, device: str | None
) -> tuple[tuple[float, float] | None, str | None]:
    """How long model work and executed work take at the peak; or why that is not known."""
    if peak is None:
        return None, f"no peak is known of {device or 'this device'}: give --peak bf16=..."
    totals = [0.0, 0.0]
    sums = matrix.group_by("precision").agg(pl.col("model_flops", "flops").sum())
    for precision, model, executed in sums.iter_rows():
        top = peak.flops_per_s.get(precision or "")
        if top is None:
            return None, f"no {precision or 'known'} peak of {peak.name}: give --peak"
        totals[0] += model / top
        totals[1] += executed / top
    return (totals[0], totals[1]), None


def _known_calls(
    trace: Trace, steps: Steps, formulas: OwnFormulas | None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls of known work with `time_ns` and the longest `kernel`; GPU events with their `row`."""
    if trace.ops["input_dims"].null_count() == len(trace.ops):
        raise MissingDataError(
            f"{trace.path}: no shapes of operators in it, their FLOPs are unknown",
            hint="record with record_shapes=True; haiprof: --trace-shapes",
        )
    owned = with_operator(trace, steps)
    low, high, _ = (*step_window(trace, steps), None) if steps else traced_window(trace)
    known = calls_with_work(trace, owned.tree, (low, high), formulas)
    row = nearest_rows(owned.tree, owned.row, known["row"].to_numpy())
    has_gpu = len(trace.gpu) > 0
    own = owned.gpu.select("dur_ns", "ts_ns", pl.col("name").cast(pl.String), row=pl.Series(row))
    if steps is None:
        own = own.filter(pl.col("ts_ns").is_between(low, high) | (pl.col("row") >= 0))
    is_matrix = {name: is_matrix_work(name) for name in own["name"].unique()}
    own = own.with_columns(
        is_matrix=pl.col("name").replace_strict(is_matrix, default=False, return_dtype=pl.Boolean)
    )
    time = own.filter(pl.col("row") >= 0).sort("dur_ns", descending=True).group_by("row").agg(
        time_ns=pl.col("dur_ns").sum(), kernel=pl.col("name").first()
    )  # fmt: skip
    calls = known.join(time, on="row", how="left") if has_gpu else known.with_columns(
        time_ns="dur_ns", kernel=pl.lit(None, dtype=pl.String)
    )  # fmt: skip
    if has_gpu:  # recomputation that stops early leaves a call that ran nothing
        calls = calls.filter(~pl.col("is_recomputed") | (pl.col("time_ns") > 0))
    return with_tensor_cores(calls.with_columns(pl.col("time_ns").fill_null(0))), own


def with_tensor_cores(calls: pl.DataFrame) -> pl.DataFrame:
    """Products of fp32 that ran on tensor cores are tf32, by the name of their kernel."""
    names = list(filter(uses_tensor_cores, calls["kernel"].drop_nulls().unique()))
    tensor = pl.col("kernel").is_in(names) & (pl.col("precision") == "fp32")
    tf32 = pl.when(tensor & pl.col("kind").is_in(MATRIX)).then(pl.lit("tf32"))
    return calls.with_columns(precision=tf32.otherwise("precision"))


def calls_with_work(
    trace: Trace, tree: CallTree, window: tuple[int, int] | None,
    formulas: OwnFormulas | None = None,
) -> pl.DataFrame:  # fmt: skip
    """Calls of known work that began in the window; None is everything."""
    own = {name: formula_of(texts) for name, texts in (formulas or {}).items()}
    spans = tree.spans.with_row_index("row")
    triton = spans["name"].unique().cast(pl.String)
    triton = triton.filter(triton.str.contains(_TRITON))
    table = {**FORMULAS, **{name: triton_work(name) for name in triton}, **own}
    if window is not None:
        spans = spans.filter(pl.col("ts_ns").is_between(*window, closed="left"))
    known = spans["name"].unique().cast(pl.String)
    known = known.filter(known.is_in(list(table)))
    calls = spans.filter(pl.col("name").is_in(known.implode())).select(
        pl.col("row").cast(pl.Int64), "event", "dur_ns", "sequence_number",
        pl.col("name", "input_dims", "input_types").cast(pl.String),
    )  # fmt: skip
    needing = calls.filter(pl.col("name").is_in([*NEED_VALUES, *own]))
    values = concrete_values(trace.path, needing.select("event", "name"))
    calls = calls.join(values, on="event", how="left")
    keys = ["name", "input_dims", "input_types", "values"]
    worked = [
        (*key, work.kind, work.flops, work.model_flops, work.bytes, work.precision,
         work.least_bytes if work.least_bytes != work.bytes else None, work.rows)
        for key in calls.select(keys).unique().iter_rows()
        if (work := work_of(key[0], arguments_of(*key[1:3]), values_of(key[3]), table))
    ]  # fmt: skip
    schema = dict.fromkeys(keys, pl.String) | _WORK_SCHEMA
    found = pl.DataFrame(worked, schema=schema, orient="row")
    calls = calls.join(found, on=keys, how="inner", nulls_equal=True)
    # One form of an operator may call another: upsample_nearest1d.vec, of the same name.
    above = tree.parent[calls["row"].to_numpy()]
    again = calls["name"] == tree.names_at(above)
    calls = calls.filter(~pl.col("row").is_in(above[again.fill_null(value=False).to_numpy()]))
    # Whether a call is composed of others whose work is known: the innermost one counts, also of
    # two composed ones, such as matmul in linear.
    composed = calls["name"].is_in(list(COMPOSED - set(own))).to_numpy()
    rows = calls["row"].to_numpy()
    holds = np.zeros(len(tree.parent), dtype=np.bool_)
    for _, above in tree.outwards(tree.parent[rows]):
        holds[above] = True
    calls = calls.filter(~pl.Series(composed & holds[rows]))
    # What is part of one that counts as a whole: of a convolution, of a list of tensors.
    as_whole = pl.col("kind").is_in([ATTENTION, CONVOLUTION, MOE, OPTIMIZER])
    whole = calls.filter(as_whole | pl.col("name").is_in(list(own)))["row"].to_numpy()
    outer = nearest_rows(tree, tree.parent[calls["row"].to_numpy()], whole) >= 0
    backward = tree.spans["name"].cast(pl.String).str.starts_with(_BACKWARD).to_numpy()
    inside = nearest_rows(tree, calls["row"].to_numpy(), np.flatnonzero(backward)) >= 0
    again = pl.Series(inside) & (calls["sequence_number"].fill_null(-1) >= 0)
    return calls.with_columns(is_recomputed=again).filter(~pl.Series(outer))


def nearest_rows(tree: CallTree, rows: Ints, chosen: Ints) -> Ints:
    """The innermost of the chosen rows around each row, itself included; -1 where there is none."""
    return tree.climb(rows, np.isin(np.arange(len(tree.parent)), chosen))


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
SHORT_NS = 10_000  # below it the begin and end of a kernel are a good part of it
_LEAST_NS = 5_000  # no kernel is expected to take less

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
    peak_source: str | None  # None where the device's peak is not known


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
    rows = _name(pieces.join(_with_times_at_roofline(known, peak), on="row", how="left"))
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


def _with_times_at_roofline(calls: pl.DataFrame, peak: Peak | None) -> pl.DataFrame:
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
    compute, memory, is_known = _ns_at_peak(peak, "flops", "bytes")
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
        *("device", "step", "event", "row", "top", "precision", "row_count", "ns"),
        *("estimate", "compute_ratio", *LAUNCH), operator=pl.coalesce("name", "bare_name"),
        shapes="input_dims", kind=pl.coalesce("kind", "bare_kind"),
        kernel=pl.coalesce("kernel", "longest"), is_short=pl.col("dur_ns") < SHORT_NS,
        known_ns=pl.when(pl.col("name").is_not_null()).then("ns"),
        **{name: pl.col(name) * part for name in ("flops", "bytes", "roof_ns", "tensor_ns")},
        **{name: pl.min_horizontal(pl.col(name) * part, "ns")
           for name in ("best_ns", "reach_ns", "sure_ns")},
    )  # fmt: skip
    keys = ["device", "step", "top", *OPERATOR]
    nullable = {
        name: pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum())
        for name in ("known_ns", "flops", "bytes", "roof_ns", "best_ns", "reach_ns", "sure_ns",
                     "tensor_ns")
    }  # fmt: skip
    return rows.sort("ns", descending=True).group_by(keys, maintain_order=True).agg(
        pl.col("kernel", "row_count", "estimate", "compute_ratio", *LAUNCH).first(),
        pl.col("ns").sum(),
        call_count=pl.col("row").filter(pl.col("row") >= 0).n_unique().cast(pl.Int64),
        kernel_count=pl.col("event").n_unique().cast(pl.Int64),
        short_count=pl.col("event").filter("is_short").n_unique().cast(pl.Int64),
        short_ns=pl.col("ns").filter("is_short").sum(),
        **nullable,
    )  # fmt: skip
