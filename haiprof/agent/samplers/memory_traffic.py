"""Memory traffic: of each socket by the best source that works here; of each rank, near and far."""

from __future__ import annotations

import itertools
import os
import re
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from haiprof.agent.samplers.ranks import RankSampler
from haiprof.agent.samplers.table import Node, RankProcess, TableSampler
from haiprof.base.control_group_limits import parse_cpu_list
from haiprof.base.version import read_data
from haiprof.linux import perf_events
from haiprof.linux.perf_events import TYPE_HARDWARE, TYPE_RAW, Counters, Event, Kernel, refusal
from haiprof.linux.procfs import list_names, read_start_ticks
from haiprof.linux.readings import Entity, EntityGone, Reading, Unavailable, Value
from haiprof.linux.topology import PMU_FOLDER, Cpu, no_core_pmu, node_count, read_cpu, socket_of_cpu
from haiprof.run_format.tables import MEMORY_BANDWIDTH, REMOTE_MEMORY

READ, WRITE, TOTAL, REMOTE = "read_bytes", "write_bytes", "total_bytes", "remote_bytes"
_UNIT_BYTES = {"MiB": 1 << 20, "KiB": 1 << 10, "Bytes": 1, "B": 1}
_RANGES = re.compile(r"(config[12]?):([\d,\-]+)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How a column is counted on one kind of PMU; its counters are summed."""

    column: str
    pmu: str  # pattern of the PMU's names in /sys/bus/event_source/devices
    named: Sequence[Sequence[str]] = ()
    """Events that the kernel may describe there, alternatives in order; with their own scale."""
    terms: Sequence[str] = ()  # the events themselves, where the kernel describes none
    unit: Fraction = Fraction(64)  # bytes per count of `terms`, and of named events if `unscaled`
    unscaled: bool = False  # the kernel gives its named events no scale


_EVENTS = read_data("agent/samplers/memory_traffic.json")
"""`memory` and `fills`: events of CPU models, with their sources; the first that fits counts."""


def _events_of(cpu: Cpu, kind: str) -> Mapping[str, Any] | None:
    """What the data file has of a CPU model; None for one that is not known."""
    for each in _EVENTS[kind]:
        is_family = each["families"] is None or cpu.family in each["families"]
        is_model = any(low <= cpu.model <= high for low, high in each["models"])
        if cpu.vendor == each["vendor"] and is_family and is_model:
            return each  # type: ignore[no-any-return]
    return None


def metrics_of(cpu: Cpu, root: Path) -> tuple[Metric, ...]:
    """The events of a CPU model."""
    if (found := _events_of(cpu, "memory")) is None:
        why = f"no memory controller events are known for {cpu}"
        raise Unavailable(why, status="unsupported")
    if found.get("one_node") and node_count(root) != len(set(socket_of_cpu(root).values())):
        why = f"{cpu}: its DRAM events cover a socket only where that is one NUMA node (NPS1)"
        raise Unavailable(why, status="unsupported")
    return tuple(
        Metric(**{**each, "unit": Fraction(each.get("unit", 64))}) for each in found["metrics"]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pmu:
    """One PMU in /sys/bus/event_source/devices."""

    name: str
    type: int
    cpus: tuple[int, ...]  # one CPU for each socket, or other unit, that it counts for
    formats: Mapping[str, str] = field(default_factory=dict)  # bits of each term: `config:0-7`
    events: Mapping[str, str] = field(default_factory=dict)
    """The events that the kernel describes, with `name.scale` and `name.unit`."""

    def event(self, terms: str) -> Event:
        """An event such as `event=0x04,umask=0x03`."""
        configs = {"config": 0, "config1": 0, "config2": 0}
        for term in terms.split(","):
            name, _, value = term.partition("=")
            word, bits = _bits(name, self.formats.get(name, f"{name}:0-63"), int(value or "1", 0))
            configs[word] |= bits
        return Event(name=f"{self.name}/{terms}/", type=self.type, **configs)


def find_pmus(root: Path, pattern: str) -> list[Pmu]:
    """The PMUs of that name; empty where there are none."""
    folder = root / PMU_FOLDER
    names = sorted(name for name in list_names(folder) if re.match(pattern, name))
    return [
        Pmu(
            name=name, type=int((folder / name / "type").read_text()),
            cpus=tuple(parse_cpu_list((folder / name / "cpumask").read_text())),
            formats=_texts(folder / name / "format"), events=_texts(folder / name / "events"),
        )
        for name in names
    ]  # fmt: skip


def unit_events(metric: Metric, pmu: Pmu) -> Iterable[tuple[Event, Fraction]]:
    """The events of a metric on one PMU, with the bytes per count of each."""
    for names in metric.named:
        found = [(name, _scale(pmu, name, metric)) for name in names if name in pmu.events]
        if len(found) == len(names) and all(scale is not None for _, scale in found):
            return [(pmu.event(pmu.events[name]), scale) for name, scale in found if scale]
    if metric.terms:
        return [(pmu.event(terms), metric.unit) for terms in metric.terms]
    reason = f"{pmu.name}: this kernel describes no event for {metric.column}"
    raise Unavailable(reason, status="unsupported", lasting=True)


def _scale(pmu: Pmu, name: str, metric: Metric) -> Fraction | None:
    """Bytes per count as the kernel says; `metric.unit` where it says nothing and that is known."""
    scale, unit = pmu.events.get(f"{name}.scale"), pmu.events.get(f"{name}.unit")
    if scale is None and unit is None and metric.unscaled:
        return metric.unit
    return None if scale is None or unit not in _UNIT_BYTES else Fraction(scale) * _UNIT_BYTES[unit]


def _bits(name: str, ranges: str, value: int) -> tuple[str, int]:
    """A term's value in the bits of its config word, lowest first."""
    if (match := _RANGES.match(ranges)) is None:
        raise ValueError(f"no place for the term {name}")
    bits, rest = 0, value
    for part in match[2].split(","):
        low, _, high = part.partition("-")
        width = int(high or low) - int(low) + 1
        bits |= (rest & ((1 << width) - 1)) << int(low)
        rest >>= width
    if rest:
        raise ValueError(f"{name}={value:#x} does not fit into {ranges}")
    return match[1], bits


def _texts(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text().strip() for name in list_names(folder)}


_EVERY_CPU = 0  # the kernel.perf_event_paranoid that allows counting a whole CPU


def uncore_entities(root: Path, kernel: Kernel) -> list[Entity]:
    """The counters of a CPU model on every socket; a column that cannot be counted says why."""
    cpu, sockets = read_cpu(root), socket_of_cpu(root)
    try:
        metrics = metrics_of(cpu, root)
    except Unavailable as why:
        raise Unavailable(no_core_pmu(root, cpu) or why.reason, status="unsupported") from None
    counters = {socket: Counters(kernel) for socket in sorted(set(sockets.values()))}
    origins: dict[str, str] = {}
    refused: dict[str, Unavailable] = {}
    for column in (READ, WRITE, TOTAL, REMOTE):
        own = [metric for metric in metrics if metric.column == column]
        try:
            names = _open_column(column, own, counters, root=root, sockets=sockets)
            origins[column] = f"perf_event_open of {len(names)} PMUs: {names[0]} to {names[-1]}"
        except Unavailable as why:
            refused[column] = why
            for each in counters.values():
                each.refuse(column, why)
    if not origins.keys() & {READ, WRITE, TOTAL}:
        for each in counters.values():
            each.close()
        known = {metric.column for metric in metrics}
        raise worst([why for column, why in refused.items() if column in known])
    return [_socket_entity(socket, each, origins) for socket, each in counters.items()]


def _open_column(
    column: str, metrics: Iterable[Metric], counters: Mapping[int, Counters], *, root: Path,
    sockets: Mapping[int, int],
) -> list[str]:  # fmt: skip
    """Opens all counters of a column on every socket; the names of their PMUs."""
    names: list[str] = []
    counted: set[int] = set()
    for metric in metrics:
        try:
            pmus = find_pmus(root, metric.pmu)
        except (OSError, ValueError) as error:
            raise Unavailable(f"{metric.pmu}: {error}", status="unsupported") from None
        if not pmus:
            if column == REMOTE and len(counters) == 1:
                raise Unavailable("there is no other socket")
            cpu = read_cpu(root)
            where = "virtual machine" if cpu.virtual else "kernel"
            name = metric.pmu.split("(")[0].removesuffix(r"\Z").replace(r"\d+", "*")
            raise Unavailable(no_core_pmu(root, cpu) or f"this {where} shows no PMU {name}")
        for pmu in pmus:
            names.append(pmu.name)
            try:
                events = list(unit_events(metric, pmu))
            except ValueError as error:
                raise Unavailable(f"{pmu.name}: {error}", status="unsupported") from None
            for number, (event, unit) in itertools.product(pmu.cpus, events):
                if (socket := sockets.get(number)) is None:
                    raise Unavailable(f"{pmu.name}: the socket of CPU {number} is not known")
                try:
                    counters[socket].open(column, event, unit, pids=(-1,), cpu=number)
                except OSError as error:
                    raise refusal(error, event, root, allowing=_EVERY_CPU, virtual="") from None
                counted.add(socket)
    if not names:
        reason = f"no event is known for {column} on {read_cpu(root)}"
        raise Unavailable(reason, status="unsupported")
    if counted != counters.keys():
        raise Unavailable(f"{names[0]}: not on every socket", status="unsupported")
    return names


def _socket_entity(socket: int, counters: Counters, origins: Mapping[str, str]) -> Entity:
    def read() -> Sequence[Value | Unavailable]:
        values = counters.read(origins)
        if TOTAL not in origins and READ in origins:
            parts = (values[READ], values[WRITE])
            known = [part for part in parts if not isinstance(part, Unavailable)]
            refused = [part for part in parts if isinstance(part, Unavailable)]
            values[TOTAL] = refused[0] if refused else sum(known)
        return (*values.values(), counters.take_share())

    reading = Reading(
        columns=(READ, WRITE, TOTAL, REMOTE, "counted_ratio"), read=read, close=counters.close,
        origin="perf_event_open, uncore PMUs",
    )  # fmt: skip
    details = {"source": "uncore", "origins": origins}
    name = f"socket {socket} (uncore)"
    return Entity(key=(socket,), name=name, readings=(reading,), details=details)


def worst(reasons: Sequence[Unavailable]) -> Unavailable:
    """The reason with a remedy, else the first one."""
    return min(reasons, key=lambda why: ("denied", "unsupported", "absent").index(why.status))


class MemoryBandwidthSampler(TableSampler):
    """One record per socket: of resctrl, else of memory controllers, which count other things."""

    recorder = "numa"
    table = MEMORY_BANDWIDTH

    def __init__(self, node: Node, *, kernel: Kernel | None = None) -> None:
        super().__init__(node)
        self._kernel = kernel or Kernel()

    def find(self) -> Iterable[Entity]:
        """The sockets, from the first source that gives a total."""
        try:
            return perf_events.resctrl_entities(self.root)
        except Unavailable as why:
            first = why
        try:
            return uncore_entities(self.root, self._kernel)
        except Unavailable as why:
            remedy = ", or ".join(each.remedy for each in (why, first) if each.remedy)
            reason, status = f"{why.reason}; {first.reason}", worst([why, first]).status
            raise Unavailable(reason, status=status, remedy=remedy) from None


LINE_BYTES = 64
INSTRUCTIONS, CYCLES = "instruction_count", "cycle_count"
CACHE, TLB = "cache_miss_count", "tlb_miss_count"
LOCAL_FILLS, REMOTE_FILLS = "local_dram_bytes", "remote_dram_bytes"
_CACHE_MISSES, _TLB_LOAD_MISSES = 3, 3 | 0 << 8 | 1 << 16
"""PERF_COUNT_HW_CACHE_MISSES; PERF_COUNT_HW_CACHE_DTLB with OP_READ and RESULT_MISS: the kernel
knows which event of Intel's or AMD's that is (perf_event_open(2))."""
_OWN_THREADS = perf_events.EXCLUDE_KERNEL | perf_events.INHERIT


def core_events(cpu: Cpu) -> Mapping[str, Event | Unavailable]:
    """What fills each counter of the table `remote_memory`, or why nothing does."""
    found = _events_of(cpu, "fills")
    # Neoverse's REMOTE_ACCESS also counts what came from the caches of the other socket.
    why = Unavailable(f"no events for DRAM near and far are known for {cpu}", status="unsupported")
    local, remote = (why, why) if found is None else (
        Event(name=name, type=TYPE_RAW, config=int(config, 0), config1=int(more, 0),
              bits=_OWN_THREADS) for name, config, more in found["events"]
    )  # fmt: skip
    return {
        INSTRUCTIONS: Event(name="instructions", type=TYPE_HARDWARE, config=1, bits=_OWN_THREADS),
        CYCLES: Event(name="cycles", type=TYPE_HARDWARE, config=0, bits=_OWN_THREADS),
        LOCAL_FILLS: local,
        REMOTE_FILLS: remote,
        CACHE: Event(name="cache-misses", type=TYPE_HARDWARE, config=_CACHE_MISSES,
                     bits=_OWN_THREADS),
        TLB: Event(name="dTLB-load-misses", type=perf_events.TYPE_CACHE, config=_TLB_LOAD_MISSES,
                   bits=_OWN_THREADS),
    }  # fmt: skip


_OWN_PROCESS = 2  # the kernel.perf_event_paranoid that allows counting one's own user code
_TRIES = 5
_MANY = 100_000_000
_FILTERED = Unavailable(
    "the PMU of this virtual machine counts no DRAM fills: its host filters the event",
    status="unsupported",
)


class RemoteMemorySampler(RankSampler):
    """One record per rank process: what its threads and children did since it was first seen."""

    recorder = "perf"
    table = REMOTE_MEMORY

    def __init__(
        self, node: Node, *, kernel: Kernel | None = None, spare: Callable[[], int] | None = None
    ) -> None:
        super().__init__(node)
        self.kernel = kernel or Kernel()
        self.cpu = read_cpu(self.root)
        self.events = dict(core_events(self.cpu))
        self.spare = spare or spare_files  # how many more files may be opened

    def find(self) -> Iterable[Entity]:
        """Tries each event on haiprof's own thread; ranks come with `refresh`."""
        refuse = partial(refusal, root=self.root, allowing=_OWN_PROCESS)
        for column, event in self.events.items():
            if isinstance(event, Event):
                try:
                    self.kernel.close(self.kernel.open(event.attr(), 0, -1))
                except OSError as error:
                    virtual = no_core_pmu(self.root, self.cpu)
                    self.events[column] = refuse(error, event, virtual=virtual)
        refusals = {c: each for c, each in self.events.items() if isinstance(each, Unavailable)}
        if len(refusals) == len(self.events):
            raise next(iter(refusals.values()))
        for column, why in refusals.items():
            self.missing.note(column, why)
        return super().find()

    def header(self) -> dict[str, object]:
        """`entities`, and `events`: what fills each column."""
        events = {c: each.name for c, each in self.events.items() if isinstance(each, Event)}
        return {**super().header(), "events": events}

    def readings(self, process: RankProcess) -> tuple[Reading]:
        """One reading of all counters; they are opened at the first."""
        counters, columns = _RankCounters(process, self), (*self.events, "counted_ratio")
        origin = f"perf_event_open, threads of process {process.pid}"
        return (Reading(columns=columns, origin=origin, read=counters.read, close=counters.close),)


@dataclass
class _RankCounters:
    """The counters of one process: one per event and thread, inherited by what starts later."""

    process: RankProcess
    of: RemoteMemorySampler
    _counters: Counters | None = None

    def read(self) -> Sequence[Value | Unavailable]:
        """One value per event, then the share of the time in which they counted."""
        if read_start_ticks(self.of.root, self.process.pid) != self.process.start_ticks:
            raise EntityGone
        self._counters = counters = self._counters or self._open()
        values = counters.read(dict.fromkeys(self.of.events, "reading a counter"))
        done = values.get(INSTRUCTIONS)
        nothing = values.get(LOCAL_FILLS) == 0  # nobody runs so much without a byte from memory
        if self.of.cpu.virtual and isinstance(done, int) and done > _MANY and nothing:
            values |= {LOCAL_FILLS: _FILTERED, REMOTE_FILLS: _FILTERED}
        return (*values.values(), counters.take_share())

    def close(self) -> None:
        """Ends the counting."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def _open(self) -> Counters:
        """Counters for every thread there is."""
        # A thread that appears meanwhile may be counted by inheritance or not at all, according to
        # which thread has started it: everything is then opened anew.
        for _ in range(_TRIES):
            threads = self._threads()
            count, spare = len(threads), self.of.spare()
            needed = count * sum(isinstance(each, Event) for each in self.of.events.values())
            if needed > spare:
                reason = f"{count} threads need {needed} open files, haiprof may open {spare}"
                raise Unavailable(reason, status="denied", remedy="a higher ulimit -n")
            counters = Counters(self.of.kernel)
            for column, event in self.of.events.items():
                if isinstance(event, Unavailable):
                    counters.refuse(column, event)
                    continue
                unit = Fraction(LINE_BYTES if column in (LOCAL_FILLS, REMOTE_FILLS) else 1)
                try:
                    counters.open(column, event, unit, pids=sorted(threads), cpu=-1)
                except OSError as error:
                    why = refusal(error, event, self.of.root, allowing=_OWN_PROCESS, virtual="")
                    counters.refuse(column, why)
            if self._threads() <= threads:
                return counters
            counters.close()
        raise Unavailable("threads start faster than their counters can be opened")

    def _threads(self) -> set[int]:
        try:
            folder = f"{self.of.root}/proc/{self.process.pid}/task"
            return {int(name) for name in os.listdir(folder)}
        except OSError:
            raise EntityGone from None


def spare_files() -> int:
    """Half of what this process may have open, less what it has: the rest is the launcher's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(0, limit // 2 - len(os.listdir("/proc/self/fd")))
