"""Training processes of this user outside haiprof, and whether they can be entered."""

from __future__ import annotations

import os
from pathlib import Path

from haiprof.base.errors import RunNotFoundError, UsageError
from haiprof.linux.process_files import status_fields
from haiprof.linux.procfs import command_line, is_mine, own_pids, process_state, user_id
from haiprof.linux.training_processes import Process, ranks_among, ranks_below

_SYS_PTRACE = 19  # bit of CAP_SYS_PTRACE, linux/capability.h


def training_processes(name: str, *, proc: Path = Path("/proc")) -> list[Process]:
    """The ranks at or below a process, or of a script's name, by rank."""
    if name.isdigit():
        _check_owner(int(name), proc)
        ranks = ranks_below(int(name), proc=proc)
    else:
        pids = [pid for pid in own_pids(proc=proc) if _runs(pid, name, proc)]
        ranks = ranks_among(pids, proc=proc)
    if not ranks:
        raise RunNotFoundError(
            f"{name}: no process of yours that has PyTorch loaded"
            + ("" if name.isdigit() else ", and no job of that name"),
            hint="haiprof ps lists jobs under haiprof; or name a process id",
        )
    return ranks


def why_not_enter(pid: int, *, proc: Path = Path("/proc"), me: str = "self") -> str | None:
    """Why code cannot be put into a process; None where it can.

    Source: ptrace(2), "Ptrace access mode checking"; Linux Documentation/admin-guide/LSM/Yama.rst.
    """
    state = process_state(pid, proc=proc)["state"]
    if state is None or state in "ZX":
        return "it has ended"
    if state in "Tt":
        return "it is stopped by a signal or a debugger: let it go on first (kill -CONT)"
    status, own = status_fields(f"{proc}/{pid}"), status_fields(f"{proc}/{me}")
    if status.get("TracerPid", "0").split() != ["0"]:
        return f"process {status['TracerPid'].strip()} traces it (a debugger, strace)"
    if set(status.get("Uid", "").split()) != {str(os.getuid())}:
        return "it belongs to another user"
    for space, what in (("pid", "process"), ("mnt", "file")):
        if _link(proc / str(pid) / "ns" / space) != _link(proc / me / "ns" / space):
            return f"it is in another {what} namespace (a container): run haiprof in there"
    if int(own.get("CapEff", "0") or "0", 16) >> _SYS_PTRACE & 1:
        return None
    scope = _yama_scope(proc)
    if scope:
        return (
            f"the kernel allows only root to do that (kernel.yama.ptrace_scope is {scope}): "
            "an administrator can set it to 0, or give CAP_SYS_PTRACE"
        )
    if not is_mine(pid, proc=proc):
        return "it has changed its user or capabilities, and is protected (not dumpable)"
    return None


def _check_owner(pid: int, proc: Path) -> None:
    uid = user_id(pid, proc=proc)
    if uid is None:
        raise RunNotFoundError(f"no process {pid}", hint="haiprof ps lists running jobs")
    if uid != os.getuid():
        raise UsageError(f"process {pid} belongs to another user (uid {uid})")


def _runs(pid: int, name: str, proc: Path) -> bool:
    words = command_line(pid, proc=proc)
    return any(word == name or os.path.basename(word) == name for word in words[:8])


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _yama_scope(proc: Path) -> int:
    try:
        return int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0
