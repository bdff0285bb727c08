"""What `functions`, `modules` and `efficiency` show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.function_reports import FunctionReports
from haiprof.diagnosis.gpu_functions import ABNORMAL, FUNCTIONS, RANKS, FunctionReport
from haiprof.diagnosis.thresholds import FAR_MIN_RANKS
from haiprof.show.frame_table import HEADINGS, Columns, frame_table, headings, heads
from haiprof.show.text import count_text, flops_text, printable, value_text
from haiprof.show.views.blocks import bullets, notes_block, section
from haiprof.trace_analysis import kernel_names

_EFFICIENCY_LIMIT = 14
_EFFICIENCY_COLUMNS = headings("efficiency")
_OPERATOR_WIDTH, _SHAPES_WIDTH = 20, 18  # Together with the numbers a line of 100 columns


def efficiency_view(whole: pl.DataFrame, operators: pl.DataFrame) -> RenderableType:
    """The whole screen."""
    summed = _over_ranks(operators)
    shapes = pl.col("shapes").str.replace_all(" ", "").str.strip_prefix("[").str.strip_suffix("]")
    short = shapes.str.replace_all(r",\[\]", "").str.slice(0, _SHAPES_WIDTH)
    rows = summed.with_columns(
        shapes=short,
        operator=pl.col("operator").str.strip_prefix("aten::").str.slice(0, _OPERATOR_WIDTH),
        flops_rate="flops_per_s",
        bytes_rate="bytes_per_s",
    )
    table = frame_table(rows, _EFFICIENCY_COLUMNS, limit=_EFFICIENCY_LIMIT)
    nothing = [Text("none whose FLOPs and bytes are known")]
    ranks: list[RenderableType] = []
    for row in whole.head(16).iter_rows(named=True):
        nameless = (
            "CPU" if row["kernel_known_ratio"] is None else "a GPU that the trace does not name"
        )
        device = printable(str(row["device_name"] or nameless))
        ranks.append(Text(f"rank {row['rank']}, {device}: {_mfu_text(row)}", style="bold"))
        ranks.append(Text(f"  {_basis_text(row)}", style="dim", overflow="fold"))
    shown = nothing if rows.is_empty() else table
    return Group(*ranks, section("Operators by total time", *shown))


def _mfu_text(row: dict[str, object]) -> str:
    work = float(row["model_flops"] or 0)  # type: ignore[arg-type]
    wall = duration_text(int(row["wall_ns"]))  # type: ignore[call-overload]
    if not work:
        return f"no MFU: no matrix product whose FLOPs are known, in {wall}"
    amount = f"{flops_text(work)} in {wall}"
    if row["mfu_ratio"] is None:
        return f"MFU not known ({row['reason']}); {amount}"
    least = "at least " if row["is_lower_bound"] else ""
    mfu, hfu = (ratio_text(row[name]) for name in ("mfu_ratio", "hfu_ratio"))  # type: ignore[arg-type]
    again = f", HFU {hfu}" if row["recomputed_flops"] else ""
    return f"MFU {least}{mfu}{again}; {amount}"


def _basis_text(row: dict[str, object]) -> str:
    known, matrix = row["kernel_known_ratio"], row["matrix_known_ratio"]
    parts = []
    if known is not None:
        parts.append(f"rests on {ratio_text(known)} of kernel time")  # type: ignore[arg-type]
    if matrix is not None:
        parts.append(f"{ratio_text(matrix)} of that of matrix kernels")  # type: ignore[arg-type]
    if row["peak"]:
        parts.append(f"dense peak: {row['peak']}")
    return "; ".join(parts) or "times of the host: no GPU event"


def _over_ranks(operators: pl.DataFrame) -> pl.DataFrame:
    """The ranks' rows together."""
    keys = ["operator", "shapes", "precision", "bound"]
    times = pl.col("time_ns")
    weighted = {}
    for name in ("flops_per_s", "bytes_per_s", "roofline_ratio"):
        whole = times.filter(pl.col(name).is_not_null()).sum()
        weighted[name] = pl.when(whole > 0).then((pl.col(name) * times).sum() / whole)
    return operators.group_by(keys).agg(
        pl.col("count").sum(), pl.when(times.is_not_null().any()).then(times.sum()), **weighted
    ).sort("time_ns", *keys, descending=[True, *[False] * len(keys)], nulls_last=True)  # fmt: skip


_LEAST_RATIO, _TREE_LIMIT, _CLASS_LIMIT = 0.01, 40, 12
_INSTANCE = re.compile(r"_\d+$")
_TIMES = ("host_ns", "host_self_ns", "device_ns", "device_self_ns", "backward_device_ns",
          "backward_device_self_ns", "backward_host_ns", "graph_device_self_ns")  # fmt: skip
_TREE = headings("modules_on_gpu")
_CLASSES = headings("module_classes_on_gpu")
_ON_DEVICE = pl.col("device_ns") + pl.col("backward_device_ns")
_ON_HOST = pl.col("host_ns") + pl.col("backward_host_ns")
_HOST_TREE = headings("modules_on_host")
_HOST_CLASSES = heads(name="class", call_count="calls", host_self_ns="own", share_ratio="of all")


def modules_view(found: pl.DataFrame, wall_ns: int, *, depth: int | None = None) -> RenderableType:
    """The whole screen; times are sums over ranks."""
    summed = found.group_by("path", maintain_order=True).agg(
        pl.col("name", "kind", "depth").first(),
        pl.col("call_count", "kernel_count", "graph_kernel_count", *_TIMES).sum(),
    )
    device = _device_ns(summed)  # of traces without a GPU the host's time counts
    whole, on = (device, _ON_DEVICE) if device else (wall_ns, _ON_HOST)
    tree = summed.filter(pl.col("path").is_not_null()).with_columns(
        own_ns=pl.col("device_self_ns") + pl.col("backward_device_self_ns"),
        share_ratio=pl.lit(None, pl.Float64) if not whole else on / whole,
        name=pl.lit("· ").repeat_by("depth").list.join("") + pl.col("name"),
    )
    if depth is not None:
        tree = tree.filter(pl.col("depth") < depth)
    large = tree.filter(pl.col("share_ratio").fill_null(1) >= _LEAST_RATIO)
    columns, by_class = (_TREE, _CLASSES) if device else (_HOST_TREE, _HOST_CLASSES)
    title = "Where the time goes, 1 % and more; shares include nested calls"
    parts = [section(title, *frame_table(large, columns, limit=_TREE_LIMIT))]
    table = frame_table(_by_class(summed, whole), by_class, limit=_CLASS_LIMIT)
    parts.append(section("By class, self time", *table))
    return Group(*parts, *_graph_lines(summed), *_outside_lines(summed, whole))


def _device_ns(found: pl.DataFrame) -> int:
    """GPU time of the parts' own launches, forward and backward."""
    return int(found["device_self_ns"].sum()) + int(found["backward_device_self_ns"].sum())


def _by_class(summed: pl.DataFrame, whole: int) -> pl.DataFrame:
    known = summed.filter(pl.col("path").is_not_null())
    names = {name: _INSTANCE.sub("", name) for name in known["name"].unique()}
    sums = known.with_columns(pl.col("name").replace_strict(names)).group_by("name").agg(
        pl.col("call_count", *_TIMES).sum()
    )  # fmt: skip
    has_gpu = _device_ns(sums) > 0
    own = pl.col("device_self_ns") + pl.col("backward_device_self_ns")
    own = own if has_gpu else pl.col("host_self_ns")
    share = own / whole if whole else pl.lit(None, pl.Float64)
    return sums.with_columns(share_ratio=share).sort(-own, "name")


def _graph_lines(summed: pl.DataFrame) -> Iterator[RenderableType]:
    """What CUDA graphs launched, whose kernels the trace does not tell apart by module."""
    count, ns = (int(summed[f"graph_{name}"].sum()) for name in ("kernel_count", "device_self_ns"))
    if count:
        share = ratio_text(ns / (_device_ns(summed) or 1))
        text = f"\n{share} of GPU time, {count} kernels, is of CUDA graphs: it counts for the part"
        yield Text(f"{text} that launched the graph, not for those inside", style="dim")


def _outside_lines(summed: pl.DataFrame, whole: int) -> Iterator[RenderableType]:
    """How much is in no part at all."""
    if not whole:
        return
    if _device_ns(summed):
        outside = _device_ns(summed.filter(pl.col("path").is_null()))
        text = "of GPU time was launched outside of all of these"
    else:
        inside = summed.filter(pl.col("depth") == 0).select(_ON_HOST.sum()).item()
        outside, text = max(whole - inside, 0), "of the traced time is in none of these"
    if outside:
        yield Text(f"\n{ratio_text(outside / whole)} {text}", style="dim")


_LIMIT = 6
TITLES = {ABNORMAL: "abnormal", FUNCTIONS: "over all ranks", RANKS: "by rank"}
_COLUMNS: Mapping[str, Mapping[str, Columns]] = {
    kind: {name: [*columns.items()] for name, columns in tables.items()}
    for kind, tables in HEADINGS["functions"].items()
}
_NO_SAMPLES = (
    "no sample belongs to one function: samples are further apart than functions last; `--burst` "
    "samples every 100 µs"
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
    # A trace without a GPU has nothing to say of one: neither a meaning nor a table.
    told = [each for each in found.reports
            if not several or each.meaning or next(shown_tables(each, count), None)]  # fmt: skip
    parts = [part for report in told for part in _report(report, count, brief=several)]
    left_out = [report for report in found.reports if report not in told]
    if left_out:
        reasons = [f"{report.title}: {report.missing[0]}" for report in left_out if report.missing]
        parts.append(section("not in the traces", *bullets(reasons)))
    if found.hardware is not None:
        parts.append(section("hardware while they ran", *_hardware(found.hardware)))
    parts.append(notes_block(found.notes, "not in the reduced files"))
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
    columns = heads(metric="counter", value="mean", rank_count="ranks", sample_count="samples",
                    name="while it ran")  # fmt: skip
    return list(frame_table(shown, columns, limit=4 * _LIMIT, where="--json and --csv"))


def _report(report: FunctionReport, rank_count: int, *, brief: bool) -> Iterator[RenderableType]:
    """Meaning first, then tables; of all five only what differs and what bounds most."""
    share = report.facts["bottleneck"]["median"]
    title = report.title if share is None else f"{report.title}: {ratio_text(share)} of the time"
    nothing = () if report.tables[FUNCTIONS].is_empty() else ("nothing abnormal",)
    yield section(title, *bullets(report.meaning or nothing))
    limit = _LIMIT if brief else 4 * _LIMIT
    for name, table, columns in shown_tables(report, rank_count):
        if not (brief and name == RANKS):
            rows = frame_table(table, columns, limit=limit, where="--json and --csv")
            yield section(TITLES[name], *rows)
    yield notes_block(report.missing, "not known")


def shown_tables(
    report: FunctionReport, rank_count: int
) -> Iterator[tuple[str, pl.DataFrame, Columns]]:
    """Name, rows and columns of its tables that say something, the abnormal first."""
    for name, columns in _COLUMNS[report.kind].items():
        table = report.tables[name]
        known = {column for column, _ in columns if table[column].count()} - {"rank", "name"}
        if known and not (name == ABNORMAL and rank_count < FAR_MIN_RANKS):
            if "name" in table.columns:  # to a line: kernels without arguments, the end of stacks
                names = table["name"].unique().to_list()
                plain = stack_labels(names) if report.kind == kernel_names.PYTHON else \
                    {each: kernel_label(each) for each in names}  # fmt: skip
                short = pl.col("name").replace_strict(plain, return_dtype=pl.String)
                table = table.with_columns(short)
            yield name, table, [each for each in columns if each[0] in known | {"rank", "name"}]


def stack_labels(stacks: Sequence[str]) -> dict[str, str]:
    """The last calls of each stack, the last one first: `aten::mm < linear.py(114): forward < ...`.

    Folders and the frames of torch's own `__call__` say nothing; they are left out. Stacks that
    end alike also have the last call in which they differ.
    """
    calls: dict[str, list[str]] = {}
    for stack in stacks:
        *outer, last = (_PATH.sub("", call) for call in stack.split("|"))
        inner_first = (call for call in reversed(outer) if not call.endswith("_call_impl"))
        calls[stack] = [last, *inner_first]
    alike: dict[tuple[str, ...], list[str]] = {}
    for stack, visible in calls.items():
        alike.setdefault(tuple(visible[:_STACK_END]), []).append(stack)
    return {stack: _label(calls[stack], _fork([calls[own] for own in group]))
            for group in alike.values() for stack in group}  # fmt: skip


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
    plain, geometry = kernel_names.split_geometry(name)
    if geometry:
        return kernel_label(plain) + geometry
    short = kernel_names.short_kernel_name(name)
    if not short.startswith("at::native::") or not short.endswith("_kernel"):
        return short
    plain = short.removeprefix("at::native::")
    words = (found[1] for found in _DOES.finditer(name, name.find("<")))
    does = next((word for word in words if word not in _ANYTHING), None)
    return f"{plain} [{does}]" if does else plain
