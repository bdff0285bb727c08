"""One launched job, from its start to its verdict; failures of haiprof never reach it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from haiprof.agent import process_ends
from haiprof.agent.job_environment import Surroundings
from haiprof.agent.node_agent import Agent
from haiprof.agent.notifications import Notifier, send_death
from haiprof.agent.reactions import Reactor
from haiprof.agent.step_watch import Watch
from haiprof.agent.trace_finisher import Finisher, RunFolder
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_KINETO_DAEMON, ENV_LOG_DIR, ENV_TRAINJOB, SHARES, Options
from haiprof.base.subcommand import Subcommand, end_child
from haiprof.base.units import NS_PER_S, duration_text, visible
from haiprof.launch.run_directories import RunCopies
from haiprof.launch.supervisor import Line, Outcome, Pulse, Supervisor, discard
from haiprof.linux.procfs import read_start_ticks, still_runs
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.run_format.reader import read_failures, try_read_json

if TYPE_CHECKING:  # these are loaded where they are asked for
    from haiprof.agent.burst import Burst, Nsys, Refusal
    from haiprof.agent.kineto_daemon import KinetoAgent
    from haiprof.agent.notifications import TrainJobStatus

TICK_S = 0.5
VERDICT_TIMEOUT_S = 120.0
SURROUNDINGS_WAIT_S = 1.0  # for git, after a job that ended before git answered
_NAMED_REASONS = 8
_HEADLINE_CHARS = 1000
_Result = TypeVar("_Result")


@dataclass
class Job:
    """A job under measurement."""

    run: RunPaths
    manifest: Manifest
    options: Options
    created: bool  # whether this launcher has made the run directory
    subcommand: Subcommand
    supervisor: Supervisor  # of the launcher, as it was when this process was forked from it
    pid: int = 0  # the job's process, once it has started
    _agent: Agent | None = None
    _nsys: Nsys | Refusal | None = None
    _burst: Burst | None = None
    _verdict: subprocess.Popen[bytes] | None = None
    _judged: tuple[int, int] = (0, 0)
    _finisher: Finisher | None = None
    _scalars: subprocess.Popen[bytes] | None = None
    _surroundings: Surroundings | None = None
    _kineto: KinetoAgent | None = None
    _reactor: Reactor | None = None
    _ends: process_ends.ProcessEnds | None = None
    _others: process_ends.OtherProcesses | None = None
    _notifier: Notifier | None = None
    _trainjob: TrainJobStatus | None = None
    _death_is_sent: bool = False
    _copies: RunCopies | None = None
    _folder: RunFolder | None = None
    _host: str = field(default_factory=socket.gethostname)

    def __post_init__(self) -> None:
        self._trace_parts = os.fspath(self.run.trace_parts)  # looked for twice a second

    def prepare(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Prepares the run before the job starts; returns variables for the job."""
        if self.options.burst:
            self._guard(lambda: self._prepare_burst(environ))
        if self.options.kineto or ENV_KINETO_DAEMON in environ:
            # `import torch` waits for a socket without a reader.
            from haiprof.agent.kineto_daemon import prepare_kineto

            asked = self.options.kineto
            self._kineto = self._guard(lambda: prepare_kineto(self.run, environ, asked=asked))
        return self._kineto.environment if self._kineto is not None else {}

    def close_unstarted(self, ended: Manifest) -> None:
        """The program could not be run."""
        self._stop_kineto()
        self.close_manifest(ended)

    def record(self, launcher: Line, pulse: Pulse, pid: int, environ: Mapping[str, str]) -> None:
        """Records the started job until it ends, and prints the verdict."""
        self.pid = pid
        self.manifest = replace(self.manifest, job_pid=pid)
        if self._kineto is not None:
            self._guard(self._kineto.start)
        self._guard(self._start_agent)
        if self.options.address:
            self._copies = RunCopies(
                self.run, self.options.address, self._put,
                words=() if self.created else ("--only-node",),
            )  # fmt: skip
        if self.created:
            known, command = self.manifest.environment, self.manifest.command
            self._surroundings = Surroundings(known, command, environ)
            self._guard(self._surroundings.start)
        outcome = self._wait(launcher, pulse)
        self.supervisor.forget_signals()
        if outcome is not None:  # of this launcher's own child: others know of theirs
            status = None if outcome.signal is not None else outcome.status
            self._guard(partial(process_ends.note_job_end, self.run, self._host, pid=pid,
                                status=status, ended_by=outcome.signal))  # fmt: skip
        self._guard(self._stop_kineto)
        self._guard(self._stop_agent)
        self._guard(lambda: self._conclude(outcome))
        self._guard(lambda: self._notify_end(outcome))
        if self._trainjob is not None:
            succeeded, verdict = self.manifest.exit_status == 0, self._read_verdict()
            close = partial(self._trainjob.close, self.supervisor.asked_to_end, verdict)
            self._guard(partial(close, succeeded=succeeded))
        if self._copies is not None:
            self._copies.finish(self.supervisor.asked_to_end, quiet=self.options.quiet)

    def _wait(self, launcher: Line, pulse: Pulse) -> Outcome | None:
        """How the job ended; None where the launcher was killed before it."""
        started = read_start_ticks(Path("/"), self.pid)
        while True:
            try:
                said = launcher.receive(TICK_S)
            except EOFError:
                break
            if said is None:
                self._guard(self._tick)
            elif "arrived" in said:
                self._guard(partial(
                    process_ends.note_signal, self.run, self._host, said, ask_slurm=self.created
                ))  # fmt: skip
            elif "status" in said:
                pulse.start()
                return Outcome(said["status"], said["signal"])
            else:
                pulse.start()
        self._guard(partial(process_ends.note_launcher_gone, self.run, self._host))
        print_message(
            f"the launcher is gone; the job goes on as process {self.pid}, and is recorded"
        )
        while still_runs(Path("/"), self.pid, started):
            time.sleep(TICK_S)
            self._guard(self._tick)
        discard(2)  # the launcher is gone, and with it the reader
        return None

    def close_manifest(self, ended: Manifest) -> None:
        """Writes the outcome if this launcher created the run."""
        if not self.created:
            return
        try:
            write_manifest(self.run, ended)
        except OSError as error:
            print_message(
                f"cannot write the outcome to {self.run.manifest}: {error.strerror or error}"
            )

    def _guard(self, action: Callable[[], _Result], *, loses: str = "_agent") -> _Result | None:
        """Runs an action of haiprof's: where it fails, that part of the recording is lost."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 (whatever it is, the job goes on without it)
            print_message(
                f"{type(error).__name__} beside the job: {error}; the job is not affected"
            )
            setattr(self, loses, None)
            return None

    def _stop_kineto(self) -> None:
        if self._kineto is not None:
            self._kineto.stop()

    def _prepare_burst(self, environ: Mapping[str, str]) -> None:
        """Prepares a burst, or prints before the job starts why there will be none."""
        from haiprof.agent.burst import Refusal, prepare_burst

        self._nsys = prepare_burst(
            environ, log_dir=self.run.root, options=self.options, in_child=self.supervisor.unblock
        )
        if isinstance(self._nsys, Refusal):
            print_message(
                f"no burst of GPU metrics: {self._nsys.reason}; to have one: {self._nsys.remedy}"
            )

    def _note_surroundings(self, wait_s: float = 0.0) -> None:
        """Adds the surroundings to the manifest once known: a killed launcher writes none."""
        found = None if self._surroundings is None else self._surroundings.take(wait_s)
        if found is not None:
            self.manifest = replace(self.manifest, environment=found)
            self.close_manifest(self.manifest)

    def _start_agent(self) -> None:
        options, run, unblock = self.options, self.run, self.supervisor.unblock
        self._agent = agent = Agent(run, options, job_pid=self.pid)
        agent.start()
        if options.notify and (agent.elected or self.created):
            identity = {"job": self.manifest.name, "run": str(run.root), "host": agent.host}
            self._notifier = Notifier(options.notify, identity, in_child=unblock)
        trainer = next((each for each in ENV_TRAINJOB if os.environ.get(f"{each}URL")), None)
        if self.created and trainer is not None:
            from haiprof.agent.notifications import TrainJobStatus

            self._trainjob = TrainJobStatus(os.environ, trainer, self.manifest.command)
        if options.traces:
            self._finisher = Finisher(run, agent.host, in_child=unblock)
        if agent.elected:
            self._start_for_node(agent)
        if options.tensorboard and self.created:
            self._scalars = self._haiprof("scalars", "--follow", nice=True)

    def _start_for_node(self, agent: Agent) -> None:
        """What one launcher of a node does for all of them."""
        options, run, unblock = self.options, self.run, self.supervisor.unblock
        if self._nsys is not None:
            from haiprof.agent.burst import Burst, has_trained

            self._burst = Burst(
                run.node(agent.host), options, self._nsys, in_child=unblock,
                has_trained=lambda: any(has_trained(p.phases) for _, _, p in run.rank_folders()),
            )  # fmt: skip
        if options.detail_h:
            self._folder = RunFolder(run, agent.host, options.detail_h, in_child=unblock)
        self._others = process_ends.OtherProcesses(run, agent.host, self.pid)
        if options.react != "off" or options.notify:
            watch = Watch(
                options.slow_limit, options.hang_limit, record_s=options.time_s,
                warmup_s=options.warmup_s,
            )  # fmt: skip
            self._reactor = Reactor(
                run, agent.host, options,
                # Ranks that wait busily would starve a snapshot; where none goes on, it may hurry.
                lambda command, words, fd: self._haiprof(
                    command, *words, nice=command != "snapshot", output=fd
                ),
                watch, self._notifier,
            )  # fmt: skip
        with contextlib.suppress(OSError):  # no descriptor is left: how ranks end is not seen

            def tell(line: Mapping[str, Any]) -> None:
                if self._notifier is not None:
                    self._death_is_sent |= send_death(self._notifier, line)

            self._ends = process_ends.ProcessEnds(run, agent.host, self.pid, on_end=tell)
            self._ends.start()

    def _notify_end(self, outcome: Outcome | None) -> None:
        """Tells how the job ended, and its verdict; waits a bounded time until all is delivered."""
        notifier = self._notifier
        if notifier is None:
            return
        if self.created:
            ended, found = self.manifest, self._read_verdict()
            how = "how it ended is not known, as its launcher was killed"
            if outcome is not None:
                how = f"exit status {outcome.status}"
            if ended.signal is not None:
                how = f"ended by {ended.signal}"
            ns = (ended.end_wall_ns or time.time_ns()) - ended.start_wall_ns
            is_recorded = bool(self.run.rank_folders())
            why = "it could not be made" if is_recorded else "no training steps recorded"
            headline = found.get("headline") or f"no verdict: {why}"
            death = found.pop("death", None) or {}
            if death and not self._death_is_sent:  # the job was over before its end was seen
                ranks = death.get("ranks") or [None]
                alone = len(self.run.rank_folders()) == 1
                notifier.send("death", headline, rank=ranks[0], signal=None, pid=None,
                              status=ended.exit_status if alone else None)  # fmt: skip
            notifier.send(
                "end", f"the job is over after {duration_text(ns)}: {how}\n"
                f"{headline}", exit_status=ended.exit_status, signal=ended.signal,
                seconds=round(ns / NS_PER_S, 3), verdict=found or None,
            )  # fmt: skip
        notifier.close(self.supervisor.asked_to_end)

    def _read_verdict(self) -> dict[str, Any]:
        """Headline, death, and titles of the problems; empty where there is no verdict."""
        saved = try_read_json(self.run.verdict_json)
        death, findings = saved.get("death"), saved.get("findings") or []
        return saved and {
            "headline": death.get("headline") if isinstance(death, dict) else saved.get("headline"),
            "problems": [one.get("title") for one in findings],
            "death": death if isinstance(death, dict) else None,
        }

    def _put(self, words: Sequence[str], background: bool) -> subprocess.Popen[bytes]:
        """Puts the run at its address; the address may hold a password: no command line has it."""
        environ = {**os.environ, ENV_LOG_DIR: self.options.address}
        return self._haiprof("put", *words, nice=background, environ=environ)

    def _tick(self) -> None:
        self._note_surroundings()
        self._turn("_copies")
        self._turn("_burst")
        agent = self._agent
        if agent is None or not self.pid:
            return
        if self._finisher is None and os.path.isdir(self._trace_parts):
            # A window was asked for while the job ran.
            self._finisher = Finisher(self.run, agent.host, in_child=self.supervisor.unblock)
        if agent.elected:
            self._turn("_finisher")
        agent.serve()
        self._turn("_folder")
        self._turn("_ends", agent.live_ranks())
        self._turn("_others", agent.live_ranks())
        self._turn("_reactor", agent)
        self._turn("_trainjob", agent)
        if self._verdict is not None:
            return
        agent.tick()
        if (
            self.options.time_s
            and agent.recording_is_over()
            and (self._finisher is None or self._finisher.is_settled())
        ):
            agent.stop()
            if self._burst is not None:
                self._burst.cancel("the recording ended before the burst began")
            if self.created and not self.options.quiet:
                print_message(
                    f"recorded {self.options.time_s:g} s; the job runs on without haiprof's hooks"
                )
                self._judge(nice=True)

    def _turn(self, name: str, *facts: object) -> None:
        """Gives one part its turn; where that fails the others go on."""
        part = getattr(self, name)
        if part is not None:
            self._guard(partial(part.tick, *facts), loses=name)

    def _stop_agent(self) -> None:
        for part in (self._ends, self._reactor, self._folder, self._agent):
            if part is not None:
                part.close()
        if self._burst is not None:
            self._burst.finish(
                "the job ended before the burst was over", self.supervisor.asked_to_end
            )

    def _conclude(self, outcome: Outcome | None) -> None:
        if self.run.rank_folders():
            self._note_surroundings(SURROUNDINGS_WAIT_S)
        self.manifest = ended = self._outcome(outcome)
        self.close_manifest(ended)
        if ended.signal is not None:
            print_message(f"the job was ended by {ended.signal}")
        elif ended.exit_status and not self.options.quiet:
            print_message(f"the job ended with exit status {ended.exit_status}")
        self._finish(self._scalars)
        if self._finisher is not None:
            self._finisher.finish(self.supervisor.asked_to_end, quiet=self.options.quiet)
        if not self.created or (self.options.quiet and not (self.options.notify or self._trainjob)):
            return
        died = bool(ended.signal or ended.exit_status)
        if not self.run.rank_folders() and not (died and self.run.uncaught_files()):
            if not self.options.quiet:
                _explain_no_reports(ended)
        elif self._verdict is not None and self._judged == self._evidence():
            self._finish(self._verdict)
            if not self.options.quiet:
                print_message(f"the verdict above is in {self.run.verdict_text}")
        else:  # no verdict yet, or one before more ranks reported in or more was traced
            self._judge(nice=False)
            self._finish(self._verdict)
        if died and not self.options.quiet and not os.isatty(2):
            # In a log the cause is the last line, after all that the job and the verdict have said.
            headline = (self._read_verdict().get("death") or {}).get("headline")
            if isinstance(headline, str):
                print_message(visible(" ".join(headline.split())[:_HEADLINE_CHARS]))

    def _outcome(self, outcome: Outcome | None) -> Manifest:
        ended = replace(
            self.manifest, end_wall_ns=time.time_ns(),
            signal=None if outcome is None else outcome.signal_name,
            exit_status=None if outcome is None or outcome.signal is not None else outcome.status,
            hook_failures=read_failures(self.run.boot_failures),
        )  # fmt: skip
        agent = self._agent
        if agent is None:
            return ended
        return replace(
            ended, ranks=agent.reported_ranks(), unreported=self._guard(agent.note_unreported) or []
        )

    def _judge(self, *, nice: bool) -> None:
        self._judged = self._evidence()
        output = subprocess.DEVNULL if self.options.quiet else None
        self._verdict = self._haiprof("verdict", "--save", nice=nice, output=output)

    def _evidence(self) -> tuple[int, int]:
        return len(self.run.rank_folders()), sum(1 for _ in self.run.traces.glob("rank*"))

    def _haiprof(
        self, command: str, *arguments: str, nice: bool, output: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Runs another haiprof command on this run, printing to stderr, or into a descriptor."""

        def in_child() -> None:
            self.supervisor.unblock()
            if nice:
                os.nice(10)
            os.umask(0o777 & ~SHARES[self.options.share])

        return subprocess.Popen(
            self.subcommand(command, str(self.run.root), *arguments), env=environ,
            stdin=subprocess.DEVNULL, stdout=_stderr_fd() if output is None else output,
            stderr=None if output is None else subprocess.DEVNULL, preexec_fn=in_child,
        )  # fmt: skip

    def _finish(self, process: subprocess.Popen[bytes] | None) -> None:
        """Waits for one of our own commands; Ctrl-C or TERM ends the waiting, not the status."""
        if process is None:
            return
        deadline = time.monotonic() + VERDICT_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if self.supervisor.asked_to_end():
                break
        if process.poll() is None:
            end_child(process)


def _explain_no_reports(ended: Manifest) -> None:
    """Prints why no rank reported in, without the second that a verdict takes."""
    reasons = [
        f"process {p['pid']} ({p['command']}): {p['reason']}; {p['remedy']}"
        for p in ended.unreported
    ]
    reasons += [f"the hook could not be loaded in {line}" for line in ended.hook_failures]
    print_message(
        "no training steps recorded: no process of the job trained with PyTorch under haiprof"
    )
    for reason in reasons[:_NAMED_REASONS]:
        print_message(reason)


def _stderr_fd() -> int:
    """Where a child's output goes: our stderr, or nowhere when that is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return sys.stderr.fileno()
    return subprocess.DEVNULL
