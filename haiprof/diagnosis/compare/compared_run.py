"""One of two compared runs: its judged steps and ledger; or the last good run of that name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from haiprof.base.errors import HaiprofError, MissingDataError, RunFormatError, RunNotFoundError
from haiprof.base.intervals import Floats
from haiprof.base.safe_files import make_folder
from haiprof.diagnosis.engine import read_ledger
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.thresholds import COMPARE_MIN_STEPS
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, find_runs, read_manifest
from haiprof.run_format.reader import read_json
from haiprof.run_format.writer import write_json

LAST_GOOD = "last-good"
_NAMED = 3
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """What is compared of one run; its ledger is read when it is asked for."""

    analyzer: RunFrames
    manifest: Manifest | None
    """None where run.json is damaged."""
    inputs: RuleInputs
    """Judged steps, as of the verdict, and what was recorded beside them."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.analyzer.run.root

    @property
    def step_count(self) -> int:
        """Judged steps of the rank that has fewest."""
        return min((own.height for own in self.inputs.by_rank.values()), default=0)

    @cached_property
    def ledger(self) -> RunLedger | None:
        """None without judged steps."""
        return read_ledger(self.analyzer, self.inputs)

    @property
    def step_ns(self) -> Floats:
        """From each step's begin to the next one's, mean over ranks, in order."""
        return np.zeros(0) if self.ledger is None else self.ledger.time.period_ns.mean(axis=0)


def open_compared_run(path: Path) -> ComparedRun:
    """Reads one run, as `compared_run_of`."""
    return compared_run_of(RunFrames(path))


def compared_run_of(analyzer: RunFrames) -> ComparedRun:
    """What is compared of a run."""
    inputs = gather_inputs(analyzer, trace_limit_bytes=0)
    try:
        manifest = analyzer.manifest()
    except RunFormatError:
        manifest = None
    return ComparedRun(analyzer=analyzer, manifest=manifest, inputs=inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The chosen run."""

    side: ComparedRun
    why: str
    """For people: what it is the newest of, and what was passed over; empty where it was named."""


def baseline_named(name: str, side: ComparedRun) -> Baseline:
    """The run that `--baseline` means: a run directory, a log directory, or `last-good`."""
    if name == LAST_GOOD:
        return last_good(side)
    try:
        return Baseline(side=open_compared_run(Path(name)), why="")
    except RunNotFoundError as error:
        hint = f"a baseline is a run directory, a log directory, or {LAST_GOOD}"
        raise RunNotFoundError(str(error), hint=error.hint or hint) from None


def last_good(side: ComparedRun) -> Baseline:
    """The newest run before this one that is fit for comparison.

    It lies in the same log directory, has the same name and as many ranks, ended with exit status
    0, has steps enough, and was not itself found slower: `haiprof compare --baseline last-good`
    notes that in `report/compare.json` of the run that it judged.
    """
    manifest = side.analyzer.manifest()
    log_dir = side.path.absolute().parent
    against: list[str] = []
    for folder in reversed(find_runs(log_dir)):
        earlier = _readable(lambda path: read_manifest(RunPaths(path)), folder)
        if earlier is None or earlier.name != manifest.name or folder.samefile(side.path):
            continue
        if earlier.start_wall_ns >= manifest.start_wall_ns:
            continue
        candidate = _readable(open_compared_run, folder)
        why_not = _why_not(earlier, candidate, side)
        if candidate is not None and not why_not:
            passed = f"; passed over: {_several(against)}" if against else ""
            good = f"the newest earlier run of {manifest.name!r} that ended well"
            return Baseline(side=candidate, why=f"{good} and was not found slower{passed}")
        against.append(f"{folder.name} {why_not}")
    passed = f" ({_several(against)})" if against else ""
    raise MissingDataError(
        f"{log_dir}: no earlier good run named {manifest.name!r}{passed}",
        hint="the first run has none, and is the next one's if it ends well; "
        "or name one: haiprof compare BASELINE RUN",
    )


def note_outcome(side: ComparedRun, data: dict[str, Any]) -> bool:
    """Writes down how a run compared, so that a slower one is no baseline; whether that worked."""
    try:
        run = side.analyzer.run
        make_folder(run.report, below=run.root)
        write_json(run.comparison_json, data, below=run.root)
    except OSError:
        return False
    return True


def _several(against: list[str]) -> str:
    more = f" and {len(against) - _NAMED} more" if len(against) > _NAMED else ""
    return "; ".join(against[:_NAMED]) + more


def _why_not(manifest: Manifest, candidate: ComparedRun | None, side: ComparedRun) -> str:
    if manifest.exit_status != 0:
        return "did not end with exit status 0"
    if candidate is None:
        return "cannot be read"
    if len(candidate.inputs.world) != len(side.inputs.world):
        return f"has {len(candidate.inputs.world)} ranks with steps, not {len(side.inputs.world)}"
    if candidate.step_count < COMPARE_MIN_STEPS:
        return f"has fewer than {COMPARE_MIN_STEPS} steps after warm-up"
    verdict = (_readable(read_json, candidate.analyzer.run.comparison_json) or {}).get("verdict")
    slower = isinstance(verdict, dict) and verdict.get("state") == "slower"
    return "was itself found slower" if slower else ""


def _readable(read: Callable[[Path], Found], folder: Path) -> Found | None:
    try:
        return read(folder)
    except HaiprofError:
        return None
