"""Puts haiprof's hook into a running process: sys.remote_exec from CPython 3.14 on, else hypno."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from haiprof.errors import MissingExtraError, RunFormatError
from haiprof.jobs.outside import find_spy
from haiprof.jobs.processes import why_not_enter
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.reader import read_json
from haiprof.samplers.training import Process

RISKS = (
    "--inject runs haiprof's hook inside the process, at a place that the process does not choose. "
    "It stands still for about 0.1 s; a job whose other ranks wait notices as much. A process that "
    "loads a library at that moment can die of it, and its job with it (haiprof waits until none "
    "was loaded for some seconds): do not do this to what you cannot afford to lose."
)
ANSWER_S = 30.0
_POLL_S = 0.05
_SETTLED_S = 5.0
"""A process that was entered while it imported torch died (SIGSEGV, one of two): the loader that an
injected library needs was at work. Steady loops survived, 18 of 18 (research/spikes.md E5)."""
_SETTLE_LIMIT_S = 60.0
_SETTLE_POLL_S = 0.5
_IMPORTING = ("importlib", "ctypes/__init__.py")
_CALL_TIMEOUT_S = 60.0
_REMOTE_EXEC_FROM = 14
_EXTRA = "hypno"
_PROGRAM = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
_INJECT = "import sys, hypno; hypno.inject_py(int(sys.argv[1]), sys.argv[2])"
# No name of ours in the job's __main__, and nothing on its streams, whatever happens.
_CODE = (
    "try:\n exec(compile(open({path!r}).read(), {path!r}, 'exec'), "
    "{{'__name__': 'haiprof_attach', '__file__': {path!r}}})\nexcept BaseException:\n pass\n"
)


def check_injection(process: Process) -> str | None:
    """Why a process cannot be entered; null where it can. Nothing is changed.

    Raises:
        MissingExtraError: The package that it takes is not installed.
    """
    reason = why_not_enter(process.pid)
    if reason is None and process.python is None:
        reason = "its Python cannot be told"
    if reason is None and not _by_remote_exec(process) and not importlib.util.find_spec(_EXTRA):
        raise MissingExtraError(
            f"--inject into Python 3.{process.python} needs the package {_EXTRA}",
            hint="pip install 'haiprof[attach]'",
        )
    return reason


def write_payload(run: RunPaths) -> None:
    """Puts what will be executed into the run directory.

    Raises:
        OSError: It cannot be written.
    """
    source = importlib.util.find_spec("haiprof.hook.payload")
    assert source is not None
    assert source.origin is not None
    text = Path(source.origin).read_text(encoding="utf-8")
    run.boot_attach.write_text(text, encoding="utf-8")
    # remote_exec gives the code no name: the file that it is told to run says who it is.
    entry = run.boot_attach.with_name("enter.py")
    entry.write_text(_CODE.format(path=str(run.boot_attach)), encoding="utf-8")


def inject(process: Process, run: RunPaths) -> str | None:
    """Has the process execute the payload, and waits for its answer.

    Returns:
        Why the hook is not in; null where it is.
    """
    program, argument = _INJECT, _CODE.format(path=str(run.boot_attach))
    command = [sys.executable, "-c", program, str(process.pid), argument]
    if _by_remote_exec(process):
        interpreter = os.path.realpath(f"/proc/{process.pid}/exe")
        entry = str(run.boot_attach.with_name("enter.py"))
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
    """Waits until none has mapped another library for some seconds, and none imports anything.

    Returns:
        False where that never happens; at once true where nothing depends on it.
    """
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
    """Whether a thread is in an import, as py-spy sees it; not known where that is missing."""
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
        if run.injected(pid).exists():
            try:
                answer = read_json(run.injected(pid))
            except RunFormatError as error:
                return str(error)
            return None if answer.get("state") == "done" else str(answer.get("reason"))
        time.sleep(_POLL_S)
    return "no answer: its main thread runs no Python code (it waits inside a C function)"
