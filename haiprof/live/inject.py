"""Puts haiprof's hook into a running process: sys.remote_exec from CPython 3.14 on, else hypno."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from haiprof.base.errors import MissingExtraError, RunFormatError, UsageError
from haiprof.base.safe_files import write_file
from haiprof.launch.run_directories import find_open_folder
from haiprof.linux.training_processes import Process
from haiprof.live.external_sampling import find_spy
from haiprof.live.processes import why_not_enter
from haiprof.run_format.boot import BOOT_FOLDER
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import read_json

RISKS = (
    "--inject runs haiprof's hook inside the process, at a place that the process does not choose. "
    "It stands still for about 0.1 s; a job whose other ranks wait notices as much. A process that "
    "loads a library at that moment can die of it, and its job with it (haiprof waits until none "
    "was loaded for some seconds): do not do this to what you cannot afford to lose."
)
ANSWER_S = 30.0
_POLL_S = 0.05
_SETTLED_S = 5.0
"""Injecting while the process imported torch crashed it (SIGSEGV, one of two): the dynamic loader
was active. Steady loops survived, 18 of 18 (research/spikes.md E5)."""
_SETTLE_LIMIT_S = 60.0
_SETTLE_POLL_S = 0.5
_IMPORTING = ("importlib", "ctypes/__init__.py")
_CALL_TIMEOUT_S = 60.0
_REMOTE_EXEC_FROM = 14
_EXTRA = "hypno"
_PAYLOAD = str(BOOT_FOLDER.parent / "payload.py")
_PROGRAM = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
_INJECT = "import sys, hypno; hypno.inject_py(int(sys.argv[1]), sys.argv[2])"
# Leaves no name in the job's __main__, and prints nothing, whatever happens.
_CODE = (
    "try:\n exec(compile(open({path!r}).read(), {path!r}, 'exec'), {{'__name__': 'haiprof_attach', "
    "'__file__': {path!r}, 'run_dir': {run!r}, 'owner': {owner}}})\nexcept BaseException:\n pass\n"
)


def check_injection(process: Process) -> str | None:
    """Why a process cannot be entered; None where it can. Nothing is changed."""
    reason = why_not_enter(process.pid)
    if reason is None and process.python is None:
        reason = "its Python version cannot be determined"
    if reason is None and not _by_remote_exec(process) and not importlib.util.find_spec(_EXTRA):
        raise MissingExtraError(
            f"--inject into Python 3.{process.python} needs the package {_EXTRA}",
            hint="pip install 'haiprof[attach]'",
        )
    return reason


def write_payload(run: RunPaths) -> None:
    """Writes the script into the run directory: remote_exec takes a file without arguments."""
    open_folder = find_open_folder(run.root.parent)
    if open_folder:
        raise UsageError(
            f"--inject: every user can rename what is in {open_folder}",
            hint=f"chmod +t {open_folder}, or another --log-dir",
        )
    write_file(run.boot_enter, _code(run).encode(), below=run.root, replace=False)


def _code(run: RunPaths) -> str:
    root = os.path.realpath(run.root)
    return _CODE.format(path=_PAYLOAD, run=root, owner=os.stat(root).st_uid)


def inject(process: Process, run: RunPaths) -> str | None:
    """Has the process execute the payload, and waits for its answer.

    The reason why the hook is not in; None where it is.
    """
    command = [sys.executable, "-c", _INJECT, str(process.pid), _code(run)]
    if _by_remote_exec(process):
        interpreter = os.path.realpath(f"/proc/{process.pid}/exe")
        entry = str(run.boot_enter)
        command = [interpreter, "-I", "-S", "-c", _PROGRAM, str(process.pid), entry]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CALL_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return _answer(process.pid, run)


def are_settled(processes: Sequence[Process]) -> bool:
    """Waits until no process has mapped a new library for some seconds, or imports anything."""
    pids = [process.pid for process in processes if not _by_remote_exec(process)]
    limit = time.monotonic() + _SETTLE_LIMIT_S
    mapped, since = [_libraries(pid) for pid in pids], time.monotonic()
    while pids and time.monotonic() < limit:
        time.sleep(_SETTLE_POLL_S)
        now = [_libraries(pid) for pid in pids]
        if now != mapped:
            mapped, since = now, time.monotonic()
        elif time.monotonic() > since + _SETTLED_S and not any(_imports(pid) for pid in pids):
            return True
    return not pids


def _libraries(pid: int) -> frozenset[str]:
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return frozenset()
    return frozenset(line.split(None, 5)[-1] for line in text.splitlines() if ".so" in line)


def _imports(pid: int) -> bool:
    """Whether a thread is in an import, by py-spy; False without py-spy."""
    command = find_spy()
    if command is None:
        return False
    try:
        done = subprocess.run(
            [command, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_CALL_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(word in done.stdout for word in _IMPORTING)


def _by_remote_exec(process: Process) -> bool:
    return process.python is not None and process.python >= _REMOTE_EXEC_FROM


def _answer(pid: int, run: RunPaths) -> str | None:
    limit = time.monotonic() + ANSWER_S
    while time.monotonic() < limit:
        with contextlib.suppress(RunFormatError):  # missing yet, or incomplete
            answer = read_json(run.injection_result(pid))
            return None if answer.get("state") == "done" else str(answer.get("reason"))
        time.sleep(_POLL_S)
    return "no answer: its main thread runs no Python code (it waits inside a C function)"
