"""Collectives of one rank, on GPU and CPU; the same one on several ranks, and their clocks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import polars as pl

from haiprof.base.intervals import covered_lengths, difference, total, union
from haiprof.base.medians import MAD_TO_SIGMA
from haiprof.base.units import duration_text
from haiprof.trace_analysis import device_time
from haiprof.trace_analysis.operator_work import ITEM_BYTES, type_of
from haiprof.trace_analysis.pool import Progress, default_pool
from haiprof.trace_format.clock_offsets import estimate_offsets
from haiprof.trace_format.kineto.events import GPU_BACKENDS, HOST_BACKENDS
from haiprof.trace_format.kineto.rank_trace import Trace

WHOLE_JOB = "whole job"
# Words of a description, in the order in which a part is named. DeviceMesh describes a group as
# `mesh_` and its dimension's name, which torchtitan calls dp_replicate, tp ...; Megatron-Core's
# descriptions are those of parallel_state.py, such as TENSOR_MODEL_PARALLEL_GROUP.
_WORDS = (
    ("data", r"e?dp|e?fsdp|hsdp|ddp|data"),
    ("tensor", r"e?tp|tensor"),
    ("pipeline", r"pp|pipeline|pipe"),
    ("context", r"cp|context"),
    ("sequence", r"sp|ulysses|sequence"),
    ("expert", r"ep|expert"),
)
# Not a dimension of its own: what follows it is, among the ranks that hold the same experts.
_OF_EXPERTS = r"expert_(?=data|tensor_parallel)|(?<=dp)_(?:shard_)?(?:mod|in)_ep"

GROUPS_SCHEMA = {
    "process_group": pl.String, "description": pl.String, "part": pl.String, "backend": pl.String,
    "group_size": pl.Int64, "group_ranks": pl.String,
}  # fmt: skip


def part_of(description: str | None) -> str | None:
    """The part of the job that a group of this description serves; None where it does not say."""
    text = (description or "").lower()
    if text == "default_pg":
        return WHOLE_JOB
    plain = re.sub(_OF_EXPERTS, "", text)
    words = re.split(r"[^a-z]+", plain)
    found = [name for name, sign in _WORDS if any(re.fullmatch(sign, word) for word in words)]
    return f"{' and '.join(found)} parallel" if found else None


def process_group_table(trace: Trace) -> pl.DataFrame:
    """The process groups that a rank belongs to, as `torch.profiler` lists them."""
    said = trace.metadata.get("distributedInfo")
    listed = said.get("pg_config") if isinstance(said, dict) else None
    rows = []
    for each in filter(lambda each: isinstance(each, dict), listed or ()):
        name, description, backend = (
            text if isinstance(text := each.get(key), str) else None
            for key in ("pg_name", "pg_desc", "backend_config")
        )
        description = None if description in ("", "undefined") else description
        ranks = each.get("ranks")
        is_known = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
        known = (len(ranks), json.dumps(ranks)) if is_known else (None, None)
        rows.append((name, description, part_of(description), backend, *known))
    return pl.DataFrame(rows, schema=GROUPS_SCHEMA, orient="row").unique(
        "process_group", keep="first", maintain_order=True
    )


BACKENDS = f"^(?:{HOST_BACKENDS}):"
"""Spans of a backend's own threads, which PyTorch names `gloo:all_reduce`."""
CATEGORY = "cpu_collective"
WAIT = "wait for a collective"


def cpu_collectives(trace: Trace) -> pl.DataFrame:
    """The collectives that threads of a backend ran on the CPU, and who asked for each."""
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

    Between operators a thread waits: `Work.wait()` and the end of a backward pass are none.
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
            name=pl.lit(WAIT), tid=pl.lit(tid, pl.Int64),
            ts_ns=pl.Series(np.append(busy.ends, 0)[at], dtype=pl.Int64), end_ns=pl.Series(done),
        ).filter(pl.Series(idle))  # fmt: skip
        last = waits.sort("end_ns").unique("ts_ns", keep="last", maintain_order=True)
        parts.append(last.select("name", "tid", "ts_ns", "end_ns", "kernel"))
    return pl.concat(parts).sort("ts_ns")


# By the first that a name contains: PyTorch's collective names, NCCL's and RCCL's kernel names.
_KINDS = (
    (r"reduce_?scatter", "reduce_scatter"), (r"all_?reduce", "all_reduce"),
    (r"all_?gather", "all_gather"), (r"all_?to_?all", "all_to_all"), ("broadcast", "broadcast"),
    ("barrier", "barrier"), (r"send_?recv", "send_receive"), (r"send\b", "send"),
    (r"recv\b", "receive"), ("gather", "gather"), ("scatter", "scatter"), ("reduce", "reduce"),
)  # fmt: skip
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""No rank leaves one of these before all have entered, unlike the root of a broadcast."""

_MOST_ELEMENTS = 1 << 56
ON_CPU = -1  # device of collectives that gloo or MPI run on the CPU
KERNELS_SCHEMA = {
    "event": pl.Int64, "step": pl.Int64, "kind": pl.String, "name": pl.String, "device": pl.Int64,
    "stream": pl.Int64, "process_group": pl.String, "group_ranks": pl.String, "part": pl.String,
    "group_size": pl.Int64, "world_size": pl.Int64, "sequence": pl.Int64, "dtype": pl.String,
    "in_count": pl.Int64, "out_count": pl.Int64, "element_bytes": pl.Int64, "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}  # fmt: skip


def collective_kernels(trace: Trace, *, steps: tuple[int, int] | None = None) -> pl.DataFrame:
    """Communication kernels of a rank, by start; without any, its collectives on the CPU."""
    gpu = device_time.gpu_events(trace, steps).with_row_index("row")
    talking = device_time.with_kind(gpu).filter(pl.col("kind") == device_time.COMMUNICATION)["row"]
    if talking.is_empty():
        return _on_cpu(trace, steps)
    texts = ("name", "collective", "dtype", "process_group", "group_ranks")
    kernels = gpu.filter(pl.col("row").is_in(talking.implode())).with_columns(
        *(text_or_null(name).alias(name) for name in texts)
    )
    calls = trace.runtime.select("correlation", launch_ns="ts_ns", launch_tid="tid").drop_nulls()
    found = kernels.join(
        calls.unique("correlation", keep="first"), on="correlation", how="left"
    ).with_columns(when=pl.coalesce("launch_ns", "ts_ns"))
    launched = _with_operator(trace, _with_step(trace, found).sort("ts_ns", "row"))
    told = []
    for name in ("collective", "annotation", "name"):
        known = {text: kind for text in launched[name].drop_nulls().unique()
                 if (kind := kind_of(text)) != "other"}  # fmt: skip
        told.append(pl.col(name).replace_strict(known, default=None, return_dtype=pl.String))
    # The part of each one's group, and its ranks where only the list of groups has them.
    groups = process_group_table(trace).select(
        "process_group", "part", listed_ranks="group_ranks", listed_size="group_size"
    )
    start = pl.col("ts_ns") + clock_base_ns(trace)
    sizes = {dtype: _size(dtype) for dtype in launched["dtype"].unique()}
    grouped = launched.join(groups, on="process_group", how="left", maintain_order="left")
    found = grouped.with_columns(
        kind=pl.coalesce(*told, pl.lit("other")),
        world_size=pl.lit(trace.world_size, dtype=pl.Int64),
        group_ranks=pl.coalesce("group_ranks", "listed_ranks"),
        group_size=pl.coalesce("group_size", "listed_size"),
        start_ns=start, end_ns=start + pl.col("dur_ns"),
        element_bytes=pl.col("dtype").replace_strict(sizes, default=None, return_dtype=pl.Int64),
    ).sort("ts_ns", "row")  # fmt: skip
    return found.select(pl.col(name).cast(dtype) for name, dtype in KERNELS_SCHEMA.items())


def _on_cpu(trace: Trace, steps: tuple[int, int] | None) -> pl.DataFrame:
    """Collectives of gloo or MPI, where no GPU communicates.

    Sizes are known where shapes were recorded, the group where the rank has a single one: threads
    of a backend do not say for which group they work.
    """
    found = cpu_collectives(trace)
    told = [_inputs(*said) for said in found.select("input_dims", "input_types").iter_rows()]
    sizes = [(count, dtype, _size(dtype)) for count, dtype in told]
    columns = ("in_count", "dtype", "element_bytes")
    found = found.hstack(
        pl.DataFrame(sizes, schema={name: KERNELS_SCHEMA[name] for name in columns}, orient="row")
    )
    groups = process_group_table(trace)
    several = groups.filter(pl.col("group_size") > 1)
    group = several.row(0, named=True) if several.height == 1 else {}
    # Of several groups any may be meant: that all ranks take part does not make it the world's.
    world = None if several.height > 1 else trace.world_size
    found = found.with_columns(
        pl.lit(group.get(name), KERNELS_SCHEMA[name]).alias(name)
        for name in ("process_group", "group_ranks", "group_size", "part")
    )
    marked = _with_step(trace, found.with_columns(when="launch_ns"))
    if steps is not None:
        marked = marked.filter(pl.col("step").is_between(*steps, closed="left"))
    start = pl.col("ts_ns") + clock_base_ns(trace)
    named = marked.with_columns(
        kind=pl.col("name").map_elements(kind_of, return_dtype=pl.String),
        device=pl.lit(ON_CPU), stream=pl.lit(-1), world_size=pl.lit(world, pl.Int64),
        start_ns=start, end_ns=start + pl.col("dur_ns"),
    )  # fmt: skip
    known = named.select(set(named.columns) & set(KERNELS_SCHEMA))
    return pl.concat([pl.DataFrame(schema=KERNELS_SCHEMA), known], how="diagonal_relaxed")


def clock_base_ns(trace: Trace) -> int:
    """What Kineto subtracted from its timestamps, which differs between ranks."""
    base = trace.metadata.get("baseTimeNanoseconds")
    return base if type(base) is int else 0


def kind_of(name: str) -> str:
    """The kind of collective that a name states; `other` where it states none."""
    return next((kind for sign, kind in _KINDS if re.search(sign, name.lower())), "other")


def text_or_null(name: str) -> pl.Expr:
    """A text column as strings, null where the file has none."""
    text = pl.col(name).cast(pl.String)
    return pl.when(text != "").then(text)


def _size(dtype: str | None) -> int | None:
    kind = type_of(dtype)
    return 1 if kind.startswith("float8") else ITEM_BYTES.get(kind)


def _with_step(trace: Trace, found: pl.DataFrame) -> pl.DataFrame:
    """With the profiler step around the time `when`."""
    steps = trace.steps.select("step", step_start="start_ns", step_end="end_ns").sort("step_start")
    marked = found.sort("when").join_asof(steps, left_on="when", right_on="step_start")
    inside = pl.col("when") < pl.col("step_end")
    return marked.with_columns(step=pl.when(inside).then("step"))


def _with_operator(trace: Trace, kernels: pl.DataFrame) -> pl.DataFrame:
    """With the `nccl:` annotation at the launch, and counts and type from record_param_comms there.

    Those of the annotation serve where record_param_comms has none: DistributedDataParallel's
    all-reduces of 2023 have their shape there alone.
    """
    params = trace.ops.filter(pl.col("name").cast(pl.String) == "record_param_comms")
    name, dims, types = map(text_or_null, ("name", "input_dims", "input_types"))
    when = ("ts_ns", "dur_ns", "tid")
    shaped = _around_launch(kernels, params.select(*when, op_dims=dims, op_types=types))
    # PyTorch's spans around its calls of NCCL and the like: annotations or, in some, operators.
    is_backend = pl.col("name").cast(pl.String).str.contains(f"^(?:{GPU_BACKENDS}):")
    spans = [
        table.filter(is_backend).select(*when, annotation=name, span_dims=dims, span_types=types)
        for table in (trace.annotations, trace.ops)
    ]
    found = _around_launch(shaped, pl.concat(spans))
    rows = [
        (*_inputs(*inputs[:2], only_first=True), *_inputs(*inputs[2:], untyped=True))
        for inputs in found.select("op_dims", "op_types", "span_dims", "span_types").iter_rows()
    ]
    schema = {"op_count": pl.Int64, "op_dtype": pl.String, "span_count": pl.Int64,
              "span_dtype": pl.String}  # fmt: skip
    said = pl.DataFrame(rows, schema=schema, orient="row")
    return found.hstack(said).with_columns(
        in_count=pl.coalesce("in_count", "op_count", "span_count"),
        dtype=pl.coalesce("dtype", "op_dtype", "span_dtype"),
    )


def _inputs(
    dims: str | None, types: str | None, *, only_first: bool = False, untyped: bool = False
) -> tuple[int | None, str | None]:
    """Elements of all inputs together and their type, where they are tensors of one type.

    With `untyped`, where no type was recorded, the elements alone.
    """
    try:
        shapes, dtypes = json.loads(dims or ""), json.loads(types or "[]")
        if only_first:  # without a dimension it is a number
            shapes, dtypes = shapes[:1] if shapes[0] else [], dtypes[:1]
        is_typed = len(set(dtypes)) == 1 and _size(dtypes[0]) is not None
        # An empty shape is a number, or not known.
        is_bare = untyped and types in (None, "[]") and all(shapes)
        if not shapes or not (is_typed or is_bare):
            return None, None
        count = sum(math.prod(map(int, each)) for each in shapes)
        dtype = dtypes[0] if is_typed else None
        return (count, dtype) if 0 <= count < _MOST_ELEMENTS else (None, None)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None, None


def _around_launch(kernels: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Joins to each kernel the last span that began before its launch there and holds it."""
    names = {"ts_ns": "span_ns", "tid": "launch_tid", "dur_ns": "span_dur"}
    carried = [name for name in spans.columns if name not in names]
    found = kernels.sort("launch_ns").join_asof(
        spans.rename(mapping=names).sort("span_ns"), left_on="launch_ns", right_on="span_ns",
        by="launch_tid", check_sortedness=False,
    )  # fmt: skip
    inside = pl.col("launch_ns") < pl.col("span_ns") + pl.col("span_dur")
    kept = found.with_columns(pl.when(inside).then(pl.col(carried)))
    return kept.drop("span_ns", "span_dur").sort("ts_ns", "row")


PARTS_SCHEMA = {
    "device": pl.Int64, "part": pl.String, "group_count": pl.Int64, "collective_count": pl.Int64,
    "time_ns": pl.Int64, "exposed_ns": pl.Int64, "exposed_ratio": pl.Float64,
}  # fmt: skip


def communication_parts(trace: Trace, *, steps: device_time.Steps = None) -> pl.DataFrame:
    """How long each part of the job communicates on a rank, and what of it computing hides.

    Exposed time of the pipeline is its bubble together with transfers that nothing hides: a
    stage waits in the kernel that receives, and no trace of one stage tells the two apart.

    Source: pipeline bubble, Narayanan et al., "Efficient Large-Scale Language Model Training
    on GPU Clusters Using Megatron-LM" (SC 2021), section 2.2, where transfers take no time.
    """
    talking = collective_kernels(trace, steps=steps)
    base = clock_base_ns(trace)
    gpu = device_time.with_kind(device_time.gpu_events(trace, steps))
    rows: list[tuple[object, ...]] = []
    for (device, part), own in talking.group_by("device", "part", maintain_order=True):
        ran = union(own["start_ns"].to_numpy() - base, own["end_ns"].to_numpy() - base)
        on_device = gpu.filter(pl.col("device") == device)
        groups = own["process_group"].drop_nulls().n_unique()
        row = (device, part, groups, own.height, total(ran))
        if on_device.is_empty():
            rows.append((*row, None, None))
            continue
        computing = device_time.union_of(
            on_device.filter(pl.col("kind") == device_time.COMPUTATION)
        )
        exposed = total(difference(ran, computing))
        ends = on_device["ts_ns"] + on_device["dur_ns"]
        span = int(ends.max()) - int(on_device["ts_ns"].min())  # type: ignore[arg-type]
        rows.append((*row, exposed, exposed / span if span else None))
    found = pl.DataFrame(rows, schema=PARTS_SCHEMA, orient="row")
    return found.sort("device", -pl.col("time_ns"), "part", nulls_last=True)


def waits_by_part(parts: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """With how long each rank waited in the collectives of each part; null where none is known."""
    known = waits.filter(pl.col("missing").is_null())
    keys = ["rank", "device", "part"]
    summed = known.group_by(keys).agg(pl.col("wait_ns").sum(), waited_count=pl.len().cast(pl.Int64))
    joined = parts.join(summed, on=keys, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(pl.col("waited_count").fill_null(0))


if TYPE_CHECKING:  # it is what merging traces needs
    from haiprof.trace_format.merge_inputs import TraceInput

BY_SEQUENCE, BY_ORDER, BY_END = "sequence", "order", "end"
CONFIDENCE = {BY_SEQUENCE: 1.0, BY_ORDER: 0.9, BY_END: 0.7}
SIZES_DIFFER = 0.5
"""Confidence in collectives of one number whose element counts or types contradict each other."""
SAME_END_NS = 100_000
"""Ends this close on one clock may be one collective's; ranks of a ring end within tens of us."""
ORDER_HOLDS_RATIO = 0.9
"""Order is accepted if at least this share of its collectives is possible in time."""
ONE_CLOCK_RATIO = 0.5
"""Clocks agree where at least this share of a group's kernels end together on all its ranks."""

_GROUP = ("kind", "process_group", "group_ranks")


def match_collectives(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels of all ranks with the collective that each is part of.

    - `sequence` (1.0; 0.5 where sizes contradict): process group, its ranks, kind and number
    within the group, which PyTorch records since 2.3.
    - `order` (0.9): the n-th of its kind, group and communication stream in the same profiler
    step, where every rank has as many, and nearly all of them overlap in time, as they
    are or once the hosts' clocks are compared by the collectives' ends.
    - `end` (0.7): ends at the same time, where order fails: windows that differ, or kernels
    missing from a trace. Only where clocks agree.
    """
    # Communication streams by their first kernel: numbers differ between ranks, order does not.
    place = ["rank", "device", "stream"]
    known = kernels.filter(pl.col("kind") != "other")
    streams = known.group_by(place).agg(pl.col("start_ns").min().alias("first"))
    role = pl.col("first").rank("ordinal").over("rank").alias("role")
    roles = known.join(streams.select(*place, role), on=place).sort("rank", "start_ns", "event")
    is_numbered = pl.col("sequence").is_not_null() & pl.col("process_group").is_not_null()
    numbered = _add_key(roles.filter(is_numbered), [*_GROUP, "sequence"], BY_SEQUENCE)
    rest = roles.filter(~is_numbered)
    # In order where every rank has as many of the group in the step.
    within = [*_GROUP, "role", "step"]
    counts = rest.group_by("rank", *within).len("count").group_by(within)
    same = counts.agg(pl.col("count").n_unique().alias("different")).filter(different=1)
    even = rest.join(same, on=within, how="semi", nulls_equal=True)
    ordered = _in_possible_order(_add_key(even, within, BY_ORDER))
    left = rest.join(ordered.select("rank", "event"), on=["rank", "event"], how="anti")
    ended = _by_end(left)
    found = pl.concat([numbered, ordered, ended], how="diagonal").select(
        "rank", "event", "key", "matched_by"
    )
    joined = kernels.join(found, on=["rank", "event"], how="left")
    # Numbers in place of keys; null for keys of a single rank.
    keys = joined.drop_nulls("key").group_by("key").agg(
        pl.col("start_ns").min(), rank_count=pl.col("rank").n_unique()
    ).filter(pl.col("rank_count") > 1).sort("start_ns", "key").select(
        "key", collective=pl.int_range(pl.len(), dtype=pl.Int64)
    )  # fmt: skip
    numbered = joined.join(keys, on="key", how="left").drop("key")
    # Confidence of the match, null without one; in an all-to-all each rank sends what it has.
    differ = pl.any_horizontal(pl.col(name).n_unique().over("collective") > 1
                               for name in ("dtype", "in_count", "out_count"))  # fmt: skip
    contradicted = (pl.col("matched_by") == BY_SEQUENCE) & differ & (pl.col("kind") != "all_to_all")
    sure = pl.col("matched_by").replace_strict(CONFIDENCE, default=None, return_dtype=pl.Float64)
    is_matched = pl.when(pl.col("collective").is_not_null())
    return numbered.with_columns(
        is_matched.then("matched_by"),
        confidence=is_matched.then(pl.when(contradicted).then(SIZES_DIFFER).otherwise(sure)),
    ).sort("start_ns", "rank")


def _add_key(kernels: pl.DataFrame, columns: list[str], matched_by: str) -> pl.DataFrame:
    """Adds a text key: the columns, and the number of the kernel among those with the same key."""
    nth = pl.col("event").cum_count().over("rank", *columns)
    parts = [pl.col(name).cast(pl.String).fill_null("") for name in columns]
    return kernels.with_columns(
        key=pl.concat_str(pl.lit(matched_by), *parts, nth.cast(pl.String), separator="|"),
        matched_by=pl.lit(matched_by),
    )


def _in_possible_order(kernels: pl.DataFrame) -> pl.DataFrame:
    """Drops groups whose order contradicts time: no rank may end before the last one starts.

    Of the times as they are and those with clocks compared by ends, the better ones count: ranks of
    gloo on one host end a collective ms apart, and what that says of their clocks is wrong.
    """
    # Clocks agree uncorrected where most kernels of the group end together on all its ranks: one
    # ahead by a whole period of the job would look like a rank without its first kernel.
    counted = kernels.with_columns(group_rank_count=pl.col("rank").n_unique().over(*_GROUP))
    everyone = pl.col("rank").n_unique().over("key") == pl.col("group_rank_count")
    together = _by_end(counted).filter(everyone).select("rank", "event", together=True)
    share = pl.col("together").is_not_null().mean().over(*_GROUP, "role")
    agreed = counted.join(together, on=["rank", "event"], how="left").select(
        "rank", "event", one_clock=share >= ONE_CLOCK_RATIO
    )
    # Column by column: polars evaluates a window inside of another one within the outer's groups.
    first = pl.col("end_ns").min()
    timed = kernels.with_columns(start=pl.col("start_ns") - first, end=pl.col("end_ns") - first)
    timed = timed.with_columns(clock=pl.col("end") - pl.col("end").median().over("key"))
    off = pl.when(~pl.col("one_clock")).then(pl.col("clock")).otherwise(0).median()
    timed = timed.join(agreed, on=["rank", "event"]).with_columns(off=off.over("rank"))
    judged = timed.with_columns(plain=_is_possible(pl.lit(0)), moved=_is_possible(pl.col("off")))
    shares = judged.with_columns(pl.col(name).mean().over(*_GROUP, "role").alias(f"{name}_share")
                                 for name in ("plain", "moved"))  # fmt: skip
    as_they_are = pl.col("plain_share") >= pl.col("moved_share")
    possible = pl.when(as_they_are).then("plain").otherwise("moved")
    share = pl.max_horizontal("plain_share", "moved_share")
    return shares.filter((share >= ORDER_HOLDS_RATIO) & possible).select(kernels.columns)


def _is_possible(off: pl.Expr) -> pl.Expr:
    """Whether the last rank starts before the first one ends, with clocks ahead by `off`."""
    last_start = (pl.col("start") - off).max().over("key")
    first_end = (pl.col("end") - off).min().over("key")
    return (last_start <= first_end) | ~pl.col("kind").is_in(SYNCHRONISING)


def _by_end(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels of different ranks that end together."""
    synchronising = kernels.filter(pl.col("kind").is_in(SYNCHRONISING))
    apart = (pl.col("end_ns").diff() > SAME_END_NS).fill_null(value=True)
    cluster = apart.cum_sum().over(*_GROUP, order_by="end_ns")
    found = synchronising.sort("end_ns").with_columns(
        key=pl.concat_str(pl.lit(BY_END), *(pl.col(name).fill_null("") for name in _GROUP),
                          cluster.cast(pl.String), separator="|"),
        matched_by=pl.lit(BY_END),
    )  # fmt: skip
    return found.filter(pl.col("rank").is_unique().all().over("key"))


CLOCKS_AGREE_NS = 100_000
"""A smaller offset is not corrected: the ranks of a ring end tens of us apart on one clock."""
SURE_FACTOR = 5  # an offset is corrected only where it is this many times its own spread
_Ns = TypeVar("_Ns", int, pl.Expr)


def clock_offsets(kernels: pl.DataFrame) -> pl.DataFrame:
    """Estimates how far each rank's clock is ahead of the others.

    Offsets of ranks that share no collective, not even through other ranks, cannot be compared.
    """
    together = kernels.drop_nulls("collective").filter(pl.col("kind").is_in(SYNCHRONISING))
    ends = together.select("end_ns", clock="rank", event="collective")
    rows = estimate_offsets(ends).select(
        pl.col("offset_ns").round().cast(pl.Int64), rank="clock", collective_count="event_count",
        residual_ns=(pl.col("mad_ns") * MAD_TO_SIGMA).round().cast(pl.Int64),
    )  # fmt: skip
    everyone = kernels.select("rank").unique().join(rows, on="rank", how="left")
    sure = is_sure(pl.col("offset_ns"), pl.col("residual_ns"))
    return everyone.select(
        "rank", pl.col("collective_count").fill_null(0), "offset_ns", "residual_ns",
        corrected=(sure & (pl.col("collective_count") > 1)).fill_null(value=False),
    ).sort("rank")  # fmt: skip


def is_sure(offset_ns: _Ns, residual_ns: _Ns) -> _Ns:
    """Whether an offset is one of the clocks: beyond 100 us and five times its own spread."""
    size = abs(offset_ns)
    return (size > CLOCKS_AGREE_NS) & (size > SURE_FACTOR * residual_ns)


def host_offsets(offsets: pl.DataFrame, hosts: pl.DataFrame) -> pl.DataFrame:
    """Offsets of clocks where hosts are known: ranks of one host have one clock."""
    if hosts["host"].null_count():
        return offsets
    known = offsets.join(hosts, on="rank", how="left")
    of_host = pl.col("offset_ns").median().over("host")
    apart = (of_host - of_host.median()).round().cast(pl.Int64)
    sure = pl.col("corrected").any().over("host") & (apart.abs() > CLOCKS_AGREE_NS)
    return known.with_columns(offset_ns=apart, corrected=sure.fill_null(value=False)).drop("host")


def on_one_clock(kernels: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """Subtracts the corrected offsets from `start_ns` and `end_ns`."""
    moved = pl.when("corrected").then("offset_ns").otherwise(0).fill_null(0)
    joined = kernels.join(offsets.select("rank", moved=moved), on="rank", how="left")
    return joined.with_columns(
        start_ns=pl.col("start_ns") - pl.col("moved"), end_ns=pl.col("end_ns") - pl.col("moved")
    ).drop("moved")


MOVED = "moved by collectives"
CONFIRMED = "wall clock, confirmed by collectives"
UNCHECKED = "wall clock"
UNKNOWN = "no wall clock: placed at the first start of the others"
ASSUMED = "no wall clock in any trace: times as recorded"
_WITHOUT = (UNKNOWN, ASSUMED)

RULE = (
    f"a host's clock is moved where the ends of collectives show it off by more than "
    f"{CLOCKS_AGREE_NS // 1000} µs and {SURE_FACTOR} times the spread; ranks of one host are moved "
    "together, unless one of them differs from its host by as much"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """By how much one rank's clock is corrected, and on which evidence."""

    rank: int
    method: str  # `MOVED`, `CONFIRMED`, `UNCHECKED`, `UNKNOWN` or `ASSUMED`
    moved_ns: int  # subtracted from its times
    offset_ns: int | None
    """How far it is ahead by the ends of collectives; None without matched collectives."""
    residual_ns: int | None
    """The spread of that over the collectives (1.48 MAD): a smaller offset is noise."""
    collective_count: int  # matched collectives that it takes part in


def rank_clocks(
    inputs: Mapping[int, TraceInput], *, by_collectives: bool = True,
    progress: Progress | None = None,
) -> list[RankClock]:  # fmt: skip
    """Chooses the clock correction of each rank."""
    timed = {rank: each for rank, each in inputs.items() if each.has_wall_clock}
    comparable = timed or inputs
    offsets = {}
    if by_collectives and len(comparable) > 1:
        paths: Sequence[Path] = [each.path for each in comparable.values()]
        found = default_pool(paths).map(collective_kernels, paths, {}, progress)
        empty = [(0, pl.DataFrame(schema=KERNELS_SCHEMA))]
        kernels = device_time.with_rank([*empty, *zip(comparable, found, strict=True)])
        on_gpus = kernels.filter(pl.col("device").ne_missing(ON_CPU))  # gloo's end them ms apart
        rows = clock_offsets(match_collectives(on_gpus)).iter_rows(named=True)
        offsets = {row["rank"]: row for row in rows}
    # What is subtracted from each rank's times, by `RULE`.
    groups: dict[str | int, list[int]] = {}
    for rank in (rank for rank, row in offsets.items() if row["offset_ns"] is not None):
        groups.setdefault(comparable[rank].host or rank, []).append(rank)
    moved: dict[int, int] = {}
    for ranks in groups.values():
        rows_of = [offsets[rank] for rank in ranks]
        together = round(median(row["offset_ns"] for row in rows_of))
        several = min(row["collective_count"] for row in rows_of) > 1
        sure = several and is_sure(together, max(row["residual_ns"] for row in rows_of))
        together = together if sure else 0
        for rank, row in zip(ranks, rows_of, strict=True):
            apart = is_sure(row["offset_ns"] - together, row["residual_ns"])
            moved[rank] = row["offset_ns"] if row["collective_count"] > 1 and apart else together
    start_ns = min((each.base_ns + (each.first_ns or 0) for each in timed.values()), default=0)
    clocks = []
    for rank, each in inputs.items():
        row = offsets.get(rank, {})
        count = row.get("collective_count", 0)
        method = MOVED if moved.get(rank) else CONFIRMED if count else UNCHECKED
        shift = moved.get(rank, 0)
        if rank not in comparable:
            method, shift = UNKNOWN, each.base_ns + (each.first_ns or 0) - start_ns
        elif not timed and method == UNCHECKED:
            method = ASSUMED
        clocks.append(RankClock(
            rank=rank, method=method, moved_ns=shift, offset_ns=row.get("offset_ns"),
            residual_ns=row.get("residual_ns"), collective_count=count,
        ))  # fmt: skip
    return clocks


def clock_notes(inputs: Mapping[int, TraceInput], clocks: Sequence[RankClock]) -> list[str]:
    """Notes on the clocks, for people."""
    found = [f"rank {each.rank}: {each.method}" for each in clocks if each.method in _WITHOUT]
    found += [
        f"rank {each.rank}: its clock was ahead by {duration_text(each.moved_ns)}, by "
        f"{each.collective_count} collectives; its times are moved back"
        for each in clocks
        if each.method == MOVED
    ]
    unchecked = [str(each.rank) for each in clocks if each.method == UNCHECKED]
    if len(clocks) > 1 and unchecked:
        hosts = {each.host for each in inputs.values()}
        shared = len(hosts) == 1 and None not in hosts
        where = "of one host, which its ranks share" if shared else "as the hosts have them"
        ranks = "all ranks" if len(unchecked) == len(clocks) else f"ranks {', '.join(unchecked)}"
        found.append(f"{ranks}: not compared by collectives; wall clocks {where}")
    return found
