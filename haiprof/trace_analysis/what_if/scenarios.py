"""Default what-if scenarios: the loader, the network, launches, the largest names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.device_time import COMMUNICATION, Steps
from haiprof.trace_analysis.kernel_names import short_kernel_name
from haiprof.trace_analysis.what_if.replay import (
    KERNEL,
    LOADER_NAME,
    OPERATOR,
    Change,
    faster_launches,
    faster_loader,
    faster_network,
    rank_as_others,
)
from haiprof.trace_format.kineto.events import GPU_BACKENDS

if TYPE_CHECKING:
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

SPEEDUP = 2.0  # the speed-up of each change in the default scenarios
NAME_COUNT = 6  # how many kernels and how many operators are tried: those with the most time
RANK_COUNT = 4  # how many ranks are tried alone: those that hold the others up most
# Ranges that stand among operators, and what the network is asked about.
_NO_OPERATORS = rf"{LOADER_NAME}|^ProfilerStep|^record_param_comms|^c10d::|^(?:{GPU_BACKENDS}):"


def scenarios(analysis: TraceQuestions, steps: Steps = None) -> list[Change]:
    """Chooses the default changes: each thing twice as fast, each late rank as fast as others."""
    operators = analysis.operator_kernels(steps).with_columns(pl.col("operator").cast(pl.String))
    # Whether PyTorch's DataLoader shows in the traces; until 2022 as an operator.
    names = (analysis.annotation_breakdown()["name"].cast(pl.String), operators["operator"])
    has_loader = any(own.str.contains(LOADER_NAME).any() for own in names)
    found = [faster_loader(SPEEDUP)] if has_loader else []
    has_gpu = int(analysis.load_report()["gpu_count"].sum()) > 0
    if has_gpu:
        # The kernels with the most time; those that differ in template arguments are one.
        work = analysis.kernel_breakdown(steps).filter(pl.col("kind") != COMMUNICATION)
        name, ns = pl.col("name").cast(pl.String), pl.col("sum_ns")
        short = name.map_elements(short_kernel_name, pl.String)
        times = work.drop_nulls("name").group_by(short=short).agg(name.unique(), ns.sum())
        most = times.sort(-ns, "short").filter(ns > 0).head(NAME_COUNT).select("name", "short")
        found += [faster_launches(SPEEDUP), *(_exact_names(KERNEL, *row) for row in most.rows())]
    own = pl.col("cpu_self_ns") + pl.col("gpu_self_ns").fill_null(0)
    plain = ~pl.col("operator").str.contains(_NO_OPERATORS)
    sums = operators.filter(plain).group_by("operator").agg(own.sum())
    largest = sums.sort(-pl.col("cpu_self_ns"), "operator").filter(pl.col("cpu_self_ns") > 0)
    found += [_exact_names(OPERATOR, [name], name) for name in largest["operator"].head(NAME_COUNT)]
    if len(analysis.files) > 1:
        late: list[Change] = []
        with contextlib.suppress(MissingDataError):
            ranks = analysis.arrival_lateness(steps).filter(pl.col("late_ns") > 0)["rank"]
            late = [rank_as_others(rank) for rank in ranks.head(RANK_COUNT)]
        found.append(rank_as_others())
        if has_gpu or late:
            found += [faster_network(SPEEDUP), *late]
    return found


def _exact_names(kind: str, names: Iterable[str], shown: str) -> Change:
    """A change of exactly these names."""
    exact = "|".join(re.escape(name) for name in sorted(names))
    return replace(Change(kind=kind, name=rf"\A(?:{exact})\Z", speedup=SPEEDUP), shown=shown)
