"""One of two compared runs: its steps, ledger and surroundings; or the last good run of a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from haiprof.base.errors import HaiprofError, MissingDataError, RunFormatError, RunNotFoundError
from haiprof.base.intervals import Floats
from haiprof.base.options import ENV_FLIGHT_DUMPS, ENV_FLIGHT_SIZES, FLIGHT_ENTRIES
from haiprof.base.safe_files import make_folder
from haiprof.diagnosis.engine import read_ledger
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.thresholds import COMPARE_MIN_STEPS
from haiprof.run_analysis.run_files import mapping
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
        """Judged steps of the rank that has fewest, folded ones too."""
        counts = (
            own.height + (int(self.inputs.blocks[r].count.sum()) if r in self.inputs.blocks else 0)
            for r, own in self.inputs.by_rank.items()
        )
        return min(counts, default=0)

    @cached_property
    def ledger(self) -> RunLedger | None:
        """None without judged steps."""
        return read_ledger(self.analyzer, self.inputs)

    @property
    def step_ns(self) -> Floats:
        """From each step's begin to the next one's, mean over ranks, in order."""
        if self.ledger is None:
            return np.zeros(0)
        time = self.ledger.time
        return time.each_step(time.period_ns.mean(axis=0))


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


_NOT_SPEED = ("log_dir", "name", "run_id", "quiet", "tensorboard", "prometheus_port")
_CODE = ("commit", "branch", "changes_digest", "dirty")
_MACHINE = ("cpu_model", "cpu_count", "allowed_cpu_count", "memory", "kernel", "architecture",
            "nvidia_driver")  # fmt: skip
_VERSIONS = ("python", "torch", "device", "gpu_name")
_TORCH_VERSIONS = ("torch_cuda", "torch_hip", "torch_git_version")
_OPEN = ("package", "variable", "option")
"""Of these the names are the run's own: one that a run lacks is a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """One thing that is not the same in both runs."""

    kind: str
    """`command`, `code`, `package`, `version`, `variable`, `machine`, `ranks` or `option`."""
    name: str
    before: Any
    """None where the run has none."""
    after: Any


def differences(before: ComparedRun, after: ComparedRun) -> tuple[Differs, ...]:
    """What differs, most telling first; only what both runs recorded."""
    sides = _read_facts(before), _read_facts(after)
    found = []
    for kind, old in sides[0].items():
        new = sides[1][kind]
        if old is None or new is None:
            continue
        names = sorted({*old, *new}) if kind in _OPEN else list(old)
        for name in names:
            known = kind in _OPEN or None not in (old[name], new[name])
            if known and old.get(name) != new.get(name):
                found.append(
                    Differs(kind=kind, name=name, before=old.get(name), after=new.get(name))
                )
    return tuple(found)


def _read_facts(side: ComparedRun) -> dict[str, Mapping[str, Any] | None]:
    """By kind and name; None where the run did not record that kind."""
    manifest = side.manifest
    environment = manifest.environment if manifest else {}
    files = next((rank for rank in side.analyzer.files.ranks if rank.report), None)
    report = files.report if files else {}
    line = next(iter(files.of_type("environment")), {}) if files else {}
    packages = mapping(line.get("packages")) or {"packages_digest": line.get("packages_digest")}
    options = dict(manifest.options) if manifest else {}
    # Those that haiprof's launcher did not set.
    return {
        "command": {"command": manifest.command if manifest else None},
        "code": {
            **{name: mapping(environment.get("git")).get(name) for name in _CODE},
            "script": mapping(environment.get("script")).get("digest"),
        },
        "machine": {
            **{name: mapping(environment.get("machine")).get(name) for name in _MACHINE},
            "host": manifest.host if manifest else None,
        },
        "ranks": {"ranks with steps": len(side.inputs.world)},
        "version": {
            **{name: report.get(name) for name in _VERSIONS},
            **{name: line.get(name) for name in _TORCH_VERSIONS},
        },
        "package": packages if line else None,
        "variable": (
            {
                name: value
                for name, value in mapping(line.get("variables")).items()
                if name not in ENV_FLIGHT_DUMPS
                and not (name in ENV_FLIGHT_SIZES and value == FLIGHT_ENTRIES)
            }
        )
        if line
        else None,
        "option": {n: options[n] for n in options if n not in _NOT_SPEED} if manifest else None,
    }


def unknown(before: ComparedRun, after: ComparedRun) -> tuple[str, ...]:
    """What could not be compared, and why."""
    found = []
    for word, side in (("baseline", before), ("new run", after)):
        git = mapping(side.manifest.environment.get("git")) if side.manifest else {}
        if side.manifest is None:
            found.append(f"{word}: run.json is damaged: command, options and code are not compared")
        elif not side.manifest.environment:
            found.append(f"{word}: recorded by a haiprof that did not note its surroundings")
        elif git.get("commit") is None:
            found.append(f"{word}: code not compared by commit: {git.get('reason')}")
        elif git.get("dirty") is None:
            why = git.get("dirty_reason") or "the job or its launcher was over before git answered"
            found.append(f"{word}: whether all changes were committed is not known: {why}")
    return tuple(found)
