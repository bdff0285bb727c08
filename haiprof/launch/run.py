"""`haiprof COMMAND`: launches a job under measurement, with a companion process, to the verdict."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.base.log_addresses import check_packages, run_address
from haiprof.base.messages import print_message
from haiprof.base.options import (
    ENV_ACTIVE,
    ENV_DEBUG,
    ENV_FLIGHT_DUMPS,
    ENV_FLIGHT_SIZES,
    ENV_KINETO_DAEMON,
    FLIGHT_ENTRIES,
    Options,
    is_enabled,
    merge_options,
    options_from_environment,
    options_from_files,
)
from haiprof.base.subcommand import Subcommand
from haiprof.launch.command import CommandLine, nearest_file, parse_command_line
from haiprof.launch.run_directories import PUT_EVERY_S, create_run, find_open_folder
from haiprof.launch.supervisor import Line, Pulse, Supervisor, die_of
from haiprof.run_format.boot import boot_entries, carries_run
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.secrets import mask_command, mask_text

_LOOKED_AT = 4  # earlier runs of the same name that may still run


def live_as_companion(
    to_launcher: Line, *, supervisor: Supervisor, line: CommandLine, options: Options,
    environ: Mapping[str, str], launcher_pid: int, subcommand: Subcommand,
) -> None:  # fmt: skip
    """The work of the companion process, from the run directory to the verdict."""
    # The supervisor is as it was when this process was forked from it.
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
    started = {}
    with contextlib.suppress(EOFError):
        started = to_launcher.receive(None) or {}
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
    """PyTorch's Flight Recorder on, as it is by default from torch 2.5 on; its dumps in the run."""
    # NCCL's watchdog writes them before it ends a rank. What the user has set stays.
    wanted = dict.fromkeys(ENV_FLIGHT_SIZES, FLIGHT_ENTRIES)
    dumps = dict.fromkeys(ENV_FLIGHT_DUMPS, run.flight_prefix)
    pairs = [each for each in (wanted, dumps) if not any(name in environ for name in each)]
    return {name: value for each in pairs for name, value in each.items()}


def _runs_already(run: RunPaths, name: str) -> str | None:
    """Another run of this job in the same log directory that its launcher still looks after."""
    # Only the newest few of that name are looked at, and only this node's processes: it is a hint.
    from haiprof.linux.procfs import command_line, list_names  # not at the launcher's start

    names = sorted(each for each in list_names(run.root.parent) if each.startswith(f"{name}-"))
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
    where = run.root
    with contextlib.suppress(ValueError, OSError):
        where = where.relative_to(Path.cwd())
    return f"recording {shlex.join(mask_command(words))} into {where}{detail}"


START_LIMIT_S = 30.0  # how long a log directory that does not answer may delay the start of the job
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as a shell reports them


def main(words: list[str], subcommand: Subcommand) -> int:
    """Runs the launcher; returns the job's exit status."""
    try:
        return _launch(words, os.environ, subcommand)
    except HaiprofError as error:
        if os.environ.get(ENV_DEBUG) == "1":
            raise
        print_message(f"error: {error}")
        if error.hint:
            print_message(f"hint: {error.hint}")
        return error.exit_code


def _launch(words: list[str], environ: Mapping[str, str], subcommand: Subcommand) -> int:
    line = parse_command_line(words)
    if not is_enabled(environ):
        return _run_plain(line.command)
    options = merge_options(options_from_files(), options_from_environment(environ), line.options)
    # This launcher itself runs inside a recorded job.
    if carries_run(environ.get("PYTHONPATH", ""), environ.get(ENV_ACTIVE, "")):
        print_message(
            f"already recorded by haiprof into {environ[ENV_ACTIVE]}: running the command as it is"
        )
        return _run_plain(line.command)
    _check_extras(options)
    program, script = [*line.command, ""][:2]
    by_python = program.endswith(("python", "python3")) and script.endswith(".py")
    missing = script if by_python and not os.path.exists(script) else ""
    if missing:
        near = nearest_file(missing, ending=".py")
        hint = f"did you mean haiprof {near}?" if near else "haiprof SCRIPT.py, or haiprof --help"
        raise UsageError(f"{missing}: no such file", hint=hint)
    if shutil.which(program, path=environ.get("PATH")) is None:  # no run of what cannot start
        is_there = os.sep in program and os.path.exists(program)
        number = errno.EACCES if is_there else errno.ENOENT
        return _cannot_run(line.command, OSError(number, os.strerror(number)))
    package = line.command[2].partition(".")[0] if line.command[1:2] == ["-m"] else ""
    if package and program == sys.executable and not _has_module(package):
        raise UsageError(f"-m {line.command[2]}: no module named {package!r} here or in {program}")
    for warning in line.warnings:
        print_message(warning)
    return _launch_recorded(line, options, environ=environ, subcommand=subcommand)


def _has_module(package: str) -> bool:
    """Whether `python -m` would find a package; nothing is imported for it."""
    import importlib.util

    before = sys.path[:]
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return True  # Python itself will say
    finally:
        sys.path[:] = before


def _launch_recorded(
    line: CommandLine, options: Options, *, environ: Mapping[str, str], subcommand: Subcommand
) -> int:
    """Runs the job with a process beside it that records; bare where that one does not answer."""
    try:
        supervisor = Supervisor()
    except OSError as error:
        print_message(f"cannot supervise the job ({error.strerror}): the job runs unrecorded")
        return _run_plain(line.command)
    live = partial(
        live_as_companion, supervisor=supervisor, line=line, options=options, environ=environ,
        launcher_pid=os.getpid(), subcommand=subcommand,
    )  # fmt: skip
    environment: dict[str, str] = {}
    hint = ""
    try:
        supervisor.fork_companion(live)
        said = supervisor.hear(START_LIMIT_S)
        environment = said.get("environment", {})
        refusal, hint = said.get("refused"), said.get("hint", "")
    except TimeoutError as error:
        print_message(f"{options.log_dir}: {error}: the job runs unrecorded")
        supervisor.abandon_companion()
        return _supervise(supervisor, line.command, environ)
    except (OSError, EOFError) as error:
        refusal = f"cannot record: {error}"
    if refusal is not None:
        print_message(f"{refusal}: the job runs unrecorded")
        if hint:
            print_message(f"hint: {hint}")
        supervisor.release()
        return _run_plain(line.command)
    return _supervise(supervisor, line.command, {**environ, **environment})


def _supervise(supervisor: Supervisor, command: list[str], environ: Mapping[str, str]) -> int:
    try:
        supervisor.start(command, environ)
    except OSError as error:
        status = _cannot_run(command, error)
        supervisor.conclude(failed=status)
        return status
    outcome = supervisor.wait()
    supervisor.conclude(**asdict(outcome))
    if outcome.signal is not None:
        die_of(outcome.signal)
    return outcome.status


def _check_extras(options: Options) -> None:
    import importlib.util

    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError(
            "--tensorboard needs the package tensorboard", hint="pip install 'haiprof[tensorboard]'"
        )
    if options.address:
        check_packages(options.address)
    if options.prometheus_port and importlib.util.find_spec("prometheus_client") is None:
        raise MissingExtraError(
            "--prometheus-port needs the package prometheus-client",
            hint="pip install 'haiprof[prometheus]'",
        )


def _run_plain(command: list[str]) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
        signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            os.execv("/bin/sh", ["/bin/sh", *command])  # without a first line: as shells do
    except OSError as error:
        return _cannot_run(command, error)


def _cannot_run(command: list[str], error: OSError) -> int:
    name, why = command[0], error.strerror or error
    if isinstance(error, FileNotFoundError) and os.path.isfile(name):
        why = f"neither a Python script nor a program; a program in this folder is ./{name}"
    print_message(f"error: cannot run {name}: {why}")
    return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
