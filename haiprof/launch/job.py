"""One launched job, from its start to its verdict; nothing of ours that fails reaches it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from haiprof.config import ENV_ACTIVE, ENV_KINETO_DAEMON, Options
from haiprof.launch.say import say
from haiprof.launch.supervisor import Outcome, Supervisor, die_of
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest, write_manifest
from haiprof.rundir.reader import read_failures

if TYPE_CHECKING:
    from haiprof.launch.agent import Agent
    from haiprof.launch.burst import Burst
    from haiprof.launch.finisher import Finisher
    from haiprof.launch.kineto import KinetoSide
    from haiprof.launch.nsys import Nsys, Refusal
    from haiprof.launch.reaction import Reactor
    from haiprof.launch.surroundings import Surroundings

VERDICT_TIMEOUT_S = 120.0
SURROUNDINGS_WAIT_S = 1.0  # for git, after a job that was over before it answered
_NAMED_REASONS = 8
_Result = TypeVar("_Result")
# The working directory is the user's: a calendar.py there must not be taken for Python's.
_HAIPROF = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.insert(0, {parent!r}); "
    "from haiprof.__main__ import main; raise SystemExit(main())"
)


class Job:
    """A job under measurement.

    Args:
        run: Its run directory.
        manifest: As written before the start.
        options: What to record.
        created: Whether this launcher created the run, and so speaks for it.
        package_parent: Where the package haiprof stands.
    """

    def __init__(
        self,
        run: RunPaths,
        manifest: Manifest,
        options: Options,
        *,
        created: bool,
        package_parent: str,
    ) -> None:
        self.run = run
        self.manifest = manifest
        self.options = options
        self.created = created
        self._package_parent = package_parent
        self._program = _HAIPROF.format(parent=package_parent)
        self._supervisor: Supervisor | None = None
        self._agent: Agent | None = None
        self._nsys: Nsys | Refusal | None = None
        self._burst: Burst | None = None
        self._verdict: subprocess.Popen[bytes] | None = None
        self._judged = (0, 0)
        self._finisher: Finisher | None = None
        self._scalars: subprocess.Popen[bytes] | None = None
        self._surroundings: Surroundings | None = None
        self._kineto: KinetoSide | None = None
        self._reactor: Reactor | None = None

    def supervise(
        self, supervisor: Supervisor, command: list[str], environ: Mapping[str, str]
    ) -> int:
        """Starts the job, waits for it, says what was found, returns its status.

        Raises:
            OSError: The program does not exist or cannot be executed.
        """
        if self.options.burst:
            self._beside(lambda: self._prepare_burst(supervisor, environ))
        environment = job_environment(environ, self.run)
        if self.options.kineto or ENV_KINETO_DAEMON in environ:
            self._beside(lambda: self._prepare_kineto(environ))
            environment |= self._kineto.environment if self._kineto is not None else {}
        try:
            supervisor.start(command, environment)
        except OSError:
            self._stop_kineto()
            raise
        self._supervisor = supervisor
        if self._kineto is not None:
            self._beside(self._kineto.agent.start)
        self._beside(self._start_agent)
        self._beside(lambda: self._ask_surroundings(command, environ))
        outcome = supervisor.wait(lambda: self._beside(self._tick))
        self._beside(self._stop_kineto)
        self._beside(self._stop_agent)
        self._beside(supervisor.close)
        self._beside(lambda: self._conclude(outcome))
        if outcome.signal is not None:
            die_of(outcome.signal)
        return outcome.status

    def close_manifest(self, ended: Manifest) -> None:
        """Writes the outcome where this launcher speaks for the run."""
        if not self.created:
            return
        try:
            write_manifest(self.run, ended)
        except OSError as error:
            say(f"cannot write the outcome to {self.run.manifest}: {error.strerror or error}")

    # -- beside the job -----------------------------------------------------------------------

    def _beside(self, action: Callable[[], _Result]) -> _Result | None:
        """Does something of ours; the job and its exit status are the same if it fails."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 (whatever it is, the job goes on without it)
            say(f"{type(error).__name__} beside the job: {error}; the job is not affected")
            self._agent = None
            return None

    def _prepare_kineto(self, environ: Mapping[str, str]) -> None:
        """Before the job starts: `import torch` waits for a socket without a reader."""
        from haiprof.launch.kineto import prepare_kineto

        self._kineto = prepare_kineto(self.run, environ, asked=self.options.kineto)

    def _stop_kineto(self) -> None:
        if self._kineto is not None:
            self._kineto.stop()

    def _prepare_burst(self, supervisor: Supervisor, environ: Mapping[str, str]) -> None:
        """Says before the job starts why there will be no burst, where there will be none."""
        from haiprof.launch.burst import prepare_burst
        from haiprof.launch.nsys import Refusal

        self._nsys = prepare_burst(
            environ, log_dir=self.run.root, options=self.options, in_child=supervisor.unblock
        )
        if isinstance(self._nsys, Refusal):
            say(f"no burst of GPU metrics: {self._nsys.reason}; to have one: {self._nsys.remedy}")

    def _ask_surroundings(self, command: list[str], environ: Mapping[str, str]) -> None:
        from haiprof.launch.surroundings import Surroundings

        if not self.created:
            return
        self._surroundings = Surroundings(self.manifest.environment, command, environ)
        self._surroundings.start()

    def _note_surroundings(self, wait_s: float = 0.0) -> None:
        """Into the manifest, once they are known: a killed launcher writes no other one."""
        found = None if self._surroundings is None else self._surroundings.take(wait_s)
        if found is not None:
            self.manifest = replace(self.manifest, environment=found)
            self.close_manifest(self.manifest)

    def _start_burst(self, nsys: Nsys | Refusal, supervisor: Supervisor, host: str) -> None:
        from haiprof.launch.burst import Burst, has_trained

        def trained() -> bool:
            return any(has_trained(paths.phases) for _, _, paths in self.run.rank_folders())

        node = self.run.node(host)
        self._burst = Burst(
            node, self.options, nsys, has_trained=trained, in_child=supervisor.unblock
        )

    def _start_agent(self) -> None:
        from haiprof.launch.agent import Agent  # loads while the job starts

        _detach_streams()
        self._agent = Agent(self.run, self.options)
        self._agent.start()
        if self._nsys is not None and self._supervisor is not None and self._agent.elected:
            self._start_burst(self._nsys, self._supervisor, self._agent.host)
        if self.options.traces:
            self._start_finisher(self._agent)
        if self.options.react != "off" and self._agent.elected:
            self._start_reactor(self._agent)
        if self.options.tensorboard and self.created:
            self._scalars = self._haiprof("scalars", "--follow", nice=True)

    def _start_reactor(self, agent: Agent) -> None:
        from haiprof.launch.reaction import Reactor

        def start(command: str, words: Sequence[str], output: int) -> subprocess.Popen[bytes]:
            return self._haiprof(command, *words, nice=True, output=output)

        self._reactor = Reactor(self.run, agent.host, self.options, start)

    def _start_finisher(self, agent: Agent) -> None:
        from haiprof.launch.finisher import Finisher

        self._finisher = Finisher(
            self.run,
            agent.host,
            package_parent=self._package_parent,
            in_child=None if self._supervisor is None else self._supervisor.unblock,
        )

    def _tick(self) -> None:
        self._note_surroundings()
        if self._burst is not None:
            self._tick_burst(self._burst)
        agent, supervisor = self._agent, self._supervisor
        if agent is None or supervisor is None:
            return
        if self._finisher is None and self.run.trace_parts.is_dir():
            self._start_finisher(agent)  # a window was asked for while the job ran
        if self._finisher is not None and agent.elected:
            self._finisher.tick()
        agent.serve()
        if self._reactor is not None:
            self._tick_reactor(self._reactor, agent)
        if self._verdict is not None:
            return
        agent.tick(supervisor.pid)
        if self.options.time_s and agent.recording_is_over() and self._traces_are_written():
            agent.stop()
            if self._burst is not None:
                self._burst.cancel("the recording ended before the burst began")
            if self.created and not self.options.quiet:
                say(f"recorded {self.options.time_s:g} s; the job runs on without haiprof's hooks")
                self._judge(nice=True)

    def _traces_are_written(self) -> bool:
        return self._finisher is None or self._finisher.is_settled()

    def _tick_burst(self, burst: Burst) -> None:
        """One that fails is said once, and costs neither the agent nor the job anything."""
        agent, self._burst = self._agent, None

        def tick() -> None:
            burst.tick()
            self._burst = burst

        self._beside(tick)
        self._agent = agent

    def _tick_reactor(self, reactor: Reactor, agent: Agent) -> None:
        """One that fails is said once, and costs nothing but itself."""
        self._reactor = None

        def tick() -> None:
            reactor.tick(agent)
            self._reactor = reactor

        self._beside(tick)
        self._agent = agent

    def _stop_agent(self) -> None:
        if self._reactor is not None:
            self._reactor.close()
        if self._agent is not None:
            self._agent.close()
        if self._burst is not None and self._supervisor is not None:
            self._burst.finish(
                "the job ended before the burst was over", self._supervisor.asked_to_end
            )

    # -- after the job ------------------------------------------------------------------------

    def _conclude(self, outcome: Outcome) -> None:
        if self.run.rank_folders():
            self._note_surroundings(SURROUNDINGS_WAIT_S)
        ended = self._outcome(outcome)
        self.close_manifest(ended)
        if outcome.signal_name is not None:
            say(f"the job was ended by {outcome.signal_name}")
        elif outcome.status and not self.options.quiet:
            say(f"the job ended with exit status {outcome.status}")
        self._finish(self._scalars)
        if self._finisher is not None and self._supervisor is not None:
            self._finisher.finish(self._supervisor.asked_to_end, quiet=self.options.quiet)
        if self.options.quiet or not self.created:
            return
        if not self.run.rank_folders():
            _explain_silence(ended)
        elif self._verdict is not None and self._judged == self._evidence():
            self._finish(self._verdict)
            say(f"the verdict above is in {self.run.verdict_text}")
        else:  # no verdict yet, or one before more ranks reported in or more was traced
            self._judge(nice=False)
            self._finish(self._verdict)

    def _outcome(self, outcome: Outcome) -> Manifest:
        """The manifest with how the job ended, and who reported in."""
        ended = replace(
            self.manifest,
            end_wall_ns=time.time_ns(),
            exit_status=None if outcome.signal is not None else outcome.status,
            signal=outcome.signal_name,
            hook_failures=read_failures(self.run.boot_failures),
        )
        agent = self._agent
        if agent is None:
            return ended
        keys = ("rank", "attempt", "host", "pid")
        reports = [report for report in agent.reports() if report]
        return replace(
            ended,
            ranks=[{key: report.get(key) for key in keys} for report in reports],
            unreported=self._beside(agent.note_unreported) or [],
        )

    def _judge(self, *, nice: bool) -> None:
        self._judged = self._evidence()
        self._verdict = self._haiprof("verdict", "--save", nice=nice)

    def _evidence(self) -> tuple[int, int]:
        """How many ranks and traces there are to judge."""
        return len(self.run.rank_folders()), sum(1 for _ in self.run.traces.glob("rank*"))

    def _haiprof(
        self, command: str, *arguments: str, nice: bool, output: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Another haiprof command on this run, in a process of its own; talks to stderr.

        With `output`, a descriptor, it writes there, and does not talk.
        """
        supervisor = self._supervisor

        def in_child() -> None:
            if supervisor is not None:
                supervisor.unblock()
            if nice:
                os.nice(10)

        return subprocess.Popen(
            [sys.executable, "-c", self._program, command, str(self.run.root), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=_stderr_fd() if output is None else output,
            stderr=None if output is None else subprocess.DEVNULL,
            preexec_fn=in_child,
        )

    def _finish(self, process: subprocess.Popen[bytes] | None) -> None:
        """Waits for one of our own commands; Ctrl-C or TERM ends the waiting, not the status."""
        if process is None or self._supervisor is None:
            return
        deadline = time.monotonic() + VERDICT_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if self._supervisor.asked_to_end():
                break
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def job_environment(environ: Mapping[str, str], run: RunPaths) -> dict[str, str]:
    """The job's environment: the boot folder in front of PYTHONPATH, everything else as it was."""
    changed = dict(environ)
    changed["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(run.boot), environ.get("PYTHONPATH", "")))
    )
    changed[ENV_ACTIVE] = str(run.root)
    return changed


def _explain_silence(ended: Manifest) -> None:
    """No rank reported in: says why, without the second that a verdict takes."""
    reasons = [
        f"process {p['pid']} ({p['command']}): {p['reason']}; {p['remedy']}"
        for p in ended.unreported
    ]
    reasons += [f"the hook could not be loaded in {line}" for line in ended.hook_failures]
    say("no training steps recorded: no process of the job trained with PyTorch under haiprof")
    for reason in reasons[:_NAMED_REASONS]:
        say(reason)


def _detach_streams() -> None:
    """Lets go of the job's stdin and stdout: a reader of its pipe sees the end with the job's."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)


def _stderr_fd() -> int:
    """Where a child's output goes: our stderr, or nowhere when that is closed."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return subprocess.DEVNULL
