"""The rows of the trace report that people see: sums over ranks, parts side by side."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from haiprof.trace_analysis.collectives import WHOLE_JOB

Tables = Mapping[str, pl.DataFrame]

STEP_PARTS = (
    "kernel", "communication", "memcpy", "memset", "runtime", "dataloader", "cpu_exec", "other",
)  # fmt: skip
_SHAPES_WIDTH = 32
IDLE_PARTS = ("host_wait", "kernel_wait", "other", "unknown")


def gpu_time(tables: Tables) -> pl.DataFrame:
    """`temporal` with the communication of `overlap`, per rank and device."""
    keys = ["rank", "device"]
    talk = tables["overlap"].select(*keys, "communication_ns", "overlap_ratio")
    return tables["temporal"].join(talk, on=keys, how="left").sort(keys)


def step_time(tables: Tables) -> pl.DataFrame:
    """Mean step of each rank: `rank`, `step_count`, `wall_ns`, and each part's share of it.

    Without profiler steps it is all of the trace, and `step_count` is null.
    """
    wall = pl.col("wall_ns")
    parts = [
        pl.when((wall.sum() > 0) & pl.col(f"{part}_ns").is_not_null().all())
        .then(pl.col(f"{part}_ns").sum() / wall.sum())
        .alias(f"{part}_ratio")
        for part in STEP_PARTS
    ]
    found = tables["steps"].group_by("rank", maintain_order=True)
    count = pl.col("step").count()
    return found.agg(pl.when(count > 0).then(count).alias("step_count"), wall.mean(), *parts)


def kernel_types(tables: Tables) -> pl.DataFrame:
    """Busy time by kind over all ranks, the longest first; without what did not happen."""
    found = tables["kernel_types"].group_by("kernel_type").agg(pl.col("time_ns").sum())
    share = pl.col("time_ns") / pl.col("time_ns").sum()
    return (
        found.filter(pl.col("time_ns") > 0)
        .with_columns(time_ratio=share)
        .sort(-pl.col("time_ns"), "kernel_type")
    )


def idle(tables: Tables) -> pl.DataFrame:
    """Idle time of each stream and the share of each cause: `host_wait_ratio`, ..."""
    keys = ["rank", "device", "stream"]
    category = pl.col("idle_category")
    shares = [
        pl.col("idle_ratio").filter(category == part).first().alias(f"{part}_ratio")
        for part in IDLE_PARTS
    ]
    found = tables["idle"].group_by(keys).agg(pl.col("idle_ns", "count").sum(), *shares)
    return found.sort(keys)


def launches(tables: Tables) -> pl.DataFrame:
    """Launches by call over all ranks; of events without launch only how many they are."""
    counts = ("launch_count", "kernel_count", "short_count", "runtime_outlier_count",
              "launch_delay_outlier_count")  # fmt: skip
    known = pl.col("call").is_not_null()
    found = (
        tables["launches"]
        .group_by("call")
        .agg(
            *(pl.col(name).sum() for name in counts),
            cpu_mean_ns=pl.col("cpu_duration_ns").sum() / pl.col("launch_count").sum(),
            delay_mean_ns=pl.col("launch_delay_ns").sum() / pl.col("launch_count").sum(),
        )
    )
    numbers = [name for name in found.columns if name not in ("call", "kernel_count")]
    return (
        found.with_columns(pl.when(known).then(pl.col(name)).alias(name) for name in numbers)
        .sort(-pl.col("kernel_count"), "call")
        .with_columns(pl.col("call").fill_null("launch not in the trace"))
    )


def queues(tables: Tables) -> pl.DataFrame:
    """Launch queues, the longest first, with the share of time in which each was empty."""
    span = pl.col("span_ns")
    share = pl.when(span > 0).then(pl.col("empty_ns") / span)
    found = tables["queue"].with_columns(empty_ratio=share)
    return found.sort("mean_length", descending=True, nulls_last=True)


def copies(tables: Tables) -> pl.DataFrame:
    """Copies and sets by kind over all ranks; bytes are null unless every size is known."""
    size, busy = pl.col("bytes"), pl.col("busy_ns").sum()
    found = (
        tables["memory_bandwidth"]
        .group_by("copy_kind")
        .agg(
            pl.col("copy_count").sum(),
            pl.col("busy_ns").sum(),
            bytes=pl.when(size.is_not_null().all()).then(size.sum()),
            mean_bytes_per_s=pl.when(size.is_not_null().all() & (busy > 0)).then(
                size.sum() / busy * 1e9
            ),
        )
    )
    return found.sort(-pl.col("busy_ns"), "copy_kind")


def lateness(tables: Tables) -> pl.DataFrame:
    """How late each rank is, the latest first, with what the others waited for it."""
    return tables["lateness"].join(
        tables["stragglers"], on="rank", how="left", maintain_order="left", suffix="_any"
    )


def operators(tables: Tables) -> pl.DataFrame:
    """Operators over all ranks of traces without a GPU, the most own time first."""
    short = pl.col("shapes").str.replace_all(" ", "").str.strip_prefix("[").str.strip_suffix("]")
    shapes = short.str.replace_all(r",\[\]", "").str.slice(0, _SHAPES_WIDTH)
    summed = tables["operators"].group_by("operator", "shapes").agg(
        pl.col("call_count", "cpu_self_ns", "cpu_total_ns").sum()
    )  # fmt: skip
    own = pl.col("cpu_self_ns")
    return summed.with_columns(
        name="operator", shapes=shapes, own_ratio=own / own.sum()
    ).sort(-own, "operator", "shapes", nulls_last=True)  # fmt: skip


def communication_parts(tables: Tables) -> pl.DataFrame:
    """Communication by part; nothing where no group says which part it serves."""
    found = tables["communication_parts"]
    return found.clear() if found.filter(pl.col("part") != WHOLE_JOB).is_empty() else found


def rank_collectives(tables: Tables) -> pl.DataFrame:
    """The collectives of a rank that is alone; of several ranks nothing: who waited is known."""
    found = tables["rank_collectives"]
    return found.clear() if "process_groups" in tables else found
