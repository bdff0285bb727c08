"""Python processes of the job that loaded torch but never reported in, and why."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from haiprof.linux.process_tree import ProcessTree
from haiprof.linux.procfs import has_mapped, strings, variables
from haiprof.run_format.secrets import mask_command

_RANK_VARIABLES = ("RANK", "LOCAL_RANK")
_COMMAND_CHARS = 120
_NOTHING, _LABELLED, _REPORTED = range(3)  # what a part of the process tree holds

_TAKES_VALUE = "WX"  # python -W ARG, -X OPT
_ENDS_OPTIONS = "cm"  # python -c CODE, -m MODULE
_BLOCKING_FLAGS = {
    "I": ("python -I ignores PYTHONPATH, which carries haiprof", "start it without -I"),
    "E": ("python -E ignores PYTHONPATH, which carries haiprof", "start it without -E"),
    "S": ("python -S never imports sitecustomize, haiprof's way in", "start it without -S"),
}
_KEEP_PYTHONPATH = "add to the variable instead of replacing it: PYTHONPATH=yours:$PYTHONPATH"
_PUT_FIRST = "put yours behind haiprof's, which runs it too: PYTHONPATH=$PYTHONPATH:yours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreported:
    """One process that haiprof could not enter."""

    pid: int
    command: str
    """Its command line, shortened."""
    reason: str
    """Why haiprof could not enter."""
    remedy: str
    """What to change."""


@dataclass(frozen=True, slots=True)
class _Python:
    """A Python process and what it was started with."""

    pid: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def is_labelled(self) -> bool:
        """Whether its environment says that it is a rank."""
        return any(name in self.environ for name in _RANK_VARIABLES)


@dataclass(frozen=True, slots=True)
class _Job:
    root: Path
    children: Mapping[int, list[int]]
    reported: Collection[int]
    boot_dir: Path


def find_unreported(
    root_pid: int, reported_pids: Collection[int], boot_dir: Path, *, root: Path = Path("/")
) -> list[Unreported]:
    """Walks the job's process tree once, as it is now.

    Listed are Python processes that cannot load the hook and that have libtorch mapped or are
    labelled as a rank in their environment. Not listed are: processes that could load the hook
    (they have not trained yet), what runs below one that reported in (DataLoader workers) or below
    a listed one (its forks), and launchers of ranks that reported in or are labelled.
    """
    tree = ProcessTree(root)
    tree.refresh()
    found: list[Unreported] = []
    _visit(root_pid, _Job(root, tree.children, reported_pids, boot_dir), found)
    return found


def _visit(pid: int, job: _Job, found: list[Unreported]) -> int:
    """Adds findings at or below a process; returns what is there: nothing, a label, a report."""
    if pid in job.reported:
        return _REPORTED
    below: list[Unreported] = []
    met = max((_visit(c, job, below) for c in sorted(job.children.get(pid, ()))), default=_NOTHING)
    process = _python_process(job.root, pid)
    if process is None:
        found += below
        return met
    unreported = _judge(process, met, job)
    found += below if unreported is None else [unreported]
    return max(met, _LABELLED if process.is_labelled else _NOTHING)


def _judge(process: _Python, label_below: int, job: _Job) -> Unreported | None:
    """The finding about a process, if there is one."""
    if label_below == _REPORTED or (label_below == _LABELLED and not process.is_labelled):
        return None
    blocked = _why_blocked(process, job.root, job.boot_dir)
    if blocked is None or not (
        process.is_labelled or has_mapped(process.pid, b"libtorch", proc=job.root / "proc")
    ):
        return None
    reason, remedy = blocked
    command = _shorten(process.argv)
    return Unreported(pid=process.pid, command=command, reason=reason, remedy=remedy)


def _why_blocked(process: _Python, root: Path, boot_dir: Path) -> tuple[str, str] | None:
    """Why the process cannot load the hook, and what to do; None when it can."""
    for flag in interpreter_flags(process.argv):
        if flag in _BLOCKING_FLAGS:
            return _BLOCKING_FLAGS[flag]
    if "PYTHONPATH" not in process.environ:
        return "its environment has no PYTHONPATH: it was dropped on the way", _KEEP_PYTHONPATH
    entries = process.environ["PYTHONPATH"].split(os.pathsep)
    for entry in entries:
        if _is_boot_dir(entry, boot_dir):
            return None
        if entry and (root / entry.lstrip("/") / "sitecustomize.py").exists():
            return f"{entry}/sitecustomize.py comes before haiprof's on PYTHONPATH", _PUT_FIRST
    return "its PYTHONPATH was overwritten: haiprof's entry is gone", _KEEP_PYTHONPATH


def _is_boot_dir(entry: str, boot_dir: Path) -> bool:
    return bool(entry) and (
        Path(entry) == boot_dir or os.path.realpath(entry) == os.path.realpath(boot_dir)
    )


def interpreter_flags(argv: Collection[str]) -> str:
    """The single-letter flags that the interpreter itself took, in order.

    They end at the script, `-`, `--`, `-c` or `-m`; `-uI` is two of them, `-Wignore` is one.
    """
    flags = ""
    words = iter(list(argv)[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
            continue
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return flags
        for at, letter in enumerate(word[1:], start=1):
            flags += letter
            if letter in _ENDS_OPTIONS:
                return flags
            if letter in _TAKES_VALUE:
                if at == len(word) - 1:
                    next(words, None)
                break
    return flags


def _python_process(root: Path, pid: int) -> _Python | None:
    """Command line and environment of a Python process; None for others."""
    folder = root / "proc" / str(pid)
    try:
        if not os.path.basename(os.readlink(folder / "exe")).startswith("python"):
            return None
        argv = tuple(strings(folder / "cmdline"))
        return _Python(pid, argv, variables(strings(folder / "environ")))
    except OSError:
        return None  # it has ended, or belongs to another user


def _shorten(argv: Collection[str]) -> str:
    command = " ".join(mask_command(argv))
    return command if len(command) <= _COMMAND_CHARS else command[: _COMMAND_CHARS - 1] + "…"
