"""What a counter's growth is called, and how much one has grown between two samples."""

from __future__ import annotations

import math

from haiprof.run_format.schema import NULL_I64, CounterEnd

# What a counter of ns per ns is called; others of its kind become ratios under their own name.
_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_RATES_OF_NS = {
    **{f"cpu_{state}_ns": (f"cpu_{state}_cores", "cores") for state in _CPU_STATES},
    "cpu_ns": ("cpu_cores", "cores"),
    "cpu_main_ns": ("cpu_main_cores", "cores"),
    "cpu_throttled_ns": ("cpu_throttled_cores", "cores"),
    "disk_busy_ns": ("disk_busy_count", "count"),
    "receive_pause_ns": ("receive_paused_priority_count", "count"),
    "transmit_pause_ns": ("transmit_paused_priority_count", "count"),
}
NS_OF_EVENTS = {
    **{
        f"{events}_{part}_ns": f"{events}_count"
        for events in ("server_read", "server_write", "metadata")
        for part in ("queue", "rtt", "execute")
    },
}
"""Counters of ns that events took, with the counter of those events: the mean of one is shown."""


def rate_of(name: str, unit: str) -> tuple[str, str]:
    """What a counter's growth over time is called, and its unit."""
    if unit == "ns":
        return _RATES_OF_NS.get(name, (f"{name.removesuffix('_ns')}_ratio", "ratio"))
    return f"{name}_per_s", f"{unit}/s"


def is_known(value: float) -> bool:
    """Whether a stored value is one, and not the sign of a missing one."""
    return value != NULL_I64 and math.isfinite(value)


def growth(before: float, now: float, end: CounterEnd) -> float | None:
    """By how much a counter grew; None where that cannot be known: missing, set back, saturated.

    One that goes back has wrapped if it grew by less than half its range, else it was set back
    (serial number arithmetic, RFC 1982).
    """
    bits, sticks, scale = end
    if not (is_known(before) and is_known(now)) or (sticks and now == scale * ((1 << bits) - 1)):
        return None
    grown = now - before
    if grown < 0 and not sticks and scale << bits < 1 << 63:
        grown += scale << bits
        return grown if 0 <= grown < scale << (bits - 1) else None
    return grown if grown >= 0 else None
