"""Reads /proc and /sys: files that stay open, one process's counters, and suspended time."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from haiprof.base.units import NS_PER_MS
from haiprof.linux.process_files import read_small, stat_fields
from haiprof.linux.readings import Clock, Reading, Unavailable, Value, os_status


def read_text(path: Path) -> str | None:
    """A file's text without the white space around it."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return None


def read_int(path: Path) -> int | None:
    """The number that a file holds; None without the file, or where it holds something else."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def list_names(folder: Path) -> list[str]:
    """Names in a folder, in any order."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def link_name(path: Path) -> str | None:
    """The last part of what a link leads to, such as the name of a driver."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(path))
    return None


def inode(path: Path | str) -> int | None:
    """The inode: another one shows that a folder was removed and made again."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino
    return None


# 16 KiB holds most of these files, and a larger buffer is allocated anew at every read
# (measured 5 to 10 times slower with 1 MiB).
_BUFFER_BYTES = 16 * 1024
_STRINGS_LIMIT_BYTES = 1 << 20
_MAPS_PIECE_BYTES = 1 << 16
_ESCAPE = re.compile(r"\\([0-7]{3})")

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
OTHER_USER = "run haiprof as the user of the job"


class ProcFile:
    """A file of /proc that is opened once and read many times."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def read(self) -> bytes:
        """The whole content as it is now."""
        if self._fd >= 0:
            try:
                return self._content()
            except OSError:
                self.close()  # the file was replaced (driver reload, remount): open it again
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._content()

    def close(self) -> None:
        """Closes the file; the next `read` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _content(self) -> bytes:
        # A file of many records (diskstats, net/dev) comes in pieces of about a page, whatever
        # the buffer: only an empty read is its end.
        content = b""
        while piece := os.pread(self._fd, _BUFFER_BYTES, len(content)):
            content += piece
        return content


def last_number(content: bytes, name: bytes) -> int | None:
    """The number after a name; from the end, as lines before it may be long."""
    at = content.rfind(name)
    return None if at < 0 else int(content[at + len(name) :].split(None, 1)[0])


def unescape(word: str) -> str:
    """Decodes a path in a list of mounts: the kernel writes blanks as octal numbers."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), word)


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo (proc_pid_mountinfo(5))."""

    device: str  # `major:minor`
    root: str  # what of the file system is seen at the mount point
    point: str
    type: str
    source: str
    options: str  # of the file system; of cgroups of version 1 their controllers


def mount_entries(content: str) -> Iterator[MountEntry]:
    """The mounts of this process, in the order in which they were made."""
    for line in content.splitlines():
        left, _, right = line.partition(" - ")
        words, kind = left.split(" "), right.split(" ")
        if len(words) >= 6 and len(kind) >= 3:
            root, point, source = map(unescape, (words[3], words[4], kind[1]))
            yield MountEntry(words[2], root, point, kind[0], source, kind[2])


def file_reading(
    path: Path, columns: Sequence[str], parse: Callable[[bytes], Sequence[Value]], *,
    lacking: str = "", remedy: str = "",
) -> Reading:  # fmt: skip
    """A reading of one file that stays open."""
    file = ProcFile(path)
    return Reading(
        columns=tuple(columns), origin=str(path), read=lambda: parse(file.read()), lacking=lacking,
        remedy=remedy, close=file.close,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process at one time; source: Linux Documentation/filesystems/proc.rst."""

    pid: int
    parent: int
    start_ticks: int
    running: bool  # neither a zombie nor dead (proc(5))
    own_ticks: int  # utime + stime
    own_system_ticks: int  # stime: in the kernel
    total_ticks: int  # the same with those of the children it has waited for
    faults: int  # minor faults of the process and of the children it has waited for
    major_faults: int  # the same of those that waited for storage
    waited_faults: int  # those of the children alone: grows at each wait, and so shows it
    rss_bytes: int
    thread_count: int
    io_bytes: tuple[int, int, int, int] | None
    """rchar, wchar, read_bytes, write_bytes; the kernel adds a child's when it is waited for."""
    io_missing: Unavailable | None  # why there are none


def read_process(root: Path, pid: int) -> ProcessReading | None:
    """Reads /proc/PID/io, then statm and stat; None when the process is gone."""
    # The order matters to `process_family`: bytes of a waited child are never seen before the wait.
    # Resident memory is statm's: stat's own lags behind by what each CPU still holds back.
    folder = f"{root}/proc/{pid}"
    io_result = _read_io(f"{folder}/io")
    with contextlib.suppress(OSError, ValueError, IndexError):
        rss_bytes = int(read_small(f"{folder}/statm").split()[1]) * PAGE_BYTES
        fields = stat_fields(folder)
        own = int(fields[11]) + int(fields[12])
        waited_faults = int(fields[8])
        return ProcessReading(
            pid=pid, parent=int(fields[1]), start_ticks=int(fields[19]),
            running=fields[0] not in (b"Z", b"X", b"x"), own_ticks=own,
            own_system_ticks=int(fields[12]),
            total_ticks=own + int(fields[13]) + int(fields[14]),
            faults=int(fields[7]) + waited_faults, major_faults=int(fields[9]) + int(fields[10]),
            waited_faults=waited_faults, rss_bytes=rss_bytes, thread_count=int(fields[17]),
            io_bytes=None if isinstance(io_result, Unavailable) else io_result,
            io_missing=io_result if isinstance(io_result, Unavailable) else None,
        )  # fmt: skip
    return None


def read_parent(root: Path, pid: int) -> int | None:
    """The parent's pid; None when the process is gone."""
    fields = read_stat(root, pid)
    return None if fields is None else int(fields[1])


def read_start_ticks(root: Path, pid: int) -> int | None:
    """When the process started; None when it is gone."""
    fields = read_stat(root, pid)
    return None if fields is None else int(fields[19])


def still_runs(root: Path, pid: int, start_ticks: int | None) -> bool:
    """Whether the process that started then is neither gone nor dead (proc(5))."""
    fields = read_stat(root, pid)
    return fields is not None and int(fields[19]) == start_ticks and fields[0] not in b"ZXx"


def read_stat(root: Path, pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third (state) on; None when the process is gone."""
    try:
        fields = stat_fields(f"{root}/proc/{pid}")
    except (OSError, ValueError):
        return None
    whole = len(fields) > 36 and fields[1].isdigit() and fields[19].isdigit()
    return fields if whole else None  # up to the CPU, field 39; the kernel writes 52


def _read_io(path: str) -> tuple[int, int, int, int] | Unavailable:
    try:
        words = read_small(path).split()
        values = dict(zip(words[0::2], map(int, words[1::2]), strict=False))
        return (values[b"rchar:"], values[b"wchar:"],
                values[b"read_bytes:"], values[b"write_bytes:"])  # fmt: skip
    except OSError as error:
        status = os_status(error)
        because = "" if status == "denied" else " (a kernel without CONFIG_TASK_IO_ACCOUNTING)"
        reason = f"/proc/PID/io: {error.strerror}{because}"
        return Unavailable(reason, status=status, remedy=OTHER_USER if not because else "")
    except (ValueError, KeyError):
        return Unavailable("/proc/PID/io: unexpected content", status="unsupported")


def process_state(pid: int, *, proc: Path = Path("/proc")) -> dict[str, str | None]:
    """The kernel's view of a process on this node: `state`, its letter, and `wchan`."""
    # Source: proc_pid_stat(5): R running, S sleeping, D waiting for a disk or driver, T stopped by
    # a signal, t stopped by a tracer, Z ended and not yet collected.
    if (fields := read_stat(proc.parent, pid)) is None:
        return {"state": None, "wchan": None}
    try:
        wchan = (proc / str(pid) / "wchan").read_text(errors="replace")
    except OSError:
        wchan = ""
    return {"state": fields[0].decode(), "wchan": wchan.strip("0\n") or None}


def process_ids(proc: Path) -> list[int]:
    """All processes; none where /proc cannot be listed."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(proc) if name.isdigit()]
    return []


def process_exists(pid: object) -> bool:
    """Whether a process id, as some report states it, is taken."""
    return os.path.exists(f"/proc/{pid}")


def own_pids(*, proc: Path = Path("/proc")) -> list[int]:
    """Processes of this user; none where /proc cannot be listed."""
    return [pid for pid in process_ids(proc) if is_mine(pid, proc=proc)]


def is_mine(pid: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process of this node belongs to this user."""
    return user_id(pid, proc=proc) == os.getuid()


def has_mapped(pid: int, library: bytes, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a file of that name mapped; reads no further than its first line."""
    end = b""
    try:
        with (proc / str(pid) / "maps").open("rb", buffering=0) as maps:
            while piece := maps.read(_MAPS_PIECE_BYTES):
                if library in end + piece:
                    return True
                end = piece[-len(library) :]
    except OSError:
        return False  # it has ended
    return False


def user_id(pid: int, *, proc: Path = Path("/proc")) -> int | None:
    """User id of a process; None when it is gone."""
    with contextlib.suppress(OSError):
        return (proc / str(pid)).stat().st_uid
    return None


def strings(path: Path) -> list[str]:
    """The strings of /proc/PID/cmdline or environ."""
    with path.open("rb") as file:
        content = file.read(_STRINGS_LIMIT_BYTES)
    *whole, last = content.split(b"\0")
    if last and len(content) < _STRINGS_LIMIT_BYTES:  # a process that has overwritten its title
        whole.append(last)
    return [os.fsdecode(text) for text in whole]


def command_line(pid: int, *, proc: Path = Path("/proc")) -> list[str]:
    """The command line of a process; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return strings(proc / str(pid) / "cmdline")
    return []


def environment(pid: int, *, proc: Path = Path("/proc")) -> dict[str, str]:
    """The environment a process was started with; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return variables(strings(proc / str(pid) / "environ"))
    return {}


def variables(entries: Iterable[str]) -> dict[str, str]:
    """Values by name of `NAME=value` entries; others are left out."""
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


_SHORTEST_NS = NS_PER_MS


def boot_ns() -> int:
    """Reads CLOCK_BOOTTIME in ns."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SuspendWatch:
    """Compares both clocks. Rates stay right across a suspension; Unix times after it do not."""

    def __init__(self, clock: Clock, boot_clock: Clock) -> None:
        self._clock, self._boot_clock = clock, boot_clock
        self._at_most_ns = self._bounds()[1]

    def gap_ns(self) -> int:
        """How long the machine was suspended since the last call; 0 if it was not."""
        # A virtual machine that its host pauses stops both clocks: nothing inside it can tell.
        # Source: clock_gettime(2).
        at_least_ns, at_most_ns = self._bounds()
        gap_ns = at_least_ns - self._at_most_ns
        if gap_ns < _SHORTEST_NS:
            self._at_most_ns = min(self._at_most_ns, at_most_ns)
            return 0
        self._at_most_ns = at_most_ns
        return gap_ns

    def _bounds(self) -> tuple[int, int]:
        """Bounds of the clocks' difference; this thread may be preempted between the reads."""
        before_ns = self._clock()
        boot_time_ns = self._boot_clock()
        return boot_time_ns - self._clock(), boot_time_ns - before_ns
