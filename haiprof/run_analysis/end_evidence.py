"""How each rank ended: what texts and signals say of it, its last moment, line and collectives."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from haiprof.base.code_places import is_library
from haiprof.base.errors import RunFormatError
from haiprof.base.units import shorten
from haiprof.run_analysis.process_ends import FILE_LINE, WORKER_DIED, Error, ProcessEnd
from haiprof.run_analysis.run_files import (
    RankFiles,
    RunFiles,
    SampledProcess,
    integer,
    mapping,
    read_stack_file,
    read_table,
    record_columns,
)
from haiprof.run_format.schema import HEARTBEAT, KIND_NAMES, NULL_I64
from haiprof.run_format.stack_frames import Frame, frame_text, own_frame

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
_OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|DefaultCPUAllocator: (?:can't|not enough)|OutOfMemoryError|"
    r"out of memory|Cannot allocate memory"
)
_SHARED_MEMORY = re.compile(
    r"out of shared memory|insufficient shared memory|unable to (?:open|write to|allocate|resize) "
    r"(?:file|shared memory)|torch_shm|/dev/shm"
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_NOT_WRITTEN = re.compile(
    r"PytorchStreamWriter failed writing|inline_container.*unexpected pos|iostream error"
)
"""Of torch.save, which does not say why: mostly the disk is full."""
_WORKER_RAISED = re.compile(r"in DataLoader worker process (\d+)")
_SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "a segmentation fault in native code (SIGSEGV)",
    signal.SIGBUS: "a bus error (SIGBUS): memory behind a mapping was not there",
    signal.SIGABRT: "aborted (SIGABRT): C++ terminate, a failed assertion, a watchdog, or a signal "
    "that was sent",
    signal.SIGFPE: "an arithmetic error in native code (SIGFPE)",
    signal.SIGILL: "an instruction that this CPU does not have (SIGILL)",
    signal.SIGXCPU: "ended by SIGXCPU, which the kernel sends at the limit of CPU time (ulimit -t)",
    signal.SIGXFSZ: "ended by SIGXFSZ, which the kernel sends where a file would grow beyond the "
    "limit of its size (ulimit -f)",
    signal.SIGPIPE: "ended by SIGPIPE: it wrote to a pipe or a socket that nobody reads any more",
    signal.SIGALRM: "ended by SIGALRM, which a timer sends (alarm, setitimer)",
    signal.SIGKILL: "killed (SIGKILL); the sender is not known",
}


def wait_failure(error: Error | None) -> str | None:
    """What ended a rank that waited for another one; None where its error is its own."""
    if error is None:
        return None
    said = f"{error.type}: {error.message}"
    return next((by for pattern, by in _WAITED_FOR if pattern.search(said)), None)


def is_launchers(error: Error | None) -> bool:
    """Whether an exception only reports that another process failed."""
    return error is not None and error.type.rpartition(".")[2] in _LAUNCHERS_ERRORS


def accused_ranks(error: Error | None) -> tuple[int, ...]:
    """Ranks that an exception names as those that others waited for."""
    match = _ACCUSED.search(error.message) if error is not None else None
    words = match[1].replace(" ", "").split(",") if match else []
    return tuple(int(word) for word in words if word.isdigit() and len(word) < 8)


def worker_death(error: Error | None) -> tuple[str, str] | None:
    """The cause and the end of a DataLoader worker of which an exception tells.

    The main thread's line is where a signal met it (SIGCHLD), and caused nothing.
    """
    match = WORKER_DIED.search(error.message) if error is not None else None
    if match is None:
        return None
    if match[2] is None:
        status = f" with exit status {match[3]}" if match[3] else ""
        return "exit", f"its DataLoader worker {match[1]} ended{status}; why is not known"
    kind = "killed" if match[2] in ("Killed", "Terminated", "Interrupt") else "crash"
    return kind, f"its DataLoader worker {match[1]} was ended by a signal: {match[2]}"


def kind_of(end: ProcessEnd) -> str:
    """One word for the cause of an end: `exception`, `out_of_memory`, `killed`, `exit` ..."""
    error = end.error
    if end.ran_out_of_gpu_memory:
        return "out_of_memory"
    if error is not None and error.type != "SystemExit":
        said = f"{error.type}: {error.message}"
        if _SHARED_MEMORY.search(said) or "Bus error" in said:
            return "shared_memory_full"
        if error.errno in (28, 122) or _DISK_FULL.search(said) or _NOT_WRITTEN.search(said):
            return "disk_full"
        if _OUT_OF_MEMORY.search(said):
            return "out_of_memory"
        if error.type == "KeyboardInterrupt":
            return "interrupted"
        if worker := worker_death(error):
            return "out_of_memory" if end.oom else worker[0]
        return "crash" if end.is_terminated else "exception"
    if end.oom:
        return "out_of_memory"
    if end.signal is not None:
        crash = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
        return "crash" if end.signal in crash else "killed"
    return "exit" if end.status is not None or end.failure is not None else "gone"


def what_happened(end: ProcessEnd) -> str:
    """The end of one process, for people."""
    error = end.error
    if end.gpu_memory is not None and end.ran_out_of_gpu_memory:
        return end.gpu_memory.text
    if error is not None and error.type != "SystemExit":
        if worker := worker_death(error):
            return worker[1] + (", by the kernel: its memory was used up" if end.oom else "")
        inner = inner_error(error)
        raised = _WORKER_RAISED.search(error.message)
        who = f"its DataLoader worker {raised[1]} raised " if raised else ""
        place = inner[1] or error.location
        exits = end.failure is not None and end.failure.errors[0].type == "SystemExit"
        via = f", and exited with status {end.status}" if exits and end.status else ""
        by_signal = f" ({signal_name(end.signal)})" if end.signal is not None else ""
        way = f"it aborted itself{by_signal}: " if end.is_terminated else ""
        by = "; known by its last lines on stderr" if end.is_printed else ""
        if _NOT_WRITTEN.search(error.message):
            by += "; torch could not write the file: a full disk, a quota, or a limit (ulimit -f)"
        return f"{way}{who}{inner[0] or error.short}{f' ({place})' if place else ''}{via}{by}"
    if end.oom:
        oom = end.oom
        held = [oom.get(name) for name in ("anonymous_bytes", "file_bytes", "shared_bytes")]
        sizes = [size for size in held if isinstance(size, int) and size >= 0]
        with_bytes = f" with {sum(sizes) / (1 << 30):.2f} GiB resident" if sizes else ""
        of = "of its control group" if oom.get("in_cgroup") is not False else "of the machine"
        return f"killed by the kernel (SIGKILL): the memory {of} was used up{with_bytes}"
    if end.signal is not None:
        return _SIGNALS.get(end.signal) or f"ended by {signal_name(end.signal)}"
    if end.status == 0:
        return "it ended with exit status 0"
    if end.status is not None:
        thread = thread_text(end)
        if knows_exit(end):
            failure = end.failure
            by = "sys.exit" if failure is not None and failure.how == "exit_call" else "SystemExit"
            parts = [f"it exited with status {end.status} ({by})"]
            for each in failure.errors[:1] if failure is not None else ():
                parts[0] += f" at {each.location}" if each.location else ""
                parts += [shorten(each.message)] if each.exit_status is None else []
            for each in failure.errors[1:2] if failure is not None else ():
                parts[-1] += f", while handling {each.short} ({each.location})"
            return ": ".join(parts) + thread
        without = end.started_ns is not None and not end.closed  # of others nothing was recorded
        way = " without Python's own exit" if without else ""
        way += " (os._exit, exec, native code, no memory)" if without else ""
        last = next((line.strip() for line in reversed(end.printed) if line.strip()), "")
        said = f"; its last line on stderr: {shorten(last)}" if last else ""
        return f"it ended with exit status {end.status}{way}; why is not known{said}{thread}"
    return "it is gone and left no report: killed, or its machine was lost"


def thread_text(end: ProcessEnd) -> str:
    """`; its thread reader had died of ValueError: bad record (train.py:9 in read)`, or nothing."""
    noted = end.thread_error
    if noted is None or noted.error is None:
        return ""
    place = f" ({noted.error.location})" if noted.error.location else ""
    return f"; its thread {noted.thread} had died of {noted.error.short}{place}"


def is_certain(end: ProcessEnd) -> bool:
    """Whether the cause of an end was seen: what was printed may be about something else."""
    unsure = end.error is not None and _NOT_WRITTEN.search(end.error.message) is not None
    return not (end.is_printed or unsure) and (kind_of(end) != "exit" or knows_exit(end))


def knows_exit(end: ProcessEnd) -> bool:
    """Whether it is proved that the process left by sys.exit: no exception would look the same."""
    return end.exited or end.error is not None


def unlike_messages(error: Error | None) -> str | None:
    """That a rank was sent more than it waited for, as gloo notices it; None where it was not."""
    match = _UNLIKE.search(error.message) if error is not None else None
    if match is None:
        return None
    return f"it was sent a message of {match[1]} bytes where it waited for {match[2]}"


def inner_error(error: Error) -> tuple[str, str, str]:
    """What another process's traceback in a message says: error, user's line, and its source."""
    if "Traceback (most recent call last)" not in error.message:
        return "", "", ""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if _ERROR.match(line)), "")
    places = [
        (file, line, function, source)
        for file, line, function, source in FILE_LINE.findall(error.message)
        if not is_library(file, function)
    ]
    if not places:
        return said[:200], "", ""
    file, line, function, source = places[-1]
    return said[:200], f"{file.rpartition('/')[2]}:{line} in {function}", source


def signal_name(number: int) -> str:
    """`SIGTERM`, and `SIG37` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


_DEPTH = 200
_BACK = 50
"""So many samples back at the most is one looked for whose stack is known."""


def last_line(rank: RankFiles) -> tuple[str, int] | None:
    """Where the training thread was last seen, and when (Unix time); None where it never was."""
    offset_ns = rank.clock_offset_ns
    try:
        processes, _ = read_stack_file(rank.paths.stacks)
    except RunFormatError:
        return None
    own = [p for p in processes if p.worker is None and p.pid == rank.report.get("pid")]
    if not own or offset_ns is None:
        return None
    sampled = own[-1]
    for place in range(len(sampled.stack) - 1, max(-1, len(sampled.stack) - _BACK), -1):
        frame = own_frame(_frames(sampled, int(sampled.stack[place])))
        if frame is not None:
            return frame_text(frame), int(sampled.time_ns[place]) + offset_ns
    return None


def _frames(process: SampledProcess, stack: int) -> list[Frame]:
    """From the outermost to the innermost frame."""
    found: list[Frame] = []
    while stack and len(found) < _DEPTH:
        frame = process.frames[process.places[stack - 1]]
        found.append((frame.file, frame.line, frame.function))
        stack = process.parents[stack - 1]
    return found[::-1]


_PHASES = frozenset(KIND_NAMES.values())


def last_phase(rank: RankFiles) -> str | None:
    """The innermost phase under way when a process was killed; None where that is not known."""
    begun = mapping(rank.last("unclean_end").get("open_ns"))
    known = [(start, name) for name, at in begun.items() if name in _PHASES
             and (start := integer(at)) is not None]  # fmt: skip
    return sorted(known, key=lambda phase: phase[0])[-1][1] if known else None


_TAIL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCollective:
    """The last collective that a rank began in a group."""

    group: str
    sequence: int
    kind: str | None
    """None where only its number is known."""

    @property
    def text(self) -> str:
        """`all_reduce 241`."""
        return f"{self.kind or 'collective'} {self.sequence}"


def last_collectives(
    files: RunFiles, collectives: pl.DataFrame, attempts: Mapping[int, int]
) -> dict[int, dict[str, LastCollective]]:
    """By rank and group: the last collective begun, from heartbeats and the last dumps."""
    found: dict[int, dict[str, LastCollective]] = {}
    for rank in files.ranks:
        if attempts.get(rank.rank) == rank.attempt:
            for group, sequence in _heartbeats(rank.paths.heartbeat).items():
                last = LastCollective(group=group, sequence=sequence, kind=None)
                found.setdefault(rank.rank, {})[group] = last
    own = collectives.filter(~pl.col("p2p"))
    newest = own.sort("sequence", "created_ns").group_by("rank", "attempt", "group").last()
    for row in newest.select("rank", "attempt", "group", "sequence", "kind").rows():
        rank, attempt, group, sequence, kind = row
        if attempts.get(rank) != attempt:
            continue
        known = found.setdefault(rank, {}).get(group)
        if known is None or sequence >= known.sequence:
            found[rank][group] = LastCollective(group=group, sequence=sequence, kind=kind)
    kinds = {(g, s): k for g, s, k in own.select("group", "sequence", "kind").unique().rows()}
    return {
        rank: {g: replace(o, kind=o.kind or kinds.get((g, o.sequence))) for g, o in groups.items()}
        for rank, groups in found.items()
    }


def behind(last: Mapping[int, Mapping[str, LastCollective]]) -> dict[int, LastCollective]:
    """Ranks that have begun fewer collectives of a group than others, with the one they lack.

    Only of the group with the most ranks: in smaller ones all members may lag behind alike.
    """
    sizes: dict[str, int] = {}
    for groups in last.values():
        for group in groups:
            sizes[group] = sizes.get(group, 0) + 1
    for group in sorted(sizes, key=lambda g: (-sizes[g], g)):
        begun = {rank: groups[group] for rank, groups in last.items() if group in groups}
        most = max(begun.values(), key=lambda each: (each.sequence, each.kind is not None))
        found = {rank: most for rank, each in begun.items() if each.sequence < most.sequence}
        if found:
            return found
    return {}


def _heartbeats(path: Path) -> dict[str, int]:
    """The last number begun, by group; empty where there is no file."""
    try:
        columns = record_columns(read_table(path, HEARTBEAT, first=-_TAIL))
    except RunFormatError:
        return {}
    pairs = zip(columns["group"].tolist(), columns["enqueued"].tolist(), strict=True)
    return {str(group): number for group, number in pairs if number != NULL_I64}
