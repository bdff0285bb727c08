"""What the kernel writes for a control group's limits: CPU cores and bytes of memory."""

from __future__ import annotations

from collections.abc import Sequence

V1_UNLIMITED_BYTES = 1 << 62
"""Version 1 writes LONG_MAX in whole pages for no limit; no machine has half of it."""


def parse_cpu_limit(words: Sequence[bytes]) -> float | None:
    """A CPU quota in cores; None where there is none (`max`, and -1 in version 1).

    Source: Linux Documentation/scheduler/sched-bwc.rst, admin-guide/cgroup-v2.rst (cpu.max).
    """
    quota_us, period_us = words
    if quota_us == b"max" or int(quota_us) < 0:
        return None
    if int(period_us) <= 0:
        raise ValueError("a period of no time")
    return int(quota_us) / int(period_us)


def parse_memory_limit(word: bytes) -> int | None:
    """A memory limit in bytes; None where there is none."""
    return None if word == b"max" or int(word) >= V1_UNLIMITED_BYTES else int(word)
