"""The runs of a log directory, with the progress and outcome of each."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from haiprof.base.errors import HaiprofError
from haiprof.base.log_addresses import shown_path
from haiprof.base.units import MISSING, duration_text, ratio_text
from haiprof.base.users import other_uid, user_name
from haiprof.run_format import manifest as manifests
from haiprof.run_format.control import Schema, conform, is_count, is_none_or, is_string
from haiprof.run_format.kept_answers import fingerprint, keep_answer, read_answer
from haiprof.run_format.layout import MANIFEST_NAME, RunPaths
from haiprof.run_format.reader import read_json
from haiprof.show.run_header import DAMAGED, ENDED, KILLED, RUNNING, manifest_or_none, run_header
from haiprof.show.text import count_text, moment_text
from haiprof.show.views.blocks import FittingTable
from haiprof.show.views.deaths import WORDS

_KEPT_NAME = "list"
_SOURCES = (MANIFEST_NAME, "ranks", "nodes", "uncaught", "memory", "flight", "control",
            "scheduler.json")  # fmt: skip
"""What the entry of a run is made from."""
_RANK_S = 0.004
"""What reading a rank takes; 1,024 of 1,000 steps took 4.5 s (benchmarks/scale_sweep.py)."""
_OF_HEADER = ("name", "path", "start_wall_ns", "duration_ns", "state", "exit_status", "signal")
_COMPUTED = ("step_count", "step_ns", "died_of", "died_rank", "slowed_by", "problem",
             "is_counted")  # fmt: skip
"""Fields that take reading the ranks' files; the others are cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run of the list."""

    name: str
    user: str | None  # Whose it is; None for one's own
    path: str
    start_wall_ns: int | None
    duration_ns: int | None
    state: str
    exit_status: int | None
    signal: str | None
    rank_count: int
    step_count: int | None = None
    """Steps of the rank that has most; None where the ranks cannot be read."""
    step_ns: float | None = None
    """The mean step, as its verdict said at its end; None where none was kept."""
    died_of: str | None = None
    """Why it died, in a word: `exception`, `out of memory`; None where it did not."""
    died_rank: int | None = None
    """The rank that it began with; None where it is not known, or were several."""
    slowed_by: str | None = None
    """The first problem of its verdict: `evaluation heavy, 41 %`; None without one."""
    problem: str | None = None  # Why something of it cannot be read
    is_counted: bool = False
    """Whether its ranks' files were read; where not, `step_count` and `died_of` are None."""


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


_COUNTS = ("start_wall_ns", "duration_ns", "step_count", "died_rank")
_KEPT: Schema = {
    **dict.fromkeys(("name", "path"), is_string),
    **dict.fromkeys(_COUNTS, is_none_or(is_count)),
    **dict.fromkeys(("user", "signal", "died_of", "slowed_by", "problem"), is_none_or(is_string)),
    "state": (RUNNING, ENDED, KILLED, DAMAGED).__contains__,
    "exit_status": is_none_or(lambda value: type(value) is int and abs(value) < 1 << 31),
    "rank_count": is_count,
    "step_ns": is_none_or(_is_time),
    "is_counted": lambda value: isinstance(value, bool),
}
"""What the fields of a kept entry must hold; where one does not, the entry is worked out anew."""


def run_list(
    log_dir: Path, *, limit_s: float | None = None, job: manifests.Manifest | None = None
) -> list[RunEntry]:
    """The runs directly below a log directory, newest last; of those over what they keep is read.

    None begins to be counted after `limit_s`; with `job` only runs of the same job are in it.
    """
    until_s = math.inf if limit_s is None else time.monotonic() + limit_s
    every = manifests.run_folders(log_dir)
    folders = [path for path in every if job is None or _is_of_job(path, job)]
    entries = sorted((_kept_entry(RunPaths(path)) for path in folders), key=_order)
    counted = [
        entry
        if entry.is_counted or time.monotonic() + entry.rank_count * _RANK_S > until_s
        else _count(entry)
        for entry in reversed(entries)
    ]
    return counted[::-1]


def _is_of_job(folder: Path, job: manifests.Manifest) -> bool:
    try:
        return manifests.is_same_job(manifests.read_manifest(RunPaths(folder)), job)
    except HaiprofError:
        return False


def _order(entry: RunEntry) -> tuple[int, str]:
    path = Path(entry.path)
    return (entry.start_wall_ns, path.name) if entry.start_wall_ns else manifests.start_order(path)


def list_view(log_dir: Path, runs: Sequence[RunEntry]) -> RenderableType:
    """The runs as a table for people."""
    if not runs:
        where = Text(manifests.where_runs_are(log_dir), style="dim")
        return Group(Text(f"no runs in {log_dir}"), where)
    return RunTable(log_dir, runs)


@dataclass(frozen=True, slots=True)
class RunTable:
    """The table of runs: as many columns as fit beside their names."""

    log_dir: Path
    runs: Sequence[RunEntry]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its folder, the runs, and what is not known of them."""
        # Where a program reads it, or a file takes it, no name is cut.
        options = options if options.is_terminal else options.update(width=1 << 16)
        cells = {title: [cell(run) for run in self.runs] for title, cell, _ in _COLUMNS}
        known = {title: own for title, own in cells.items() if set(own) - {"", MISSING}}
        names = [Path(run.path).name for run in self.runs]
        left = [title for title, _, is_left in _COLUMNS if is_left]
        rows = list(zip(*known.values(), names, strict=True))
        said = [f"{run.name}: {run.problem}" for run in self.runs if run.problem]
        if uncounted := sum(not run.is_counted for run in self.runs):
            runs = count_text(uncounted, "run")
            said.append(f"steps of {runs} not counted yet: haiprof ls --all")
        folder = Text(str(self.log_dir), style="bold", no_wrap=True, overflow="ellipsis")
        table = FittingTable((*known, "run"), rows, left=(*left, "run"), first_to_go=_FIRST_TO_GO)
        notes = [Text(line, style="dim", no_wrap=True, overflow="ignore") for line in said]
        yield from console.render(Group(folder, table, *notes), options)


_COLUMNS: tuple[tuple[str, Callable[[RunEntry], str], bool], ...] = (
    ("start", lambda run: moment_text(run.start_wall_ns), True),
    ("user", lambda run: run.user or "", True),
    ("lasted", lambda run: duration_text(run.duration_ns), False),
    ("ranks", lambda run: str(run.rank_count), False),
    ("steps", lambda run: _number(run.step_count), False),
    ("each", lambda run: duration_text(run.step_ns), False),
    ("state", lambda run: run.state, True),
    ("exit", lambda run: run.signal or _number(run.exit_status), False),
    (
        "why",
        lambda run: (
            run.died_of or run.slowed_by or ""
            if run.died_rank is None
            else f"rank {run.died_rank}: {run.died_of}"
        ),
        True,
    ),
)
"""Title, what it shows of a run, and whether it begins at the left."""
_FIRST_TO_GO = ("lasted", "each", "exit", "ranks", "why", "user", "steps")


def _kept_entry(run: RunPaths) -> RunEntry:
    """What is known of a run: kept in it once it is over, by its verdict or by an earlier list."""
    kept = _earlier_entry(run)
    if kept is not None and kept.state == ENDED:
        return kept  # its run.json is among what the kept entry is valid for
    entry = _entry_without_steps(run)
    if kept is not None and entry.state in (KILLED, DAMAGED):  # by now; when is read again
        return replace(entry, **{name: getattr(kept, name) for name in _COMPUTED})
    return entry


def _count(entry: RunEntry) -> RunEntry:
    """The entry with the most steps of a rank and why the job died; kept in a run that is over."""
    from haiprof.live.follow import steps_so_far
    from haiprof.run_analysis.run_frames import RunFrames

    run, entry = RunPaths(Path(entry.path)), replace(entry, is_counted=True)
    stamp = None if entry.state == RUNNING else fingerprint(run, of=_SOURCES)
    try:
        if entry.state == RUNNING:  # it has not died
            entry = replace(entry, step_count=steps_so_far(run))
        else:
            frames = RunFrames(run.root)
            death = next((death for death in frames.deaths() if death.final), None)
            words = {} if death is None else _death_words(death.cause, death.ranks)
            entry = replace(entry, step_count=frames.most_steps(), **words)
    except HaiprofError as error:
        entry = replace(entry, problem=entry.problem or str(error))
    if stamp:
        keep_answer(run, _KEPT_NAME, asdict(entry), valid_for=stamp)
    return entry


def _earlier_entry(run: RunPaths) -> RunEntry | None:
    """The entry that an earlier list kept; None where it is damaged or the run has changed."""
    if not os.path.lexists(run.answer(_KEPT_NAME)):
        return None
    stamp = fingerprint(run, of=_SOURCES)
    kept = read_answer(run, _KEPT_NAME, valid_for=stamp) if stamp else None
    if kept is None or kept.keys() != _KEPT.keys() or conform(kept, _KEPT) is None:
        return None
    return RunEntry(**{**kept, "path": shown_path(run.root)})  # it may be named differently now


def _entry_without_steps(run: RunPaths) -> RunEntry:
    """What the manifest tells of a run, and its verdict where one was saved at the end."""
    problem = manifest = None
    try:
        manifest = manifest_or_none(run)
    except HaiprofError as error:
        problem = str(error)
    header, uid = run_header(run, manifest), other_uid(run.manifest)
    judged = _saved_verdict(run, manifest.end_wall_ns if manifest else None)
    entry = RunEntry(
        **{name: getattr(header, name) for name in _OF_HEADER},
        user=None if uid is None else user_name(uid), problem=problem,
        rank_count=len({rank for rank, _, _ in run.rank_folders()}),
    )  # fmt: skip
    return entry if judged is None else replace(entry, **judged, is_counted=True)


def _saved_verdict(run: RunPaths, end_wall_ns: int | None) -> dict[str, Any] | None:
    """What the verdict that was saved at the job's end says; None where there is none."""
    try:
        content = read_json(run.verdict_json) if end_wall_ns else {}
    except HaiprofError:
        return None
    steps = content.get("most_steps")
    if content.get("end_wall_ns") != end_wall_ns or not end_wall_ns or type(steps) is not int:
        return None
    death, step_ns = content.get("death"), content.get("step_ns")
    found = {"step_count": steps, "step_ns": step_ns if _is_time(step_ns) else None}
    if death is None:
        slowed_by = _first_problem(content)
        return {**found, "died_of": None, "died_rank": None, "slowed_by": slowed_by}
    cause, ranks = (death.get("cause"), death.get("ranks")) if isinstance(death, dict) else (0, 0)
    if not isinstance(cause, str) or cause not in WORDS or not isinstance(ranks, list):
        return None
    return {**found, **_death_words(cause, ranks)}


def _first_problem(content: Mapping[str, Any]) -> str | None:
    findings = content.get("findings")
    first = findings[0] if isinstance(findings, list) and findings else None
    if not isinstance(first, dict) or first.get("severity") not in ("critical", "warning"):
        return None
    slug, lost = first.get("slug"), first.get("lost_ratio")
    share = f", {ratio_text(lost)}" if type(lost) is float and _is_time(lost) else ""
    if not isinstance(slug, str) or not (slug.isascii() and slug.isidentifier()):
        return None
    return slug.replace("_", " ") + share


def _death_words(cause: str, ranks: Sequence[object]) -> dict[str, Any]:
    rank = ranks[0] if len(ranks) == 1 and type(ranks[0]) is int else None
    return {"died_of": WORDS[cause], "died_rank": rank}


def _number(number: int | None) -> str:
    return MISSING if number is None else str(number)
