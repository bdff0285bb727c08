"""Training processes outside haiprof, and their stacks as py-spy samples them."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from haiprof.base.code_places import is_library
from haiprof.base.errors import RunNotFoundError, UsageError
from haiprof.base.options import ENV_ACTIVE
from haiprof.base.safe_files import MadeFolder, write_file
from haiprof.linux.process_files import status_fields
from haiprof.linux.processes import Process, is_launcher, jobs_below, ranks_among, ranks_below
from haiprof.linux.procfs import (
    command_line,
    is_mine,
    link_name,
    own_pids,
    process_state,
    read_int,
    user_id,
)
from haiprof.run_analysis.run_files import entries, integer, mapping, number, objects, text
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import try_read_json

_SYS_PTRACE = 19  # bit of CAP_SYS_PTRACE, linux/capability.h


def training_processes(name: str, *, proc: Path = Path("/proc")) -> list[Process]:
    """The ranks at or below a process, or of a script's name, by rank."""
    if name.isdigit():
        uid = user_id(int(name), proc=proc)
        if uid is None:
            hint = "haiprof ls --live lists running jobs"
            raise RunNotFoundError(f"no process {name}", hint=hint)
        if uid != os.getuid():
            raise UsageError(f"process {name} belongs to another user (uid {uid})")
        ranks, where = [], " below it"
        for job in jobs_below(int(name), proc=proc):
            ranks += ranks_below(job, proc=proc)
    else:
        pids = [
            pid for pid in own_pids(proc=proc)
            if any(name in (w, os.path.basename(w)) for w in command_line(pid, proc=proc)[:8])
        ]  # fmt: skip
        ranks, where = ranks_among(pids, proc=proc), ""
    recorded = {}  # the run in which each has reported in, whoever started it
    for rank in ranks:
        folder = Path(rank.environ.get(ENV_ACTIVE) or "")
        reported = RunPaths(folder).rank_folders() if folder.name else ()
        if rank.pid in [try_read_json(paths.report).get("pid") for _, _, paths in reported]:
            recorded[rank.pid] = folder.name
    if ranks and len(recorded) == len(ranks):
        runs = ", ".join(sorted(set(recorded.values())))
        raise UsageError(
            f"{name}: haiprof records all that trains{where}", hint=f"name the job: {runs}"
        )
    ranks = [rank for rank in ranks if rank.pid not in recorded]
    parents = {rank.parent: is_launcher(command_line(rank.parent, proc=proc)) for rank in ranks}
    jobs = sorted({rank.parent if parents[rank.parent] else rank.pid for rank in ranks})
    # Without a common launcher they may be labelled as the ranks of one job.
    numbers, worlds = {each.rank for each in ranks}, {each.world_size for each in ranks}
    is_one = len(numbers) == len(ranks) and None not in numbers and len(worlds) == 1
    if len(jobs) > 1 and not is_one:
        named = [f"{job} ({shlex.join(command_line(job, proc=proc))[:60]})" for job in jobs]
        raise UsageError(
            f"{'process ' * bool(where)}{name}: several jobs run{where}: {'; '.join(named)}",
            hint="name one of them by its process id",
        )
    if not ranks:
        no_job = "" if name.isdigit() else ", and no job of that name"
        raise RunNotFoundError(
            f"{name}: no process of yours that has PyTorch loaded{no_job}",
            hint="haiprof ls --live lists jobs under haiprof; or name a process id",
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
        if link_name(proc / str(pid) / "ns" / space) != link_name(proc / me / "ns" / space):
            return f"it is in another {what} namespace (a container): run haiprof in there"
    if int(own.get("CapEff", "0") or "0", 16) >> _SYS_PTRACE & 1:
        return None
    scope = read_int(proc / "sys/kernel/yama/ptrace_scope")
    if scope:
        return (
            f"the kernel allows only root to do that (kernel.yama.ptrace_scope is {scope}): "
            "an administrator can set it to 0, or give CAP_SYS_PTRACE"
        )
    if not is_mine(pid, proc=proc):
        return "it has changed its user or capabilities, and is protected (not dumpable)"
    return None


RATE_HZ = 10
MOST_RANKS = 8  # py-spy takes a few percent of a core per process that it looks at
NO_SPY = "py-spy is not installed (pip install 'haiprof[attach]')"  # Why no stacks are sampled
_GRACE_S = 30.0
_DUMP_S = 10.0
_CONFIDENCE_Z = 1.96

# Phase by a frame in the stack; the outermost one counts (recomputation is backward).
_FRAMES = (
    ("dataloader", "__next__", "torch/utils/data/dataloader.py"),
    ("dataloader", "__iter__", "torch/utils/data/dataloader.py"),
    ("backward", "_engine_run_backward", "torch/autograd/graph.py"),
    ("backward", "backward", "torch/autograd/__init__.py"),
    ("optimizer", "wrapper", "torch/optim/optimizer.py"),
    ("optimizer", "step", "torch/amp/grad_scaler.py"),
    ("forward", "_wrapped_call_impl", "torch/nn/modules/module.py"),
    ("forward", "__call__", "torch/nn/modules/module.py"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStacks:
    """Sampled stacks of the main thread of one process."""

    rank: int
    pid: int
    sample_count: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the samples by phase, `other` included; in [0, 1]."""
    hottest: tuple[tuple[str, float], ...] = ()
    """Innermost own frames with their shares, the largest first."""
    problem: str | None = None  # Why there are no samples

    def margin(self, phase: str) -> float:
        """Half the 95 % interval of a share, if samples are independent (normal approximation)."""
        share = self.shares.get(phase, 0.0)
        return _CONFIDENCE_Z * math.sqrt(share * (1 - share) / max(self.sample_count, 1))


def sample_stacks(
    processes: Sequence[Process], run: RunPaths, *, seconds: float
) -> list[SampledStacks]:
    """Samples the stacks of processes for so many seconds; nothing in them is stopped."""
    command = find_spy()
    numbered = list(enumerate(processes))
    step = max(1, math.ceil(len(numbered) / MOST_RANKS))
    chosen = [(p.rank if p.rank is not None else place, p) for place, p in numbered[::step]]
    if command is None:
        return [SampledStacks(rank=rank, pid=p.pid, problem=NO_SPY) for rank, p in chosen]
    seen = []
    with MadeFolder.temporary("haiprof-") as folder:
        children = [_start(command, p.pid, folder / str(rank), seconds) for rank, p in chosen]
        for child, (rank, process) in zip(children, chosen, strict=True):
            problem = _outcome(child, seconds + _GRACE_S)
            if stacks := _main_stacks(folder / str(rank)):
                text = "".join(f"{';'.join(frames)} {count}\n" for frames, count in stacks)
                write_file(run.stacks(rank), text.encode(), below=run.root)
                seen.append(judge(rank, process.pid, stacks))
            else:
                seen.append(SampledStacks(rank=rank, pid=process.pid, problem=problem))
    return seen


def read_samples(run: RunPaths) -> list[SampledStacks]:
    """What `haiprof attach` saw of processes from outside; empty where a run is of another kind."""
    seen = objects(try_read_json(run.external_samples_json).get("seen"))
    return [
        SampledStacks(
            rank=integer(each.get("rank")) or 0, pid=integer(each.get("pid")) or 0,
            sample_count=integer(each.get("sample_count")) or 0,
            shares=_numbers(mapping(each.get("shares")).items()),
            hottest=tuple(_numbers(p for p in entries(each.get("hottest"))
                                   if isinstance(p, list) and len(p) == 2).items()),
            problem=text(each.get("problem")),
        )
        for each in seen
    ]  # fmt: skip


def _numbers(pairs: Iterable[Sequence[object]]) -> dict[str, float]:
    found = ((text(name), number(value)) for name, value in pairs)
    return {name: value for name, value in found if name is not None and value is not None}


def find_spy() -> str | None:
    """The command py-spy: on PATH, or beside this interpreter."""
    scripts = os.path.dirname(sys.executable)
    return shutil.which("py-spy") or shutil.which("py-spy", path=scripts)


def dump_threads(command: str, pid: int, option: str) -> list[Mapping[str, Any]] | str:
    """The threads of a process by py-spy, whose answer may hold anything; or its error."""
    try:
        done = subprocess.run(
            [command, "dump", option, "--json", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_DUMP_S, check=False,
        )  # fmt: skip
        threads = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(threads, list):
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return objects(threads)


def _start(command: str, pid: int, path: Path, seconds: float) -> subprocess.Popen[str]:
    words = [
        command, "record", "--nonblocking", "--idle", "--threads", "--full-filenames",
        "--format", "raw", "--rate", str(RATE_HZ), "--duration", str(max(1, round(seconds))),
        "--output", str(path), "--pid", str(pid),
    ]  # fmt: skip
    null = subprocess.DEVNULL
    return subprocess.Popen(words, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True)


def _outcome(child: subprocess.Popen[str], timeout_s: float) -> str:
    """Waits for py-spy; its error message, if it failed."""
    try:
        _, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return "py-spy did not end"
    said = [line for line in errors.strip().splitlines() if "rror" in line]
    return (said or ["py-spy saw no Python in it"])[-1].strip()


def _main_stacks(path: Path) -> list[tuple[tuple[str, ...], int]]:
    """Stacks of the main thread, outermost frame first, with how often each was seen."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    parts = [(text.split(";"), count) for text, _, count in (x.rpartition(" ") for x in lines)]
    return [(tuple(frames), int(count)) for (thread, *frames), count in parts
            if count.isdigit() and "MainThread" in thread]  # fmt: skip


def judge(rank: int, pid: int, stacks: Sequence[tuple[tuple[str, ...], int]]) -> SampledStacks:
    """Shares of the phases in sampled stacks."""
    total = sum(count for _, count in stacks)
    phases: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for frames, count in stacks:
        phases[next((p for f in frames if (p := phase_of(f)) is not None), "other")] += count
        # Of neither a package nor Python's library.
        jobs = (frame for frame in reversed(frames) if not is_library(*_place_and_name(frame)))
        own[next(jobs, frames[-1] if frames else "?")] += count
    ordered = sorted(own.items(), key=lambda item: (-item[1], item[0]))
    return SampledStacks(
        rank=rank, pid=pid, sample_count=total,
        shares={phase: count / total for phase, count in phases.items()},
        hottest=tuple((frame, count / total) for frame, count in ordered[:3]),
    )  # fmt: skip


def _place_and_name(frame: str) -> tuple[str, str]:
    name, _, place = frame.partition(" (")
    return place.rpartition(":")[0], name


def phase_of(frame: str) -> str | None:
    """The phase that a frame (`name (file:line)`) begins; None for any other."""
    file, name = _place_and_name(frame)
    function = name.rpartition(".")[2]
    return next((p for p, own, end in _FRAMES if function == own and file.endswith(end)), None)
