"""The node agent: samples counters in a thread, tracks which ranks reported in, and which not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.agent.job_environment import find_pod
from haiprof.agent.relay import LiveRank, Relay
from haiprof.agent.samplers.loop import SamplingLoop
from haiprof.base.errors import HaiprofError
from haiprof.base.messages import print_message
from haiprof.base.options import Options
from haiprof.base.safe_files import make_folder
from haiprof.linux.processes import ProcessTree
from haiprof.linux.procfs import has_mapped, process_exists, strings, variables
from haiprof.run_format.boot import BOOT_FOLDER
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import try_read_json, try_read_lines
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.secrets import mask_command
from haiprof.run_format.writer import append_line, write_json

if TYPE_CHECKING:
    from haiprof.agent.prometheus_endpoint import Scrape
    from haiprof.linux.processes import Process

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

    def visit(pid: int) -> tuple[int, list[Unreported]]:
        """What is at or below a process: nothing, a label, a report; and the findings there."""
        if pid in reported_pids:
            return _REPORTED, []
        visited = [visit(child) for child in sorted(tree.children.get(pid, ()))]
        met = max((held for held, _ in visited), default=_NOTHING)
        found = [each for _, below in visited for each in below]
        folder = root / "proc" / str(pid)
        try:
            if not os.path.basename(os.readlink(folder / "exe")).startswith("python"):
                return met, found
            argv, environ = strings(folder / "cmdline"), variables(strings(folder / "environ"))
        except OSError:
            return met, found  # it has ended, or belongs to another user
        label = _LABELLED if any(name in environ for name in _RANK_VARIABLES) else _NOTHING
        blocked = _why_blocked(argv, environ, root, boot_dir) if met <= label else None
        if blocked and (label or has_mapped(pid, b"libtorch", proc=root / "proc")):
            text = " ".join(mask_command(argv))
            short = text if len(text) <= _COMMAND_CHARS else text[: _COMMAND_CHARS - 1] + "…"
            found = [Unreported(pid=pid, command=short, reason=blocked[0], remedy=blocked[1])]
        return max(met, label), found

    return visit(root_pid)[1]


def _why_blocked(
    argv: Sequence[str], environ: Mapping[str, str], root: Path, boot_dir: Path
) -> tuple[str, str] | None:
    """Why a process cannot load the hook, and what to do; None when it can."""
    for flag in interpreter_flags(argv):
        if flag in _BLOCKING_FLAGS:
            return _BLOCKING_FLAGS[flag]
    if "PYTHONPATH" not in environ:
        return "its environment has no PYTHONPATH: it was dropped on the way", _KEEP_PYTHONPATH
    for entry in environ["PYTHONPATH"].split(os.pathsep):
        if entry and os.path.realpath(entry) == os.path.realpath(boot_dir):
            return None
        if entry and (root / entry.lstrip("/") / "sitecustomize.py").exists():
            return f"{entry}/sitecustomize.py comes before haiprof's on PYTHONPATH", _PUT_FIRST
    return "its PYTHONPATH was overwritten: haiprof's entry is gone", _KEEP_PYTHONPATH


def interpreter_flags(argv: Sequence[str]) -> str:
    """The single-letter flags that the interpreter itself took, in order.

    They end at the script, `-`, `--`, `-c` or `-m`; `-uI` is two of them, `-Wignore` is one.
    """
    flags = ""
    words = iter(argv[1:])
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


FIRST_SCAN_S = 0.5
SCAN_GROWTH = 1.6
MAX_SCAN_S = 60.0
STOP_WAIT_S = 5.0
SETTLE_S = 0.05
REACH_AGAIN_S = 2.0
"""The controller, which may write the token, starts at about the same time."""
TOKEN_NAME = "reach.token"


@dataclass
class Agent:
    """The agent beside the job on this node, in the launcher's companion process."""

    run: RunPaths
    options: Options
    job_pid: int | None = None
    host: str = field(default_factory=socket.gethostname)
    unreported: dict[int, Unreported] = field(default_factory=dict)
    elected: bool = False
    """Whether this launcher is the one that samples this node."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _scrape: Scrape | None = None
    _relay: Relay | None = None
    _reach_at: float | None = None
    _scan_at: float = 0.0
    _scan_gap_s: float = FIRST_SCAN_S
    _started_s: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Starts sampling, unless another launcher on this node already does."""
        self.elected = self._elect()
        if not self.elected:
            return
        relay = Relay(self.run, self.host)
        try:
            relay.start()
        except OSError as error:
            line = {"type": "control", "state": "unavailable", "reason": str(error)}
            append_line(self.run.node(self.host).events, line)
        else:
            self._relay = relay
            if self.options.reach:
                self._reach(relay)
        loop = SamplingLoop(self.run, self.host, self.options)

        def sample() -> None:
            if not self._stop.wait(SETTLE_S):  # a command that ends at once is over before
                loop.run(self._stop)

        self._thread = threading.Thread(target=sample, name="haiprof-sampler", daemon=True)
        self._thread.start()
        if self.options.prometheus_port:
            from haiprof.agent.prometheus_endpoint import Scrape

            self._scrape = Scrape(self.run, self.host, self.options, lambda: loop.streams)
            self._scrape.start()

    def serve(self) -> None:
        """Relays requests to the ranks and their replies back while the job runs."""
        if self._relay is None:
            return
        if self._reach_at is not None and time.monotonic() >= self._reach_at:
            self._reach(self._relay)
        self._relay.tick()

    def live_ranks(self) -> list[LiveRank]:
        """The ranks of this node that can be asked."""
        return [] if self._relay is None else self._relay.live_ranks()

    def ask_steps(self, pids: Collection[int]) -> None:
        """Asks processes of ranks how many optimizer steps there were; see `Relay.ask_steps`."""
        if self._relay is not None:
            self._relay.ask_steps(pids)

    def starting(self) -> list[Process]:
        """Processes that have loaded torch and haiprof's hook, and have not begun to train."""
        from haiprof.linux.processes import ranks_below

        if "phases" not in self.options.recorder or self.job_pid is None:
            return []  # nobody reports in
        known = self._reported_pids() | self.unreported.keys()
        return [p for p in ranks_below(self.job_pid) if p.pid not in known]

    def tick(self) -> None:
        """Looks for ranks that never report in, at growing intervals."""
        now = time.monotonic()
        if now < self._scan_at or self.job_pid is None:
            return
        self._scan_at = now + self._scan_gap_s
        self._scan_gap_s = min(self._scan_gap_s * SCAN_GROWTH, MAX_SCAN_S)
        found = find_unreported(self.job_pid, self._reported_pids(), BOOT_FOLDER)
        ended = {pid: p for pid, p in self.unreported.items() if not process_exists(pid)}
        self.unreported = {**ended, **{process.pid: process for process in found}}

    def _reach(self, relay: Relay) -> None:
        """Joins the agents of nodes that do not share this run directory, now or later."""
        from haiprof.agent.reach import Controller, join

        options = self.options
        token_file = options.reach_token or options.log_dir / TOKEN_NAME
        again, self._reach_at = self._reach_at is not None, None
        try:
            end = join(options.reach, token_file)
        except (HaiprofError, OSError) as error:
            self._reach_at = time.monotonic() + REACH_AGAIN_S
            if not again:
                hint = f" ({error.hint})" if isinstance(error, HaiprofError) and error.hint else ""
                print_message(
                    f"{error}{hint}; trying again: until then requests do not reach this node"
                )
            return
        if isinstance(end, Controller):
            relay.controller = end
        else:
            relay.uplink = end

    def recording_is_over(self) -> bool:
        """Whether the time is up in some rank, and every other one has ended or is gone."""
        options = self.options
        if time.monotonic() - self._started_s < options.time_s + options.warmup_s:
            return False  # it cannot be: nothing is read while a long recording goes on
        endings = [_ending(paths.events) for _, _, paths in self.run.rank_folders()]
        if "time" not in endings:
            return False
        recording = [
            report
            for report, ending in zip(self.reports(), endings, strict=False)
            if ending is None and report.get("host") == self.host
        ]
        return not any(process_exists(report.get("pid")) for report in recording)

    def close(self) -> None:
        """Ends sampling, and listening to the ranks."""
        self.stop()
        if self._relay is not None:
            self._relay.stop()
            self._relay = None

    def stop(self) -> None:
        """Ends sampling."""
        self._stop.set()
        if self._scrape is not None:
            self._scrape.stop()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)
            self._thread = None

    def note_unreported(self) -> list[dict[str, object]]:
        """Writes down, once, who should have reported in and did not."""
        reported = [report.get("pid") for report in self.reports()]
        missing: list[dict[str, object]] = [
            asdict(process) for process in self.unreported.values() if process.pid not in reported
        ]
        self.unreported.clear()
        for process in missing:
            append_line(self.run.node(self.host).events, {"type": "unreported", **process})
        return missing

    def _elect(self) -> bool:
        node = self.run.node(self.host)
        try:
            make_folder(node.root, below=self.run.root, new=True, trusted=True)
        except FileExistsError:
            return False
        clock = ClockAnchor.now()
        content = {
            "version": SCHEMA_VERSION, "host": self.host, "pid": os.getpid(),
            "job_pid": self.job_pid,
            "clock": {"wall_ns": clock.wall_ns, "mono_ns": clock.mono_ns},
            "pod": find_pod(os.environ), "slurm_node": os.environ.get("SLURMD_NODENAME"),
        }  # fmt: skip
        write_json(node.agent, content, below=self.run.root)
        return True

    def reports(self) -> list[dict[str, Any]]:
        """rank.json of every rank that reported in, on any node; empty where it is not whole."""
        return [try_read_json(paths.report) for _, _, paths in self.run.rank_folders()]

    def reported_ranks(self) -> list[dict[str, Any]]:
        """Which rank reported in from where, for the manifest."""
        keys = ("rank", "attempt", "host", "pid")
        return [{key: report.get(key) for key in keys} for report in self.reports() if report]

    def _reported_pids(self) -> set[int]:
        mine = [report for report in self.reports() if report.get("host") == self.host]
        return {report["pid"] for report in mine if isinstance(report.get("pid"), int)}


def _ending(events: Path) -> str | None:
    """How a rank's recording ended: `time`, `exit`, `hook_error`; None while it goes on."""
    for line in reversed(try_read_lines(events)):
        if line.get("type") == "hook_error":
            return "hook_error"
        if line.get("type") == "record_end":
            return str(line.get("reason"))
    return None
