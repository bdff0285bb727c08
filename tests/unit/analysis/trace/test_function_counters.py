"""Hardware samples joined to functions: only a sample that is mostly one function's tells of it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from haiprof.run_analysis.counters import COUNTER_SCHEMA
from haiprof.trace_analysis.pattern_gathering import function_counters
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import kernel, launch, trace_of

BASE_NS = 1_700_000_000_000_000_000
GEMM, NCCL = "gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def samples(every_us: int, values: dict[str, list[tuple[int, int, float]]]) -> pl.DataFrame:
    """Each metric by (from, to, value) in us, sampled at the end of each interval."""
    rows = []
    for metric, parts in values.items():
        for at in range(0, 1001, every_us):
            value = next((v for first, last, v in parts if first < at <= last), 0.0)
            rows.append({"time_ns": BASE_NS + at * 1000, "host": "node0", "source": "burst",
                         "entity": "gpu 0", "rank": 0, "gpu": 0, "metric": metric,
                         "unit": "ratio", "value": value, "flag": None})  # fmt: skip
    return pl.DataFrame(rows, schema=COUNTER_SCHEMA)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """A product from 0 to 400 us, an all-reduce from 400 to 700, and a short kernel at 900."""
    events = [
        launch(1, 0), kernel(GEMM, 0, 400, correlation=1),
        kernel(NCCL, 400, 300, stream=9), kernel("relu", 910, 20), kernel("end", 995, 5),
    ]  # fmt: skip
    return trace_of(tmp_path, events, baseTimeNanoseconds=BASE_NS)


def test_samples_tell_what_the_hardware_did_while_a_function_ran(trace: Trace) -> None:
    found = function_counters(trace, samples(100, {
        "sm_active_ratio": [(0, 400, 0.9), (400, 700, 0.1), (700, 1000, 0.3)],
        "nvlink_transmit_ratio": [(400, 500, 0.2), (500, 700, 0.5)],
    }))  # fmt: skip
    by_name = found.rows_by_key(["name", "metric"], named=True, unique=True)
    assert by_name[GEMM, "sm_active_ratio"]["mean"] == pytest.approx(0.9)
    assert by_name[GEMM, "sm_active_ratio"]["sample_count"] == 4
    link = by_name[NCCL, "nvlink_transmit_ratio"]
    assert (link["kind"], link["type"]) == ("communication", "ring all_reduce")
    assert link["mean"] == pytest.approx(0.4)
    assert (link["min"], link["max"], link["interval_ns"]) == (0.2, 0.5, 100_000)
    assert link["std"] == pytest.approx(0.02**0.5)
    kinds = found.filter(pl.col("name").is_null())
    assert set(kinds["kind"]) == {"gpu-compute", "communication"}
    assert "relu" not in set(found["name"])  # 20 of 100 us: the sample is not its own


def test_samples_that_are_too_far_apart_say_nothing(trace: Trace) -> None:
    wide = samples(1000, {"sm_active_ratio": [(0, 1000, 0.5)]})
    assert function_counters(trace, wide).is_empty()
    assert function_counters(trace, wide.clear()).is_empty()


def test_samples_of_another_time_are_not_joined(trace: Trace) -> None:
    later = samples(100, {"sm_active_ratio": [(0, 1000, 0.5)]}).with_columns(
        pl.col("time_ns") + 10**9
    )
    assert function_counters(trace, later).is_empty()
