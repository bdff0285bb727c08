"""Processes of a job that use Kineto's protocol, whom they ask, and the result for each."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from haiprof.agent.kineto_daemon import address_for, ask_agent
from haiprof.base.errors import HaiprofError, MissingDataError, RunNotFoundError, UsageError
from haiprof.linux.processes import is_launcher
from haiprof.linux.procfs import (
    command_line,
    environment,
    has_mapped,
    is_mine,
    own_pids,
    read_parent,
)
from haiprof.live.find import Progress, find_job, members, slurm_number
from haiprof.run_format.control import read_object
from haiprof.run_format.environment import (
    LOADER_WORKER,
    RANK_VARIABLES,
    WORLD_VARIABLES,
    find_number,
)
from haiprof.run_format.layout import RunPaths

STEP_SHARE = 0.5
"""Ranks are at the same step if their optimizers' first steps ended within half a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTrace:
    """The result of the request for one process."""

    rank: int | None
    host: str
    pid: int
    state: str  # `done`, `silent` or `failed`
    reason: str | None = None  # Why there is no trace
    path: str | None = None
    steps: tuple[int, int] | None = None
    """First step and the one after the last, where haiprof recorded the steps beside it."""
    steps_reason: str | None = None  # Why the steps are not known
    optimizer_step_count: int | None = None  # Optimizer steps in the trace
    start_wall_ns: int | None = None
    end_wall_ns: int | None = None
    first_optimizer_wall_ns: int | None = None  # End of the first optimizer step in it
    step_ns: int | None = None
    """Usual time from the end of one optimizer step to the next; None with fewer than two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTraces:
    """The result of a request."""

    folder: str  # Where the traces are
    backend: str  # `kineto` or `dynolog`
    processes: tuple[ProcessTrace, ...]

    @property
    def done(self) -> tuple[ProcessTrace, ...]:
        """Processes with a trace."""
        return tuple(each for each in self.processes if each.state == "done")

    @property
    def aligned(self) -> bool | None:
        """Whether all of them recorded the same steps; None if not known.

        By the steps' numbers where they are known; else by when the first optimizer step in each
        trace ended, since ranks of one job step together.
        """
        numbers = {each.steps for each in self.done}
        if len(self.done) < 2:
            return True if self.done else None
        if None not in numbers:
            return len(numbers) == 1
        firsts = [each.first_optimizer_wall_ns for each in self.done]
        known = [first for first in firsts if first is not None]
        steps = [each.step_ns for each in self.done if each.step_ns is not None]
        if len(known) < len(firsts) or not steps:
            return None
        counts = {each.optimizer_step_count for each in self.done}
        return len(counts) == 1 and max(known) - min(known) < STEP_SHARE * max(steps)

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {"folder": self.folder, "backend": self.backend, "aligned": self.aligned,
                "processes": [asdict(each) for each in self.processes]}  # fmt: skip


APPEAR_S = 20.0
"""A process asks every 5 s; one that found no daemon at its start takes 10 s for each attempt."""
_POLL_S = 0.5
_SAME_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_COMPILERS = ("torch._inductor.compile_worker", "_inductor/compile_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoProcess:
    """A process that can be asked for a trace."""

    pid: int
    own_pid: int  # Its process id in its own namespace, which is in its trace's name
    address: str  # Of the agent that it asks
    rank: int | None  # None where neither its environment nor its place says so
    world_size: int | None


def speaks_kineto(pid: int) -> bool:
    """Whether a process of this user was started with KINETO_USE_DAEMON."""
    return is_mine(pid) and address_for(environment(pid)) is not None


def of_run(run: RunPaths) -> list[KinetoProcess]:
    """The ranks of a run on this node that speak Kineto's protocol."""
    here = {m.pid: m.rank for m in members(run) if m.here and m.pid is not None}
    places = {pid: address_for(environment(pid)) for pid in here}
    return [replace(_process(pid, {}, address, alone=False), rank=here[pid])
            for pid, address in places.items() if address is not None]  # fmt: skip


def of_process(pid: int, progress: Progress, *, by_agent: bool = True) -> list[KinetoProcess]:
    """The ranks of the job that a process belongs to, without its launchers and helpers."""
    if not is_mine(pid):
        raise UsageError(f"process {pid}: it does not run, or belongs to another user")
    environ = environment(pid)
    if address_for(environ) is None:
        raise UsageError(
            f"process {pid}: it was started neither under haiprof nor with KINETO_USE_DAEMON",
            hint="KINETO_USE_DAEMON=1 python train.py, with haiprof trace kineto-agent listening",
        )
    return _await_processes(
        lambda: _of_job(pid, environ), f"process {pid}: neither it nor a child", progress, by_agent
    )


def all_processes(
    progress: Progress, *, slurm_job: int = 0, pids: Sequence[int] = (), by_agent: bool = True
) -> list[KinetoProcess]:
    """This user's processes on this node that speak Kineto's protocol: those of a job of Slurm.

    With `pids` only these. Without either, all of them.
    """

    def choose() -> list[int]:
        mine = [pid for pid in own_pids() if speaks_kineto(pid) and (not pids or pid in pids)]
        wanted = str(slurm_job) if slurm_job else None
        return [p for p in mine if wanted in (None, environment(p).get("SLURM_JOB_ID"))]

    who = f"job {slurm_job} of Slurm: no process of it here" if slurm_job else "no process here"
    if not choose():
        raise MissingDataError(
            f"{who} was started with KINETO_USE_DAEMON",
            hint="KINETO_USE_DAEMON=1 python train.py, with haiprof trace kineto-agent listening",
        )
    return _await_processes(choose, who, progress, by_agent)


def kineto_addresses() -> set[str]:
    """Of the agents that this user's processes on this node ask."""
    places = {address_for(environment(pid)) for pid in own_pids()}
    return {address for address in places if address is not None}


def _await_processes(
    choose: Callable[[], list[int]], who: str, progress: Progress, by_agent: bool
) -> list[KinetoProcess]:
    """Those that train, once all of them have asked their agent, or the time for that is up."""
    limit, told = time.monotonic() + APPEAR_S, False
    while True:
        places = {pid: address_for(environment(pid)) for pid in _training(choose())}
        chosen = {pid: address for pid, address in places.items() if address is not None}
        clients: dict[int, dict[str, object]] = {}
        for address in set(chosen.values()) if by_agent else ():
            clients |= clients_of(address)
        known = [each for each in chosen if each in clients or not by_agent]
        if known and (len(known) == len(chosen) or time.monotonic() > limit):
            break
        if time.monotonic() > limit:
            raise MissingDataError(
                f"{who} has asked the agent for {APPEAR_S:.0f} s",
                hint="a process asks every 5 s from `import torch` on, if an agent listened then",
            )
        if not told:
            told = True
            progress("waiting for the job to ask the agent, which it does every 5 s")
        time.sleep(_POLL_S)
    alone = len(chosen) == 1
    return [_process(pid, clients.get(pid, {}), each, alone=alone) for pid, each in chosen.items()]


def clients_of(address: str) -> dict[int, dict[str, object]]:
    """The processes that an agent knows, by process id."""
    said = ask_agent(address, {"do": "clients"}).get("clients")
    return {each["pid"]: each for each in said} if isinstance(said, list) else {}


def _process(pid: int, client: Mapping[str, object], address: str, *, alone: bool) -> KinetoProcess:
    environ = environment(pid)
    rank, world = (find_number(environ, names) for names in (RANK_VARIABLES, WORLD_VARIABLES))
    if rank is None and alone:
        rank, world = 0, 1  # as torch numbers a process without a launcher
    pids = client.get("pids")
    own_pid = pids[0] if isinstance(pids, list) and pids else pid
    return KinetoProcess(pid=pid, own_pid=own_pid, address=address, rank=rank, world_size=world)


def _of_job(pid: int, environ: Mapping[str, str]) -> list[int]:
    """Processes that use Kineto's protocol and are this one, below it, or ranks of the same job."""
    mine = [each for each in own_pids() if speaks_kineto(each)]
    if find_number(environ, RANK_VARIABLES) is None:
        return [each for each in mine if each == pid or pid in _ancestors(each)]
    own = {each: environment(each) for each in mine}
    ranks = [each for each in mine if find_number(own[each], RANK_VARIABLES) is not None]
    same = [environ.get(name) for name in _SAME_JOB]
    return [each for each in ranks if [own[each].get(name) for name in _SAME_JOB] == same]


def _training(pids: Sequence[int]) -> list[int]:
    """Those that have loaded torch, without launchers, DataLoader workers and compilers.

    A launcher has no rank, and its children have; a rank's own child carries the same rank.
    """
    ranks = {pid: find_number(environment(pid), RANK_VARIABLES) for pid in pids}
    above = {pid: [p for p in _ancestors(pid) if p in ranks] for pid in pids}
    with_rank = [pid for pid, rank in ranks.items() if rank is not None]
    launchers = {p for pid in with_rank for p in above[pid] if ranks[p] is None}
    loaded = [pid for pid in pids if pid not in launchers and has_mapped(pid, b"libtorch_cpu")]
    of_rank = [p for p in loaded if ranks[p] is not None]
    children = [p for p in of_rank if any(ranks[p] == ranks[q] for q in above[p] if q in loaded)]
    return sorted(p for p in loaded if p not in children and not _is_helper(p))


def _is_helper(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return True  # gone
    command = command_line(pid)
    compiles = any(helper in word for word in command for helper in _COMPILERS)
    return name == LOADER_WORKER or compiles or is_launcher(command)


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    parent = read_parent(Path("/"), pid)
    while parent and parent not in found:
        found.append(parent)
        parent = read_parent(Path("/"), parent)
    return found


BACKENDS = ("auto", "hook", "kineto", "dynolog")


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoJob:
    """A job that is traced through Kineto's daemon protocol."""

    run: RunPaths | None  # None where it does not run under haiprof
    processes: tuple[KinetoProcess, ...]
    elsewhere: tuple[str, ...] = ()  # Other hosts with ranks of it; they are asked there


def kineto_job(
    name: str, log_dirs: Iterable[Path], *, backend: str, progress: Progress, others: bool = False,
) -> KinetoJob | None:  # fmt: skip
    """The job, if it is to be traced that way; None if haiprof's hook traces it."""
    if backend not in BACKENDS:
        raise UsageError(f"no backend {backend!r}", hint=f"one of {', '.join(BACKENDS)}")
    if backend == "hook":
        return None
    by_agent = backend != "dynolog"
    try:
        run = find_job(name, log_dirs, others=others).run
    except RunNotFoundError:
        if (number := slurm_number(name)) is not None:
            found = all_processes(progress, slurm_job=number, by_agent=by_agent)
        elif name.isdecimal() and speaks_kineto(int(name)):
            found = of_process(int(name), progress, by_agent=by_agent)
        else:
            raise
        return KinetoJob(run=None, processes=tuple(found))
    ranks = of_run(run)
    if backend == "auto" and not ranks:
        return None
    hosts = {member.host for member in members(run) if not member.here and member.host}
    return KinetoJob(run=run, processes=tuple(ranks), elsewhere=tuple(sorted(hosts)))


DEFAULT_ENDPOINT = "localhost:1778"
TIMEOUT_S = 10.0  # The daemon serves one connection at a time, and a silent one blocks the rest
_LENGTH = struct.Struct("=i")
_ANSWER_LIMIT_BYTES = 1 << 20
_PORT_LIMIT = 65_535


class DynologError(HaiprofError):
    """A dynolog daemon cannot be reached, or sends an unknown answer."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host:port`; a missing port is dynolog's own."""
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, DEFAULT_ENDPOINT.rpartition(":")[2]
    if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_LIMIT:
        raise UsageError(f"{text!r}: expected the daemon's HOST:PORT, such as {DEFAULT_ENDPOINT}")
    return host.strip("[]"), int(port)


def call(endpoint: tuple[str, int], request: Mapping[str, Any]) -> dict[str, Any]:
    """One request and its answer."""
    shown = f"dynolog at {endpoint[0]}:{endpoint[1]}"
    data = json.dumps(request).encode()
    try:
        with socket.create_connection(endpoint, TIMEOUT_S) as connection:
            connection.sendall(_LENGTH.pack(len(data)) + data)
            (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
            if not 0 < length <= _ANSWER_LIMIT_BYTES:
                raise DynologError(f"{shown}: announces an answer of {length} bytes")
            text = _read(connection, length)
    except TimeoutError:
        raise DynologError(
            f"{shown}: no answer for {TIMEOUT_S:.0f} s",
            hint="another client may block the daemon: it serves one at a time",
        ) from None
    except OSError as error:
        raise DynologError(
            f"{shown}: {error.strerror or error}",
            hint="the daemon is started with --enable_ipc_monitor; --dynolog HOST:PORT names it",
        ) from None
    answer = read_object(text)
    if answer is None:
        raise DynologError(f"{shown}: its answer is no JSON object")
    return answer


def trigger(
    endpoint: tuple[str, int], config: str, *, job: int, pids: Sequence[int], limit: int = 0
) -> tuple[set[int], set[int]]:
    """Asks the daemon to have processes traced: those that it matched, and those that it traces."""
    request = {
        "fn": "setKinetOnDemandRequest",  # as dynolog spells it
        "config": config,
        "job_id": job,
        "pids": list(pids) or [0],
        "process_limit": limit or len(pids) or 1024,  # its own default is 3
    }
    answer = call(endpoint, request)
    found = [answer.get(name) for name in ("processesMatched", "activityProfilersTriggered")]
    if not all(isinstance(each, list) and all(type(p) is int for p in each) for each in found):
        raise DynologError(
            f"dynolog at {endpoint[0]}:{endpoint[1]}: its answer names no processes",
            hint=f"it said {json.dumps(answer)[:200]}",
        )
    matched, triggered = (set(each or []) for each in found)
    return matched, triggered


def _read(connection: socket.socket, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = connection.recv(min(missing, 1 << 16))
        if not part:
            raise ConnectionError("it closed the connection early")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
