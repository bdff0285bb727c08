"""Every path in a log directory and in a run directory; nobody else concatenates them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "run.json"
BOOT_CONFIG_NAME = "config.json"
AGREED_PREFIX = ".agreed-"  # in traces/.parts: files in which ranks settle what they all trace
BOOT_FAILURES_NAME = "failures.log"  # boot/sitecustomize.py spells it out: it imports nothing


@dataclass(frozen=True)
class RankPaths:
    """The files that one process of the job writes: `ranks/<rank>` or `ranks/<rank>.<attempt>`."""

    root: Path

    @property
    def report(self) -> Path:
        """Who reported in: rank, pid, host, versions."""
        return self.root / "rank.json"

    @property
    def phases(self) -> Path:
        """Phase spans on the host clock (`schema.PHASES`)."""
        return self.root / "phases.rec"

    @property
    def device(self) -> Path:
        """Phase times on the device clock (`schema.DEVICE`)."""
        return self.root / "device.rec"

    @property
    def events(self) -> Path:
        """What varies in size: roots, optimizers, recording marks, faults of the hook, cost."""
        return self.root / "events.jsonl"

    @property
    def heartbeat(self) -> Path:
        """How far each process group's collectives have come (`schema.HEARTBEAT`)."""
        return self.root / "heartbeat.rec"

    def collectives(self, wall_ns: int) -> Path:
        """The last collectives, with their times, as the Flight Recorder had them then."""
        return self.root / f"collectives-{wall_ns}.json.gz"

    def collective_files(self) -> list[Path]:
        """Those that exist, oldest first."""
        return sorted(self.root.glob("collectives-*.json.gz"))


@dataclass(frozen=True)
class NodePaths:
    """The files that the node agent of one host writes: `nodes/<host>`."""

    root: Path

    @property
    def agent(self) -> Path:
        """The agent's own report: pid, clocks, what it could not measure and why."""
        return self.root / "agent.json"

    @property
    def events(self) -> Path:
        """What happened beside the job: cost, missing counters, processes that did not report."""
        return self.root / "events.jsonl"

    @property
    def bursts(self) -> Path:
        """What Nsight Systems wrote about a short window (`--burst`)."""
        return self.root / "bursts"

    @property
    def burst_report(self) -> Path:
        """Its report, for its own viewer."""
        return self.bursts / "gpu.nsys-rep"

    @property
    def burst_export(self) -> Path:
        """The report as SQLite, which haiprof reads."""
        return self.bursts / "gpu.sqlite"

    @property
    def burst_log(self) -> Path:
        """What Nsight Systems printed."""
        return self.bursts / "nsys.log"

    @property
    def burst_scratch(self) -> Path:
        """Its temporary files; gone once it has ended."""
        return self.bursts / "tmp"

    def records(self, source: str) -> Path:
        """The record file of one sampler, such as `host`, `process` or `gpu`."""
        return self.root / f"{source}.rec"


@dataclass(frozen=True)
class RunPaths:
    """Every path in one run directory."""

    root: Path

    @property
    def manifest(self) -> Path:
        """What the run was: command, options, clocks, outcome."""
        return self.root / MANIFEST_NAME

    @property
    def boot(self) -> Path:
        """The folder that goes in front of PYTHONPATH."""
        return self.root / "boot"

    @property
    def boot_config(self) -> Path:
        """The options, beside the injected sitecustomize."""
        return self.boot / BOOT_CONFIG_NAME

    @property
    def boot_failures(self) -> Path:
        """One line per process in which the hook could not be loaded; absent where it could."""
        return self.boot / BOOT_FAILURES_NAME

    @property
    def boot_attach(self) -> Path:
        """What runs in a process that was not started under haiprof (`haiprof attach --inject`)."""
        return self.boot / "attach.py"

    def injected(self, pid: int) -> Path:
        """What became of it in one process."""
        return self.boot / f"injected-{pid}.json"

    def stacks(self, rank: int) -> Path:
        """Stacks of a rank's main thread, sampled from outside, and how often each was seen."""
        return self.report / f"stacks-{rank}.folded"

    @property
    def outside_json(self) -> Path:
        """What was seen from outside of processes that do not run under haiprof."""
        return self.report / "outside.json"

    @property
    def ranks(self) -> Path:
        """One folder per rank and attempt."""
        return self.root / "ranks"

    @property
    def nodes(self) -> Path:
        """One folder per host."""
        return self.root / "nodes"

    @property
    def report(self) -> Path:
        """What was concluded: verdict.json, verdict.txt."""
        return self.root / "report"

    @property
    def verdict_json(self) -> Path:
        """The verdict for scripts."""
        return self.report / "verdict.json"

    @property
    def diagnosis_json(self) -> Path:
        """What `haiprof diagnose` found, in the form of docs/diagnosis.md."""
        return self.report / "diagnosis.json"

    @property
    def verdict_text(self) -> Path:
        """The verdict card as it was printed."""
        return self.report / "verdict.txt"

    @property
    def comparison_json(self) -> Path:
        """How the run compared with the one that `--baseline last-good` chose."""
        return self.report / "compare.json"

    @property
    def report_html(self) -> Path:
        """The report page."""
        return self.report / "report.html"

    @property
    def traces(self) -> Path:
        """Traces of torch.profiler, one file per rank and window, and execution traces."""
        return self.root / "traces"

    @property
    def trace_parts(self) -> Path:
        """What ranks put down raw, until it is compressed into `traces`."""
        return self.traces / ".parts"

    @property
    def tensorboard(self) -> Path:
        """Event files for TensorBoard."""
        return self.root / "tensorboard"

    @property
    def snapshots(self) -> Path:
        """One folder per snapshot: what every rank was doing at that time."""
        return self.root / "snapshots"

    @property
    def control(self) -> Path:
        """Requests to the job and its replies, and the sockets of its agents; its owner's alone."""
        return self.root / "control"

    @property
    def control_requests(self) -> Path:
        """One file per request."""
        return self.control / "requests"

    @property
    def control_replies(self) -> Path:
        """One folder per request, with one file per rank."""
        return self.control / "replies"

    @property
    def control_members(self) -> Path:
        """Ranks of nodes that do not share the run directory, as their agents told."""
        return self.control / "members"

    def control_request(self, request_id: str) -> Path:
        """The file of one request."""
        return self.control_requests / f"{request_id}.json"

    def control_reply(self, request_id: str) -> Path:
        """The replies to one request."""
        return self.control_replies / request_id

    def control_reaction(self, trigger: str, number: int) -> Path:
        """What one of the agents did by itself: the file is its claim, and then the result."""
        return self.control / f"reaction-{trigger}-{number}.json"

    def rank(self, rank: int, attempt: int = 0) -> RankPaths:
        """The files of one rank; a restarted rank is another attempt."""
        return RankPaths(self.ranks / (f"{rank}.{attempt}" if attempt else str(rank)))

    def node(self, host: str) -> NodePaths:
        """The files of one host."""
        return NodePaths(self.nodes / host)

    def rank_folders(self) -> list[tuple[int, int, RankPaths]]:
        """Those that exist, as (rank, attempt, paths), in order."""
        found = []
        for name in _subfolders(self.ranks):
            rank, _, attempt = name.partition(".")
            if _is_number(rank) and (_is_number(attempt) or not attempt):
                found.append((int(rank), int(attempt or 0), RankPaths(self.ranks / name)))
        return sorted(found, key=lambda item: item[:2])

    def node_folders(self) -> list[tuple[str, NodePaths]]:
        """Those that exist, as (host, paths), in order."""
        return [(name, NodePaths(self.nodes / name)) for name in sorted(_subfolders(self.nodes))]


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_number(name: str) -> bool:
    """Plain decimal digits, few enough for an integer column."""
    return name.isascii() and name.isdigit() and len(name) < 10
