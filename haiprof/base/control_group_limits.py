"""What the kernel writes for CPUs, and for a control group's limits of cores and memory."""

from __future__ import annotations

from collections.abc import Sequence

_CPU_LIMIT = 1 << 16  # Linux is built for 8,192 at most
V1_UNLIMITED_BYTES = 1 << 62  # version 1's none is LONG_MAX in pages: no machine has half of it


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


def parse_cpu_list(text: str) -> list[int]:
    """CPUs of a list as the kernel prints it: `0-3,8`."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), min(int(last or first) + 1, int(first) + _CPU_LIMIT)))
        if len(cpus) >= _CPU_LIMIT:
            raise ValueError("no list of CPUs")
    return cpus
