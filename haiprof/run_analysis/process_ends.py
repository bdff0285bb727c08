"""How every process of a job ended: what it wrote itself, and what its node saw from outside."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from haiprof.base.code_places import Frame, Stack, frame_text, is_library, own_frame, parse_frames
from haiprof.base.errors import RunFormatError
from haiprof.base.units import NS_PER_S, bytes_text, shorten, without_source_places
from haiprof.base.version import read_data
from haiprof.run_analysis.code_samples import SampledProcess, StackTree, read_stack_file
from haiprof.run_analysis.gpu_memory import GpuOutOfMemory, failed_allocations, parse_torch_message
from haiprof.run_analysis.run_files import (
    RankFiles,
    RunFiles,
    entries,
    integer,
    mapping,
    objects,
    read_of_processes,
    read_record,
    read_table,
    record_columns,
    text,
)
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.schema import HEARTBEAT, KIND_NAMES, NULL_I64
from haiprof.run_format.secrets import mask_text
from haiprof.run_format.stack_lines import WAITS

_UNCAUGHT_LIMIT = 1 << 20
_ENTRY_LIMIT, _CHAIN_LIMIT = 8, 8
_LINE_LIMIT, _LINE_CHARS = 60, 400
_FIELD_CHARS = 8_000
_SHIM = "<shim>"  # the file of what CPython 3.12 and later run between C and Python
_CRASH_BYTES = 1 << 15  # as much as in_job/crash.c writes
FILE_LINE = re.compile(
    r'File "([^"\n]+)", line (\d{1,9}), in (\S+)(?:[ \t]*\n[ \t]+(?!File ")(\S[^\n]*))?'
)
"""A frame of a printed traceback: file, line, function, and the source below it."""
_DUMPED = re.compile(r"Current thread .*\(most recent call first\):")
_DUMPED_FRAME = re.compile(r'  File "([^"]+)", line (\d{1,9}) in (.+)')
"""What Python's faulthandler prints of a crash."""
WORKER_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: ([\w ]+)|exited unexpectedly(?: with exit code (\d+))?)"
)
"""How torch tells of a worker's end: process, signal, exit status."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_SAME_FAILURE_NS = 60_000_000_000
"""An allocation that failed longer before an exception was another one, which the job caught."""
_WAITED = (
    (r"Watchdog caught collective operation timeout|collective operation timed? ?out|"
     r"NCCL (?:communicator was aborted|operation .* timed out)|ncclUnhandledCudaError: .*abort",
     "NCCL's watchdog"),
    (r"HeartbeatMonitor|heartbeat monitor", "NCCL's heartbeat monitor"),
    (r"monitoredBarrier", "the monitored barrier's timeout"),
    (r"connectFullMesh failed|timed out connecting", "gloo, which could not connect the ranks"),
    (r"Timed out waiting \d+ ?ms for (?:recv|send|bound buffer|\w+) operation|"
     r"Application timeout caused pair closure|gloo.*[Tt]imed? ?out", "gloo's timeout"),
    (r"op\.preamble\.length <= op\.nbytes", "gloo's check of message sizes"),
    (r"Connection closed by peer|Connection reset by peer|[Bb]roken pipe|"
     r"ncclRemoteError|remote process exited|Connection was likely closed",
     "the broken connection"),
    (r"Timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms|Socket Timeout|"
     r"The client socket has timed out|store .*timed? ?out|RendezvousTimeoutError|"
     r"failed to connect to .*timed? ?out", "the store's timeout"),
    (r"TCPStore|recvValue failed|DistStoreError|DistNetworkError", "the store that went away"),
)  # fmt: skip
"""Texts of torch.distributed, gloo and NCCL in a rank that waited for another one."""
_WAITED_FOR = tuple((re.compile(pattern), by) for pattern, by in _WAITED)
_UNLIKE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_LAUNCHERS_ERRORS = (
    "ChildFailedError", "SignalException", "ProcessRaisedException", "ProcessExitedException",
    "CalledProcessError", "RendezvousClosedError",
)  # fmt: skip
_ACCUSED = re.compile(r"[Rr]anks? ([\d, ]+?) (?:failed to pass|did not pass|failed to report)")
_ERROR = re.compile(r"[\w.]+(?:Error|Exception|Interrupt|Exit)\b")
_NOT_WRITTEN = re.compile(
    r"PytorchStreamWriter failed writing|inline_container.*unexpected pos|iostream error"
)
"""Of torch.save, which does not say why: mostly the disk is full."""
_NO_FILE = "; torch could not write the file: a full disk, a quota, or a limit (ulimit -f)"
_KINDS = (
    ("shared_memory_full", re.compile(
        r"out of shared memory|insufficient shared memory|unable to "
        r"(?:open|write to|allocate|resize) (?:file|shared memory)|torch_shm|/dev/shm|Bus error")),
    ("disk_full", re.compile(r"No space left on device|Disk quota exceeded")),
    ("disk_full", _NOT_WRITTEN),
    ("out_of_memory", re.compile(
        r"MemoryError|bad_alloc|DefaultCPUAllocator: (?:can't|not enough)|OutOfMemoryError|"
        r"out of memory|Cannot allocate memory")),
    ("interrupted", re.compile(r"\AKeyboardInterrupt:")),
)  # fmt: skip
"""Causes by what an exception says."""
_OF_DEVICE = re.compile(r"\b(?:CUDA|HIP|XPU|NPU)\b")
_LOADER_FILE = "torch/utils/data/dataloader.py"
_WORKER_RAISED = re.compile(r"in DataLoader worker process (\d+)")


class SignalWords(NamedTuple):
    """What the end by a signal is called, and what to do; empty where nothing is known of it."""

    says: str = ""
    do: str = ""


NO_WORDS = SignalWords()
SIGNALS: Mapping[int, SignalWords] = {
    int(signal.Signals[name]): SignalWords(**words) for name, words in
    read_data("run_analysis/signals.json").items()
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """An exception that nobody caught."""

    type: str
    message: str
    line: Frame | None = None  # the innermost line of the user's own code
    source: str = ""  # what stands there
    frames: Stack = ()
    errno: int | None = None
    ended_child: tuple[int, int, int] | None = None
    """Of a child that had failed by then: process id, signal and exit status, one of which is 0."""

    @property
    def exit_status(self) -> int | None:
        """What a SystemExit asks for; None where that is a text, which stands for 1."""
        return int(self.message) & 0xFF if re.fullmatch(r"-?\d{1,9}", self.message) else None

    @property
    def short(self) -> str:
        """`RuntimeError: what happened`, in one line."""
        name = self.type.rpartition(".")[2]
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        said = shorten(without_source_places(lines[0])) if lines else ""
        return name if said in ("", name) else f"{name}: {said}"

    @property
    def location(self) -> str:
        """`train.py:88 in step`; empty where there is none."""
        return frame_text(self.line) if self.line is not None else ""

    @property
    def is_failure(self) -> bool:
        """Whether it tells what went wrong: neither an exit nor `NO_ERROR`."""
        return self.type not in ("", "SystemExit")

    def wait_failure(self) -> str | None:
        """What ended a rank that waited for another one; None where its error is its own."""
        lost = self._has_lost_worker()
        return None if lost else wait_failure_text(f"{self.type}: {self.message}")

    def _has_lost_worker(self) -> bool:
        """Whether the connection to a DataLoader worker broke while a batch was taken over."""
        name = self.type.rpartition(".")[2]
        lost = name in ("ConnectionResetError", "EOFError", "BrokenPipeError")
        return lost and any(file.endswith(_LOADER_FILE) for file, _, _ in self.frames)

    def is_launchers(self) -> bool:
        """Whether an exception only reports that another process failed."""
        return self.type.rpartition(".")[2] in _LAUNCHERS_ERRORS

    def accused_ranks(self) -> tuple[int, ...]:
        """Ranks that an exception names as those that others waited for."""
        match = _ACCUSED.search(self.message)
        words = match[1].replace(" ", "").split(",") if match else []
        return tuple(int(word) for word in words if word.isdigit() and len(word) < 8)

    def worker_death(self) -> tuple[str, str] | None:
        """The cause and the end of a DataLoader worker of which an exception tells.

        The main thread's line is where a signal met it (SIGCHLD), and caused nothing.
        """
        match, child = WORKER_DIED.search(self.message), self.ended_child
        if match is None and not self._has_lost_worker():
            return None
        kind, by, worker, status = "exit", "", "one of its DataLoader workers", None
        if match is not None and (match[2] or child is None):
            worker, status = f"its DataLoader worker (pid {match[1]})", match[3]
            if match[2]:
                kind = "killed" if match[2] in ("Killed", "Terminated", "Interrupt") else "crash"
                by = f"a signal: {match[2]}"
        elif child is not None:
            worker, status = f"its DataLoader worker (pid {child[0]})", str(child[2])
            if child[1]:
                kind, by = "crash" if child[1] in _CRASHES else "killed", signal_name(child[1])
        if by:
            return kind, f"{worker} was ended by {by}"
        with_status = f" with exit status {status}" if status else ""
        return kind, f"{worker} ended{with_status}; why is not known"

    def dead_worker(self) -> int | None:
        """The process of the only DataLoader worker of whose end an exception tells."""
        match, child = WORKER_DIED.search(self.message), self.ended_child
        if match is not None and match[1].isdigit():
            return int(match[1])
        return child[0] if child is not None else None

    def unlike_messages(self) -> str | None:
        """That a rank was sent more than it waited for, as gloo notices it; None where not."""
        said = _UNLIKE.search(self.message)
        return said and f"it was sent a message of {said[1]} bytes where it waited for {said[2]}"

    def inner_error(self) -> tuple[str, str, str]:
        """What another process's traceback in a message says: error, user's line, its source."""
        if "Traceback (most recent call last)" not in self.message:
            return "", "", ""
        lines = [line.strip() for line in self.message.splitlines()]
        said = next((line for line in reversed(lines) if _ERROR.match(line)), "")[:200]
        places = [p for p in FILE_LINE.findall(self.message) if not is_library(p[0], p[2])]
        if not places:
            return said, "", ""
        file, line, function, source = places[-1]
        return said, f"{file.rpartition('/')[2]}:{line} in {function}", source


NO_ERROR = Error(type="", message="")  # of a process that no exception ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncaught:
    """Exceptions of one process, in the order in which they came."""

    how: str
    """`exception`, `exit` (SystemExit), `exit_call` (the last call of sys.exit), `terminate` (C++),
    `thread`, which ends no process, or `printed`: only its last lines on stderr tell of it."""
    thread: str | None
    wall_ns: int | None
    errors: tuple[Error, ...]  # the exception, and those that it was raised from

    @property
    def error(self) -> Error:
        """What was wrong: of a SystemExit in flight the exception that led to it.

        Of a DataLoader worker that was lost: the one of the chain that tells by what.
        """
        real = [e for e in self.errors if e.type != "SystemExit" or self.how == "exit_call"]
        found = next(iter(real or self.errors), NO_ERROR)
        told = (e for e in real if (m := WORKER_DIED.search(e.message)) and (m[2] or m[3]))
        return next(told, found) if WORKER_DIED.search(found.message) else found


_NOT_FAILED = Uncaught(how="", thread=None, wall_ns=None, errors=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """One process of the job and how it ended, as far as that is known."""

    host: str
    pid: int
    rank: int | None  # None for a launcher or a helper
    generation: int = 0  # 0 for the first start of the ranks, 1 after the first restart
    parent: int | None = None
    helper: bool = False  # a worker or another process of a rank's
    started_ns: int | None = None  # Unix time at which it began to be recorded
    wall_ns: int | None = None  # Unix time of its end; None where nobody saw it
    status: int | None = None
    signal: int | None = None
    core: bool = False
    seen: bool = False  # whether its node saw it end
    closed: bool = False  # whether it went through Python's own exit
    closed_ns: int | None = None  # Unix time at which it came there; its connections close later
    exited: bool = False  # whether it is known that no exception but SystemExit ended it
    left_at: Frame | None = None  # where its main thread called sys.exit last
    oom: Mapping[str, Any] | None = None  # what the kernel said of a kill for want of memory
    shm: Mapping[str, Any] | None = None  # `used_bytes`, `total_bytes` of /dev/shm after it ended
    address_limit_bytes: int | None = None
    """Address space that it was allowed (`ulimit -v`); None where there was no limit."""
    uncaught: tuple[Uncaught, ...] = ()
    crashed_at: tuple[Frame, ...] = ()
    """Where its main thread's Python was when a signal from native code ended it, outermost first;
    by haiprof, else as faulthandler printed it."""
    crashed_beside: bool = False  # whether another thread than that one crashed
    printed: tuple[str, ...] = ()  # last lines on stderr, where that is a file and they are its own
    printed_stdout: tuple[str, ...] = ()  # the same of stdout, where that is another file
    gpu_memory: GpuOutOfMemory | None = None
    """The last allocation on its GPU that failed, whether it died of that or not."""
    step: int | None = None
    world_size: int | None = None  # as the process itself knew it when it failed

    @property
    def failure(self) -> Uncaught:
        """The exceptions that ended it; its `how` is empty where none did."""
        return next((each for each in self.uncaught if each.how != "thread"), _NOT_FAILED)

    @property
    def how(self) -> str:
        """What kind of exception ended it, as in `Uncaught`; empty where none did."""
        return self.failure.how

    @property
    def ran_out_of_gpu_memory(self) -> bool:
        """Whether the exception that ended it, or one that led to it, says so."""
        return any(parse_torch_message(error.message) for error in self.failure.errors)

    @property
    def error(self) -> Error:
        """The exception that ended it, or the one that led to its exit."""
        return self.failure.error

    @property
    def thread_error(self) -> Uncaught:
        """The first exception that ended one of its threads."""
        return next((each for each in self.uncaught if each.how == "thread"), _NOT_FAILED)

    @property
    def failed_ns(self) -> int | None:
        """Unix time at which it was lost: its exception, else its end."""
        times = (self.failure.wall_ns, self.wall_ns)
        return min((time for time in times if time is not None), default=None)

    @property
    def clean(self) -> bool:
        """Whether it ended as a process ends that has done its work."""
        is_quiet = self.status is None and self.closed and not self.how
        return self.signal is None and (self.status == 0 or is_quiet)

    @property
    def killed_with_bytes(self) -> int | None:
        """Resident at the kill, as the kernel's log has it."""
        names = ("anonymous_bytes", "file_bytes", "shared_bytes")
        held = [integer((self.oom or {}).get(name)) for name in names]
        sizes = [size for size in held if size is not None and size >= 0]
        return sum(sizes) if sizes else None

    @property
    def over(self) -> bool:
        """Whether anything tells that it has ended."""
        return self.seen or self.closed or bool(self.how)

    def kind(self) -> str:
        """One word for the cause of an end: `exception`, `out_of_memory`, `killed`, `exit` ..."""
        error = self.error
        if self.ran_out_of_gpu_memory:
            return "out_of_memory"
        if error.is_failure:
            said = f"{error.type}: {error.message}"
            known = next((kind for kind, pattern in _KINDS if pattern.search(said)), None)
            if known is not None or error.errno in (errno.ENOSPC, errno.EDQUOT):
                return known or "disk_full"
            if worker := error.worker_death():
                return "out_of_memory" if self.oom else worker[0]
            aborted = self.how == "printed" and self.signal is not None
            return "crash" if self.how == "terminate" or aborted else "exception"
        if self.oom:
            return "out_of_memory"
        if self.signal is not None:
            return "crash" if self.signal in _CRASHES else "killed"
        return "exit" if self.status is not None or self.how else "gone"

    def what_happened(self) -> str:
        """The end of one process, for people."""
        error = self.error
        if self.gpu_memory is not None and self.ran_out_of_gpu_memory:
            return self.gpu_memory.text
        if error.is_failure:
            if worker := error.worker_death():
                return worker[1] + (", by the kernel: its memory was used up" if self.oom else "")
            inner_said, inner_place, _ = error.inner_error()
            raised = _WORKER_RAISED.search(error.message)
            no_memory = self.kind() == "out_of_memory"
            verb = "ran" if no_memory else "raised"
            who = f"its DataLoader worker {raised[1]} {verb} " if raised else ""
            place = inner_place or error.location or self.crash_place()
            exits = self.failure.errors[0].type == "SystemExit"
            via = f", and exited with status {self.status}" if exits and self.status else ""
            by_signal = f" ({signal_name(self.signal)})" if self.signal is not None else ""
            way = f"it aborted itself{by_signal}: " if self.how == "terminate" else ""
            said = self._out_of_memory_text() if no_memory else inner_said or error.short
            by = "; known by its last lines on stderr" if self.how == "printed" else ""
            by += _NO_FILE if _NOT_WRITTEN.search(error.message) else ""
            by += self._root_text() + self.thread_text()
            return f"{way}{who}{said}{f' ({place})' if place else ''}{via}{by}"
        if self.oom:
            held = self.killed_with_bytes
            with_bytes = "" if held is None else f" with {held / (1 << 30):.2f} GiB resident"
            of = "the machine" if self.oom.get("in_cgroup") is False else "its control group"
            return f"killed by the kernel (SIGKILL): the memory of {of} was used up{with_bytes}"
        if self.signal is not None:
            said = ""
            if self.signal in _CRASHES:
                said = f", {self.crash_place()}" if self.crashed_at else self._last_line()
            by = SIGNALS.get(self.signal, NO_WORDS).says or f"ended by {signal_name(self.signal)}"
            return by + said
        if self.status == 0:
            return "it ended with exit status 0"
        if self.status is not None:
            thread = self.thread_text()
            if self.knows_exit():
                by = "sys.exit" if self.how == "exit_call" else "SystemExit"
                exited, handled, *_ = *self.failure.errors, NO_ERROR, NO_ERROR
                at = f" at {exited.location}" if exited.location else ""
                says = exited is not NO_ERROR and exited.exit_status is None
                told = f": {shorten(exited.message)}" if says else ""
                if handled is not NO_ERROR:
                    told += f", while handling {handled.short} ({handled.location})"
                last = "" if says else self._last_line()
                return f"it exited with status {self.status} ({by}){at}{told}{last}{thread}"
            way = ""  # of processes that were not recorded nothing tells it
            if self.started_ns is not None and not self.closed:
                way = " without Python's own exit (os._exit, exec, native code, no memory)"
            why = f"why is not known{self._last_line()}{thread}"
            return f"it ended with exit status {self.status}{way}; {why}"
        return "it is gone and left no report: killed, or its machine was lost"

    def _out_of_memory_text(self) -> str:
        """`out of memory, at its limit of 2.86 GiB by ulimit -v`."""
        if _OF_DEVICE.search(self.error.message):
            return "out of GPU memory"
        limit = self.address_limit_bytes
        at = f", at its limit of {bytes_text(limit)} by ulimit -v" if limit is not None else ""
        return f"out of memory{at}"

    def crash_place(self) -> str:
        """`called at train.py:8 in step`; of another thread what Python did; empty: not known."""
        own = own_frame(self.crashed_at)
        how = "on another thread, while Python was" if self.crashed_beside else "called"
        return f"{how} at {frame_text(own)}" if own else ""

    def _last_line(self) -> str:
        """`; its last line on stderr: ERROR disk is full`; empty where none is known."""
        printed = (("stderr", self.printed), ("stdout", self.printed_stdout))
        last = (f"; its last line on {name}: {shorten(line.strip())}"
                for name, lines in printed for line in reversed(lines) if line.strip())  # fmt: skip
        return next(last, "")

    def _root_text(self) -> str:
        """`; raised from KeyError: 'a' (data.py:3 in load)`: the first of its chain with a line."""
        chain = self.failure.errors if self.how == "exception" else ()
        roots = [e for e in chain if e.line and e.type != "SystemExit" and e is not self.error]
        if not roots or roots[-1].message in self.error.message:
            return ""
        return f"; raised from {roots[-1].short} ({roots[-1].location})"

    def thread_text(self) -> str:
        """`; its thread reader had died of ValueError: no file (train.py:9 in read)`, or empty."""
        error = self.thread_error.error
        place = f" ({error.location})" if error.location else ""
        said = f"; its thread {self.thread_error.thread} had died of {error.short}{place}"
        return said if error is not NO_ERROR else ""

    def is_certain(self) -> bool:
        """Whether the cause of an end was seen: what was printed may be about something else."""
        unsure = self.how == "printed" or _NOT_WRITTEN.search(self.error.message)
        return not unsure and (self.kind() != "exit" or self.knows_exit())

    def knows_exit(self) -> bool:
        """Whether it is proved that it left by sys.exit: no exception would look the same."""
        return self.exited or self.error is not NO_ERROR


NO_END = ProcessEnd(host="", pid=0, rank=None)  # of a process of which nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A signal that came to a launcher."""

    host: str
    wall_ns: int
    signal: int
    from_pid: int | None
    from_command: str | None
    slurm_job: str | None
    slurm_end_ns: int | None
    slurm_state: str | None = None
    """`TIMEOUT`, `REQUEUED`, or as Slurm called it then: `PREEMPTED`, `COMPLETING`."""


_Found = dict[tuple[str, int], dict[str, Any]]
"""By host and process: fields of its ProcessEnd, as far as they are known."""


def process_ends(files: RunFiles) -> list[ProcessEnd]:
    """Every process of which an end or a report is known, ranks first, in order."""
    found: _Found = defaultdict(dict)
    for rank in files.ranks:
        _take_report(found, rank)
    for host, pid, content in read_of_processes(files.paths.uncaught_files(), _UNCAUGHT_LIMIT):
        _take_uncaught(found, host, pid, content)
    for host, pid, path in files.paths.native_ends("terminate"):
        _take_terminate(found[host, pid], path)
    for host, pid, path in files.paths.native_ends("crash"):
        _take_crash(found[host, pid], path)
    for host, pid, failed in failed_allocations(files.paths):
        found[host, pid]["gpu_memory"] = failed
    for node in files.nodes:
        for line in (*node.of_type("process_end"), *node.of_type("job_end")):
            _take_end(found, node.host, line)
    ends = [ProcessEnd(host=host, pid=pid, **_take_fields(facts))
            for (host, pid), facts in found.items()]  # fmt: skip
    ends = [_add_torch_numbers(_add_printed(end)) for end in ends]
    ends = [_without_helpers(_add_workers_kill(end, ends), ends) for end in ends]
    ends = _place_generations(ends)
    return sorted(ends, key=lambda e: (e.rank is None, e.rank or 0, e.generation, e.host, e.pid))


def caught_failures(files: RunFiles) -> dict[int, GpuOutOfMemory]:
    """The last allocation on its GPU that failed, of each rank that did not die of one."""
    if not files.paths.out_of_memory_files():
        return {}
    return {
        end.rank: end.gpu_memory
        for end in process_ends(files)
        if end.rank is not None and not end.helper
        and end.gpu_memory is not None and not end.ran_out_of_gpu_memory
    }  # fmt: skip


def arrived_signals(files: RunFiles) -> list[Arrived]:
    """Signals that came to launchers, in order of time."""
    found = []
    for node, line in [(n, line) for n in files.nodes for line in n.of_type("signal")]:
        number, wall_ns = integer(line.get("signal")), integer(line.get("wall_ns"))
        if number is None or wall_ns is None:
            continue
        end_s = integer(line.get("slurm_end_s"))
        end_ns = None if end_s is None else end_s * NS_PER_S
        found.append(read_record(Arrived, line, host=node.host, wall_ns=wall_ns, signal=number,
                                 slurm_end_ns=end_ns))  # fmt: skip
    return sorted(found, key=lambda signal: signal.wall_ns)


def _take_report(found: _Found, rank: RankFiles) -> None:
    host, pid = text(rank.report.get("host")), integer(rank.report.get("pid"))
    if host is None or pid is None:
        return
    restart = integer(rank.report.get("restart")) or 0
    ends = [line for line in rank.of_type("record_end") if line.get("reason") == "exit"]
    offset, closed = rank.clock_offset_ns, integer(ends[-1].get("time_ns")) if ends else None
    found[host, pid].update(
        rank=rank.rank, generation=restart or rank.attempt,
        started_ns=integer(mapping(rank.report.get("clock")).get("wall_ns")),
        parent=integer(rank.report.get("ppid")), closed=bool(ends),
        closed_ns=None if offset is None or closed is None else closed + offset,
        exited=any(line.get("uncaught") is False for line in ends),
        left_at=own_frame(parse_frames(ends[-1].get("left_at")) or ()) if ends else None,
    )  # fmt: skip


def _take_uncaught(found: _Found, host: str, pid: int, content: Mapping[str, Any]) -> None:
    ended = content.get("ended")
    if not isinstance(ended, list):
        return
    facts = found[host, pid]
    facts["uncaught"] = tuple(map(_uncaught, objects(ended[:_ENTRY_LIMIT])))
    facts.update({name: integer(content.get(name)) for name in ("step", "world_size")})
    if "rank" not in facts:
        facts["rank"] = integer(content.get("rank"))
        if facts["rank"] is not None:
            facts["generation"] = integer(content.get("restart")) or 0
    if content.get("loader_worker") is True:
        facts["helper"] = True


def _take_terminate(facts: dict[str, Any], path: Path) -> None:
    """A C++ exception, as in_job/terminate.cpp writes it: Unix time, type, text."""
    with contextlib.suppress(OSError):
        content = path.read_bytes()[:_FIELD_CHARS].decode(errors="replace")
        time, kind, message, *_ = *content.split("\n", 2), "", ""
        error = Error(type=kind or "std::terminate", message=mask_text(message))
        wall_ns = int(time) if time.isascii() and time.isdigit() and len(time) < 20 else None
        native = Uncaught(how="terminate", thread=None, wall_ns=wall_ns, errors=(error,))
        facts["uncaught"] = (*facts.get("uncaught", ()), native)[:_ENTRY_LIMIT]


def _uncaught(entry: Mapping[str, Any]) -> Uncaught:
    child = _failed_child(entry.get("children"))
    errors = objects(entries(entry.get("errors"))[:_CHAIN_LIMIT])
    return Uncaught(
        how=text(entry.get("how")) or "exception", thread=text(entry.get("thread")),
        wall_ns=integer(entry.get("wall_ns")), errors=tuple(_error(each, child) for each in errors),
    )  # fmt: skip


def _failed_child(children: object) -> tuple[int, int, int] | None:
    """The one of the children that ended whose end is a failure; None of several."""
    failed = []
    for child in entries(children):
        pid, code, status = (*map(integer, entries(child)), None, None, None)[:3]
        if pid is not None and status:
            by_signal = code in (os.CLD_KILLED, os.CLD_DUMPED)
            failed.append((pid, status if by_signal else 0, 0 if by_signal else status))
    return failed[0] if len(failed) == 1 else None


def _error(content: Mapping[str, Any], ended_child: tuple[int, int, int] | None) -> Error:
    frames = parse_frames(content.get("frames")) or ()
    return Error(
        type=(text(content.get("type")) or "?")[:200],
        message=(text(content.get("message")) or "")[:_FIELD_CHARS], line=own_frame(frames),
        source=(text(content.get("source")) or "")[:400], frames=frames,
        errno=integer(content.get("errno")), ended_child=ended_child,
    )  # fmt: skip


def _take_crash(facts: dict[str, Any], path: Path) -> None:
    """Where Python was, as in_job/crash.c writes it: time, signal, thread, and a line a frame."""
    with contextlib.suppress(OSError, ValueError):
        content = path.read_bytes()[:_CRASH_BYTES].decode(errors="replace")
        (_, _, is_main), *rows = (line.split("\t") for line in content.splitlines())
        frames = [(file, int(line), name) for line, name, file in rows if file and name]
        facts["crashed_at"] = tuple(frame for frame in frames[::-1] if frame[0] != _SHIM)
        facts["crashed_beside"] = is_main == "0"


def _take_end(found: _Found, host: str, line: Mapping[str, Any]) -> None:
    pid, wall_ns = integer(line.get("pid")), integer(line.get("wall_ns"))
    if pid is None or wall_ns is None:
        return
    facts = found[host, pid]
    status, number = integer(line.get("status")), integer(line.get("signal"))
    if facts.get("seen") and status is None and number is None:
        return  # the launcher's word and the agent's are about the same end
    facts.update(
        seen=True, core=line.get("core") is True,
        wall_ns=min(wall_ns, facts.get("wall_ns", wall_ns)),
        status=status if status is None or 0 <= status < 256 else None,
        signal=number if number is not None and 0 < number < 128 else None,
        **{name: line[name] for name in ("oom", "shm") if isinstance(line.get(name), dict)},
    )  # fmt: skip
    limit = integer(line.get("address_limit_bytes"))
    if limit is not None and limit > 0:
        facts["address_limit_bytes"] = limit
    for name, field in (("stderr", "printed"), ("stdout", "printed_stdout")):
        if name in line:
            said = entries(line[name])[-_LINE_LIMIT:]
            facts[field] = tuple(each[:_LINE_CHARS] for each in said if isinstance(each, str))
    facts.setdefault("rank", integer(line.get("rank")))
    facts["parent"] = facts.get("parent") or integer(line.get("parent"))
    facts["helper"] = facts.get("helper") or line.get("helper") is True


def _take_fields(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Without a call of sys.exit for another status than the one it ended with: it was caught."""
    kept = {name: facts[name] for name in facts.keys() & ProcessEnd.__dataclass_fields__.keys()}
    kept |= {"rank": facts.get("rank"), "generation": facts.get("generation", -1)}
    kept["uncaught"] = tuple(
        each for each in facts.get("uncaught", ()) if each.how != "exit_call"
        or [facts.get("status")] == [error.exit_status or 1 for error in each.errors[:1]]
    )  # fmt: skip
    return kept


_PRINTED_ERROR = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
_TERMINATED = re.compile(
    r"terminate called after throwing an instance of '([^'\n]{1,200})'\n\s*what\(\):\s*(.*)", re.S
)
"""What libstdc++ prints of an exception that nothing caught, before it aborts."""


def _add_printed(end: ProcessEnd) -> ProcessEnd:
    """Adds the error on stderr (of an abort the C++ runtime's) where nothing else tells of one."""
    if end.signal in _CRASHES and not end.crashed_at:
        end = replace(end, crashed_at=_dumped_frames(end.printed))
    error = None
    if end.how:
        return end
    if end.signal == signal.SIGABRT:
        if aborted := _TERMINATED.search("\n".join(end.printed)):
            error = Error(type=aborted[1], message=aborted[2].strip()[:_FIELD_CHARS])
    elif end.status and not end.exited:
        error = _printed_error(end.printed)
    if error is None:
        return end
    printed = Uncaught(how="printed", thread=None, wall_ns=None, errors=(error,))
    return replace(end, uncaught=(*end.uncaught, printed))


def _dumped_frames(printed: Sequence[str]) -> tuple[Frame, ...]:
    """Of the thread that crashed, as Python's faulthandler printed it; none where it did not."""
    begun = [at for at, line in enumerate(printed) if _DUMPED.match(line)]
    lines = printed[begun[-1] + 1 :] if begun else ()
    found = takewhile(bool, map(_DUMPED_FRAME.match, lines))
    return tuple((each[1], int(each[2]), each[3]) for each in found if each)[::-1]


def _printed_error(printed: Sequence[str]) -> Error | None:
    """Of the last traceback; None where there is none, or not all of it."""
    begun = [at for at, line in enumerate(printed) if line.startswith("Traceback (most recent")]
    lines = printed[begun[-1] + 1 :] if begun else ()
    at = next((at for at, line in enumerate(lines) if not line.startswith(" ")), None)
    said = None if at is None else _PRINTED_ERROR.match(lines[at])
    if at is None or said is None:
        return None
    found = FILE_LINE.findall("\n".join(lines[:at]))
    frames = tuple((file, int(line), function) for file, line, function, _ in found)
    own = own_frame(frames)
    source = found[frames.index(own)][3] if own else ""
    message = "\n".join([said[2] or "", *lines[at + 1 :]]).strip()
    return Error(type=said[1], message=message[:_FIELD_CHARS], line=own, source=source,
                 frames=frames)  # fmt: skip


def _add_torch_numbers(end: ProcessEnd) -> ProcessEnd:
    """Adds what torch's own text tells of GPU memory, where the process noted less or nothing."""
    told = ((e, said) for e in end.failure.errors if (said := parse_torch_message(e.message)))
    for error, said in islice(told, 1):
        noted, raised_ns = end.gpu_memory, end.failure.wall_ns or 0
        if noted is None or raised_ns - (noted.wall_ns or raised_ns) > _SAME_FAILURE_NS:
            return replace(end, gpu_memory=replace(said, line=error.line, step=end.step))
        unknown = [f.name for f in fields(noted) if getattr(noted, f.name) is None]
        filled = {name: getattr(said, name) for name in unknown}
        return replace(end, gpu_memory=replace(noted, **filled))
    return end


def _add_workers_kill(end: ProcessEnd, ends: Sequence[ProcessEnd]) -> ProcessEnd:
    """Adds what the kernel said of the DataLoader worker whose end an exception tells of."""
    died = WORKER_DIED.search(end.error.message)
    killed = (e.oom for e in ends if died and e.oom and (e.host, str(e.pid)) == (end.host, died[1]))
    return replace(end, oom=next(killed, end.oom))


def _without_helpers(end: ProcessEnd, ends: Sequence[ProcessEnd]) -> ProcessEnd:
    """A process with a rank's label below or above that rank is a helper: a worker, a shell."""
    if end.rank is None or end.started_ns is not None:
        return end
    family = [e for e in ends if e.rank == end.rank and e.host == end.host and not e.helper]
    below, above = {e.pid for e in family}, {e.parent for e in family if e.started_ns is not None}
    is_helper = end.parent in below or end.pid in above or end.helper
    return replace(end, helper=True) if is_helper else end


def _place_generations(ends: Sequence[ProcessEnd]) -> list[ProcessEnd]:
    """Processes that did not say so belong to the last generation that had begun by then."""
    placed = [end for end in ends if end.generation >= 0]
    unplaced = [end for end in ends if end.generation < 0]
    seen = [(e.generation, e.failed_ns if e.started_ns is None else e.started_ns)
            for e in placed if e.rank is not None]  # fmt: skip
    for end in sorted(unplaced, key=lambda end: end.failed_ns or 0):
        time = end.failed_ns or 0
        generation = max((g for g, since in seen if since is not None and since <= time), default=0)
        over = {
            e.generation for e in placed
            if end.rank is not None and e.rank == end.rank and not (e.helper or end.helper)
            and e.over and (e.failed_ns or 0) < time
        }  # fmt: skip
        while generation in over:  # that start's process of this rank had ended: this is the next
            generation += 1
        placed.append(replace(end, generation=generation))
    return placed


def wait_failure_text(said: str) -> str | None:
    """The same of a text."""
    return next((by for pattern, by in _WAITED_FOR if pattern.search(said)), None)


def signal_name(number: int) -> str:
    """`SIGTERM`, and `SIG37` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


_BACK = 50  # so many samples back at the most is one looked for whose stack is known


class LastSeen(NamedTuple):
    """Where the training thread was at its last sample."""

    line: str
    wall_ns: int
    since_ns: int  # Unix time of the first of the samples up to that one which are all at that line
    is_at_lock: bool  # whether it waited for a lock at that very line


def last_seen(rank: RankFiles, worker_pid: int | None = None) -> LastSeen | None:
    """The last sample of the training thread, or of a worker; None where it was never sampled."""
    offset_ns, of_workers = rank.clock_offset_ns, worker_pid is not None
    paths = rank.paths.worker_stack_files().values() if of_workers else (rank.paths.stacks,)
    own = [(p, tree) for p, tree in _read_processes(paths) if (p.worker is not None) is of_workers
           and p.pid == (worker_pid or rank.report.get("pid"))]  # fmt: skip
    if not own or offset_ns is None:
        return None
    samples = ((own_frame(each[1]), *each) for each in _last_samples(*own[-1]))
    last = next((each for each in islice(samples, _BACK) if each[0] is not None), None)
    if last is None or (frame := last[0]) is None:
        return None
    _, time_ns, frames, wait = last
    alike = takewhile(lambda each: each[0] == frame, samples)
    since_ns = min((at_ns for _, at_ns, _, _ in alike), default=time_ns)
    is_at_lock = frame == frames[-1] and wait == WAITS.index("lock")
    return LastSeen(frame_text(frame), time_ns + offset_ns, since_ns + offset_ns, is_at_lock)


def _read_processes(paths: Iterable[Path]) -> Iterator[tuple[SampledProcess, StackTree]]:
    """The processes of files that can be read, and the stacks of each file."""
    for path in paths:
        grown = StackTree()
        with contextlib.suppress(RunFormatError):
            yield from ((process, grown) for process in read_stack_file(path, grown)[0])


def _last_samples(process: SampledProcess, grown: StackTree) -> Iterator[tuple[int, Stack, int]]:
    """Time, stack and wait, from the last sample back."""
    sampled, tree = process.samples()[0], grown.whole()
    columns = (sampled[name][::-1].tolist() for name in ("time_ns", "stack", "wait"))
    known: dict[int, Stack] = {}
    for time_ns, stack, wait in zip(*columns, strict=True):
        if stack not in known:
            known[stack] = tuple(tree.frames[at][:3] for at in tree.frame_places(stack))
        yield time_ns, known[stack], wait


def workers_last_at(rank: RankPaths) -> dict[int, Stack]:
    """By process of a DataLoader worker: its stack at its last sample that knows one."""
    found = {}
    for path in rank.worker_stack_files().values():
        for process, tree in list(_read_processes([path]))[-1:]:
            last = (stack for _, stack, _ in islice(_last_samples(process, tree), _BACK) if stack)
            found[process.pid] = next(last, ())
    return found


_PHASES = frozenset(KIND_NAMES.values())


def last_phase(rank: RankFiles) -> str | None:
    """The innermost phase under way when a process was killed; None where that is not known."""
    begun = mapping(rank.last("unclean_end").get("open_ns"))
    known = [(start, name) for name, at in begun.items() if name in _PHASES
             and (start := integer(at)) is not None]  # fmt: skip
    return sorted(known, key=lambda phase: phase[0])[-1][1] if known else None


_TAIL = 64
_BEAT_NS = 1_500_000_000  # a process writes what it began last once a second, if that has changed


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCollective:
    """The last collective that a rank began in a group."""

    sequence: int
    kind: str | None  # None where only its number is known

    @property
    def text(self) -> str:
        """`all_reduce 241`."""
        return f"{self.kind or 'collective'} {self.sequence}"


def last_collectives(
    files: RunFiles, collectives: pl.DataFrame, attempts: Mapping[int, int],
    ended_ns: Mapping[int, int | None],
) -> dict[int, dict[str, LastCollective]]:  # fmt: skip
    """By rank and group: the last collective begun, from heartbeats and the last dumps.

    Of a heartbeat of its last moments nothing is known: the rank may have gone on.
    """
    found: dict[int, dict[str, LastCollective]] = {}
    for rank in files.ranks:
        if attempts.get(rank.rank) == rank.attempt:
            if (until_ns := ended_ns.get(rank.rank)) is not None:
                until_ns -= (rank.clock_offset_ns or 0) + _BEAT_NS
            for group, sequence in _heartbeats(rank.paths.heartbeat, until_ns).items():
                last = LastCollective(sequence=sequence, kind=None)
                found.setdefault(rank.rank, {})[group] = last
    own = collectives.filter(~pl.col("p2p"))
    newest = own.sort("sequence", "created_ns").group_by("rank", "attempt", "group").last()
    for row in newest.select("rank", "attempt", "group", "sequence", "kind").rows():
        rank, attempt, group, sequence, kind = row
        if attempts.get(rank) != attempt:
            continue
        known = found.setdefault(rank, {}).get(group)
        if known is None or sequence >= known.sequence:
            found[rank][group] = LastCollective(sequence=sequence, kind=kind)
    kinds = {(g, s): k for g, s, k in own.select("group", "sequence", "kind").unique().rows()}
    return {
        rank: {g: replace(o, kind=o.kind or kinds.get((g, o.sequence))) for g, o in groups.items()}
        for rank, groups in found.items()
    }


def behind(last: Mapping[int, Mapping[str, LastCollective]]) -> dict[int, LastCollective]:
    """Ranks that have begun fewer collectives of a group than others, with the one they lack.

    Only of the group with the most ranks: in smaller ones all members may lag behind alike.
    """
    sizes = Counter(group for groups in last.values() for group in groups)
    for group in sorted(sizes, key=lambda g: (-sizes[g], g)):
        begun = {rank: groups[group] for rank, groups in last.items() if group in groups}
        most = max(begun.values(), key=lambda each: (each.sequence, each.kind is not None))
        found = {rank: most for rank, each in begun.items() if each.sequence < most.sequence}
        if found:
            return found
    return {}


def _heartbeats(path: Path, until_ns: int | None) -> dict[str, int]:
    """The last number begun, by group, where none came after a time; empty without a file."""
    try:
        columns = record_columns(read_table(path, HEARTBEAT, first=-_TAIL))
    except RunFormatError:
        return {}
    rows = zip(*(columns[name].tolist() for name in ("group", "enqueued", "time_ns")), strict=True)
    last = {group: (number, time_ns) for group, number, time_ns in rows if number != NULL_I64}
    return {
        str(group): number
        for group, (number, time_ns) in last.items()
        if until_ns is None or time_ns <= until_ns
    }
