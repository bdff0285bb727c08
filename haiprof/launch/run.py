"""`haiprof COMMAND`: launches a job under measurement and ends with the verdict."""

from __future__ import annotations

import errno
import os
import shlex
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from haiprof.config import (
    ENV_ACTIVE,
    ENV_DEBUG,
    Options,
    enabled,
    merge_options,
    options_from_environment,
    options_from_pyproject,
)
from haiprof.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.launch.command import CommandLine, parse_command_line
from haiprof.launch.rundirs import PACKAGE, create_run
from haiprof.launch.say import say
from haiprof.rundir.layout import RunPaths

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as a shell reports them


def main(words: list[str]) -> int:
    """Runs the launcher; returns the job's exit status."""
    try:
        return _launch(words, os.environ)
    except HaiprofError as error:
        if os.environ.get(ENV_DEBUG) == "1":
            raise
        say(f"error: {error}")
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code


def _launch(words: list[str], environ: Mapping[str, str]) -> int:
    if words[0] == "trace":  # hai-platform's spelling of a traced run
        words = ["--trace", *words[1:]]
    line = parse_command_line(words)
    if not enabled(environ):
        return _run_plain(line.command)
    options = merge_options(
        options_from_pyproject(Path("pyproject.toml")),
        options_from_environment(environ),
        line.options,
    )
    if _already_recorded(environ):
        say(f"already recorded by haiprof into {environ[ENV_ACTIVE]}: running the command as it is")
        return _run_plain(line.command)
    _check_extras(options)
    missing = _missing_script(line.command)
    if missing:
        raise UsageError(f"{missing}: no such file", hint="haiprof SCRIPT.py, or haiprof --help")
    if options.quiet and line.taken_after:
        say(_taken_after(line))
    try:
        run, manifest, created = create_run(
            options, command=line.command, name=line.name, environ=environ
        )
    except UsageError as error:
        say(f"{error}: the job runs unrecorded")
        return _run_plain(line.command)
    if not options.quiet:
        say(_first_line(line, options, run))
    from haiprof.launch.job import Job
    from haiprof.launch.supervisor import Supervisor

    try:
        supervisor = Supervisor()
    except OSError as error:
        say(f"cannot stand beside the job ({error.strerror}): the job runs unrecorded")
        return _run_plain(line.command)
    job = Job(run, manifest, options, created=created, package_parent=str(PACKAGE.parent))
    try:
        return job.supervise(supervisor, line.command, environ)
    except OSError as error:
        supervisor.close()
        status = _cannot_run(line.command, error)
        job.close_manifest(
            replace(manifest, end_wall_ns=manifest.start_wall_ns, exit_status=status)
        )
        return status


def _missing_script(command: list[str]) -> str:
    """The script that `haiprof train.py` names and that is not there; empty where all is well."""
    script = command[1] if len(command) > 1 and command[0].endswith(("python", "python3")) else ""
    return script if script.endswith(".py") and not os.path.exists(script) else ""


def _already_recorded(environ: Mapping[str, str]) -> bool:
    """Whether this launcher itself runs inside a recorded job."""
    active = environ.get(ENV_ACTIVE, "")
    boot = str(RunPaths(Path(active)).boot)
    return bool(active) and boot in environ.get("PYTHONPATH", "").split(os.pathsep)


def _check_extras(options: Options) -> None:
    import importlib.util

    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError(
            "--tensorboard needs the package tensorboard",
            hint="pip install 'haiprof[tensorboard]'",
        )
    if options.prometheus_port and importlib.util.find_spec("prometheus_client") is None:
        raise MissingExtraError(
            "--prometheus-port needs the package prometheus-client",
            hint="pip install 'haiprof[prometheus]'",
        )


def _first_line(line: CommandLine, options: Options, run: RunPaths) -> str:
    parts = []
    if options.time_s:
        parts.append(f"for {options.time_s:g} s")
    if options.warmup_s:
        parts.append(f"after {options.warmup_s:g} s of warm-up")
    if options.traces:
        parts.append(options.trace_words(time_s=options.time_s))
    if line.taken:
        parts.append(f"taken from the command line: {shlex.join(line.taken)}")
    if line.taken_after:
        parts.append(_taken_after(line))
    detail = f" ({'; '.join(parts)})" if parts else ""
    return f"recording {shlex.join(line.command)} into {_short(run.root)}{detail}"


def _taken_after(line: CommandLine) -> str:
    taken = shlex.join(line.taken_after)
    return f"the script does not get {taken}: put -- before what is its own"


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _run_plain(command: list[str]) -> int:
    """Becomes the command: nothing of haiprof stays."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
        signal.signal(number, signal.SIG_DFL)
    try:
        _execute(command)
    except OSError as error:
        return _cannot_run(command, error)


def _execute(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        os.execv("/bin/sh", ["/bin/sh", *command])  # a script without a first line, as shells do


def _cannot_run(command: list[str], error: OSError) -> int:
    say(f"error: cannot run {command[0]}: {error.strerror or error}")
    return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
