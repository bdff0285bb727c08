"""Per rank: instructions, cycles, misses of caches and TLB, fills from near and far DRAM."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from haiprof.agent.samplers.ranks import RankSampler
from haiprof.agent.samplers.table import Node, RankProcess
from haiprof.linux.perf_events import (
    EXCLUDE_KERNEL,
    INHERIT,
    TYPE_CACHE,
    TYPE_HARDWARE,
    TYPE_RAW,
    Event,
    Kernel,
    ScaledSum,
    Share,
    close_all,
    read_sum,
    refusal,
)
from haiprof.linux.procfs import read_start_ticks
from haiprof.linux.readings import Entity, EntityGone, Reading, Unavailable, Value
from haiprof.linux.topology import Cpu, no_core_pmu, read_cpu
from haiprof.run_format.tables import REMOTE_MEMORY

LINE_BYTES = 64
INSTRUCTIONS, CYCLES = "instruction_count", "cycle_count"
CACHE, TLB = "cache_miss_count", "tlb_miss_count"
LOCAL, REMOTE = "local_dram_bytes", "remote_dram_bytes"
_CACHE_MISSES, _TLB_LOAD_MISSES = 3, 3 | 0 << 8 | 1 << 16
"""PERF_COUNT_HW_CACHE_MISSES; PERF_COUNT_HW_CACHE_DTLB with OP_READ and RESULT_MISS: the kernel
knows which event of Intel's or AMD's that is (perf_event_open(2))."""
_OWN_THREADS = EXCLUDE_KERNEL | INHERIT


def _raw(name: str, config: int, config1: int = 0) -> Event:
    return Event(name=name, type=TYPE_RAW, config=config, config1=config1, bits=_OWN_THREADS)


# Intel: fills of the core caches, prefetches included, from DRAM of the own and of other sockets
# (Linux tools/perf pmu-events, icelakex and sapphirerapids, OCR.READS_TO_CORE; the second number
# is MSR_OFFCORE_RSP).
_ICE_LAKE = (
    _raw("OCR.READS_TO_CORE.LOCAL_SOCKET_DRAM", 0x01B7, 0x70C000477),
    _raw("OCR.READS_TO_CORE.REMOTE_DRAM", 0x01B7, 0x730000477),
)
_SAPPHIRE_RAPIDS = (
    _raw("OCR.READS_TO_CORE.LOCAL_SOCKET_DRAM", 0x012A, 0x70C004477),
    _raw("OCR.READS_TO_CORE.REMOTE_DRAM", 0x012A, 0x730004477),
)
# Loads alone, without prefetches.
_LOADS = (
    _raw("MEM_LOAD_L3_MISS_RETIRED.LOCAL_DRAM", 0x01D3),
    _raw("MEM_LOAD_L3_MISS_RETIRED.REMOTE_DRAM", 0x02D3),
)
_INTEL = {
    85: _LOADS,  # Skylake, Cascade Lake, Cooper Lake servers
    106: _ICE_LAKE,
    108: _ICE_LAKE,
    143: _SAPPHIRE_RAPIDS,
    207: _SAPPHIRE_RAPIDS,  # Emerald Rapids
    173: _LOADS,  # Granite Rapids
    174: _LOADS,
}
# AMD: fills of the first-level data cache from DRAM of the same and of other NUMA nodes
# (amdzen3 to 5; Zen 2 counts demand alone). What came through the L2 by prefetch is not in it.
_ZEN3 = (
    _raw("ls_any_fills_from_sys.dram_io_near", 0x0844),
    _raw("ls_any_fills_from_sys.dram_io_far", 0x4044),
)
_ZEN2 = (
    _raw("ls_refills_from_sys.ls_mabresp_lcl_dram", 0x0843),
    _raw("ls_refills_from_sys.ls_mabresp_rmt_dram", 0x4043),
)


def core_events(cpu: Cpu) -> Mapping[str, Event | Unavailable]:
    """What fills each counter of the table `remote_memory`, or why nothing does."""
    local, remote = _fills(cpu)
    return {
        INSTRUCTIONS: Event(name="instructions", type=TYPE_HARDWARE, config=1, bits=_OWN_THREADS),
        CYCLES: Event(name="cycles", type=TYPE_HARDWARE, config=0, bits=_OWN_THREADS),
        LOCAL: local,
        REMOTE: remote,
        CACHE: Event(name="cache-misses", type=TYPE_HARDWARE, config=_CACHE_MISSES,
                     bits=_OWN_THREADS),
        TLB: Event(name="dTLB-load-misses", type=TYPE_CACHE, config=_TLB_LOAD_MISSES,
                   bits=_OWN_THREADS),
    }  # fmt: skip


def _fills(cpu: Cpu) -> tuple[Event | Unavailable, Event | Unavailable]:
    if cpu.vendor == "GenuineIntel" and cpu.family == 6 and cpu.model in _INTEL:
        return _INTEL[cpu.model]
    if cpu.vendor == "AuthenticAMD" and cpu.family in (0x19, 0x1A):
        return _ZEN3
    if cpu.vendor == "AuthenticAMD" and cpu.family == 0x17 and cpu.model >= 0x30:
        return _ZEN2
    # Neoverse's REMOTE_ACCESS also counts what came from the caches of the other socket.
    why = Unavailable(f"no events for DRAM near and far are known for {cpu}", status="unsupported")
    return why, why


_OWN_PROCESS = 2  # the kernel.perf_event_paranoid that allows counting one's own user code
_TRIES = 5
_MANY = 100_000_000
_FILTERED = Unavailable(
    "the PMU of this virtual machine counts no DRAM fills: its host filters the event",
    status="unsupported",
)


class RemoteMemorySampler(RankSampler):
    """One record per rank process: what its threads and children did since it was first seen."""

    name = "remote_memory"
    recorder = "perf"
    table = REMOTE_MEMORY

    def __init__(
        self,
        node: Node,
        *,
        kernel: Kernel | None = None,
        events: Mapping[str, Event | Unavailable] | None = None,
        spare: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(node)
        self._kernel = kernel or Kernel()
        self._cpu = read_cpu(self.root)
        self._events = dict(events or core_events(self._cpu))
        self._spare = spare or spare_files

    def find(self) -> Iterable[Entity]:
        """Tries each event on haiprof's own thread; ranks come with `refresh`."""
        for column, event in self._events.items():
            if isinstance(event, Event):
                try:
                    self._kernel.close(self._kernel.open(event.attr(), 0, -1))
                except OSError as error:
                    virtual = no_core_pmu(self.root, self._cpu)
                    self._events[column] = refusal(
                        error, event, self.root, allowing=_OWN_PROCESS, virtual=virtual
                    )
        refusals = {c: each for c, each in self._events.items() if isinstance(each, Unavailable)}
        if len(refusals) == len(self._events):
            raise next(iter(refusals.values()))
        for column, why in refusals.items():
            self.missing.note(column, why)
        return super().find()

    def header(self) -> dict[str, object]:
        """`entities`, and `events`: what fills each column."""
        events = {c: each.name for c, each in self._events.items() if isinstance(each, Event)}
        return {**super().header(), "events": events}

    def readings(self, process: RankProcess) -> tuple[Reading, ...]:
        """One reading of all counters; they are opened at the first."""
        counters = RankCounters(
            process, self._events, root=self.root, kernel=self._kernel, spare=self._spare,
            virtual=self._cpu.virtual,
        )  # fmt: skip
        return (
            Reading(
                columns=(*self._events, "counted_ratio"),
                origin=f"perf_event_open, threads of process {process.pid}",
                read=counters.read,
                close=counters.close,
            ),
        )


@dataclass
class RankCounters:
    """The counters of one process: one per event and thread, inherited by what starts later."""

    process: RankProcess
    events: Mapping[str, Event | Unavailable]
    root: Path
    kernel: Kernel
    spare: Callable[[], int]
    """How many more files may be opened."""
    virtual: bool
    _share: Share = field(default_factory=Share)
    _sums: dict[str, ScaledSum | Unavailable] = field(default_factory=dict)

    def read(self) -> Sequence[Value | Unavailable]:
        """One value per event, then the share of the time in which they counted."""
        if read_start_ticks(self.root, self.process.pid) != self.process.start_ticks:
            raise EntityGone
        if not self._sums:
            self._sums = self._open()
        values: dict[str, Value | Unavailable] = {
            column: each if isinstance(each, Unavailable) else read_sum([each], "reading a counter")
            for column, each in self._sums.items()
        }
        if self.virtual and _is_filtered(values):
            values = {**values, LOCAL: _FILTERED, REMOTE: _FILTERED}
        return (*values.values(), self._share.take())

    def close(self) -> None:
        """Ends the counting."""
        close_all(each for each in self._sums.values() if isinstance(each, ScaledSum))
        self._sums = {}

    def _open(self) -> dict[str, ScaledSum | Unavailable]:
        """Counters for every thread there is.

        A thread that appears meanwhile may be counted by inheritance or not at all, according to
        which thread has started it: everything is then opened anew.
        """
        for _ in range(_TRIES):
            threads = self._threads()
            count, spare = len(threads), self.spare()
            needed = count * sum(isinstance(each, Event) for each in self.events.values())
            if needed > spare:
                reason = f"{count} threads need {needed} open files, haiprof may open {spare}"
                raise Unavailable(reason, status="denied", remedy="a higher ulimit -n")
            opened = {column: self._open_event(column, threads) for column in self.events}
            if self._threads() <= threads:
                return opened
            close_all(each for each in opened.values() if isinstance(each, ScaledSum))
        raise Unavailable("threads start faster than their counters can be opened")

    def _open_event(self, column: str, threads: Iterable[int]) -> ScaledSum | Unavailable:
        event = self.events[column]
        if isinstance(event, Unavailable):
            return event
        unit = Fraction(LINE_BYTES if column in (LOCAL, REMOTE) else 1)
        counted = ScaledSum(self.kernel, event, self._share, unit)
        try:
            for thread in sorted(threads):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    counted.open(pid=thread, cpu=-1)
        except OSError as error:
            counted.close()
            return refusal(error, event, self.root, allowing=_OWN_PROCESS, virtual="")
        return counted

    def _threads(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(f"{self.root}/proc/{self.process.pid}/task")}
        except OSError:
            raise EntityGone from None


def _is_filtered(values: Mapping[str, Value | Unavailable]) -> bool:
    """Nobody runs so many instructions without a byte from memory."""
    done = values.get(INSTRUCTIONS)
    return isinstance(done, int) and done > _MANY and values.get(LOCAL) == 0


def spare_files() -> int:
    """Half of what this process may have open, less what it has: the rest is the launcher's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(0, limit // 2 - len(os.listdir("/proc/self/fd")))
