"""What dynolog's `dyno` asks for: of dynolog's daemons on many nodes, or of haiprof's agent here.

Source: facebookincubator/dynolog, cli/src at c3a231a; scripts/pytorch/unitrace.py.
"""

from __future__ import annotations

import gzip
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from haiprof.agent.kineto_daemon import ABSTRACT, NoAgentError, TraceRequest, shown_address
from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.safe_files import remove_file, whole_file
from haiprof.live.kineto_processes import (
    DynologError,
    KinetoTraces,
    ProcessTrace,
    all_processes,
    call,
    clients_of,
    kineto_addresses,
    trigger,
)
from haiprof.live.kineto_trace import trace_processes

AHEAD_MS = 10_000
"""Several nodes begin together so long from now. Source: unitrace.py, --start-time-delay."""
_AT_ONCE = 32
_HOST_LIMIT = 65_536
_KEYS = {"shapes": "PROFILE_REPORT_INPUT_SHAPES", "memory": "PROFILE_PROFILE_MEMORY",
         "stacks": "PROFILE_WITH_STACK", "flops": "PROFILE_WITH_FLOPS",
         "modules": "PROFILE_WITH_MODULES"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrace:
    """The options of `dyno gputrace`."""

    log_file: str
    job_id: int = 0
    pids: tuple[int, ...] = ()
    """Only these; empty takes all."""
    duration_ms: int = 500
    iterations: int = -1
    """In place of the duration, where it is more than 0."""
    start_ms: int = 0
    """Unix time at which a duration begins; 0 is at once."""
    roundup: int = 0
    """Iterations begin at a multiple of it; 0 was not given."""
    limit: int = 0
    """Of processes on a node; 0 takes all (dynolog's own default takes three)."""
    switches: tuple[str, ...] = ()
    """Of `shapes`, `memory`, `stacks`, `flops`, `modules`."""

    def config(self) -> str:
        """As dynolog hands it to Kineto."""
        lines = [f"ACTIVITIES_LOG_FILE={self.log_file}"]
        if self.iterations > 0:
            lines += ["PROFILE_START_ITERATION=0",
                      f"PROFILE_START_ITERATION_ROUNDUP={self.roundup or 1}",
                      f"ACTIVITIES_ITERATIONS={self.iterations}"]  # fmt: skip
        else:
            lines += [f"PROFILE_START_TIME={self.start_ms}",
                      f"ACTIVITIES_DURATION_MSECS={self.duration_ms}"]  # fmt: skip
        on = {name: str(name in self.switches).lower() for name in _KEYS}
        return "\n".join([*lines, *(f"{key}={on[name]}" for name, key in _KEYS.items())])

    def file_of(self, pid: int) -> str:
        """Where Kineto puts the trace of a process: `trace_4711.json`."""
        return self.log_file.replace(".json", f"_{pid}.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What the daemon of one node said."""

    host: str
    answer: Mapping[str, Any] | None = None
    error: str | None = None
    matched: tuple[int, ...] = ()
    triggered: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    """On that node, or in a folder that it shares."""


def expand_hosts(text: str) -> list[str]:
    """`n[1-3,7],login` as Slurm writes it, in order."""
    parts = re.split(r",(?![^\[\]]*\])", text)
    found = [host for part in parts for host in _expand(part)]
    if not found or len(found) > _HOST_LIMIT or not all(found):
        raise UsageError(f"--hostname {text}: expected hosts, such as n1 or n[01-16,20]")
    return list(dict.fromkeys(found))


def _expand(part: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", part)
    if match is None:
        yield part if re.fullmatch(r"[\w.:-]+", part) else ""
        return
    for each in match[2].split(","):
        first, _, last = each.partition("-")
        width = len(first)
        low, high = int(first or -1), int(last or first or -1)
        if not 0 <= low <= high < low + _HOST_LIMIT:
            yield ""
            return
        for number in range(low, high + 1):
            yield from _expand(f"{match[1]}{number:0{width}d}{match[3]}")


def has_daemon(port: int) -> bool:
    """Whether dynolog answers on this machine."""
    try:
        call(("localhost", port), {"fn": "getStatus"})
    except DynologError:
        return False
    return True


def ask_daemons(
    hosts: Sequence[str], port: int, question: Mapping[str, Any] | GpuTrace
) -> list[NodeAnswer]:
    """Asks the daemons of all nodes at the same time; traces of several nodes begin together."""
    if isinstance(question, GpuTrace) and len(hosts) > 1 and not question.start_ms:
        question = replace(question, start_ms=time.time_ns() // 1_000_000 + AHEAD_MS)

    def ask(host: str) -> NodeAnswer:
        try:
            if not isinstance(question, GpuTrace):
                return NodeAnswer(host=host, answer=call((host, port), question))
            matched, triggered = trigger((host, port), question.config(), job=question.job_id,
                                         pids=question.pids, limit=question.limit)  # fmt: skip
        except DynologError as error:
            return NodeAnswer(host=host, error=str(error))
        files = tuple(question.file_of(pid) for pid in sorted(triggered))
        return NodeAnswer(host=host, matched=tuple(sorted(matched)), files=files,
                          triggered=tuple(sorted(triggered)))  # fmt: skip

    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(ask, hosts))


def trace_here(wish: GpuTrace, progress: Callable[[str], None]) -> KinetoTraces:
    """The same of haiprof's agent on this node, whose traces are waited for and completed.

    They are put where dynolog's user expects them: `FILE_PID.json`.
    """
    processes = all_processes(progress, slurm_job=wish.job_id, pids=wish.pids)
    chosen = processes[: wish.limit] if wish.limit else processes
    if len(chosen) < len(processes):
        progress(f"--process-limit {wish.limit}: {len(processes) - len(chosen)} are left out")
    folder = Path(wish.log_file).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--log-file {wish.log_file}: {folder} is no folder")
    request = TraceRequest(
        steps=max(wish.iterations, 1),
        time_s=0.0 if wish.iterations > 0 else wish.duration_ms / 1000,
        options=dict.fromkeys(wish.switches, True),
        start_wall_ns=wish.start_ms * 1_000_000,
        roundup=wish.roundup,
    )
    found = trace_processes(chosen, request, run=None, output=folder, progress=progress)
    return replace(found, processes=tuple(_unpack(each, wish, folder) for each in found.processes))


def _unpack(trace: ProcessTrace, wish: GpuTrace, folder: Path) -> ProcessTrace:
    """The trace where dynolog's user looks for it."""
    if trace.path is None:
        return trace
    place = folder / Path(wish.file_of(trace.pid)).name
    with gzip.open(trace.path) as packed, whole_file(place, below=folder) as plain:
        shutil.copyfileobj(packed, plain)
    remove_file(Path(trace.path), below=folder)
    return replace(trace, path=str(place))


def agents_here() -> dict[str, list[int] | str]:
    """By address, the processes that haiprof's agents on this node know, or why they do not say."""
    found: dict[str, list[int] | str] = {}
    for address in sorted({ABSTRACT, *kineto_addresses()}):
        try:
            known = sorted(clients_of(address))
        except NoAgentError as error:
            found[shown_address(address)] = str(error)
            continue
        found[shown_address(address)] = known
    return found


def check_answers(answers: Sequence[NodeAnswer], *, needs_process: bool) -> None:
    """Fails where a daemon was not reached, or, if asked for, knew no process."""
    lost = [each.host for each in answers if each.error]
    if lost:
        raise HaiprofError(f"{len(lost)} of {len(answers)} nodes did not answer: {lost[0]}, ..."
                           if len(lost) > 1 else f"{lost[0]} did not answer")  # fmt: skip
    if needs_process and any(not each.matched for each in answers):
        raise HaiprofError("no process was matched")
