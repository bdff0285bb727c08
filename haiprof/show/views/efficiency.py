"""What `haiprof efficiency` shows: MFU per rank, and the operators that take the most time."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text, ratio_text
from haiprof.show.tables.frame_table import frame_table
from haiprof.show.text import printable
from haiprof.show.views.blocks import section

_LIMIT = 14
_COLUMNS = (
    ("operator", "operator"), ("shapes", "shapes"), ("precision", "type"), ("count", "calls"),
    ("time_ns", "time"), ("tflops", "TFLOP/s"), ("tb_per_s", "TB/s"), ("bound", "bound"),
    ("roofline_ratio", "roofline"),
)  # fmt: skip
_OPERATOR_WIDTH, _SHAPES_WIDTH = 20, 18
"""Together with the numbers a line of 100 columns."""


def efficiency_view(whole: pl.DataFrame, operators: pl.DataFrame) -> RenderableType:
    """The whole screen."""
    summed = _over_ranks(operators)
    shapes = pl.col("shapes").str.replace_all(" ", "").str.strip_prefix("[").str.strip_suffix("]")
    short = shapes.str.replace_all(r",\[\]", "").str.slice(0, _SHAPES_WIDTH)
    rows = summed.with_columns(
        shapes=short,
        operator=pl.col("operator").str.strip_prefix("aten::").str.slice(0, _OPERATOR_WIDTH),
        tflops=pl.col("flops") / pl.col("time_ns") / 1e3,
        tb_per_s=pl.col("bytes") / pl.col("time_ns") / 1e3,
    )
    return Group(
        *_ranks(whole),
        section("Operators, the longest in sum", *frame_table(rows, _COLUMNS, limit=_LIMIT)),
    )


def _ranks(whole: pl.DataFrame) -> Iterator[RenderableType]:
    for row in whole.head(16).iter_rows(named=True):
        device = printable(str(row["device_name"] or "CPU"))
        yield Text(f"rank {row['rank']}, {device}: {_mfu_text(row)}", style="bold")
        yield Text(f"  {_basis_text(row)}", style="dim", overflow="fold")


def _mfu_text(row: dict[str, object]) -> str:
    work = float(row["model_flops"] or 0)  # type: ignore[arg-type]
    amount = f"{work / 1e12:,.3g} TFLOP in {duration_text(int(row['wall_ns']))}"  # type: ignore[call-overload]
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
    weight = pl.col("roofline_ratio") * pl.col("time_ns")
    whole = pl.col("time_ns").filter(pl.col("roofline_ratio").is_not_null()).sum()
    return operators.group_by(keys).agg(
        pl.col("count", "time_ns", "flops", "bytes").sum(),
        roofline_ratio=pl.when(whole > 0).then(weight.sum() / whole),
    ).sort("time_ns", "operator", descending=[True, False])  # fmt: skip
