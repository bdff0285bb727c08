"""Follows running jobs: reads what was written since the last look; progress and verdict so far."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import HaiprofError, RunFormatError
from haiprof.base.intervals import Ints
from haiprof.base.medians import upper_median
from haiprof.base.safe_files import file_size
from haiprof.base.subcommand import Subcommand
from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import process_state
from haiprof.live.find import RunningJob, as_member, has_end, is_running, running_jobs
from haiprof.live.standstill import STOPPED
from haiprof.run_analysis.counters import counter_frame
from haiprof.run_analysis.folded_steps import optimizer_steps_before, read_folded_steps
from haiprof.run_analysis.run_files import RunFiles, integer, open_run, text
from haiprof.run_analysis.step_frame import read_spans
from haiprof.run_analysis.steps import PHASES, Segmentation, StepColumns, segment
from haiprof.run_format import schema
from haiprof.run_format.control import read_members, read_object
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.reader import try_read_json, try_read_lines

LAST_STEPS = 50  # Number of last steps in all "now" values
SLOWEST = 5
_WHOLE_RECORDS = 1 << 18
"""A file with more spans (hours of short steps) is not read from its start: its earlier steps are
counted by optimizer steps."""
_KEEP_STEPS = 120
_TAIL_RECORDS = 1 << 14
_SHORT_TAIL_RECORDS = 1 << 11
"""Of a long file its last spans are read, and so many of them where these hold steps enough."""
_SAMPLES_PER_RANK = 4
_RANKS_PER_LOOK = 16
MANY_RANKS = 64
"""Of more ranks the first look is at so many, at equal distances; the others come in turn."""
_HOSTS_PER_LOOK = 32  # And at counters of so many nodes at a time
_COUNTERS_EVERY_S = 2.0
_RECENT_S = 10.0
_RANK_METRICS = ("cpu_cores", "cpu_main_cores", "memory_rss_bytes", "utilization_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNow:
    """The progress of one rank."""

    rank: int
    attempt: int
    host: str | None
    pid: int | None
    step: int | None = None  # Last whole step; None before the first
    step_is_exact: bool = True
    """Whether steps were counted from the recording's start, as in the analysis."""
    step_ns: float | None = None  # Median of the last steps
    split: dict[str, float | None] = field(
        default_factory=lambda: dict.fromkeys((*PHASES, "other"))
    )
    """Share of each phase, `other` included; None where a phase was never seen in them."""
    times_ns: tuple[int, ...] = ()  # Of the last steps, in order
    slowest: tuple[tuple[int, int, str], ...] = ()
    """(step, ns, phase that it spent most time in), among the last steps."""
    idle_ns: int | None = None  # Since the last whole step ended
    recording: bool = False
    stopped: bool = False  # Whether a signal has stopped its process, as far as this node can tell
    elsewhere: bool = False
    """Whether its files are on its own node's disk, so that nothing more is known here."""
    counters: dict[str, float] = field(default_factory=dict)  # Latest value by metric


@dataclass
class LiveRank:
    """Follows one rank's files."""

    rank: int
    attempt: int
    paths: RankPaths
    report: dict[str, Any] = field(default_factory=dict)  # rank.json; empty until it is whole
    _families: dict[int, int] = field(default_factory=dict)
    _events_bytes: int = -1
    _recording: bool = True
    _first: int = 0
    _before: int = 0
    _exact: bool = True
    _opened: bool = False

    def identify(self) -> RankNow:
        """Which process it is, without its progress."""
        self.report = self.report or try_read_json(self.paths.report)  # it may be being written
        return self._now(None, 0, 0)

    def look(self, now_ns: int) -> RankNow:
        """Its present progress; what cannot be read yet is None."""
        self._read_lines()
        self.identify()
        try:
            self._open()
            spans, clock, _ = read_spans(self.paths.phases, first=self._first)
        except RunFormatError:
            return self._now(None, 0, now_ns)
        found = segment(spans, families=self._families)
        now = self._now(found, clock.wall_ns - clock.mono_ns, now_ns)
        self._forget(found, spans.start_ns)
        return now

    def _read_lines(self) -> None:
        """Roots and the end of the recording; read again only when the file has grown."""
        size = file_size(self.paths.events) or 0
        if size == self._events_bytes:
            return
        self._events_bytes = size
        lines = try_read_lines(self.paths.events)
        self._recording = not has_end(lines)
        roots = (x for x in lines if x.get("type") == "root")
        pairs = ((x.get("tag"), x.get("family")) for x in roots)
        self._families = {t: f for t, f in pairs if type(t) is int and type(f) is int}

    def _open(self) -> None:
        """At the first look: where to begin in a long file, and the number of steps before."""
        if self._opened:
            return
        count = (file_size(self.paths.phases) or 0) // schema.PHASES.record_bytes
        self._opened = count > 0
        folded = read_folded_steps(self.paths)
        if count <= _WHOLE_RECORDS and not folded.step_count:
            return
        self._exact = False
        least = folded.fact("first_record")
        for tail in (min(_SHORT_TAIL_RECORDS, _TAIL_RECORDS), _TAIL_RECORDS):
            self._first = max(count - tail, least)
            spans, _, _ = read_spans(self.paths.phases, first=self._first)
            found = segment(spans, families=self._families)
            if len(found.steps.start_ns) >= 2 * LAST_STEPS:
                break
        if count := len(found.steps.start_ns):
            before, per_step = self._first, found.steps.optimizer_step_count.mean()
            if per_step:
                before = optimizer_steps_before(self.paths, self._first, folded)
            self._before = round(before / (per_step or len(spans.kind) / count))

    def _forget(self, found: Segmentation, starts: Ints) -> None:
        """Advances, so that the next look only reads the last steps again."""
        steps = found.steps
        extra = len(steps.start_ns) - _KEEP_STEPS
        if extra < _KEEP_STEPS:
            return
        place = int((starts >= steps.start_ns[extra]).argmax())
        if place > 0:
            self._first += place
            self._before += extra

    def _now(self, found: Segmentation | None, wall_offset_ns: int, now_ns: int) -> RankNow:
        facts: dict[str, Any] = {}
        if found is not None and len(found.steps.start_ns):
            facts = _summarize(found.steps, self._before)
            facts["idle_ns"] = max(now_ns - wall_offset_ns - int(found.steps.end_ns[-1]), 0)
        known = as_member("", self.rank, self.report)
        return RankNow(
            rank=self.rank, attempt=self.attempt, host=known.host, pid=known.pid,
            step_is_exact=self._exact, recording=self._recording, **facts,
            stopped=known.here and process_state(known.pid or 0)["state"] in STOPPED,
        )  # fmt: skip


def _summarize(steps: StepColumns, before: int) -> dict[str, Any]:
    count = len(steps.start_ns)
    begin = max(count - LAST_STEPS, 0)
    times = steps.step_ns[begin:].tolist()
    phases = dict(zip(PHASES, steps.host_ns[:, begin:], strict=True))
    parts = {**phases, "other": steps.other_ns[begin:]}
    total = max(sum(times), 1)
    split = {name: int(own.sum()) / total if name == "other" or own.any() else None
             for name, own in parts.items()}  # fmt: skip
    slowest = sorted(range(len(times)), key=lambda place: -times[place])[:SLOWEST]
    return {
        "step": before + count - 1, "step_ns": float(upper_median(times)), "split": split,
        "times_ns": tuple(times),
        "slowest": tuple(
            (before + begin + at, times[at], max(parts, key=lambda name: int(parts[name][at])))
            for at in slowest
        ),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNow:
    """A running job with its ranks, at one time."""

    id: str
    name: str
    path: str
    host: str
    pid: int
    elapsed_ns: int
    running: bool
    world_size: int | None
    ranks: tuple[RankNow, ...]
    verdict: str | None = None  # The verdict so far in one line; None before the first
    user: str | None = None  # Whose it is; None for one's own
    start_wall_ns: int = 0
    problem: str | None = None  # Why something of it cannot be read

    @property
    def rank_count(self) -> int:
        """Ranks that have reported in."""
        return sum(rank.pid is not None for rank in self.ranks)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of its ranks."""
        return tuple(sorted({rank.host for rank in self.ranks if rank.host is not None}))

    @property
    def recording(self) -> bool:
        """Whether a rank is still recorded."""
        return any(rank.recording and rank.pid is not None for rank in self.ranks)

    @property
    def idle_ns(self) -> int | None:
        """Since the last whole step ended on the rank that is farthest."""
        farthest = self.step
        return next((rank.idle_ns for rank in self.ranks if rank.step == farthest), None)

    @property
    def cpu_cores(self) -> float | None:
        """Latest, ranks together; None of more than MANY_RANKS, of which a part is looked at."""
        known = self._latest("cpu_cores")
        return sum(known) if known and len(self.ranks) <= MANY_RANKS else None

    @property
    def gpu_ratio(self) -> float | None:
        """Latest, mean over GPUs that are looked at."""
        return _mean(self._latest("utilization_ratio"))

    def _latest(self, metric: str) -> list[float]:
        return [rank.counters[metric] for rank in self.ranks if metric in rank.counters]

    @property
    def step(self) -> int | None:
        """Last whole step of the rank that is farthest."""
        return max((r.step for r in self.ranks if r.step is not None), default=None)

    @property
    def step_ns(self) -> float | None:
        """Median over the ranks."""
        known = [r.step_ns for r in self.ranks if r.step_ns is not None]
        return upper_median(known) if known else None

    @property
    def split(self) -> dict[str, float | None]:
        """Mean share over the ranks."""
        names = (*PHASES, "other")
        return {name: _mean([rank.split.get(name) for rank in self.ranks]) for name in names}

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks that a signal has stopped."""
        return tuple(rank.rank for rank in self.ranks if rank.stopped)

    @property
    def suspended(self) -> bool:
        """Whether that is so for all of them."""
        return bool(self.ranks) and len(self.stopped) == len(self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The job as plain JSON values."""
        own = {"step": self.step, "step_ns": self.step_ns, "split": self.split}
        return {**asdict(self), **own, "suspended": self.suspended}

    def as_row(self) -> dict[str, Any]:
        """The same without its single ranks."""
        return {"ranks": self.rank_count, **{name: getattr(self, name) for name in _ROW}}


@dataclass
class LiveJob:
    """Follows one running job; each look costs the same, however long the job has run."""

    job: RunningJob
    clock: Callable[[], int] = time.time_ns
    _ranks: dict[int, LiveRank] = field(default_factory=dict)
    _known: dict[int, RankNow] = field(default_factory=dict)
    _looked: set[int] = field(default_factory=set)
    _turn: int = 0
    _files: RunFiles | None = None
    _counters: dict[int, dict[str, float]] = field(default_factory=dict)
    _counted_s: float = -_COUNTERS_EVERY_S

    def nothing(self) -> JobNow:
        """The job without its ranks."""
        return self._now(self.clock())

    def look(self) -> JobNow:
        """Its present progress; of very many ranks a part at each look, in turn."""
        for rank, attempt, paths in self.job.run.rank_folders():
            known = self._ranks.get(rank)
            if known is None or known.attempt < attempt:
                self._ranks[rank] = LiveRank(rank, attempt, paths)
        now_ns = self.clock()
        for live in self._due():
            self._known[live.rank] = live.look(now_ns)
            self._looked.add(live.rank)
        for rank in self._ranks.keys() - self._known.keys():
            self._known[rank] = self._ranks[rank].identify()
        if time.monotonic() > self._counted_s + _COUNTERS_EVERY_S:
            self._counted_s = time.monotonic()
            self._counters = self._read_counters(now_ns)
        return self._now(now_ns)

    def _now(self, now_ns: int) -> JobNow:
        manifest = self.job.manifest
        sizes = [integer(live.report.get("world_size")) or 0 for live in self._ranks.values()]
        known = {  # of those on their own node's disk only the identity is known here
            told["rank"]: RankNow(
                rank=told["rank"], attempt=0, host=told.get("host"), pid=told.get("pid"),
                elsewhere=True,
            )
            for told in read_members(self.job.run).values()
        } | self._known  # fmt: skip
        counted = (replace(known[r], counters=self._counters.get(r, {})) for r in sorted(known))
        return JobNow(
            id=self.job.id, name=manifest.name, path=str(self.job.run.root), host=manifest.host,
            pid=self.job.pid, user=self.job.user, start_wall_ns=manifest.start_wall_ns,
            elapsed_ns=max(now_ns - manifest.start_wall_ns, 0),
            running=is_running(self.job.run, manifest), world_size=max(sizes, default=0) or None,
            ranks=tuple(counted),
        )  # fmt: skip

    def _due(self) -> list[LiveRank]:
        """All ranks at the first look, of very many some of them; then so many in turn."""
        new = [live for rank, live in sorted(self._ranks.items()) if rank not in self._known]
        new = new[:: max(-(-len(new) // MANY_RANKS), 1)]
        own = {live.rank for live in new}
        old = [live for rank, live in sorted(self._ranks.items()) if rank not in own]
        old = [] if own and len(self._ranks) > MANY_RANKS else old
        chosen = [old[(self._turn + i) % len(old)] for i in range(min(_RANKS_PER_LOOK, len(old)))]
        self._turn += len(chosen)
        return new + chosen

    def _read_counters(self, now_ns: int) -> dict[int, dict[str, float]]:
        """The latest value of each rank's metrics, from the ends of the files."""
        hosts: Collection[str] | None = None
        if len(self._ranks) > MANY_RANKS:
            looked = [self._ranks[rank].report for rank in self._looked & self._ranks.keys()]
            seen = {text(report.get("host")) for report in looked}
            known = sorted(host for host in seen if host is not None)
            hosts = set(known[:: max(-(-len(known) // _HOSTS_PER_LOOK), 1)])
        try:
            if self._files is None or len(self._files.ranks) != len(self.job.run.rank_folders()):
                self._files = open_run(self.job.run.root, hosts=hosts)
            frame = counter_frame(
                self._files, between=(now_ns - round(_RECENT_S * NS_PER_S), now_ns), hosts=hosts,
                metrics=[(s, m) for s in ("process", "gpu") for m in _RANK_METRICS],
                first=-_SAMPLES_PER_RANK * max(len(self._ranks), 8),
            )  # fmt: skip
        except HaiprofError:
            return {}
        last = frame.filter(pl.col("rank").is_not_null() & pl.col("value").is_not_null())
        found: dict[int, dict[str, float]] = {}
        for rank, metric, value in last.sort("time_ns").select("rank", "metric", "value").rows():
            found.setdefault(rank, {})[metric] = value
        return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


_ROW = (
    "id", "name", "user", "path", "host", "pid", "start_wall_ns", "elapsed_ns", "world_size",
    "hosts", "step", "step_ns", "split", "idle_ns", "cpu_cores", "gpu_ratio", "recording",
    "stopped", "suspended", "verdict", "problem",
)  # fmt: skip


def job_progress(job: RunningJob, *, verdict: str | None = None) -> JobNow:
    """One look at how far a job is; what cannot be read is None."""
    live = LiveJob(job)
    try:
        return replace(live.look(), verdict=verdict)
    except HaiprofError as error:
        return replace(live.nothing(), verdict=verdict, problem=str(error))


def steps_so_far(run: RunPaths) -> int:
    """Steps of a running job: of the rank that has most, in all its attempts.

    Of more than MANY_RANKS every Nth is asked; ranks of one job differ by a step.
    """
    found: dict[int, int] = {}
    folders = run.rank_folders()
    ranks = sorted({rank for rank, _, _ in folders})
    chosen = set(ranks[:: max(-(-len(ranks) // MANY_RANKS), 1)])
    for rank, attempt, paths in folders:
        if rank in chosen:
            step = LiveRank(rank, attempt, paths).look(0).step
            found[rank] = found.get(rank, 0) + (0 if step is None else step + 1)
    return max(found.values(), default=0)


FIND_EVERY_S = 3.0
VERDICT_EVERY_S = 10.0
VERDICT_OF_S = 120.0
_SHARE_OF_TIME = 0.1


@dataclass
class VerdictSoFar:
    """The verdict of a job's last two minutes, computed by a niced child at intervals.

    At most a tenth of the time is spent on it.
    """

    run: Path
    subcommand: Subcommand
    headline: str | None = None
    _child: subprocess.Popen[str] | None = None
    _began_s: float = 0.0
    _due_s: float = 0.0

    def tick(self) -> None:
        """Collects the result of a child, and starts the next one when it is due."""
        now = time.monotonic()
        if self._child is not None and self._child.poll() is not None:
            said, _ = self._child.communicate()
            self._child = None
            self._due_s = now + max(VERDICT_EVERY_S, (now - self._began_s) / _SHARE_OF_TIME)
            found = read_object(said.encode()) or {}
            self.headline = text(found.get("headline")) or self.headline
        if self._child is None and now >= self._due_s:
            self._began_s = now
            words = ["verdict", str(self.run), "--json", "--last", str(VERDICT_OF_S)]
            self._child = subprocess.Popen(
                self.subcommand(*words),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, start_new_session=True, preexec_fn=lambda: os.nice(10) and None,
            )  # fmt: skip

    def stop(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


@dataclass
class Watch:
    """Follows one job, or all that run; with `others` those of other users, too."""

    log_dirs: Sequence[Path]
    only: RunningJob | None
    subcommand: Subcommand | None = None
    others: bool = False
    _live: dict[Path, LiveJob] = field(default_factory=dict)
    _verdicts: dict[Path, VerdictSoFar] = field(default_factory=dict)
    _found_s: float = -FIND_EVERY_S

    def look(self) -> list[JobNow]:
        """All jobs as they are now, the oldest first."""
        self._find()
        seen = []
        for root, live in self._live.items():
            now = live.look()
            if self.subcommand is not None:
                verdict = self._verdicts.setdefault(root, VerdictSoFar(root, self.subcommand))
                if now.step is not None and now.running:
                    verdict.tick()
                now = replace(now, verdict=verdict.headline)
            seen.append(now)
        return seen

    def stop(self) -> None:
        """Ends background work."""
        for verdict in self._verdicts.values():
            verdict.stop()

    def _find(self) -> None:
        if self.only is not None:
            self._live.setdefault(self.only.run.root, LiveJob(self.only))
            return
        if time.monotonic() < self._found_s + FIND_EVERY_S:
            return
        self._found_s = time.monotonic()
        running = running_jobs(self.log_dirs, others=self.others)
        jobs = {job.run.root: job for job in running}
        for root in self._verdicts.keys() - jobs.keys():
            self._verdicts.pop(root).stop()
        self._live = {root: self._live.get(root) or LiveJob(job) for root, job in jobs.items()}
