"""Every path in a log directory and in a run directory; nobody else concatenates them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "run.json"
BOOT_CONFIG_NAME = "config.json"
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
    def verdict_text(self) -> Path:
        """The verdict card as it was printed."""
        return self.report / "verdict.txt"

    @property
    def tensorboard(self) -> Path:
        """Event files for TensorBoard."""
        return self.root / "tensorboard"

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
