"""`haiprof COMMAND`: launches a job under measurement and ends with the verdict."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.base.log_addresses import check_packages
from haiprof.base.messages import print_message
from haiprof.base.options import (
    ENV_ACTIVE,
    ENV_DEBUG,
    Options,
    is_enabled,
    merge_options,
    options_from_environment,
    options_from_files,
)
from haiprof.base.subcommand import Subcommand
from haiprof.launch.command import CommandLine, nearest_file, parse_command_line
from haiprof.launch.companion import live_as_companion
from haiprof.launch.supervisor import Supervisor, die_of
from haiprof.run_format.boot import carries_run

START_LIMIT_S = 30.0
"""How long a log directory that does not answer may delay the start of the job."""
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
    """Replaces this process with the command."""
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
