"""Every path in a log directory and in a run directory; no other module builds them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "run.json"
BOOT_CONFIG_NAME = "config.json"
AGREED_PREFIX = ".agreed-"  # in traces/.parts: files in which ranks settle what they all trace
BOOT_FAILURES_NAME = (
    "failures.log"  # in_job/boot/sitecustomize.py spells it out: it imports nothing
)
SIDECAR_SUFFIX = ".part.json"
RAW_SUFFIX = ".trace.json"
ET_RAW_SUFFIX = ".et.json"
ET_SUFFIX = ".et.json.gz"
PLAIN_TRACE_SUFFIX = ".pt.trace.json"
"""As torch.profiler's own handler for TensorBoard ends a file's name."""
TRACE_SUFFIX = ".pt.trace.json.gz"
"""The same, compressed: what a finished trace is called."""


@dataclass(frozen=True)
class RankPaths:
    """The files that one process of the job writes: `ranks/<rank>` or `ranks/<rank>.<attempt>`."""

    root: Path

    @property
    def run_root(self) -> Path:
        """The run directory."""
        return self.root.parents[1]

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
        """Lines of varying size: roots, optimizers, recording marks, faults of the hook, cost."""
        return self.root / "events.jsonl"

    @property
    def heartbeat(self) -> Path:
        """Progress of each process group's collectives (`schema.HEARTBEAT`)."""
        return self.root / "heartbeat.rec"

    @property
    def stacks(self) -> Path:
        """Samples of the training thread's Python stack (`stack_lines`)."""
        return self.root / "stacks.jsonl"

    def worker_stacks(self, worker: int) -> Path:
        """The same of the rank's DataLoader workers of one number."""
        return self.root / f"worker-{worker}.jsonl"

    def worker_stack_files(self) -> list[Path]:
        """Those that exist."""
        return sorted(self.root.glob("worker-*.jsonl"))

    @property
    def sampling_over(self) -> Path:
        """Tells the rank's DataLoader workers that the recording is over; empty."""
        return self.root / "sampling-over"

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
    def run_root(self) -> Path:
        """The run directory."""
        return self.root.parents[1]

    @property
    def agent(self) -> Path:
        """The agent's own report: pid, clocks, what it could not measure and why."""
        return self.root / "agent.json"

    @property
    def events(self) -> Path:
        """Events beside the job: cost, missing counters, processes that did not report."""
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
        """The hook's configuration; it holds no code (see `run_format.boot`)."""
        return self.root / "boot"

    @property
    def boot_config(self) -> Path:
        """The options that the hook reads."""
        return self.boot / BOOT_CONFIG_NAME

    @property
    def boot_failures(self) -> Path:
        """One line per process in which the hook could not be loaded; absent where it could."""
        return self.boot / BOOT_FAILURES_NAME

    @property
    def boot_enter(self) -> Path:
        """The script that `haiprof attach --inject` runs in a process not started under haiprof."""
        return self.boot / "enter.py"

    def injection_result(self, pid: int) -> Path:
        """The result of that script in one process."""
        return self.boot / f"injected-{pid}.json"

    def stacks(self, rank: int) -> Path:
        """Stacks of a rank's main thread, sampled from outside, and how often each was seen."""
        return self.report / f"stacks-{rank}.folded"

    @property
    def external_samples_json(self) -> Path:
        """Samples of processes that do not run under haiprof, taken from outside."""
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
    def uncaught(self) -> Path:
        """One file per process of the job that an exception ended."""
        return self.root / "uncaught"

    @property
    def flight(self) -> Path:
        """Dumps of PyTorch's Flight Recorder, as its watchdog writes them."""
        return self.root / "flight"

    @property
    def flight_prefix(self) -> str:
        """What their names begin with, up to the rank."""
        return f"{self.flight}/rank_"

    def flight_files(self) -> list[tuple[int, Path]]:
        """Those that exist, by rank."""
        try:
            with os.scandir(self.flight) as entries:
                names = [e.name for e in entries if e.is_file(follow_symlinks=False)]
        except OSError:
            return []
        ranks = [(name.removeprefix("rank_"), name) for name in names if name.startswith("rank_")]
        return sorted((int(rank), self.flight / name) for rank, name in ranks if _is_number(rank))

    def uncaught_file(self, host: str, pid: int) -> Path:
        """The exceptions of one process."""
        return self.uncaught / f"{host}-{pid}.json"

    def uncaught_files(self) -> list[Path]:
        """Those that exist."""
        return _json_files(self.uncaught)

    def terminate_files(self) -> list[tuple[str, int, Path]]:
        """Texts of C++ exceptions that ended processes, by host and process id."""
        found = []
        for path in sorted(self.uncaught.glob("*-*.terminate")):
            host, _, pid = path.stem.rpartition("-")
            if pid.isdigit() and len(pid) < 12:
                found.append((host, int(pid), path))
        return found

    @property
    def memory(self) -> Path:
        """What GPU memory held in processes that ran out of it, and the allocator's snapshots."""
        return self.root / "memory"

    def out_of_memory_file(self, host: str, pid: int) -> Path:
        """Allocations that failed in one process."""
        return self.memory / f"{host}-{pid}.json"

    def memory_snapshot(self, host: str, pid: int) -> Path:
        """The allocator's snapshot of one process, as torch.cuda.memory writes it."""
        return self.memory / f"{host}-{pid}.pickle"

    def out_of_memory_files(self) -> list[Path]:
        """Those that exist."""
        return _json_files(self.memory)

    @property
    def report(self) -> Path:
        """Results: verdict.json, verdict.txt."""
        return self.root / "report"

    @property
    def verdict_json(self) -> Path:
        """The verdict for scripts."""
        return self.report / "verdict.json"

    @property
    def diagnosis_json(self) -> Path:
        """What `haiprof verdict` found, in the form of docs/diagnosis.md."""
        return self.report / "diagnosis.json"

    @property
    def verdict_text(self) -> Path:
        """The verdict card as it was printed."""
        return self.report / "verdict.txt"

    @property
    def answers(self) -> Path:
        """Answers of commands, kept once the job has ended (`kept_answers`)."""
        return self.report / "answers"

    def answer(self, name: str) -> Path:
        """One of them."""
        return self.answers / f"{name}.json"

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
        """Raw traces of the ranks, until they are compressed into `traces`."""
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
        """Ranks of nodes that do not share the run directory, as their agents reported them."""
        return self.control / "members"

    def control_request(self, request_id: str) -> Path:
        """The file of one request."""
        return self.control_requests / f"{request_id}.json"

    def control_reply(self, request_id: str) -> Path:
        """The replies to one request."""
        return self.control_replies / request_id

    def control_reaction(self, trigger: str, number: int) -> Path:
        """A reaction of one of the agents: the file is first its claim, then its result."""
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


def _json_files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return []
    return [folder / name for name in names if name.endswith(".json")]


def _is_number(name: str) -> bool:
    """Plain decimal digits, few enough for an integer column."""
    return name.isascii() and name.isdigit() and len(name) < 10
