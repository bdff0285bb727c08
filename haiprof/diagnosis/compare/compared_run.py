"""One of two compared runs: its steps, ledger and surroundings; or the last good run of a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from haiprof.base.errors import HaiprofError, MissingDataError, RunNotFoundError
from haiprof.base.intervals import Floats
from haiprof.base.ledger import GROWING, PROBLEM_RATIO
from haiprof.base.options import ENV_FLIGHT_DUMPS, ENV_FLIGHT_SIZES, FLIGHT_ENTRIES
from haiprof.base.safe_files import make_folder
from haiprof.base.statistics import without_trend
from haiprof.base.units import duration_text
from haiprof.diagnosis.engine import judge_facts
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs
from haiprof.diagnosis.run_ledger import RunLedger, run_ledger
from haiprof.diagnosis.thresholds import COMPARE_MIN_STEPS
from haiprof.run_analysis.run_files import entries, integer, mapping, number
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, find_runs, is_same_job, read_manifest
from haiprof.run_format.reader import read_json
from haiprof.run_format.writer import write_json

LAST_GOOD, MEDIAN = "last-good", "median"
_NAMED = 3
_MEDIAN_OF = 100  # So many of the newest earlier runs are looked at
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """What is compared of one run; its ledger is read when it is asked for."""

    manifest: Manifest | None  # None where run.json is damaged
    inputs: RuleInputs  # Judged steps, as of the verdict, and what was recorded beside them

    @property
    def analyzer(self) -> RunFrames:
        """What all of it is read from."""
        return self.inputs.analyzer

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
        return run_ledger(self.inputs, judge_facts(self.inputs)[0])

    @property
    def step_ns(self) -> Floats:
        """From each step's begin to the next one's, mean over ranks, in order."""
        if self.ledger is None:
            return np.zeros(0)
        time = self.ledger.time
        return time.each_step(time.period_ns.mean(axis=0))


def steady(found: RunLedger | None, series: Floats) -> Floats:
    """A series of steps without the trend of code that grows, which is the job's, and no noise."""
    # A drift that no account explains is the machine's, and stays.
    growing = [a.gain_low_ns for a in found.ledger.accounts if a.when == GROWING] if found else []
    if found is None or sum(growing) < PROBLEM_RATIO * found.ledger.mean_ns:
        return series
    return without_trend(series)


def open_compared_run(run: Path | RunFrames) -> ComparedRun:
    """Reads what is compared of a run."""
    frames = run if isinstance(run, RunFrames) else RunFrames(run)
    inputs = gather_inputs(frames, trace_limit_bytes=0)
    return ComparedRun(manifest=frames.files.manifest, inputs=inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """An earlier run of the same job, and how long its steps took."""

    path: str
    start_wall_ns: int
    step_ns: float  # The mean step, as in its verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The chosen run."""

    side: ComparedRun
    why: str
    """For people: what it was chosen of, and what was passed over; empty where it was named."""
    of: tuple[EarlierRun, ...] = ()  # Runs that it is the median of, oldest first


def baseline_named(name: str, side: ComparedRun) -> Baseline:
    """The run that `--baseline` means: a run or log directory, `last-good`, or `median`."""
    if name in (LAST_GOOD, MEDIAN):
        return last_good(side) if name == LAST_GOOD else median_run(side)
    try:
        return Baseline(side=open_compared_run(Path(name)), why="")
    except RunNotFoundError as error:
        hint = f"a baseline is a run directory, a log directory, {LAST_GOOD}, or {MEDIAN}"
        raise RunNotFoundError(str(error), hint=error.hint or hint) from None


def last_good(side: ComparedRun) -> Baseline:
    """The newest run before this one that is fit for comparison."""
    # It lies in the same log directory, has the same name and as many ranks, ended with exit status
    # 0, has steps enough, and was not itself found slower (`note_outcome`).
    manifest = side.analyzer.manifest()
    against: list[str] = []
    for folder, earlier in _earlier_runs(side):
        if earlier.name != manifest.name:
            continue
        candidate, why_not = _open_good(folder, earlier, side)
        if candidate is not None and not why_not:
            good = f"the newest earlier run of {manifest.name!r} that ended well"
            why = f"{good} and was not found slower{_several('; passed over: ', against)}"
            return Baseline(side=candidate, why=why)
        against.append(f"{folder.name} {why_not}")
    raise _nothing_earlier(side, f"no earlier good run named {manifest.name!r}", against)


def median_run(side: ComparedRun) -> Baseline:
    """The run whose mean step is the median of earlier runs of the same job."""
    # Those lie in the same log directory, have as many ranks, ended with exit status 0 and have
    # steps enough; `is_same_job` says what a job is. Of an even number it is the faster of the two
    # in the middle: a run is compared, not a number.
    manifest = side.analyzer.manifest()
    found: list[EarlierRun] = []
    against: list[str] = []
    for folder, earlier in _earlier_runs(side):
        if not is_same_job(earlier, manifest) or len(found) == _MEDIAN_OF:
            continue
        step_ns, why_not = _mean_step(folder, earlier, side)
        if step_ns is None:
            against.append(f"{folder.name} {why_not}")
        else:
            start_ns = earlier.start_wall_ns
            found.append(EarlierRun(path=str(folder), start_wall_ns=start_ns, step_ns=step_ns))
    if not found:
        raise _nothing_earlier(side, "no earlier run of this job that ended well", against)
    order = sorted(found, key=lambda run: run.step_ns)
    runs = "1 earlier run" if len(order) == 1 else f"{len(order)} earlier runs"
    range_text = " to ".join(dict.fromkeys(duration_text(order[at].step_ns) for at in (0, -1)))
    own_ns = side.ledger.ledger.mean_ns if side.ledger else 0.0
    below = sum(run.step_ns < own_ns for run in order)
    return Baseline(
        side=open_compared_run(Path(order[(len(order) - 1) // 2].path)),
        why=f"the median of {runs} of this job (mean steps of {range_text}; this run's "
        f"{duration_text(own_ns)} is longer than in {below}){_several('; passed over: ', against)}",
        of=tuple(found[::-1]),
    )


def _earlier_runs(side: ComparedRun) -> Iterator[tuple[Path, Manifest]]:
    """Those of the same log directory that started before this one, newest first."""
    own = side.analyzer.manifest()
    for folder in reversed(find_runs(side.path.absolute().parent)):
        earlier = _readable(lambda path: read_manifest(RunPaths(path)), folder)
        if earlier is not None and earlier.start_wall_ns < own.start_wall_ns:
            yield folder, earlier


def _nothing_earlier(side: ComparedRun, what: str, against: list[str]) -> MissingDataError:
    return MissingDataError(
        f"{side.path.absolute().parent}: {what}{_several(' (', against, ')')}",
        hint="the first run has none, and is the next one's if it ends well; "
        "or name one: haiprof compare BASELINE RUN",
    )


def _mean_step(folder: Path, manifest: Manifest, side: ComparedRun) -> tuple[float | None, str]:
    """An earlier run's, as its verdict said at its end; or why it is not compared with."""
    if manifest.exit_status != 0:
        return None, "did not end with exit status 0"
    saved = _readable(read_json, RunPaths(folder).verdict_json) or {}
    step_ns, ranks = number(saved.get("step_ns")), len(entries(saved.get("ranks")))
    count = (integer(saved.get("step_count")) or 0) // max(ranks, 1)
    if step_ns is None or saved.get("end_wall_ns") != manifest.end_wall_ns:
        found = _readable(open_compared_run, folder)
        if found is None or found.ledger is None:
            return None, "cannot be read" if found is None else "has no steps"
        step_ns = found.ledger.ledger.mean_ns
        ranks, count = len(found.inputs.world), found.step_count
    why_not = _unlike(ranks, count, side)
    return (None, why_not) if why_not else (step_ns, "")


def note_outcome(side: ComparedRun, data: dict[str, Any]) -> bool:
    """Writes down how a run compared, so that a slower one is no baseline; whether that worked."""
    try:
        run = side.analyzer.run
        make_folder(run.report, below=run.root)
        write_json(run.comparison_json, data, below=run.root)
    except OSError:
        return False
    return True


def _several(before: str, against: list[str], behind: str = "") -> str:
    more = f" and {len(against) - _NAMED} more" if len(against) > _NAMED else ""
    return f"{before}{'; '.join(against[:_NAMED])}{more}{behind}" if against else ""


def _open_good(
    folder: Path, manifest: Manifest, side: ComparedRun
) -> tuple[ComparedRun | None, str]:
    """An earlier run; or why it is not compared with."""
    if manifest.exit_status != 0:
        return None, "did not end with exit status 0"
    found = _readable(open_compared_run, folder)
    if found is None:
        return None, "cannot be read"
    noted = _readable(read_json, found.analyzer.run.comparison_json) or {}
    is_slower = mapping(noted.get("verdict")).get("state") == "slower"
    why_not = _unlike(len(found.inputs.world), found.step_count, side)
    return found, why_not or "was itself found slower" * is_slower


def _unlike(ranks: int, steps: int, side: ComparedRun) -> str:
    if ranks != len(side.inputs.world):
        return f"has {ranks} ranks with steps, not {len(side.inputs.world)}"
    few = steps < COMPARE_MIN_STEPS
    return f"has fewer than {COMPARE_MIN_STEPS} steps after warm-up" if few else ""


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

    kind: str  # `command`, `code`, `package`, `version`, `variable`, `machine`, `ranks` or `option`
    name: str
    before: Any  # None where the run has none
    after: Any


def differences(before: ComparedRun, after: ComparedRun) -> tuple[Differs, ...]:
    """What differs, most telling first; only what both runs recorded."""
    sides = _read_facts(before), _read_facts(after)
    found = []
    for kind, old in sides[0].items():
        if old is None or (new := sides[1][kind]) is None:
            continue
        for name in sorted({*old, *new}) if kind in _OPEN else list(old):
            ends = old.get(name), new.get(name)
            if ends[0] != ends[1] and (kind in _OPEN or None not in ends):
                found.append(Differs(kind=kind, name=name, before=ends[0], after=ends[1]))
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
    variables = {  # those that haiprof's launcher did not set
        name: value
        for name, value in mapping(line.get("variables")).items()
        if name not in ENV_FLIGHT_DUMPS
        and not (name in ENV_FLIGHT_SIZES and value == FLIGHT_ENTRIES)
    }
    git, script, machine = (mapping(environment.get(n)) for n in ("git", "script", "machine"))
    return {
        "command": {"command": manifest.command if manifest else None},
        "code": _pick(git, _CODE) | {"script": script.get("digest")},
        "machine": _pick(machine, _MACHINE) | {"host": manifest.host if manifest else None},
        "ranks": {"ranks with steps": len(side.inputs.world)},
        "version": _pick(report, _VERSIONS) | _pick(line, _TORCH_VERSIONS),
        "package": packages if line else None,
        "variable": variables if line else None,
        "option": {n: options[n] for n in options if n not in _NOT_SPEED} if manifest else None,
    }


def _pick(content: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: content.get(name) for name in names}


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
