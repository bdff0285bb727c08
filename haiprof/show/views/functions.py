"""What `haiprof functions` shows: five reports, in each the abnormal first and what it means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import ratio_text
from haiprof.diagnosis.functions.report import ABNORMAL, FUNCTIONS, RANKS, FunctionReport
from haiprof.diagnosis.functions.reports import FunctionReports
from haiprof.diagnosis.thresholds import FAR_MIN_RANKS
from haiprof.show.tables.frame_table import Columns, frame_table
from haiprof.show.text import count_text, value_text
from haiprof.show.views.blocks import bullets, section
from haiprof.trace_analysis.kernel_names import (
    COMMUNICATION,
    GPU_COMPUTE,
    MEMORY,
    PYTHON,
    RUNTIME,
    short_kernel_name,
    split_geometry,
)

_LIMIT = 6
TITLES = {ABNORMAL: "abnormal", FUNCTIONS: "over all ranks", RANKS: "by rank"}
_HOST: dict[str, Columns] = {
    ABNORMAL: (
        ("rank", "rank"), ("bottleneck_ratio", "bottleneck"), ("share_ratio", "in all"),
        ("others_bottleneck_ratio", "ranks' median"), ("count", "calls"), ("median_ns", "median"),
        ("name", "function"),
    ),
    FUNCTIONS: (
        ("bottleneck_ratio", "bottleneck"), ("share_ratio", "in all"), ("rank_count", "ranks"),
        ("count", "calls"), ("median_ns", "median"), ("name", "function"),
    ),
}  # fmt: skip
_COLUMNS: dict[str, dict[str, Columns]] = {
    GPU_COMPUTE: {
        ABNORMAL: (
            ("rank", "rank"), ("median_ns", "median"), ("others_median_ns", "elsewhere"),
            ("slower_ratio", "slower by"), ("excess_ns", "costs"), ("name", "kernel"),
        ),
        FUNCTIONS: (
            ("bottleneck_ratio", "bottleneck"), ("rank_count", "ranks"), ("count", "calls"),
            ("median_ns", "median"), ("occupancy_ratio", "occupancy"), ("name", "kernel"),
        ),
        RANKS: (
            ("rank", "rank"), ("utilization_ratio", "computes"), ("sm_efficiency_ratio", "SM use"),
            ("occupancy_ratio", "occupancy"), ("pace_ratio", "kernels' time by others'"),
            ("gpu_name", "GPU"),
        ),
    },
    MEMORY: {
        ABNORMAL: (
            ("rank", "rank"), ("why", "why"), ("bottleneck_ratio", "bottleneck"),
            ("bandwidth_bytes_per_s", "bandwidth"), ("others_bandwidth_bytes_per_s", "elsewhere"),
            ("name", "operation"),
        ),
        FUNCTIONS: (
            ("bottleneck_ratio", "bottleneck"), ("rank_count", "ranks"), ("count", "calls"),
            ("median_ns", "median"), ("bandwidth_bytes_per_s", "bandwidth"), ("name", "operation"),
        ),
    },
    COMMUNICATION: {
        ABNORMAL: (
            ("rank", "rank"), ("why", "why"), ("type", "type"), ("bottleneck_ratio", "bottleneck"),
            ("others_bottleneck_ratio", "elsewhere"), ("bandwidth_bytes_per_s", "bandwidth"),
            ("others_bandwidth_bytes_per_s", "elsewhere"),
        ),
        FUNCTIONS: (
            ("type", "type"), ("bottleneck_ratio", "bottleneck"), ("count", "calls"),
            ("bandwidth_bytes_per_s", "bandwidth"), ("bandwidth_std_bytes_per_s", "spread"),
            ("normal_rank", "normal"), ("different_count", "differ"), ("name", "kernel"),
        ),
        RANKS: (
            ("rank", "rank"), ("type", "type"), ("bottleneck_ratio", "bottleneck"),
            ("share_ratio", "in all"), ("wait_ns", "waits"), ("transfer_ns", "transfers"),
            ("bandwidth_bytes_per_s", "bandwidth"), ("bandwidth_std_bytes_per_s", "spread"),
        ),
    },
    RUNTIME: _HOST,
    PYTHON: _HOST,
}  # fmt: skip
_NO_SAMPLES = (
    "no sample is one function's: they lie further apart than functions last; `--burst` samples "
    "every 100 µs"
)
_STACK_END = 3
_PATH = re.compile(r"^[^<(]*/(?=[^/]+\.py\()")
_DOES = re.compile(r"(\w+?)_?(?:kernel_cuda|cuda_kernel|cuda|[Ff]unctor)\b")
_ANYTHING = ("AUnary", "BUnary", "Binary", "Unary", "gpu", "")


def functions_view(found: FunctionReports) -> RenderableType:
    """The whole view."""
    several = len(found.reports) > 1
    head = f"{count_text(len(found.ranks), 'rank')}: what bounds them, function by function"
    legend = (
        "bottleneck: share of the time in which it ran and nothing above it did "
        "(GPU compute, communication, memory, runtime, Python)"
    )
    count = len(found.ranks)
    told = [report for report in found.reports if not several or _says_something(report, count)]
    parts = [part for report in told for part in _report(report, count, brief=several)]
    left_out = [report for report in found.reports if report not in told]
    if left_out:
        parts.append(section("not in the traces", *bullets(_left_out(left_out))))
    if found.hardware is not None:
        parts.append(section("hardware while they ran", *_hardware(found.hardware)))
    if found.notes:
        parts.append(section("not in the reduced files", *bullets(found.notes)))
    return Group(Text(head, style="bold"), Text(legend, style="dim"), *parts)


def _hardware(samples: pl.DataFrame) -> Sequence[RenderableType]:
    """Counters while functions ran, kinds as a whole first; means over the ranks."""
    if samples.is_empty():
        return list(bullets((_NO_SAMPLES,)))
    summed = samples.group_by("kind", "type", "name", "source", "metric", "unit").agg(
        pl.col("rank").n_unique().alias("rank_count"),
        pl.col("sample_count").sum(),
        pl.col("mean", "interval_ns").mean(),
    )
    texts = [value_text(*row) for row in summed.select("mean", "unit").iter_rows()]
    named = summed.with_columns(
        pl.Series("value", texts, dtype=pl.String),
        whole=pl.col("name").is_null(),
        name=pl.coalesce("name", pl.format("any {}", "kind")),
    ).sort("whole", "sample_count", "name", "metric", descending=[True, True, False, False])
    plain = {name: kernel_label(name) for name in named["name"].unique()}
    shown = named.with_columns(pl.col("name").replace_strict(plain, return_dtype=pl.String))
    columns = (("metric", "counter"), ("value", "mean"), ("rank_count", "ranks"),
               ("sample_count", "samples"), ("name", "while it ran"))  # fmt: skip
    return list(frame_table(shown, columns, limit=4 * _LIMIT, where="--json and --csv"))


def _report(report: FunctionReport, rank_count: int, *, brief: bool) -> Iterator[RenderableType]:
    """Meaning first, then tables; of all five only what differs and what bounds most."""
    share = report.facts["bottleneck"]["median"]
    title = report.title if share is None else f"{report.title}: {ratio_text(share)} of the time"
    yield section(title, *bullets(report.meaning or _explain_no_findings(report)))
    limit = _LIMIT if brief else 4 * _LIMIT
    for name, table, columns in shown_tables(report, rank_count):
        if not (brief and name == RANKS):
            rows = frame_table(table, columns, limit=limit, where="--json and --csv")
            yield section(TITLES[name], *rows)
    if report.missing:
        yield section("not known", *bullets(report.missing))


def shown_tables(
    report: FunctionReport, rank_count: int
) -> Iterator[tuple[str, pl.DataFrame, Columns]]:
    """Name, rows and columns of its tables that say something, the abnormal first.

    Fewer ranks than `FAR_MIN_RANKS` have none that is abnormal: their functions are in the others.
    """
    for name, columns in _COLUMNS[report.kind].items():
        if name == ABNORMAL and rank_count < FAR_MIN_RANKS:
            continue
        table = report.tables[name]
        if not table.is_empty():
            shown = [(column, head) for column, head in columns if _has_values(table, column)]
            if any(column not in ("rank", "name") for column, _ in shown):
                yield name, _shorten_names(table, report.kind), shown


def _says_something(report: FunctionReport, rank_count: int) -> bool:
    """Whether it has a meaning or a table; a trace without a GPU has nothing to say of one."""
    return bool(report.meaning) or any(True for _ in shown_tables(report, rank_count))


def _left_out(reports: Sequence[FunctionReport]) -> list[str]:
    return [f"{report.title}: {report.missing[0]}" for report in reports if report.missing]


def _explain_no_findings(report: FunctionReport) -> tuple[str, ...]:
    return ("nothing abnormal",) if not report.tables[FUNCTIONS].is_empty() else ()


def _has_values(table: pl.DataFrame, column: str) -> bool:
    """Whether a column has values worth showing; the share of ranks needs several ranks."""
    return table[column].null_count() < len(table) or column in ("rank", "name")


def _shorten_names(table: pl.DataFrame, kind: str) -> pl.DataFrame:
    """Shortens names to a line: kernels without arguments, the end of stacks."""
    if "name" not in table.columns:
        return table
    if kind == PYTHON:
        plain = stack_labels(table["name"].unique().to_list())
        return table.with_columns(pl.col("name").replace_strict(plain, return_dtype=pl.String))
    plain = {name: kernel_label(name) for name in table["name"].unique()}
    return table.with_columns(pl.col("name").replace_strict(plain, return_dtype=pl.String))


def stack_labels(stacks: Sequence[str]) -> dict[str, str]:
    """The last calls of each stack, the last one first: `aten::mm < linear.py(114): forward < ...`.

    Folders and the frames of torch's own `__call__` say nothing; they are left out. Stacks that
    end alike also have the last call in which they differ.
    """
    calls = {stack: _visible_calls(stack) for stack in stacks}
    alike: dict[tuple[str, ...], list[str]] = {}
    for stack, visible in calls.items():
        alike.setdefault(tuple(visible[:_STACK_END]), []).append(stack)
    return {stack: _label(calls[stack], _fork([calls[own] for own in group]))
            for group in alike.values() for stack in group}  # fmt: skip


def _visible_calls(stack: str) -> list[str]:
    calls = [_PATH.sub("", call) for call in stack.split("|")]
    return [calls[-1], *(call for call in calls[-2::-1] if not call.endswith("_call_impl"))]


def _fork(stacks: Sequence[Sequence[str]]) -> int | None:
    """Index of the first call, counted from the last one, in which stacks differ."""
    places = range(_STACK_END, max(map(len, stacks)))
    return next((n for n in places if len({tuple(s[n : n + 1]) for s in stacks}) > 1), None)


def _label(calls: Sequence[str], fork: int | None) -> str:
    shown = list(calls[:_STACK_END])
    if fork is not None and fork < len(calls):
        shown += [*(["..."] if fork > _STACK_END else []), calls[fork]]
    return " < ".join([*shown, *(["..."] if len(calls) > max(_STACK_END, (fork or 0) + 1) else [])])


def kernel_label(name: str) -> str:
    """A kernel's short name; of PyTorch's generic ones also what they do: `reduce_kernel [sum]`."""
    plain, geometry = split_geometry(name)
    if geometry:
        return kernel_label(plain) + geometry
    short = short_kernel_name(name)
    if not short.startswith("at::native::") or not short.endswith("_kernel"):
        return short
    plain = short.removeprefix("at::native::")
    words = (found[1] for found in _DOES.finditer(name, name.find("<")))
    does = next((word for word in words if word not in _ANYTHING), None)
    return f"{plain} [{does}]" if does else plain
