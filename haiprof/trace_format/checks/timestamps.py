"""Events that are twice in a trace or far from all others, and times in a wrong unit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from haiprof.trace_format.checks.finding import EVERYTHING, Finding, count_text

_EVENTS_LEAST = 20  # fewer do not tell where the middle of a trace is
_FAR_SPANS = 50
_SPAN_LEAST_NS = 1_000_000_000
_FAR_SHARE = 0.01
_IDLE_LEAST_NS = 100_000_000
_LAUNCH = "LaunchKernel"
# The shortest tenth of launch calls takes 2 to 10 us on every machine seen, of kernels 1 to 20 us.
_LAUNCH_LEAST_NS, _LAUNCH_MOST_NS = 200, 800_000
_KERNEL_LEAST_NS, _KERNEL_MOST_NS = 1_000, 400_000


def without_far(events: pl.DataFrame) -> pl.DataFrame:
    """Events by start without the few that begin far from all others."""
    count = len(events)
    if count < _EVENTS_LEAST:
        return events
    starts = events["ts_ns"]
    low, high = int(starts[count // 10]), int(starts[count - 1 - count // 10])
    far = _FAR_SPANS * max(high - low, _SPAN_LEAST_NS)
    if int(starts[0]) >= low - far and int(starts[-1]) <= high + far:
        return events
    near = events.filter(pl.col("ts_ns").is_between(low - far, high + far))
    return near if count - len(near) <= max(1, _FAR_SHARE * count) else events


def without_far_from_host(gpu: pl.DataFrame, host: tuple[int, int] | None) -> pl.DataFrame:
    """GPU events without the few that no call of the host explains.

    A GPU works on after the host's last call, and may have begun before its first, but then without
    a pause: nothing that it runs was launched outside of that window.
    """
    count = len(gpu)
    if host is None or count < _EVENTS_LEAST:
        return gpu
    limit = max(host[1] - host[0], _IDLE_LEAST_NS)
    early, late = host[0] - limit, host[1] + limit
    starts = gpu["ts_ns"].to_numpy()
    if starts[0] >= early and starts[-1] <= late:
        return gpu
    reached = np.maximum.accumulate(starts + gpu["dur_ns"].to_numpy())[:-1]
    pauses = np.flatnonzero(starts[1:] - reached > limit)
    before, after = pauses[reached[pauses] < early], pauses[starts[pauses + 1] > late]
    first = int(before[-1]) + 1 if len(before) else 0
    last = int(after[0]) + 1 if len(after) else count
    far = count - (last - first)
    return gpu[first:last] if 0 < far <= max(1, _FAR_SHARE * count) else gpu


def far_finding(counts: Mapping[str, int]) -> Finding | None:
    """What is said of events that `without_far` and `without_far_from_host` left out."""
    what, effect = "far in time from all others", "left out of all answers"
    return _event_finding(counts, "far_timestamps", what=what, effect=effect)


def without_duplicates(events: pl.DataFrame, key: str) -> pl.DataFrame:
    """Events by start, each once."""
    starts, durations = events["ts_ns"].to_numpy(), events["dur_ns"].to_numpy()
    same = (starts[1:] == starts[:-1]) & (durations[1:] == durations[:-1])
    if not same.any():
        return events
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    rows = events[tied].filter(pl.col(key) > 0)
    again = rows.filter(~rows.select(pl.exclude("event")).is_unique())
    later = again.filter(~pl.struct(pl.exclude("event")).is_first_distinct())
    return events.join(later.select("event"), on="event", how="anti") if len(later) else events


def duplicate_finding(counts: Mapping[str, int]) -> Finding | None:
    """What is said of events that `without_duplicates` left out."""
    return _event_finding(counts, "duplicate_events", what="recorded twice", effect="counted once")


def _event_finding(
    counts: Mapping[str, int], check: str, *, what: str, effect: str
) -> Finding | None:
    found = {table: count for table, count in counts.items() if count}
    if not found:
        return None
    total, names = sum(found.values()), ", ".join(f"{n} of {table}" for table, n in found.items())
    return Finding(
        check=check,
        count=total,
        text=f"{count_text(total, 'event')} {what} ({names})",
        effect=effect,
        answers=EVERYTHING,
    )


def unit_finding(gpu: pl.DataFrame, runtime: pl.DataFrame) -> Finding | None:
    """Times a thousand times too long or too short, by launch calls and kernels together."""
    names = runtime["name"].unique()
    launches = names.filter(names.cast(pl.String).str.contains(_LAUNCH))
    calls = runtime.filter(pl.col("name").is_in(launches.implode()))["dur_ns"]
    if len(calls) < _EVENTS_LEAST or len(gpu) < _EVENTS_LEAST:
        return None
    call, kernel = (float(np.quantile(each.to_numpy(), 0.1)) for each in (calls, gpu["dur_ns"]))
    median = float(np.median(calls.to_numpy()))
    longest = float(np.quantile(gpu["dur_ns"].to_numpy(), 0.9))
    if call > _LAUNCH_MOST_NS and kernel > _KERNEL_MOST_NS:
        said, advice = "1000 times too long: nanoseconds written as us", "divide by 1000"
    elif median < _LAUNCH_LEAST_NS and longest < _KERNEL_LEAST_NS:
        said, advice = "1000 times too short: milliseconds written as us", "multiply by 1000"
    else:
        return None
    return Finding(
        check="wrong_unit",
        count=len(gpu) + len(runtime),
        text=f"all times seem {said} (the median launch call takes {median / 1e3:,.3f} µs)",
        effect=f"shares hold, durations do not: {advice}",
        answers=EVERYTHING,
    )
