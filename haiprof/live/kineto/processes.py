"""Processes of a job that use Kineto's protocol: the agent that they ask, and their rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.agent.kineto_protocol import address_for, ask_agent
from haiprof.base.errors import MissingDataError, UsageError
from haiprof.linux.procfs import (
    command_line,
    environment,
    has_mapped,
    is_mine,
    own_pids,
    read_parent,
)
from haiprof.linux.training_processes import is_launcher
from haiprof.live.ask import members
from haiprof.run_format.layout import RunPaths

APPEAR_S = 20.0
"""A process asks every 5 s; one that found no daemon at its start takes 10 s for each attempt."""
_POLL_S = 0.5
# As haiprof.in_job.identity reads them in the process itself.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_SAME_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_LOADER_WORKER = "pt_data_worker"  # torch names their threads
_COMPILERS = ("torch._inductor.compile_worker", "_inductor/compile_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoProcess:
    """A process that can be asked for a trace."""

    pid: int
    own_pid: int
    """Its process id in its own namespace, which is in its trace's name."""
    address: str
    """Of the agent that it asks."""
    rank: int | None
    """None where neither its environment nor its place says so."""
    world_size: int | None
    local_rank: int | None


def speaks_kineto(pid: int) -> bool:
    """Whether a process of this user was started with KINETO_USE_DAEMON."""
    return is_mine(pid) and address_for(environment(pid)) is not None


def of_run(run: RunPaths) -> list[KinetoProcess]:
    """The ranks of a run on this node that speak Kineto's protocol."""
    here = [member for member in members(run) if member.here and member.pid is not None]
    found = []
    for member in here:
        pid = member.pid or 0
        environ = environment(pid)
        address = address_for(environ)
        if address is None:
            continue
        found.append(
            KinetoProcess(
                pid=pid,
                own_pid=pid,
                address=address,
                rank=member.rank,
                world_size=_number(environ, _WORLD),
                local_rank=_number(environ, _LOCAL_RANK),
            )
        )
    return found


def of_process(
    pid: int, progress: Callable[[str], None], *, by_agent: bool = True
) -> list[KinetoProcess]:
    """The ranks of the job that a process belongs to, without its launchers and helpers."""
    environ, address = _check_process(pid)
    limit, told = time.monotonic() + APPEAR_S, False
    while True:
        clients = _clients(address) if by_agent else {}
        chosen = _training(_of_job(pid, environ))
        known = [each for each in chosen if each in clients]
        if chosen and (len(known) == len(chosen) or not by_agent):
            break
        if time.monotonic() > limit:
            if known:
                break
            raise MissingDataError(
                f"process {pid}: neither it nor a child has asked the agent for {APPEAR_S:.0f} s",
                hint="a process asks every 5 s from `import torch` on, if an agent listened then",
            )
        if not told:
            told = True
            progress(f"waiting for process {pid} to ask the agent, which it does every 5 s")
        time.sleep(_POLL_S)
    alone = len(chosen) == 1
    return [_process(each, clients.get(each, {}), address, alone=alone) for each in chosen]


def _clients(address: str) -> dict[int, dict[str, object]]:
    """The processes that an agent knows, by process id."""
    said = ask_agent(address, {"do": "clients"}).get("clients")
    return {each["pid"]: each for each in said} if isinstance(said, list) else {}


def _check_process(pid: int) -> tuple[dict[str, str], str]:
    """Environment of a process that speaks the protocol, and the address that it asks."""
    if not is_mine(pid):
        raise UsageError(f"process {pid}: it does not run, or belongs to another user")
    environ = environment(pid)
    address = address_for(environ)
    if address is None:
        raise UsageError(
            f"process {pid}: it was started neither under haiprof nor with KINETO_USE_DAEMON",
            hint="KINETO_USE_DAEMON=1 python train.py, with haiprof kineto-agent listening",
        )
    return environ, address


def _process(pid: int, client: Mapping[str, object], address: str, *, alone: bool) -> KinetoProcess:
    environ = environment(pid)
    rank, world = _number(environ, _RANK), _number(environ, _WORLD)
    if rank is None and alone:
        rank, world = 0, 1  # as torch numbers a process without a launcher
    pids = client.get("pids")
    return KinetoProcess(
        pid=pid,
        own_pid=pids[0] if isinstance(pids, list) and pids else pid,
        address=address,
        rank=rank,
        world_size=world,
        local_rank=_number(environ, _LOCAL_RANK),
    )


def _of_job(pid: int, environ: Mapping[str, str]) -> list[int]:
    """Processes that use Kineto's protocol and are this one, below it, or ranks of the same job."""
    mine = [each for each in own_pids() if speaks_kineto(each)]
    if _number(environ, _RANK) is None:
        return [each for each in mine if each == pid or pid in _ancestors(each)]
    same = [environ.get(name) for name in _SAME_JOB]
    return [
        each
        for each in mine
        if [environment(each).get(name) for name in _SAME_JOB] == same
        and _number(environment(each), _RANK) is not None
    ]


def _training(pids: Sequence[int]) -> list[int]:
    """Those that have loaded torch, without launchers, DataLoader workers and compilers.

    A launcher has no rank, and its children have; a rank's own child carries the same rank.
    """
    ranks = {pid: _number(environment(pid), _RANK) for pid in pids}
    above = {pid: [p for p in _ancestors(pid) if p in ranks] for pid in pids}
    launchers = {
        p
        for pid, rank in ranks.items()
        for p in above[pid]
        if rank is not None and ranks[p] is None
    }
    loaded = [pid for pid in pids if pid not in launchers and has_mapped(pid, b"libtorch_cpu")]
    return sorted(
        pid
        for pid in loaded
        if not _is_helper(pid)
        and (ranks[pid] is None or all(ranks[p] != ranks[pid] for p in above[pid] if p in loaded))
    )


def _is_helper(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return True  # gone
    command = command_line(pid)
    compiles = any(helper in word for word in command for helper in _COMPILERS)
    return name == _LOADER_WORKER or compiles or is_launcher(command)


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    parent = read_parent(Path("/"), pid)
    while parent and parent not in found:
        found.append(parent)
        parent = read_parent(Path("/"), parent)
    return found


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text.isdecimal() and len(text) < 10:
            return int(text)
    return None
