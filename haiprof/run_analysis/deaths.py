"""Why a job died: the rank that failed first, told from those that it took with it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import polars as pl

from haiprof.base.code_places import Frame, frame_text, own_frame
from haiprof.base.errors import HaiprofError
from haiprof.base.units import NS_PER_S, duration_text, later_text, ranks_text
from haiprof.run_analysis.collectives import Mismatch, find_mismatches
from haiprof.run_analysis.gpu_memory import (
    LEAK_REMEDY,
    REMEDIES,
    gpu_memory_series,
    growth_per_step,
)
from haiprof.run_analysis.lines import code_at
from haiprof.run_analysis.nccl_witness import begun_later
from haiprof.run_analysis.printed_lines import ERRORS, Output, PrintedLine, printed_output
from haiprof.run_analysis.process_ends import (
    NO_END,
    NO_ERROR,
    NO_WORDS,
    SIGNALS,
    Arrived,
    Error,
    LastCollective,
    ProcessEnd,
    arrived_signals,
    behind,
    last_collectives,
    last_phase,
    last_seen,
    process_ends,
    signal_name,
    wait_failure_text,
)
from haiprof.run_analysis.reactions import Reaction, asked_snapshots, lines_in_snapshots, reactions
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer
from haiprof.run_analysis.scheduler_ends import SLURM_STATES, SchedulerEnd, scheduler_ends
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest, run_folders

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
TOGETHER_NS = 2 * NS_PER_S  # ranks that fail alike within this time failed of the same
SLURM_LIMIT_NS = 90 * NS_PER_S  # Slurm sends SIGTERM at its limit, checked every half minute or so
_STILL_NS, _STILL_STEPS = 10 * NS_PER_S, 20
"""A job that was ended is said to have stood still after such a time, and that of so many steps."""
_STOOD_NS = 2 * NS_PER_S  # samples that are all at one line for so long are told as such
_READ_LATER_NS = 5 * NS_PER_S  # a line is read so long after it was printed, where nothing hangs
_WITNESS_LIMIT, _LAST_LINES, _PLACES_LIMIT = 4, 10, 4
"""Errors printed before, last lines of a rank, and places of ranks that are shown."""
_WITHOUT_A_REASON = (
    "signal", "time_limit", "preempted", "requeued", "evicted", "cancelled", "interrupted",
    "unknown", "never_started", "hang", "gone", "launcher",
)  # fmt: skip
"""Causes of a start that never trained which do not say why it did not."""
_OF_SCHEDULER = ("time_limit", "preempted", "requeued", "cancelled", "evicted", "node_lost")
"""What a scheduler does to a job, with a signal before it or without."""
_SAME_KILL_NS = NS_PER_S // 100
"""Signals to several ranks at once arrive within this time; launchers look ten times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of one rank."""

    rank: int
    host: str | None
    pid: int | None
    role: str
    """`cause`, `victim` (it waited for another one), `stopped` (by its launcher after the
    first failure, or as the whole job was), `clean`, `absent` (never seen), or `unknown`."""
    what: str  # for people
    line: str | None  # the innermost line of the user's own code, where an exception names it
    ended_ns: int | None  # Unix time at which it was lost; None where nobody saw it
    step: int | None  # the last training step that is known of it
    phase: str | None  # the innermost phase under way when it was killed; None: not known
    waited_in: str | None  # the last collective that it began, where it is a victim
    printed: tuple[str, ...]  # its last lines on stderr, else on stdout, where that is a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Why the ranks of one start of a job ended."""

    headline: str
    cause: str
    """`exception`, `out_of_memory`, `killed`, `crash`, `exit`, `early_exit`, `hang`, `deadlock`
    (of threads of one rank), `mismatch`, `node_lost`, `never_started`, `shared_memory_full`,
    `disk_full`, `time_limit`, `preempted`, `requeued`, `evicted`, `cancelled`, `signal`,
    `interrupted`, `launcher`, `gone`, `unknown`."""
    ranks: tuple[int, ...]  # who it began with; empty where it came from outside, or is not known
    certain: bool  # whether it follows from what was seen, and is not only likely
    what: str
    line: str | None
    source: str | None  # what stands at that line
    seen_at: str | None  # the first rank's last sampled line, where no exception tells it
    traceback: tuple[str, ...]  # of the first failure, outermost first
    message: str | None  # all of the exception's text, as far as it was kept
    died_ns: int | None  # Unix time of the first failure
    step: int | None
    fates: tuple[Fate, ...]
    clock: str  # what the order of ends rests on
    remedy: str
    witnesses: tuple[PrintedLine, ...] = ()
    """Errors that it printed before, behind the first loss that was no finite number."""
    scheduler: tuple[str, ...] = ()  # what Slurm or Kubernetes said of the run's end, where asked
    own_end: str | None = None  # how this start itself ended, where the death is an earlier one's
    began_in: int | None = None  # that earlier start, whose death is then told twice
    generation: int = 0
    final: bool = True  # whether the job ended with it; else its ranks were started again

    @property
    def died_in(self) -> int:
        """The start that it happened in."""
        return self.generation if self.began_in is None else self.began_in


class LastStep(NamedTuple):
    """The last training step of a rank."""

    number: int
    end_ns: int  # Unix time
    usual_ns: float  # what a step of the rank takes, as a median


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of how the job ended."""

    files: RunFiles
    ends: Sequence[ProcessEnd]
    signals: Sequence[Arrived]
    hangs: Sequence[Reaction]
    collectives: Callable[[], pl.DataFrame]  # `RunFrames.collectives()`: only of jobs that died
    steps: Mapping[tuple[int, int], LastStep]  # by rank and attempt
    world: int
    output: Output
    scheduler: Sequence[SchedulerEnd] = ()


def gather_evidence(
    files: RunFiles,
    collectives: Callable[[], pl.DataFrame],
    steps: Mapping[tuple[int, int], LastStep],
) -> Evidence:
    """Reads what ranks and nodes left about their ends."""
    ends = process_ends(files)
    sizes = [integer(rank.report.get("world_size")) for rank in files.ranks]
    sizes += [end.world_size for end in ends if not end.helper and end.rank is not None]
    sizes += [1 + (end.rank or 0) for end in ends if end.rank is not None]
    return Evidence(
        files=files, ends=ends, signals=arrived_signals(files),
        hangs=[r for r in reactions(files) if r.trigger == "hang" and (r.suspects or r.all_at)],
        collectives=collectives, steps=steps,
        world=min(max((size for size in sizes if size is not None), default=0), 1 << 20),
        output=printed_output(files), scheduler=scheduler_ends(files),
    )  # fmt: skip


def find_deaths(evidence: Evidence) -> list[Death]:
    """The deaths of a job in order: of each start of ranks that failed; none for a clean end."""
    about, found, trained = evidence.files.about, list[Death](), set[int]()
    starts: dict[int, dict[int, ProcessEnd]] = defaultdict(dict)
    for end in evidence.ends:
        if end.rank is not None and not end.helper:
            starts[end.generation][end.rank] = end
            if end.started_ns is not None or end.step:  # as far as is known, it has ended a step
                trained.add(end.generation)
    for generation, ends in sorted(starts.items()) or [(0, {})]:
        final = generation == max(starts, default=0)
        told = evidence.scheduler if final else ()
        has_failed = bool(about.signal or about.exit_status)
        if about.end_wall_ns is None:
            has_failed = any(end.failed for end in told)
        if not final or has_failed or any(e.over and not e.clean for e in ends.values()):
            death = _Case(evidence, ends, told).judge()
            lines = tuple(line for end in told for line in end.lines)
            found.append(replace(death, generation=generation, final=final, scheduler=lines))
    last = found[-1] if len(found) > 1 else None
    if last and last.final and last.cause in _WITHOUT_A_REASON and last.generation not in trained:
        found[-1] = _add_what_began_it(found, trained)
    return found


def _add_what_began_it(found: Sequence[Death], trained: Collection[int]) -> Death:
    """The end of starts that never trained: what began it is the death of the one before them."""
    at = max((at for at, death in enumerate(found) if death.generation in trained),
             default=len(found) - 2)  # fmt: skip
    first, last, count = found[at], found[-1], len(found) - 1 - at
    number = last.generation + 1
    starts = f"starts {number - count + 1} to {number}" if count > 1 else f"start {number}"
    waited = ": its ranks may have waited for each other in init_process_group"
    return replace(
        first, headline=f"{first.headline}; {starts} never trained: {last.what}",
        own_end=f"no step was seen; then {last.headline}", began_in=first.generation,
        remedy=f"{first.remedy}; and find out why the restart did not train"
        f"{waited if last.message is None else ''}",
        generation=last.generation, final=True,
    )  # fmt: skip


class _Case:
    """One start of the ranks, looked into."""

    def __init__(
        self, evidence: Evidence, ends: Mapping[int, ProcessEnd], scheduler: Sequence[SchedulerEnd]
    ) -> None:
        self.evidence, self.ends = evidence, ends
        self.told = next((end for end in scheduler if end.cause is not None), None)
        """What the scheduler says that explains the end; None where it says nothing of it."""
        self.attempts = {
            rank.rank: rank.attempt
            for rank in evidence.files.ranks
            if (end := ends.get(rank.rank)) is not None
            and (end.host, end.pid) == (rank.report.get("host"), rank.report.get("pid"))
        }
        ended = {rank: end.failed_ns for rank, end in ends.items()}
        self.last = last_collectives(evidence.files, evidence.collectives(), self.attempts, ended)
        self.behind = behind(self.last)
        if not self.last:  # without the Flight Recorder, what NCCL itself wrote
            begun = begun_later(evidence.files, self.attempts)
            self.behind = {r: LastCollective(sequence=n, kind=k) for r, (k, n) in begun.items()}
        self.phases = {
            rank.rank: phase
            for rank in evidence.files.ranks
            if self.attempts.get(rank.rank) == rank.attempt and (phase := last_phase(rank))
        }
        aborted = [end for end in ends.values() if _has_aborted(end)]
        self.many_aborted = len(aborted) > 1
        ahead = [end.failed_ns or 0 for end in aborted if end.rank not in self.behind]
        self.ahead_aborted_ns = min(ahead, default=None) if self.behind else None
        self.victims = {r: by for r, e in ends.items() if (by := self._wait_failure(e)) is not None}
        self.stopped: dict[int, str] = {}
        self.is_ended_from_outside = False
        self._find_stopped()

    @cached_property
    def mismatches(self) -> list[Mismatch]:
        """Collectives that contradict each other; searched only where that may matter."""
        return find_mismatches(self.evidence.collectives())

    def judge(self) -> Death:
        """The first cause that is proved, the surest kinds of proof first."""
        for ask in (
            self._signal, self._scheduler, self._own_failure, self._find_accused,
            self._node_lost, self._mismatch, self._never_started, self._early_exit,
            lambda: self._of_hang(self._hang_before(self._first_ns())),
            lambda: self._own_failure(interrupted=True), self._behind, self._launcher,
        ):  # fmt: skip
            if (found := ask()) is not None:
                return found
        if self.victims:
            rank = min(self.victims, key=lambda r: self.ends[r].failed_ns or 1 << 62)
            end, headline = self.ends[rank], "whom the ranks waited for is not known"
            if end.error is not NO_ERROR:
                headline += f"; rank {rank} raised {end.error.short} ({end.error.location})"
            what = f"rank {rank} was ended by {self.victims[rank]}"
            return self._death("unknown", (), headline, what=what, end=end, certain=False)
        gone = [end for end in self._causes() if end.kind() == "gone"]
        if gone:
            ranks = tuple(e.rank for e in gone if e.rank is not None)
            return self._blame_end("gone", ranks, f"{ranks_text(ranks)} died", gone[0])
        about = self.evidence.files.about
        status = about.signal or about.exit_status
        what = f"the job ended with {status}, and no rank says why" if status is not None else \
            "ranks were ended, and nothing says why"  # fmt: skip
        return self._death("unknown", (), what, certain=False)

    def _wait_failure(self, end: ProcessEnd) -> str | None:
        handled = end.failure.errors[1:2] if end.how == "exit_call" else ()
        by = next(filter(None, (e.wait_failure() for e in (end.error, *handled))), None)
        if by is not None or not _has_aborted(end):
            return by
        by = next(filter(None, map(wait_failure_text, end.printed)), None)
        if by is not None or not self.many_aborted:
            return by
        # The heartbeat monitor of a rank that is behind learns of another one's timeout by the
        # store and aborts, too; who aborts long before all that waited crashed by itself.
        first = self.ahead_aborted_ns
        with_those_ahead = first is not None and (
            end.rank not in self.behind or (end.failed_ns or 0) >= first - TOGETHER_NS
        )
        return "NCCL's watchdog (SIGABRT)" if self.mismatches or with_those_ahead else None

    def _find_stopped(self) -> None:
        """Ranks that somebody stopped after another one had failed.

        Launchers act once a process has ended, and not when it raises: who is killed before that
        is the cause, also where the others have noticed the broken connection sooner.
        """
        over = {rank: end.wall_ns if end.wall_ns is not None else end.failed_ns
                for rank, end in self.ends.items() if end.over and not end.clean}  # fmt: skip
        for rank, end in self.ends.items():
            before = min((t for r, t in over.items() if r != rank and t is not None), default=None)
            is_stop = end.signal in ENDING and not end.oom and end.error is NO_ERROR
            if is_stop and before and end.wall_ns and end.wall_ns - before > _SAME_KILL_NS:
                self.stopped[rank] = signal_name(end.signal or 0)

    def _causes(self) -> list[ProcessEnd]:
        """Ends that are nobody else's doing, in order of time."""
        spared = self.victims.keys() | self.stopped.keys()
        found = [end for rank, end in self.ends.items()
                 if end.over and not end.clean and rank not in spared]  # fmt: skip
        return sorted(found, key=lambda end: end.failed_ns or (1 << 62))

    def _signal(self) -> Death | None:
        """Somebody ended the job: the launcher knows who, and nothing had failed before."""
        failed = [e.failed_ns for e in self._causes() if e.kind() != "interrupted"
                  and (e.error is not NO_ERROR or e.signal not in ENDING)]  # fmt: skip
        failed += [self.ends[rank].failed_ns for rank in self.victims]
        first = min((time for time in failed if time is not None), default=None)
        signals = [s for s in self.evidence.signals if s.signal in ENDING]
        last = max((e.wall_ns or 0 for e in self.ends.values()), default=0)
        # Ranks that got it too may have died of it before the launcher read its own. An earlier one
        # of another number did not end them: a job in the background ignores SIGINT.
        early = [s for s in signals if first is None or s.wall_ns <= first + _SAME_KILL_NS]
        died_of = {end.signal for end in self.ends.values()}
        matching = [s for s in early if died_of == {s.signal}]
        came = next(iter(matching or early), None)
        if came is None or self.evidence.files.about.exit_status == 0:
            return None
        name, at_ns = signal_name(came.signal), came.wall_ns
        # Much later the job ran on: it took it as something else.
        if last and not -NS_PER_S <= last - at_ns <= 10 * 60 * NS_PER_S:
            return None
        for by in self.evidence.ends:
            if (by.pid, by.host) == (came.from_pid, came.host):
                who = f"rank {by.rank}" if by.rank is not None else f"process {by.pid}"
                what = f"the job ended itself: {who} sent {name} to its launcher"
                ranks = () if by.rank is None else (by.rank,)
                return self._death("signal", ranks, what, died_ns=at_ns)
        name += _sender(came)
        if self.told is not None and self.told.cause in _OF_SCHEDULER:
            return self._of_scheduler(self.told, self.told.cause, at_ns, name)
        cause, what = _outer_cause(came, self.evidence.files)
        guessed = cause in ("time_limit", "cancelled") and not came.slurm_state
        return self._end_from_outside(cause, what, name, at_ns, certain=not guessed)

    def _scheduler(self) -> Death | None:
        """The scheduler knows, and no rank had failed by itself: it ended all of the job."""
        told = self.told
        own = [e for e in self._causes() if e.error is not NO_ERROR or e.oom
               or e.signal not in (*ENDING, None)
               or (e.status and e.kind() != "interrupted")]  # fmt: skip
        if told is None or told.cause is None or own:
            return None
        return self._of_scheduler(told, told.cause, told.ended_ns)

    def _of_scheduler(
        self, told: SchedulerEnd, cause: str, at_ns: int | None, by: str = ""
    ) -> Death | None:
        """What it says, of all of the job or of the ranks on the nodes that it names."""
        if cause in _OF_SCHEDULER and not told.hosts:
            return self._end_from_outside(cause, told.what, by, at_ns)
        self.is_ended_from_outside = True
        ranks = tuple(sorted(r for r, e in self.ends.items() if e.host in told.hosts))
        if not told.hosts:  # of memory: who was killed first
            ranks = tuple(e.rank for e in self._causes()[:1] if e.rank is not None)
        what = f"{told.what} ({by})" if by else told.what
        return self._death(cause, ranks, what, died_ns=at_ns, certain=bool(told.hosts))

    def _end_from_outside(
        self, cause: str, what: str, by: str, at_ns: int | None, *, certain: bool = True
    ) -> Death | None:
        """The whole job was ended from outside; what it was about before is told, too."""
        self.is_ended_from_outside = True
        hang = self._hang_before(at_ns) or (self._asked_before(at_ns) if at_ns else None)
        if hang is not None:
            found = self._of_hang(hang)
            then = f"ended by {by}" if by else what
            return found and replace(found, headline=f"{found.headline}; then {then}")
        what += f" ({by})" if by else ""
        self.stopped = {rank: by for rank, by in self.stopped.items() if by == "SIGKILL"}
        if (stuck := self._hang_before(at_ns, named=False)) is not None:
            what += f"; before that, all ranks hung at {stuck.all_at}"
        still = "" if stuck is not None or at_ns is None else self._stood_still(at_ns)
        found = self._death(cause, (), what + still, died_ns=at_ns, certain=certain)
        if not still:
            return found
        first = "see where each rank stood" if cause == "interrupted" else found.remedy
        return replace(found, remedy=f"{first}; {REMEDIES['look_earlier']}")

    def _own_failure(self, *, interrupted: bool = False) -> Death | None:
        """The first rank that failed by itself, with those that failed alike at the same time."""
        # One that was interrupted tells nothing where anything else does: others are stopped so.
        real = [end for end in self._causes() if (kind := end.kind()) != "gone"
                and (kind == "interrupted") is interrupted]  # fmt: skip
        first = next(iter(real), NO_END)
        if not real or (first.signal in ENDING and not first.oom
                        and first.host in self._lost_hosts()):  # fmt: skip
            return None
        # The same failure at nearly the same time.
        alike = [_failure_key(end) == _failure_key(first)
                 and abs((end.failed_ns or 0) - (first.failed_ns or 0)) <= TOGETHER_NS
                 for end in real]  # fmt: skip
        ranks = tuple(sorted({end.rank for end in compress(real, alike) if end.rank is not None}))
        others, together = len(self.ends) > len(ranks), len(ranks) > 1
        who = f"all {len(ranks)} ranks" if together and not others else ranks_text(ranks)
        who += (" died first" if others else " died") + " together, of the same" * together
        return self._blame_end(first.kind(), ranks, who, first, certain=first.is_certain())

    def _find_accused(self) -> Death | None:
        """Victims' texts that name a rank."""
        named = tuple(sorted({r for e in self.ends.values() for r in e.error.accused_ranks()}))
        why = "the others' barrier names it"
        return self._of_absentee(named, why, certain=True) if named else None

    def _node_lost(self) -> Death | None:
        """A node of which nothing came any more, while others went on."""
        if not (lost := self._lost_hosts()):
            return None
        host = min(lost)
        ranks = tuple(sorted(r for r, e in self.ends.items() if e.host in lost))
        what = f"node {host} was lost: nothing was heard of it any more, nor of {ranks_text(ranks)}"
        return self._death("node_lost", ranks, what, died_ns=lost[host], certain=False)

    def _lost_hosts(self) -> dict[str, int]:
        """Nodes whose launcher never wrote an end while another one's did, and when they ceased."""
        files, ends = self.evidence.files, self.ends.values()
        over = {node.host for node in files.nodes if node.of_type("job_end")}
        silent = {e.host for e in ends} - over - {e.host for e in ends if e.over}
        return {host: last_write_ns(files, host) for host in silent} if over else {}

    def _mismatch(self) -> Death | None:
        """Ranks that were at the same place of a group with different collectives."""
        if not self.victims:
            return None
        odd: tuple[int, ...] = ()
        if found := self.mismatches:
            odd, said = found[0].odd, found[0].as_text()
        else:  # a rank noticed itself that another one's collective was not its own
            ends = sorted(self.ends.values(), key=lambda end: end.failed_ns or 0)
            seen = [(end.rank, end.error.unlike_messages()) for end in ends]
            said = next((f"rank {rank}: {text}" for rank, text in seen if text), "")
        return self._of_mismatch(said, odd, self._first_ns(), self._failed_at()) if said else None

    def _of_mismatch(
        self, said: str, odd: tuple[int, ...], died_ns: int | None, places: Mapping[int, str]
    ) -> Death:
        """Whom to blame is known where fewer ranks than all issued something else."""
        ranks_at: dict[str, list[int]] = {}
        for rank, place in sorted(places.items()):
            ranks_at.setdefault(place, []).append(rank)
        what = f"ranks issued collectives that contradict each other: {said}"
        if len(ranks_at) <= _PLACES_LIMIT:
            what += "".join(f"; {ranks_text(at)} at {place}" for place, at in ranks_at.items())
        ranks = odd if len(odd) < len(self.ends) else ()
        line = places.get(ranks[0]) if ranks else None
        return self._death("mismatch", ranks, what, died_ns=died_ns, line=line)

    def _failed_at(self) -> dict[int, str]:
        """By rank of a small job, where it was when it failed."""
        if len(self.ends) > _PLACES_LIMIT:
            return {}
        places = {
            rank: end.error.location
            or ((own := own_frame(end.crashed_at)) and frame_text(own))
            or self._seen_at((rank,), None)
            for rank, end in self.ends.items()
        }
        return {rank: place for rank, place in places.items() if place}

    def _never_started(self) -> Death | None:
        """Ranks of which nothing was ever seen."""
        absent = tuple(r for r in range(self.evidence.world) if r not in self.ends)
        began = {rank for rank, e in self.ends.items() if e.started_ns is not None or e.uncaught}
        # gloo failed to connect ranks, each of which had left its address in the store.
        had_come = any("connectFullMesh failed" in e.error.message for e in self.ends.values())
        late = tuple(rank for rank in self.stopped if began and rank not in began and not had_come)
        ranks = tuple(sorted({*absent, *late}))
        if not ranks or len(ranks) == self.evidence.world:
            return None
        why = "never came to the others: no training step of it was seen"
        if absent:
            why = "was" if len(absent) == 1 else "were"
            why += " never seen: not launched, or not under haiprof"
        what = f"{ranks_text(absent or late)} {why}"
        return self._death("never_started", ranks, what, died_ns=self._first_ns(),
                           certain=False)  # fmt: skip

    def _early_exit(self) -> Death | None:
        """Ranks that had done their work, or thought so, while others waited for them."""
        if not self.victims:
            return None
        first = self._first_ns() or 0
        until = first + NS_PER_S  # others may notice the broken connection sooner than the agent
        left = tuple(sorted(rank for rank, end in self.ends.items()
                            if end.clean and end.over
                            and (end.closed_ns or end.wall_ns or 0) < until))  # fmt: skip
        if not left:
            return None
        end, step = self.ends[left[0]], self._step(left[0])
        line = None if end.left_at is None else frame_text(end.left_at)
        after = f" after step {step}" if step is not None else ""
        way = "" if end.closed else " (os._exit: without Python's own exit)"
        way += f" (sys.exit at {line})" if line else ""
        what = f"{ranks_text(left)} ended early{after}, with exit status 0{way}, "
        what += f"while others waited for {'it' if len(left) == 1 else 'them'}"
        return self._death("early_exit", left, what, end=end, line=line)

    def _hang_before(self, time_ns: int | None, *, named: bool = True) -> Reaction | None:
        """The last snapshot of a standstill that lasted to the end, with a suspect or without."""
        hangs = [each for each in self.evidence.hangs if bool(each.suspects) is named
                 and (time_ns is None or each.wall_ns <= time_ns)]  # fmt: skip
        started = min((e.started_ns or 0 for e in self.ends.values()), default=0)
        last = next((hang for hang in hangs[-1:] if hang.wall_ns >= started), None)
        return None if last is None or self._has_resumed(last) else last

    def _asked_before(self, time_ns: int) -> Reaction | None:
        """The last snapshot that somebody took of a job that stood still until that time."""
        last = self._last_step()
        if last is None or not self._stood_still(time_ns):
            return None
        asked = asked_snapshots(self.evidence.files)
        asked = [each for each in asked if last.end_ns < each.wall_ns <= time_ns]
        return replace(asked[-1], since_wall_ns=last.end_ns) if asked else None

    def _has_resumed(self, hang: Reaction) -> bool:
        """Whether steps ended after a standstill was noticed."""
        steps = [s for r in self.ends if (s := self._step(r)) is not None]
        if hang.step is None and not hang.suspects:
            return bool(steps)
        return hang.step is not None and bool(steps) and max(steps) > hang.step + 2

    def _of_hang(self, hang: Reaction | None) -> Death | None:
        """A rank that a snapshot named while the job stood still."""
        if hang is None:
            return None
        first, since_ns = hang.suspects[0], hang.since_wall_ns
        folder = Path(hang.path or "").parent.name
        seen_in = (s for s in lines_in_snapshots(self.evidence.files) if s.folder == folder)
        taken = next(seen_in, None)
        if (odd := hang.mismatched_ranks) is not None:
            return self._of_mismatch(first.reason, odd, since_ns, taken.at if taken else {})
        doing = f", at {first.doing}" if first.doing else ""
        what = f"rank {first.rank} hung{doing}: {first.reason}"
        what += self.ends[first.rank].thread_text() if first.rank in self.ends else ""
        line, _, beside = first.doing.partition(";")  # what stands beside differs by the process
        own = self._own_files(first.rank)
        seen = last_seen(own) if own is not None and beside else None
        is_locked = seen is not None and seen.is_at_lock and seen.wall_ns >= since_ns
        return self._death("deadlock" if is_locked else "hang", (first.rank,), what,
                           died_ns=since_ns, line=line or None,
                           frame=taken and taken.frames.get(first.rank),
                           certain=first.certain and not is_locked)  # fmt: skip

    def _behind(self) -> Death | None:
        """Ranks that never came to a collective in which others waited."""
        ranks = tuple(sorted(self.behind))
        if not ranks or not self.victims or len(ranks) == len(self.ends):
            return None
        return self._of_absentee(ranks, f"it never came to {self.behind[ranks[0]].text}",
                                 certain=False)  # fmt: skip

    def _of_absentee(self, ranks: tuple[int, ...], why: str, *, certain: bool) -> Death:
        """Ranks that hung, or went another way, until the others' time was up."""
        end = next((e for r, e in self.ends.items() if r in ranks and e.thread_error.how), NO_END)
        what = f"{ranks_text(ranks)} did not come where the others waited: {why}{end.thread_text()}"
        return self._death("hang", ranks, what, died_ns=self._first_ns(), certain=certain,
                           line=end.thread_error.error.location or None)  # fmt: skip

    def _launcher(self) -> Death | None:
        """No rank failed: the launcher itself did, or the job before any rank was known."""
        for end in self.evidence.ends:
            own = end.error.is_failure and end.how != "printed" and not end.error.is_launchers()
            if end.rank is None and own:
                own = end.error.line is not None  # code of the job's, in whatever process
                own |= end.ran_out_of_gpu_memory or end.how == "terminate"
                cause = end.kind() if own else "launcher"
                return self._blame_end(cause, (), f"process {end.pid} died", end, certain=True)
            first = end.pid == self.evidence.files.about.job_pid
            failed = any(each.over and not each.clean for each in self.ends.values())
            left = bool(self.ends) and end.signal is not None and not failed
            if first and end.over and not end.clean and (left or not self.ends):
                who = "the first process of the job died, and left its ranks" if left else \
                    "the job died before a rank had reported in"  # fmt: skip
                return self._blame_end(end.kind(), (), who, end, certain=end.is_certain())
        return None

    def _blame_end(
        self, cause: str, ranks: tuple[int, ...], who: str, end: ProcessEnd, *,
        certain: bool = False,
    ) -> Death:  # fmt: skip
        what = end.what_happened()
        return self._death(cause, ranks, f"{who}: {what}", what=what, end=end, certain=certain)

    def _death(
        self, cause: str, ranks: tuple[int, ...], headline: str, *, what: str | None = None,
        end: ProcessEnd = NO_END, died_ns: int | None = None, line: str | None = None,
        frame: Frame | None = None, certain: bool = True,
    ) -> Death:  # fmt: skip
        error, said = end.error, headline
        by_worker = error.worker_death() is not None
        hosts = len({each.host for each in self.ends.values()})
        died = end.failed_ns if died_ns is None else died_ns
        hung = cause in ("hang", "deadlock") and bool(ranks) and self.behind.keys() >= set(ranks)
        seen = sorted({*self.ends, *ranks, *range(self.evidence.world)})
        fates = tuple(self._fate(rank, rank in ranks, hung=hung) for rank in seen)
        tail = _victims_text([f for f in fates if f.rank in {**self.victims, **self.stopped}], died)
        frames = error.frames
        if end.crashed_at and not frames:
            frames, frame = end.crashed_at, own_frame(end.crashed_at)
            line = line or (frame_text(frame) if frame else None)
        nowhere = line is None and not error.location
        source = "" if by_worker else error.source
        if error is not NO_ERROR and line is None and not by_worker:
            _, line, inner_source = error.inner_error()
            source = inner_source if line else source  # never what stands at another line
            line = line or error.location or None
        if not source and frame is not None and line is not None:
            source = self._code_at(frame, line, ranks)
        remedy = self._remedy(cause, end, line)
        if ended_on_nan(cause, (error.message, source), fates):
            headline += "" if NO_NUMBER.search(headline) else ", on a NaN or infinite value"
            remedy = REMEDIES["no_number"]
        witnesses = self._witnesses(died, error)
        printed = [each for each in witnesses if each.kind == "traceback" and each.rank in ranks]
        nowhere &= not (cause == "exit" and printed)
        worker = error.dead_worker() if by_worker else None
        seen_at = self._seen_at(ranks, died, worker) if nowhere or worker else None
        phase = self.phases.get(ranks[0]) if ranks and nowhere else None
        headline += f", in {phase}" if phase else ""
        whose = " of the worker" if worker else ""
        headline += f"; last sample{whose}: {seen_at}" if seen_at else ""
        if cause == "exit" and printed and line is None:
            headline += f"; it had printed {printed[-1].text}"
        return Death(
            headline=f"{headline}; {tail}" if tail and tail not in headline else headline,
            cause=cause, ranks=ranks, certain=certain, what=what or said, line=line,
            seen_at=seen_at, source=source or None,
            traceback=tuple(f"{f}:{n} in {name}" for f, n, name in frames),
            message=None if error is NO_ERROR else error.message, died_ns=died,
            step=self._step(ranks[0]) if ranks else None, fates=fates,
            clock="one clock: all ranks ran on one node"
            if hosts < 2
            else f"the clocks of {hosts} nodes, taken to agree: NTP keeps them within milliseconds",
            remedy=remedy, witnesses=witnesses,
        )  # fmt: skip

    def _code_at(self, frame: Frame, line: str, ranks: Sequence[int]) -> str:
        """What stands there, as an exception that ended it at this line noted it, or its file."""
        errors = (self.ends[rank].error for rank in ranks[:1] if rank in self.ends)
        noted = (e.source for e in errors if e.location == line)
        since_ns = self.evidence.files.about.start_wall_ns
        is_there = frame_text(frame) == line.partition(" → ")[0]
        return next(noted, "") or (code_at(*frame[:2], since_ns) if is_there else "")

    def _witnesses(self, died: int | None, error: Error) -> tuple[PrintedLine, ...]:
        """What this start printed that tells of its end, but for the exception that is known."""
        began = min((end.started_ns or 0 for end in self.ends.values()), default=0)
        until = died + _READ_LATER_NS if died else 1 << 62
        known = error.message.partition("\n")[0].strip()
        lines = [line for line in self.evidence.output.lines if began <= line.wall_ns <= until
                 and not (known and known in line.text)]  # fmt: skip
        errors = [line for line in lines if line.kind in ERRORS][-_WITNESS_LIMIT:]
        return (*[line for line in lines if line.kind == "loss"][:1], *errors)

    def _remedy(self, cause: str, end: ProcessEnd, line: str | None) -> str:
        error, remedy = end.error, REMEDIES[cause]
        if end.gpu_memory is not None and end.ran_out_of_gpu_memory:
            rank = -1 if end.rank is None else end.rank
            series = gpu_memory_series(self.evidence.files).get(rank)
            leaks = series is not None and growth_per_step(series) is not None
            return LEAK_REMEDY if leaks else end.gpu_memory.remedy
        match cause:
            case "exit" if end is not NO_END and (error.worker_death() or not end.knows_exit()):
                return REMEDIES["unknown_exit"]
            case "exception" if error.type in ("ModuleNotFoundError", "ImportError"):
                return "install what it names into the environment of that rank, or choose another"
            case "exception" if _UNLIKE_SHAPES.search(error.message):
                return REMEDIES["one_shape"]
            case "exception" if end.thread_text():
                return (
                    "fix what ended its thread, where the other line waited for it; else that line"
                )
            case "early_exit" if end.left_at is not None:
                return f"see whether that rank should leave there, alone; {remedy}"
            case "interrupted" if end is not NO_END:
                return "find out what sent SIGINT to that rank, or raises KeyboardInterrupt in it"
            case "crash" if end.crashed_at:
                runs = "what that other thread runs"
                what = runs if end.crashed_beside else "what that line calls"
                return f"see {what}; a core file (ulimit -c unlimited) shows the native code in gdb"
            case "hang" if taken := self.evidence.files.paths.snapshot_files():
                why = f"see why {line} does not end" if line else remedy
                return f"{why}: {taken[-1]} has its stacks"
            case "killed":
                return SIGNALS.get(end.signal or 0, NO_WORDS).do or remedy
            case "out_of_memory" if end.address_limit_bytes and not end.oom:
                return f"raise the limit of its address space (ulimit -v), or {remedy}"
        return remedy

    def _seen_at(
        self, ranks: Sequence[int], died: int | None, worker: int | None = None
    ) -> str | None:
        """The last line sampled of the first rank, or of its worker; how long before its end."""
        own = self._own_files(ranks[0]) if ranks else None
        if own is None or (seen := last_seen(own, worker)) is None:
            return None
        end = self.ends[ranks[0]].failed_ns or died or seen.wall_ns
        before_ns, stood_ns = end - seen.wall_ns, seen.wall_ns - seen.since_ns
        before = f", {duration_text(before_ns)} before its end" if before_ns > 0 else ""
        stood = f", as in every sample of the {duration_text(stood_ns)} before"
        return f"{seen.line}{before}{stood if stood_ns >= _STOOD_NS else ''}"

    def _own_files(self, rank: int) -> RankFiles | None:
        """The files that a rank wrote in this start."""
        return next((r for r in self.evidence.files.ranks
                     if r.rank == rank and self.attempts.get(rank) == r.attempt), None)  # fmt: skip

    def _fate(self, rank: int, cause: bool, *, hung: bool) -> Fate:
        end = self.ends.get(rank)
        # The last collective that it began, in its largest group.
        groups = self.last.get(rank, {})
        sizes = {g: sum(g in other for other in self.last.values()) for g in groups}
        last = groups[max(sizes, key=lambda g: sizes[g])] if sizes else None
        if end is None:
            what, role = "never seen", "absent"
        elif cause:
            what, role = end.what_happened(), "cause"
            if rank in self.stopped:
                what = f"ended by {self.stopped[rank]}"
                what += " when the others had failed" * bool(self.victims)
            elif not end.over:
                what = "no end of it was seen"
        elif rank in self.victims:
            what, role = f"ended by {self.victims[rank]}", "victim"
        elif rank in self.stopped:
            what, role = f"ended by its launcher ({self.stopped[rank]})", "stopped"
        elif end.over and end.clean:
            what, role = "ended with exit status 0", "clean"
        else:
            what = end.what_happened() if end.over else "no end of it was seen"
            role = "stopped" if self.is_ended_from_outside and end.signal in ENDING else "unknown"
        held_up = hung and role == "stopped"
        waits = rank in self.victims or (
            (held_up or (rank in self.stopped and not self.is_ended_from_outside))
            and rank not in self.behind and not cause
        )  # fmt: skip
        if held_up and waits:
            what = "ended with the job"  # not what broke in it then
        # A number alone is of a heartbeat, which may be a second old.
        where = last.text if last is not None and last.kind is not None else "a collective"
        known = end or NO_END
        return Fate(
            rank=rank, host=known.host or None, pid=known.pid or None, role=role, what=what,
            line=known.error.location or None, ended_ns=known.failed_ns, step=self._step(rank),
            phase=self.phases.get(rank), waited_in=where if last is not None and waits else None,
            printed=(known.printed or known.printed_stdout)[-_LAST_LINES:],
        )  # fmt: skip

    def _step(self, rank: int) -> int | None:
        end, attempt = self.ends.get(rank), self.attempts.get(rank)
        known = self.evidence.steps.get((rank, attempt)) if attempt is not None else None
        return known.number if known is not None else (end.step if end is not None else None)

    def _last_step(self) -> LastStep | None:
        known = [self.evidence.steps.get(each) for each in self.attempts.items()]
        return max(filter(None, known), key=lambda step: step.end_ns, default=None)

    def _stood_still(self, time_ns: int) -> str:
        """For how long no step had ended by then, where that is much longer than steps take."""
        last = self._last_step()
        if last is None or self.evidence.files.about.options.get("time_s"):
            return ""  # its recording may have ended before
        silent_ns = time_ns - last.end_ns
        if silent_ns < max(_STILL_NS, _STILL_STEPS * last.usual_ns):
            return ""
        return f"; no step had ended in the {duration_text(silent_ns)} before"

    def _first_ns(self) -> int | None:
        times = [e.failed_ns for r, e in self.ends.items() if r in self.victims]
        return min((time for time in times if time is not None), default=None)


def last_write_ns(files: RunFiles, host: str) -> int:
    """Unix time of the newest change to the files of a node and of its ranks; 0 for none."""
    folders = [node.paths.root for node in files.nodes if node.host == host]
    folders += [rank.paths.root for rank in files.ranks if rank.report.get("host") == host]
    times = []
    for folder in folders:
        with contextlib.suppress(OSError):
            times += [path.stat().st_mtime_ns for path in folder.iterdir()]
    return max(times, default=0)


def ended_on_nan(cause: str, said: Sequence[str | None], fates: Sequence[Fate]) -> bool:
    """By what it said, by the line that ended it, or before sys.exit by the last lines printed."""
    last = [line for fate in fates if fate.role == "cause" for line in fate.printed
            if cause == "exit" and "loss" in line.lower()]  # fmt: skip
    ends_itself = cause in ("exit", "exception")
    return ends_itself and any(NO_NUMBER.search(text or "") for text in (*said, *last))


def _has_aborted(end: ProcessEnd) -> bool:
    """Whether native code ended it, and no exception did."""
    return end.signal == signal.SIGABRT and end.error is NO_ERROR


def _failure_key(end: ProcessEnd) -> tuple[object, ...]:
    """What is the same of ends by the same failure."""
    known = end.error is not NO_ERROR
    return (end.error.type, end.error.line) if known else (end.signal, end.status)


def _victims_text(fates: Sequence[Fate], died: int | None) -> str:
    """`ranks 0, 2 waited in all_reduce 241 and were ended 25 s later by gloo's timeout`."""
    parts = []
    for role in ("victim", "stopped"):
        for what in list(dict.fromkeys(f.what for f in fates if f.role == role))[:2]:
            own = [f for f in fates if f.role == role and f.what == what]
            waited_in = {f.waited_in for f in own if f.waited_in}
            waited = f" waited in {waited_in.pop()} and" if len(waited_in) == 1 else ""
            last = max((f.ended_ns - died for f in own if f.ended_ns and died), default=0)
            later = f" {later_text(last)}" if last > 0 else ""
            were = f"{'was' if len(own) == 1 else 'were'} ended{later}"
            who = ranks_text([f.rank for f in own])
            parts.append(f"{who}{waited} {were} {what.removeprefix('ended ')}")
    return "; ".join(parts)


def _outer_cause(came: Arrived, files: RunFiles) -> tuple[str, str]:
    """What a signal to the launcher means."""
    state = came.slurm_state or ""
    words = (came.from_command or "").split()
    program = words[0].rpartition("/")[2] if words else ("slurm" if came.slurm_job else "")
    by_slurm = program.startswith("slurm")  # a script of the user's may lie in a folder of Slurm's
    left = None if came.slurm_end_ns is None else came.slurm_end_ns - came.wall_ns
    if not state and by_slurm and left is not None and left < SLURM_LIMIT_NS:
        state = "TIMEOUT"
    elif state not in ("TIMEOUT", "PREEMPTED") and by_slurm and _was_requeued(files):
        state = "REQUEUED"
    if state in ("TIMEOUT", "PREEMPTED", "REQUEUED"):
        return SLURM_STATES[state]
    if state == "CANCELLED" or by_slurm:
        other = "" if state else ", scontrol requeue"
        when, late = ("", ", or its time limit") if left is None else (" before its time limit", "")
        return "cancelled", f"Slurm ended it{when}: scancel{other}, its site's rules{late}"
    if came.signal == signal.SIGINT:
        return "interrupted", "the job was interrupted"
    return "signal", "the job was ended from outside"


def _was_requeued(files: RunFiles) -> bool:
    """Whether a later start of the same Slurm job is in the same log directory."""
    own = files.about.environment
    for folder in run_folders(files.paths.root.parent) if own.get("slurm_job") else ():
        with contextlib.suppress(HaiprofError):
            other = read_manifest(RunPaths(folder)).environment
            first, later = (int(each.get("slurm_restart") or 0) for each in (own, other))
            if other.get("slurm_job") == own["slurm_job"] and later > first:
                return True
    return False


def _sender(came: Arrived) -> str:
    if not came.from_pid:
        return ", sent by the kernel or from another container" if not came.from_command else ""
    who = (came.from_command or "").split(" ")[0].rpartition("/")[2]
    return f", sent by {who or 'process'} {came.from_pid}"


NO_NUMBER = re.compile(r"\b(?:nans?|(?:non-?|not )finite|is_?(?:nan|finite|inf))\b", re.IGNORECASE)
"""What a job says, or asks, that ends itself because its loss is no number."""
_UNLIKE_SHAPES = re.compile(
    r"resize storage that is not resizable|expects each tensor to be equal size"
)
"""What torch's default_collate raises, the first in a DataLoader worker."""
