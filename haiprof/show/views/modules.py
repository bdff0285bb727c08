"""What `haiprof modules` shows: the tree of modules with their time, and their classes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import ratio_text
from haiprof.show.tables.frame_table import frame_table
from haiprof.show.views.blocks import section

_LEAST_RATIO, _TREE_LIMIT, _CLASS_LIMIT = 0.01, 40, 12
_INSTANCE = re.compile(r"_\d+$")
_TIMES = ("host_ns", "host_self_ns", "device_ns", "device_self_ns", "backward_device_ns",
          "backward_device_self_ns", "backward_host_ns", "graph_device_self_ns")  # fmt: skip
_TREE = (("name", "module or range"), ("call_count", "calls"), ("host_ns", "host"),
         ("device_ns", "GPU"), ("backward_device_ns", "GPU backward"),
         ("own_ns", "GPU own"), ("share_ratio", "share"))  # fmt: skip
_CLASSES = (("name", "class"), ("call_count", "calls"), ("host_self_ns", "host own"),
            ("device_self_ns", "GPU own"), ("backward_device_self_ns", "own backward"),
            ("share_ratio", "share"))  # fmt: skip
_ON_HOST = pl.col("host_ns") + pl.col("backward_host_ns")
_HOST_TREE = (("name", "module or range"), ("call_count", "calls"), ("host_ns", "host"),
              ("backward_host_ns", "backward"), ("host_self_ns", "own"),
              ("share_ratio", "of all"))  # fmt: skip
_HOST_CLASSES = (("name", "class"), ("call_count", "calls"), ("host_self_ns", "own"),
                 ("share_ratio", "of all"))  # fmt: skip


def modules_view(found: pl.DataFrame, wall_ns: int, *, depth: int | None = None) -> RenderableType:
    """The whole screen; times are sums over ranks."""
    summed = _over_ranks(found)
    whole, on = _whole(summed, wall_ns)
    tree = summed.filter(pl.col("path").is_not_null()).with_columns(
        own_ns=pl.col("device_self_ns") + pl.col("backward_device_self_ns"),
        share_ratio=pl.lit(None, pl.Float64) if not whole else on / whole,
        name=pl.lit("· ").repeat_by("depth").list.join("") + pl.col("name"),
    )
    if depth is not None:
        tree = tree.filter(pl.col("depth") < depth)
    large = tree.filter(pl.col("share_ratio").fill_null(1) >= _LEAST_RATIO)
    columns, by_class = (_TREE, _CLASSES) if _device_ns(summed) else (_HOST_TREE, _HOST_CLASSES)
    title = "Where the time goes, from 1 % of it; share with all that is inside"
    parts = [section(title, *frame_table(large, columns, limit=_TREE_LIMIT))]
    classes = _by_class(summed, whole)
    parts.append(section("By class, own time", *frame_table(classes, by_class, limit=_CLASS_LIMIT)))
    return Group(*parts, *_graph_lines(summed), *_outside_lines(summed, whole))


def _over_ranks(found: pl.DataFrame) -> pl.DataFrame:
    return found.group_by("path", maintain_order=True).agg(
        pl.col("name", "kind", "depth").first(),
        pl.col("call_count", "kernel_count", "graph_kernel_count", *_TIMES).sum(),
    )


def _whole(summed: pl.DataFrame, wall_ns: int) -> tuple[int, pl.Expr]:
    """All GPU time, and a part's; of traces without a GPU all time, and the host's in the part."""
    device = _device_ns(summed)
    if device:
        return device, pl.col("device_ns") + pl.col("backward_device_ns")
    return wall_ns, _ON_HOST


def _device_ns(found: pl.DataFrame) -> int:
    """GPU time of the parts' own launches, forward and backward."""
    return _sum(found, "device_self_ns") + _sum(found, "backward_device_self_ns")


def _sum(found: pl.DataFrame, column: str) -> int:
    return int(found[column].sum())


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
    count = _sum(summed, "graph_kernel_count")
    if count:
        share = ratio_text(_sum(summed, "graph_device_self_ns") / (_device_ns(summed) or 1))
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
