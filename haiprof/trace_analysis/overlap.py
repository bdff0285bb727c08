"""Communication-computation overlap, and GPU time by the combination of kinds."""

from __future__ import annotations

from functools import reduce

import polars as pl

from haiprof.base.intervals import Intervals, difference, intersection, total
from haiprof.trace_analysis.classify import COMMUNICATION, COMPUTATION, KINDS, with_kind
from haiprof.trace_analysis.temporal import Steps, gpu_events, union_of
from haiprof.trace_format.kineto.rank_trace import Trace

OVERLAP_SCHEMA = {
    "device": pl.Int64,
    "compute_ns": pl.Int64,
    "communication_ns": pl.Int64,
    "overlap_ns": pl.Int64,
    "overlap_ratio": pl.Float64,
}
TYPES_SCHEMA = {
    "device": pl.Int64,
    "kernel_type": pl.String,
    "time_ns": pl.Int64,
    "time_ratio": pl.Float64,
}


def overlap(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """How much of the communication of each GPU computation hides.

    Source: HTA get_comm_comp_overlap, in integer ns (D1) and per device (D12).
    """
    rows = [
        (device, *_overlap(kinds[COMPUTATION], kinds[COMMUNICATION]))
        for device, kinds in _times(trace, steps)
    ]
    nothing = [(None,) * len(OVERLAP_SCHEMA)]
    return pl.DataFrame(rows or nothing, schema=OVERLAP_SCHEMA, orient="row").sort("device")


def _overlap(compute: Intervals, talk: Intervals) -> tuple[int, int, int, float | None]:
    both, talk_ns = total(intersection(compute, talk)), total(talk)
    return total(compute), talk_ns, both, both / talk_ns if talk_ns else None


def kernel_types(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """The busy time of each GPU by the kinds of event that ran at the same time.

    Source: the first frame of HTA get_gpu_kernel_breakdown, which adds all ranks together,
    cuts each piece to whole us (D3) and merges devices (D12).
    """
    rows = [
        (device, name, time_ns) for device, kinds in _times(trace, steps)
        for name, time_ns in _combinations(kinds)
    ]  # fmt: skip
    whole = pl.col("time_ns").sum().over("device")
    found = pl.DataFrame(rows, schema=list(TYPES_SCHEMA.items())[:-1], orient="row")
    return found.with_columns(time_ratio=pl.when(whole > 0).then(pl.col("time_ns") / whole)).sort(
        "device", maintain_order=True
    )


def _times(trace: Trace, steps: Steps) -> list[tuple[object, dict[str, Intervals]]]:
    """When each kind ran, per device."""
    gpu = with_kind(gpu_events(trace, steps))
    return [
        (key[0], {kind: union_of(events.filter(pl.col("kind") == kind)) for kind in KINDS})
        for key, events in gpu.group_by("device", maintain_order=True)
    ]


def _combinations(kinds: dict[str, Intervals]) -> list[tuple[str, int]]:
    """Each combination of kinds, and how long just those ran."""
    found = []
    for bits in range(1, 1 << len(KINDS)):
        inside = [kind for place, kind in enumerate(KINDS) if bits >> place & 1]
        outside = [kind for kind in KINDS if kind not in inside]
        both = reduce(intersection, (kinds[kind] for kind in inside))
        alone = reduce(difference, (kinds[kind] for kind in outside), both)
        found.append((len(inside), " overlapping ".join(inside), total(alone)))
    return [(name, time_ns) for _, name, time_ns in sorted(found, key=lambda row: row[0])]
