"""The companion process of the launcher: creates the run directory, records, judges.

It may hang or crash: only it touches the log directory, loads drivers and starts further processes.
The launcher supervises the job alone, reports its start and end, and works without the companion if
that does not answer. If the launcher is gone, the companion continues as long as the job runs.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.log_addresses import run_address
from haiprof.base.messages import print_message
from haiprof.base.options import (
    ENV_ACTIVE,
    ENV_FLIGHT_DUMPS,
    ENV_FLIGHT_SIZES,
    ENV_KINETO_DAEMON,
    FLIGHT_ENTRIES,
    Options,
)
from haiprof.base.subcommand import Subcommand
from haiprof.launch.command import CommandLine
from haiprof.launch.run_directories import PUT_EVERY_S, create_run, find_open_folder
from haiprof.launch.supervisor import Line, Pulse, Supervisor
from haiprof.run_format.boot import boot_entries
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.secrets import mask_command, mask_text

_LOOKED_AT = 4
"""Earlier runs of the same name that may still run."""


def live_as_companion(
    to_launcher: Line,
    *,
    supervisor: Supervisor,
    line: CommandLine,
    options: Options,
    environ: Mapping[str, str],
    launcher_pid: int,
    subcommand: Subcommand,
) -> None:
    """The work of the companion process, from the run directory to the verdict.

    The supervisor is as it was when this process was forked from it.
    """
    try:
        run, manifest, created = create_run(
            options, command=line.command, name=line.name, environ=environ,
            launcher_pid=launcher_pid,
        )  # fmt: skip
    except UsageError as error:
        to_launcher.send(refused=str(error), hint=error.hint)
        return
    if not options.quiet:
        folder = find_open_folder(run.root.parent)
        if folder:
            print_message(
                f"every user can rename what is in {folder}, also runs: chmod +t {folder}"
            )
        print_message(_first_line(line, options, run))
        if options.address:
            target = mask_text(run_address(options.address, run.root.name))
            print_message(
                f"it is put at {target} every {PUT_EVERY_S / 60:g} minutes and at the end"
            )
        running = _runs_already(run, line.name) if options.time_s else None
        if running:
            print_message(
                f"{line.name} is already running ({running}), and this starts it again; "
                f"to record the running one: haiprof attach {running} "
                f"--time {options.time_s:g}"
            )
    # Whether the job may only start after more than creating its run directory.
    has_to_prepare = options.burst or options.kineto or ENV_KINETO_DAEMON in environ
    pulse = Pulse(to_launcher, run.root)
    environment = job_environment(environ, run)
    if not has_to_prepare:
        to_launcher.send(environment=environment)
    from haiprof.launch.job import Job  # loads while the job starts

    job = Job(
        run, manifest, options, created=created, subcommand=subcommand,
        supervisor=supervisor,
    )  # fmt: skip
    if has_to_prepare:
        pulse.start()
        to_launcher.send(environment={**environment, **job.prepare(environ)})
        pulse.stop()
    try:
        started = to_launcher.receive(None) or {}
    except EOFError:
        started = {}
    if "started" in started:
        job.record(to_launcher, pulse, int(started["started"]), environ)
    else:
        job.close_unstarted(replace(
            manifest, end_wall_ns=time.time_ns(), exit_status=started.get("failed")
        ))  # fmt: skip


def job_environment(environ: Mapping[str, str], run: RunPaths) -> dict[str, str]:
    """Additions to the job's environment: haiprof in front of PYTHONPATH."""
    try:
        entries = boot_entries(run)
    except OSError:
        return {}  # the run directory has been removed already: the job runs unrecorded
    path = os.pathsep.join(filter(None, (*entries, environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, ENV_ACTIVE: str(run.root), **_flight_recorder(environ, run)}


def _flight_recorder(environ: Mapping[str, str], run: RunPaths) -> dict[str, str]:
    """PyTorch's Flight Recorder on, as it is by default from torch 2.5 on; its dumps in the run.

    NCCL's watchdog writes them before it ends a rank. What the user has set stays.
    """
    wanted = dict.fromkeys(ENV_FLIGHT_SIZES, FLIGHT_ENTRIES)
    dumps = dict.fromkeys(ENV_FLIGHT_DUMPS, run.flight_prefix)
    pairs = [each for each in (wanted, dumps) if not any(name in environ for name in each)]
    return {name: value for each in pairs for name, value in each.items()}


def _runs_already(run: RunPaths, name: str) -> str | None:
    """Another run of this job in the same log directory that its launcher still looks after.

    Only the newest few of that name are looked at, and only this node's processes: it is a hint.
    """
    try:
        with os.scandir(run.root.parent) as entries:
            names = sorted(e.name for e in entries if e.name.startswith(f"{name}-"))
    except OSError:
        return None
    from haiprof.linux.procfs import command_line  # not at the launcher's start

    for other in [n for n in reversed(names) if n != run.root.name][:_LOOKED_AT]:
        with contextlib.suppress(HaiprofError, OSError):
            manifest = read_manifest(RunPaths(run.root.parent / other))
            words = " ".join(command_line(manifest.launcher_pid))
            alive = manifest.end_wall_ns is None and "haiprof" in words
            if alive and manifest.host == socket.gethostname():
                return other
    return None


def _first_line(line: CommandLine, options: Options, run: RunPaths) -> str:
    parts = []
    if options.time_s:
        parts.append(f"for {options.time_s:g} s")
    if options.warmup_s:
        parts.append(f"after {options.warmup_s:g} s of warm-up")
    if options.traces:
        parts.append(options.trace_words(time_s=options.time_s))
    if line.taken:
        parts.append(f"with {shlex.join(mask_command(line.taken))}")
    detail = f" ({'; '.join(parts)})" if parts else ""
    own_python = line.command[0] == sys.executable and len(line.command) > 1
    words = line.command[1:] if own_python else line.command  # which Python is no surprise then
    return f"recording {shlex.join(mask_command(words))} into {_short(run.root)}{detail}"


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
