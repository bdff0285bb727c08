"""Hardware samples of a run joined to the functions of its traces: P1 beside P5 to P8."""

from __future__ import annotations

import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.run_analysis.counters import COUNTER_SCHEMA
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.pattern_gathering import COUNTERS_SCHEMA, function_counters
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

_HARDWARE = ("gpu", "gpu_health", "dcgm", "burst", "infiniband", "host", "memory_bandwidth")


def hardware_by_function(
    traces: TraceQuestions, run: RunFrames, *, steps: Steps = None, geometry: bool = False
) -> pl.DataFrame:
    """What the hardware's counters were while functions ran.

    Args:
        traces: Of the run's window.
        run: Whose counters and bursts are joined.
        steps: First profiler step and the one after the last; None takes all.
        geometry: As in `worker_pattern`.

    Returns:
        `rank`, and the columns of `function_counters`: a row per function and metric with samples
        that are at least half the function's. Without `--burst` samples are a second apart, so
        that most functions have none.
    """
    samples = hardware_samples(run)
    found = [pl.DataFrame(schema={"rank": pl.Int64, **COUNTERS_SCHEMA})]
    for rank, trace in traces.traces.items():
        host = traces.files[rank].host
        own = pl.col("rank") == rank
        if host is not None:
            own = own | (pl.col("gpu").is_null() & (pl.col("host") == host))
        rows = function_counters(trace, samples.filter(own), steps=steps, geometry=geometry)
        found.append(rows.select(pl.lit(rank, pl.Int64).alias("rank"), pl.all()))
    return pl.concat(found)


def hardware_samples(run: RunFrames) -> pl.DataFrame:
    """Samples of GPUs, links, DRAM and host, in the columns of `RunFrames.counters`."""
    counters = run.counters().filter(pl.col("source").is_in(_HARDWARE))
    return pl.concat([pl.DataFrame(schema=COUNTER_SCHEMA), counters, bursts_of(run)])


def bursts_of(run: RunFrames) -> pl.DataFrame:
    """A run's bursts; none where an export cannot be read."""
    try:
        return run.bursts()
    except RunFormatError:
        return pl.DataFrame(schema=COUNTER_SCHEMA)
