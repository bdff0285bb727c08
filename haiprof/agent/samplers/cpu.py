"""CPU time by mode, context switches and tasks of a node, from /proc/stat."""

from __future__ import annotations

from haiprof.linux.procfs import TICK_NS

Values = tuple[int | None, ...]

CPU_COLUMNS = (
    "cpu_user_ns",
    "cpu_nice_ns",
    "cpu_system_ns",
    "cpu_idle_ns",
    "cpu_iowait_ns",
    "cpu_irq_ns",
    "cpu_softirq_ns",
    "cpu_steal_ns",
    "cpu_count",
    "context_switch_count",
    "task_running_count",
    "task_blocked_count",
)
_IDLE, _IOWAIT = 3, 4  # places in the first line


class CpuTimes:
    """Parses /proc/stat into CPU_COLUMNS.

    The kernel's idle and iowait may decrease by some ticks; they keep their highest value until
    the whole file is reset. Guest time is already part of user time.

    Source: Linux Documentation/filesystems/proc.rst, section 1.7.
    """

    def __init__(self) -> None:
        self._last = [0] * 8

    def __call__(self, content: bytes) -> Values:
        """The values; of the CPUs, from the first line alone."""
        words = content[: content.index(b"\n")].split()
        if words[0] != b"cpu":
            raise ValueError("the first line is not the sum of all CPUs")
        times = [int(word) for word in words[1:9]]
        if len(times) != len(self._last):
            raise ValueError("not every mode is there")
        if times[0] >= self._last[0]:
            for mode in (_IDLE, _IOWAIT):
                times[mode] = max(times[mode], self._last[mode])
        self._last = times
        counts = (_last_number(content, name) for name in _COUNTS)
        return (*(ticks * TICK_NS for ticks in times), content.count(b"\ncpu"), *counts)


_COUNTS = (b"\nctxt ", b"\nprocs_running ", b"\nprocs_blocked ")


def _last_number(content: bytes, name: bytes) -> int | None:
    """The number after a name; from the end, as the line of interrupts before it is long."""
    at = content.rfind(name)
    return None if at < 0 else int(content[at + len(name) :].split(None, 1)[0])
