"""`haiprof COMMAND`: launches a job under measurement and ends with the verdict."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest, write_manifest
from haiprof.rundir.reader import read_failures

if TYPE_CHECKING:
    from haiprof.launch.agent import Agent

VERDICT_TIMEOUT_S = 120.0
_NAMED_REASONS = 8
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


def say(text: str) -> None:
    """One line to stderr; a closed stderr is not the job's problem."""
    try:
        sys.stderr.write(f"haiprof: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return


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
    try:
        run, manifest, created = create_run(
            options, command=line.command, name=line.name, environ=environ
        )
    except UsageError as error:
        say(f"{error}: the job runs unrecorded")
        return _run_plain(line.command)
    if not options.quiet:
        say(_first_line(line, options, run))
    return _Job(run, manifest, options, created).supervise(line.command, environ)


class _Job:
    """One launched job, from its start to its verdict."""

    def __init__(self, run: RunPaths, manifest: Manifest, options: Options, created: bool) -> None:
        self.run = run
        self.manifest = manifest
        self.options = options
        self.created = created
        self.ended = manifest
        self.concluded: subprocess.Popen[bytes] | None = None
        self.scalars: subprocess.Popen[bytes] | None = None

    def supervise(self, command: list[str], environ: Mapping[str, str]) -> int:
        """Starts the job, waits for it, says what was found, returns its status."""
        from haiprof.launch.supervisor import Supervisor, die_of

        supervisor = Supervisor()
        try:
            supervisor.start(command, job_environment(environ, self.run))
        except OSError as error:
            supervisor.close()
            return self._cannot_start(command[0], error)
        from haiprof.launch.agent import Agent  # psutil and NVML load while the job starts

        agent = Agent(self.run, self.options)
        agent.start()
        if self.options.tensorboard and self.created:
            self.scalars = self._haiprof("scalars", "--follow", nice=True)
        outcome = supervisor.wait(lambda: self._tick(agent, supervisor.pid))
        agent.stop()
        supervisor.close()
        name = None if outcome.signal is None else outcome.signal.name
        self._close_manifest(None if name else outcome.status, name, agent)
        self._conclude(name, outcome.status)
        if outcome.signal is not None:
            die_of(outcome.signal)
        return outcome.status

    def _tick(self, agent: Agent, pid: int) -> None:
        if self.concluded is not None:
            return
        agent.tick(pid)
        if self.options.time_s and agent.recording_is_over():
            agent.stop()
            if not self.options.quiet and self.created:
                say(f"recorded {self.options.time_s:g} s; the job runs on without haiprof's hooks")
                self.concluded = self._haiprof("verdict", "--save", nice=True)

    def _conclude(self, signal_name: str | None, status: int) -> None:
        if signal_name is not None:
            say(f"the job was ended by {signal_name}")
        elif status:
            say(f"the job ended with exit status {status}")
        if self.scalars is not None:
            _finish(self.scalars)
        if self.options.quiet or not self.created:
            return
        if not self.ended.ranks:
            self._explain_silence()
            return
        if self.concluded is None:
            self.concluded = self._haiprof("verdict", "--save")
        else:
            say(f"the verdict above is in {self.run.verdict_text}")
        _finish(self.concluded)

    def _explain_silence(self) -> None:
        """No rank reported in: says why, without the second that a verdict takes."""
        reasons = [
            f"process {p['pid']} ({p['command']}): {p['reason']}; {p['remedy']}"
            for p in self.ended.unreported
        ]
        reasons += [f"the hook could not be loaded in {line}" for line in self.ended.hook_failures]
        say("no training steps recorded: no process of the job trained with PyTorch under haiprof")
        for reason in reasons[:_NAMED_REASONS]:
            say(reason)

    def _haiprof(
        self, command: str, *arguments: str, nice: bool = False
    ) -> subprocess.Popen[bytes]:
        """Another haiprof command on this run, in a process of its own; talks to stderr."""
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")))
        )
        return subprocess.Popen(
            [sys.executable, "-m", "haiprof", command, str(self.run.root), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=_stderr_fd(),
            env=environ,
            preexec_fn=(lambda: os.nice(10)) if nice else None,
        )

    def _close_manifest(
        self, status: int | None, signal_name: str | None, agent: Agent | None = None
    ) -> None:
        """Writes the outcome, and who reported in."""
        ended = replace(
            self.manifest, end_wall_ns=time.time_ns(), exit_status=status, signal=signal_name
        )
        try:
            if agent is not None:
                keys = ("rank", "attempt", "host", "pid")
                ended = replace(
                    ended,
                    ranks=[{key: r.get(key) for key in keys} for r in agent.reports()],
                    unreported=agent.note_unreported(),
                    hook_failures=read_failures(self.run.boot_failures),
                )
            self.ended = ended
            if self.created:
                write_manifest(self.run, ended)
        except OSError as error:
            say(f"cannot write the outcome to {self.run.manifest}: {error.strerror or error}")

    def _cannot_start(self, program: str, error: OSError) -> int:
        status = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        say(f"error: cannot run {program}: {error.strerror or error}")
        self._close_manifest(status, None)
        return status


def job_environment(environ: Mapping[str, str], run: RunPaths) -> dict[str, str]:
    """The job's environment: the boot folder in front of PYTHONPATH, everything else as it was."""
    changed = dict(environ)
    changed["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(run.boot), environ.get("PYTHONPATH", "")))
    )
    changed[ENV_ACTIVE] = str(run.root)
    return changed


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


def _first_line(line: CommandLine, options: Options, run: RunPaths) -> str:
    parts = []
    if options.time_s:
        parts.append(f"for {options.time_s:g} s")
    if options.warmup_s:
        parts.append(f"after {options.warmup_s:g} s of warm-up")
    if line.taken:
        parts.append(f"taken from the command line: {shlex.join(line.taken)}")
    detail = f" ({'; '.join(parts)})" if parts else ""
    return f"recording {shlex.join(line.command)} into {_short(run.root)}{detail}"


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _run_plain(command: list[str]) -> int:
    """Becomes the command: nothing of haiprof stays."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        say(f"error: cannot run {command[0]}: {error.strerror or error}")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def _stderr_fd() -> int | None:
    """Where a child's output goes: our stderr, or nowhere when that is closed."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return subprocess.DEVNULL


def _finish(process: subprocess.Popen[bytes]) -> None:
    """Waits for one of our own commands; a second Ctrl-C ends the waiting, not the status."""
    try:
        process.wait(VERDICT_TIMEOUT_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.terminate()
