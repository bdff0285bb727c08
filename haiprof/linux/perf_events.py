"""Hardware counters of Linux: by perf_event_open, and memory traffic through resctrl."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from haiprof.linux.procfs import list_names, read_int
from haiprof.linux.readings import Entity, Reading, Status, Unavailable, os_status
from haiprof.linux.topology import socket_of_cache, socket_of_cpu

TYPE_HARDWARE, TYPE_SOFTWARE, TYPE_CACHE, TYPE_RAW = 0, 1, 3, 4
EXCLUDE_KERNEL = 1 << 5  # bits of perf_event_attr, after `disabled`
INHERIT = 1 << 1

# perf_event_attr up to config2 (PERF_ATTR_SIZE_VER1, Linux 2.6.33): type, size, config,
# sample_period, sample_type, read_format, bits, wakeup, bp_type, config1, config2.
ATTR = struct.Struct("<IIQQQQQIIQQ")
RECORD = struct.Struct("<QQQ")  # count, time enabled, time running
READ_FORMAT = 1 | 2  # PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING
_CLOSE_ON_EXEC = 1 << 3
_SYSCALL = {"x86_64": 298, "aarch64": 241, "ppc64le": 319}
_CONTAINER = "allow perf_event_open in the container's seccomp profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one counter counts."""

    name: str  # for people, with its PMU
    type: int  # number of the PMU, from its `type` file, or one of the TYPE constants
    config: int
    config1: int = 0
    config2: int = 0
    bits: int = 0  # EXCLUDE_KERNEL, INHERIT; uncore PMUs refuse the first

    def attr(self) -> bytes:
        """The `struct perf_event_attr` for the kernel."""
        head = (self.type, ATTR.size, self.config, 0, 0, READ_FORMAT, self.bits)
        return ATTR.pack(*head, 0, 0, self.config1, self.config2)


class Kernel:
    """The system calls, replaceable by a fake in tests."""

    def open(self, attr: bytes, pid: int, cpu: int) -> int:
        """A file descriptor of perf_event_open(2), closed on exec."""
        if (number := _SYSCALL.get(platform.machine())) is None:
            raise OSError(errno.ENOSYS, f"not known on {platform.machine()}")
        buffer = ctypes.create_string_buffer(attr, len(attr))
        flags = ctypes.c_ulong(_CLOSE_ON_EXEC)
        library = ctypes.CDLL(None, use_errno=True)
        fd: int = library.syscall(ctypes.c_long(number), buffer, pid, cpu, -1, flags)
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return fd

    def read(self, fd: int) -> bytes:
        """Count, time enabled and time running of an event (`RECORD`)."""
        return os.read(fd, RECORD.size)

    def close(self, fd: int) -> None:
        """Ends the counting."""
        os.close(fd)


@dataclass(slots=True)
class ScaledSum:
    """What some open counters of one event come to, as a count that only grows."""

    kernel: Kernel
    event: Event
    shares: list[float]  # of each interval in which a counter was on the hardware
    unit: Fraction = Fraction(1)  # what one count stands for, such as 64 bytes
    _last: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the last record by descriptor
    _total: int = 0

    def open(self, *, pid: int, cpu: int) -> None:
        """Opens a counter; raises OSError as perf_event_open(2) says."""
        self._last[self.kernel.open(self.event.attr(), pid, cpu)] = (0, 0, 0)

    def read(self) -> int:
        """Everything counted since they were opened."""
        # With more events than hardware counters the kernel multiplexes them, so each interval is
        # scaled by its own time enabled / time running. Scaling the totals instead, as perf does at
        # the end of a run, would give counts that decrease when the ratio changes.
        for fd, last in self._last.items():
            content = self.kernel.read(fd)
            if len(content) != RECORD.size:
                raise Unavailable(f"{self.event.name}: the kernel took the counter away")
            now = RECORD.unpack(content)
            count, enabled, running = (new - old for new, old in zip(now, last, strict=True))
            if enabled > 0 and running <= 0:
                reason = "no hardware counter was free: other profilers use them"
                remedy = "end other users of perf counters"
                raise Unavailable(f"{self.event.name}: {reason}", remedy=remedy)
            if enabled > 0:
                self.shares.append(min(1.0, running / enabled))
            self._total += count * enabled // running if running < enabled else count
            self._last[fd] = now
        return int(self._total * self.unit)

    def close(self) -> None:
        """Ends the counting."""
        for fd in self._last:
            self.kernel.close(fd)
        self._last = {}


class Counters:
    """Open counters of one thing by column, or why there are none of a column."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._shares: list[float] = []
        self._columns: dict[str, list[ScaledSum] | Unavailable] = {}

    def open(self, column: str, event: Event, unit: Fraction, *, pids: Iterable[int],
             cpu: int) -> None:  # fmt: skip
        """Adds an event to a column; raises OSError as perf_event_open(2) says."""
        known = self._columns.setdefault(column, [])
        assert isinstance(known, list), "a refused column has no counters"
        known.append(ScaledSum(self._kernel, event, self._shares, unit))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                known[-1].open(pid=pid, cpu=cpu)

    def refuse(self, column: str, why: Unavailable) -> None:
        """Ends the counting of a column."""
        self._close(column)
        self._columns[column] = why

    def read(self, origins: Mapping[str, str]) -> dict[str, int | Unavailable]:
        """What each column comes to, or why that is not known now."""
        return {
            column: each if isinstance(each, Unavailable)
            else _read_sum(each, origins.get(column, column))
            for column, each in self._columns.items()
        }  # fmt: skip

    def take_share(self) -> float:
        """The smallest share of the time with a counter on the hardware, since the last call."""
        least = min(self._shares, default=1.0)
        self._shares.clear()
        return least

    def close(self) -> None:
        """Ends the counting."""
        for column in list(self._columns):
            self._close(column)

    def _close(self, column: str) -> None:
        known = self._columns.pop(column, None)
        for each in known if isinstance(known, list) else ():
            each.close()


def _read_sum(counters: Iterable[ScaledSum], origin: str) -> int | Unavailable:
    try:
        return sum([each.read() for each in counters])
    except OSError as error:
        return Unavailable(f"{origin}: {error.strerror}", status="unsupported")
    except Unavailable as why:
        return why


def refusal(
    error: OSError, event: Event, root: Path, *, allowing: int, virtual: str
) -> Unavailable:
    """What a refused perf_event_open means."""
    status, because, remedy = _meaning(error.errno or 0, root, allowing, virtual)
    reason = f"perf_event_open of {event.name}: {error.strerror or error} ({because})"
    return Unavailable(reason, status=status, remedy=remedy, lasting=True)


def _meaning(code: int, root: Path, allowing: int, virtual: str) -> tuple[Status, str, str]:
    if code in (errno.EACCES, errno.EPERM):
        setting = paranoid(root)
        because = f"kernel.perf_event_paranoid is {'not shown' if setting is None else setting}, "
        if setting is None or setting > allowing:
            remedy = f"sysctl kernel.perf_event_paranoid={allowing}, or CAP_PERFMON for haiprof"
            return "denied", because + "and haiprof has no CAP_PERFMON", remedy
        return "denied", because + "so a seccomp filter or the owner of the process", _CONTAINER
    if code == errno.ENOSYS:
        return "unsupported", "a kernel without perf events, or a seccomp filter", _CONTAINER
    if code in (errno.EMFILE, errno.ENFILE):
        return "denied", "no file descriptor is left", "a higher ulimit -n"
    return "unsupported", virtual or "this CPU or kernel has no such event", ""


def paranoid(root: Path) -> int | None:
    """The sysctl kernel.perf_event_paranoid; None where there is none."""
    return read_int(root / "proc/sys/kernel/perf_event_paranoid")


MOUNT = "mount -t resctrl resctrl /sys/fs/resctrl (root)"
_TOTAL, _LOCAL = "mbm_total_bytes", "mbm_local_bytes"
_NO_VALUE = {
    "Unavailable": "the hardware has no value now",
    "Error": "the hardware refused",
    "Unassigned": "no hardware counter is assigned to the group",
}
_NO_GROUP = ("info", "mon_data", "mon_groups")
_NO_DIRECTION = Unavailable("resctrl does not distinguish reads from writes", status="unsupported")


def resctrl_entities(root: Path) -> list[Entity]:
    """One entity per socket, from the sum over all control groups."""
    # The traffic is that of the socket's CPUs beyond their last-level cache, wherever the memory
    # is, without transfers by devices (GPUs, network adapters).
    # Source: Linux Documentation/filesystems/resctrl.rst.
    folder = root / "sys/fs/resctrl"
    if not folder.is_dir():
        raise Unavailable(f"{folder}: the kernel or the CPU has no resctrl")
    names = sorted(list_names(folder / "mon_data"))
    ids = {name: name.removeprefix("mon_L3_") for name in names if name.startswith("mon_L3_")}
    caches = {int(number): name for name, number in ids.items() if number.isdecimal()}
    if not caches:
        raise Unavailable(f"{folder}: not mounted, or without monitoring", remedy=MOUNT)
    of_socket: dict[int, list[str]] = {}
    sockets = socket_of_cache(root, socket_of_cpu(root))
    for cache, name in caches.items():
        if cache not in sockets:
            raise Unavailable(f"{folder}: the socket of {name} is not known", status="unsupported")
        of_socket.setdefault(sockets[cache], []).append(name)
    entities = [_entity(folder, socket, names) for socket, names in sorted(of_socket.items())]
    try:
        for entity in entities:
            entity.readings[0].read()  # without the total another source is better
    except OSError as error:
        reason = f"{error.filename}: {error.strerror} (no memory bandwidth monitoring)"
        raise Unavailable(reason, status=os_status(error)) from None
    return entities


def mbm_value(path: Path) -> int:
    """The bytes in a file of mon_data."""
    text = path.read_text().strip()
    if text.isdecimal():
        return int(text)
    raise Unavailable(f"{path}: {text} ({_NO_VALUE.get(text, 'not a number')})")


@dataclass(slots=True)
class MonitoredBytes:
    """Sums files that come and go with their groups; restarts at 0 when one of them does."""

    files: Callable[[], Iterable[Path]]
    total: int = 0
    restarts: int = 0  # how often a file decreased or vanished: what was counted in between is lost
    _last: dict[Path, int] = field(default_factory=dict)

    def read(self) -> int:
        """The sum; raises as `mbm_value`."""
        now = {path: mbm_value(path) for path in self.files()}
        if any(now.get(path, -1) < value for path, value in self._last.items()):
            self.total = 0
            self.restarts += 1
        elif self._last:
            self.total += sum(value - self._last.get(path, value) for path, value in now.items())
        else:
            self.total = sum(now.values())
        self._last = now
        return self.total


@dataclass(slots=True)
class RemoteBytes:
    """Total minus local traffic."""

    local: MonitoredBytes
    whole: MonitoredBytes
    _base: int = 0
    _highest: int = 0
    _restarts: int = 0

    def read(self) -> int:
        """Bytes to and from the memory of other sockets; raises as `mbm_value`."""
        # The two are read one after the other, so the difference could decrease by what passed in
        # between: it keeps its highest value, unless one of them restarted.
        local = self.local.read()
        remote = self.whole.read() - local
        restarts = self.local.restarts + self.whole.restarts
        if restarts != self._restarts:
            self._restarts, self._base, self._highest = restarts, remote, 0
        self._highest = max(self._highest, remote - self._base)
        return self._highest


def _files(folder: Path, caches: Sequence[str], name: str) -> list[Path]:
    """The file in each control group; a group's own sum includes its monitoring groups."""
    groups = [folder, *(each for each in sorted(folder.iterdir()) if each.name not in _NO_GROUP)]
    groups = [group for group in groups if (group / "mon_data").is_dir()]
    return [group / "mon_data" / cache / name for group in groups for cache in caches]


def _entity(folder: Path, socket: int, caches: Sequence[str]) -> Entity:
    def sum_files(name: str) -> MonitoredBytes:
        return MonitoredBytes(lambda: _files(folder, caches, name))

    total, remote = sum_files(_TOTAL), RemoteBytes(sum_files(_LOCAL), sum_files(_TOTAL))
    origin = f"{folder}/*/mon_data/{','.join(caches)}"
    readings = (
        Reading(columns=("total_bytes",), origin=f"{origin}/{_TOTAL}",
                read=lambda: (total.read(),)),
        Reading(columns=("remote_bytes",), origin=f"{origin}/{_TOTAL} less {_LOCAL}",
                read=lambda: (remote.read(),), lacking="the CPU does not monitor it"),
        Reading(columns=("read_bytes", "write_bytes", "counted_ratio"), origin=str(folder),
                read=lambda: (_NO_DIRECTION, _NO_DIRECTION, 1.0)),
    )  # fmt: skip
    name, details = f"socket {socket} (resctrl)", {"source": "resctrl", "caches": list(caches)}
    return Entity(key=(socket,), name=name, readings=readings, details=details)
