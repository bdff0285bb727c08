"""Every path in a log directory and in a run directory; no other module builds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "run.json"
BOOT_CONFIG_NAME = "config.json"
AGREED_PREFIX = ".agreed-"  # in traces/.parts: files in which ranks settle what they all trace
BOOT_FAILURES_NAME = "failures.log"  # in_job/boot/sitecustomize.py has it too: it imports nothing
SIDECAR_SUFFIX = ".part.json"
RAW_SUFFIX = ".trace.json"
ET_RAW_SUFFIX = ".et.json"
ET_SUFFIX = ".et.json.gz"
PLAIN_TRACE_SUFFIX = ".pt.trace.json"  # as torch.profiler's own handler for TensorBoard has it
TRACE_SUFFIX = ".pt.trace.json.gz"  # the same, compressed: what a finished trace is called


class _Below:
    """A path at a fixed place below the root of the object that has it."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, paths: _Inside | RunPaths, _: object = None) -> Path:
        return paths.root / self._place


class _Each(_Below):
    """The path of one of many alike; it is called with what tells them apart."""

    def __get__(self, paths: _Inside | RunPaths, _: object = None) -> Callable[..., Path]:  # type: ignore[override]
        return lambda *parts: paths.root / self._place.format(*parts)


class _Found(_Below):
    """The files that match a pattern, in order of their names."""

    def __get__(self, paths: _Inside | RunPaths, _: object = None) -> Callable[[], list[Path]]:  # type: ignore[override]
        return lambda: sorted(paths.root.glob(self._place))


@dataclass(frozen=True)
class _Inside:
    """A folder in the run directory, of one process or node."""

    root: Path

    @property
    def run_root(self) -> Path:
        """The run directory."""
        return self.root.parents[1]


class RankPaths(_Inside):
    """The files that one process of the job writes: `ranks/<rank>` or `ranks/<rank>.<attempt>`."""

    report = _Below("rank.json")  # who reported in: rank, pid, host, versions
    phases = _Below("phases.rec")  # phase spans on the host clock (`schema.PHASES`)
    device = _Below("device.rec")  # phase times on the device clock (`schema.DEVICE`)
    events = _Below("events.jsonl")  # roots, optimizers, recording marks, faults of the hook, cost
    heartbeat = _Below("heartbeat.rec")  # progress of each group's collectives (`schema.HEARTBEAT`)
    folded = _Below("folded.rec")  # sums of its old steps, without records (`run_format.folded`)
    stacks = _Below("stacks.jsonl")  # samples of the training thread's Python stack (`stack_lines`)

    worker_stacks = _Each("worker-{}.jsonl")  # the same of its DataLoader workers of one number

    def worker_stack_files(self) -> dict[int, Path]:
        """Those that exist, by the workers' number."""
        return dict(_numbered_files(self.root, "worker-", ".jsonl"))

    old_worker_stacks = _Below("workers-folded.jsonl")
    """A part of the old samples of all its workers; their files go on where these end."""

    sampling_over = _Below("sampling-over")  # tells the DataLoader workers that it is over; empty

    collectives = _Each("collectives-{}.json.gz")
    """The last collectives, with their times, as the Flight Recorder had them at a Unix time."""
    collective_files = _Found("collectives-*.json.gz")


class NodePaths(_Inside):
    """The files that the node agent of one host writes: `nodes/<host>`."""

    agent = _Below("agent.json")  # the agent's own report: pid, clocks, what it could not measure
    events = _Below("events.jsonl")  # cost, missing counters, processes that did not report
    bursts = _Below("bursts")  # what Nsight Systems wrote about a short window (`--burst`)
    burst_report = _Below("bursts/gpu.nsys-rep")  # its report, for its own viewer
    burst_export = _Below("bursts/gpu.sqlite")  # the report as SQLite, which haiprof reads
    burst_log = _Below("bursts/nsys.log")  # what Nsight Systems printed
    burst_scratch = _Below("bursts/tmp")  # its temporary files; gone once it has ended

    seen = _Below("seen.jsonl")  # what `haiprof node` saw: jobs, holders of GPUs, its own cost
    lock = _Below("agent.lock")  # locked while `haiprof node` records this node; empty

    def earlier(self, path: Path) -> Path:
        """Where lines of this folder are moved once they are many."""
        return path.with_name(f"{path.stem}-1{path.suffix}")

    records = _Each("{}.rec")  # of one sampler, such as `host`, `process` or `gpu`
    old_records = _Each("{}-folded.rec")
    """Its old records, one a minute; the file itself goes on where these end."""
    history = _Each("{}-{}-{}.rec")
    """One file of what `haiprof node` keeps of a source, by its tier and number: `host-10s-3`."""

    def history_files(self, source: str, tier: str) -> list[tuple[int, Path]]:
        """Those that exist, by number: oldest first."""
        return _numbered_files(self.root, f"{source}-{tier}-", ".rec")


@dataclass(frozen=True)
class RunPaths:
    """Every path in one run directory."""

    root: Path

    manifest = _Below(MANIFEST_NAME)  # what the run was: command, options, clocks, outcome
    boot = _Below("boot")  # the hook's configuration; it holds no code (see `run_format.boot`)
    boot_config = _Below(f"boot/{BOOT_CONFIG_NAME}")  # the options that the hook reads
    boot_failures = _Below(f"boot/{BOOT_FAILURES_NAME}")
    """One line per process in which the hook could not be loaded; absent where it could."""
    boot_enter = _Below("boot/enter.py")
    """The script that `haiprof attach --inject` runs in a process not started under haiprof."""

    injection_result = _Each("boot/injected-{}.json")  # of that script in one process
    stacks = _Each("report/stacks-{}.folded")
    """Stacks of a rank's main thread, sampled from outside, and how often each was seen."""
    external_samples_json = _Below("report/outside.json")
    """Samples of processes that do not run under haiprof, taken from outside."""
    ranks = _Below("ranks")  # one folder per rank and attempt
    nodes = _Below("nodes")  # one folder per host
    uncaught = _Below("uncaught")  # one file per process of the job that an exception ended
    scheduler = _Below("scheduler.json")
    """What Slurm or Kubernetes said of the run's end; absent where nobody asked them."""
    flight = _Below("flight")  # dumps of PyTorch's Flight Recorder, as its watchdog writes them

    @property
    def flight_prefix(self) -> str:
        """What their names begin with, up to the rank."""
        return f"{self.flight}/rank_"

    def flight_files(self) -> list[tuple[int, Path]]:
        """Those that exist, by rank."""
        return _numbered_files(self.flight, "rank_")

    uncaught_file = _Each("uncaught/{}-{}.json")  # the exceptions of one process, by host and pid
    uncaught_files = _Found("uncaught/*.json")
    snapshot_files = _Found("snapshots/*/snapshot.json")

    def native_ends(self, kind: str) -> list[tuple[str, int, Path]]:
        """Files of processes that native code ended, by host and process id.

        `terminate` are the texts of C++ exceptions, `crash` where Python was.
        """
        found = []
        for path in sorted(self.uncaught.glob(f"*-*.{kind}")):
            host, _, pid = path.stem.rpartition("-")
            if pid.isdigit() and len(pid) < 12:
                found.append((host, int(pid), path))
        return found

    memory = _Below("memory")  # what GPU memory held where it ran out, and allocator's snapshots
    out_of_memory_file = _Each("memory/{}-{}.json")  # allocations that failed in one process
    out_of_memory_files = _Found("memory/*.json")
    memory_snapshot = _Each("memory/{}-{}.pickle")
    """The allocator's snapshot of one process, as torch.cuda.memory writes it."""
    report = _Below("report")  # results: verdict.json, verdict.txt
    verdict_json = _Below("report/verdict.json")  # the verdict for scripts
    diagnosis_json = _Below("report/diagnosis.json")  # the verdict in the form of docs/diagnosis.md
    verdict_text = _Below("report/verdict.txt")  # the verdict card as it was printed
    answers = _Below("report/answers")  # of commands, kept once the job has ended (`kept_answers`)
    answer = _Each("report/answers/{}.json")
    comparison_json = _Below("report/compare.json")
    """How the run compared with the one that `--baseline last-good` chose."""
    report_html = _Below("report/report.html")  # the report page
    traces = _Below("traces")  # of torch.profiler, a file per rank and window, and execution traces
    trace_parts = _Below("traces/.parts")  # raw traces, until they are compressed into `traces`
    tensorboard = _Below("tensorboard")  # event files for TensorBoard
    snapshots = _Below("snapshots")  # one folder per snapshot: what every rank was doing then
    control = _Below("control")
    """Requests to the job and its replies, and the sockets of its agents; its owner's alone."""
    control_requests = _Below("control/requests")  # one file per request
    control_replies = _Below("control/replies")  # one folder per request, with one file per rank
    control_members = _Below("control/members")
    """Ranks of nodes that do not share the run directory, as their agents reported them."""

    control_request = _Each("control/requests/{}.json")
    control_reply = _Each("control/replies/{}")  # the folder with the replies to one request
    control_reaction = _Each("control/reaction-{}-{}.json")
    """A reaction of one of the agents: the file is first its claim, then its result."""

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


def preflight_file(log_dir: Path, wall_ns: int) -> Path:
    """What a preflight found, by the Unix time at which it was."""
    return log_dir / "preflight" / f"{wall_ns}.json"


def preflight_files(log_dir: Path) -> list[Path]:
    """Those that exist, oldest first."""
    return [path for _, path in _numbered_files(log_dir / "preflight", "", ".json", 20)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it is not there."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _subfolders(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def _numbered_files(
    folder: Path, begin: str, end: str = "", digits: int = 10
) -> list[tuple[int, Path]]:
    """Files with a number between two texts in their name, by that number."""
    names = [entry.name for entry in _entries(folder) if entry.is_file(follow_symlinks=False)]
    own = (name for name in names if name.startswith(begin) and name.endswith(end))
    numbers = ((name[len(begin) : len(name) - len(end)], name) for name in own)
    return sorted((int(n), folder / name) for n, name in numbers if _is_number(n, digits))


def _is_number(name: str, limit: int = 10) -> bool:
    """Plain decimal digits, few enough for an integer column."""
    return name.isascii() and name.isdigit() and len(name) < limit
