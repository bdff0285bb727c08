"""A trace window of a running job, on demand, and waiting for its next seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from haiprof.base.errors import MissingDataError
from haiprof.base.units import NS_PER_S
from haiprof.live.find import Answers, Member, Progress, ask, find_missing_ranks, members
from haiprof.run_analysis.run_files import integer, text
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.control import OVER, TOO_LATE, read_members
from haiprof.run_format.layout import TRACE_SUFFIX, RunPaths

AHEAD_S = 2.0  # Ranks of one node hear of a request within two ticks of its agent
AHEAD_NODES_S = 10.0
"""On a shared file system another node may see a file some seconds later (NFS: acregmin 3 s)."""
LEAD_STEPS = 6
"""Three steps before the window, in which a rank warms up its profiler, and one before them, at
which all ranks must have received the request."""
STATUS_S = 2.0
GRACE_S = 30.0
WRITE_S = 120.0
TRIES = 3
"""A job that has become faster since it told its pace passes the first step before all have heard
of it: it is asked again, with twice the lead."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The result of the request on one rank."""

    rank: int
    host: str | None
    state: str  # `done`, `refused`, `failed`, or `silent`
    reason: str | None  # Why not, or why it is shorter than asked for
    steps: tuple[int, int] | None  # The first step, and the one after the last
    stall_ns: int | None  # How long the rank's training was stalled by it
    path: str | None
    """The trace; None where there is none, or it is not written yet. `HOST:PATH` on a node that
    does not share the run directory, where it may still be being compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNow:
    """The result of a request."""

    run: str
    window: int
    ranks: tuple[RankTrace, ...]
    counted_alike: bool = True
    """Whether all ranks count steps from the same one: not if the hook was injected later."""
    notes: tuple[str, ...] = ()  # Notes on ranks of the job that could not be asked

    @property
    def done(self) -> tuple[RankTrace, ...]:
        """Ranks with a trace."""
        return tuple(rank for rank in self.ranks if rank.state == "done")

    @property
    def aligned(self) -> bool:
        """Whether all of them recorded the same steps."""
        return len({rank.steps for rank in self.done}) <= 1 and (
            len(self.done) <= 1 or self.counted_alike
        )

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        found = {**asdict(self), "aligned": self.aligned}
        return {key: found[key] for key in ("run", "window", "aligned", "ranks", "notes")}


def trace_now(
    run: RunPaths, options: Mapping[str, Any], *, ranks: tuple[int, ...] | None = None,
    timeout_s: float | None = None, start_wall_ns: int = 0, progress: Progress = lambda _: None,
) -> TraceNow:  # fmt: skip
    """Asks every rank for a window that starts at the same step, and waits for the files.

    With `start_wall_ns` at the first step from about that Unix time on.
    """
    asked = [m for m in members(run) if ranks is None or m.rank in ranks]
    if not asked:
        raise MissingDataError(
            f"{run.root}: no rank that could be traced has reported in",
            hint="a rank reports in at its first step",
        )
    lead_s = AHEAD_S if len({m.host for m in asked}) == 1 else AHEAD_NODES_S
    wait_until(start_wall_ns, lead_s, progress)
    for attempt in range(TRIES):
        found, answers = _ask_once(
            run, asked, options, ranks=ranks, timeout_s=timeout_s, lead_s=lead_s * 2**attempt,
            progress=progress,
        )  # fmt: skip
        if not all((rank.reason or "").endswith((OVER, TOO_LATE)) for rank in found.ranks):
            break
    # With the traces' paths, once the agents have compressed them.
    files: dict[int | None, Path] = {}
    places: dict[int | None, str] = {}
    for reply in answers.replies.values():
        rank, name = reply.get("rank"), f"{reply.get('stem')}{TRACE_SUFFIX}"
        if isinstance(reply.get("stem"), str) and "run" in reply:
            places[rank] = f"{reply.get('host')}:{reply['run']}/traces/{name}"
        elif isinstance(reply.get("stem"), str):
            files[rank] = run.traces / name
    files = {rank: path for rank, path in files.items() if path.parent == run.traces}
    wait_for_files(list(files.values()), WRITE_S, progress)
    places |= {rank: str(path) for rank, path in files.items() if path.is_file()}
    done = [replace(rank, path=places.get(rank.rank)) for rank in found.ranks]
    return replace(found, ranks=tuple(done))


def wait_until(wall_ns: int, before_s: float, progress: Progress) -> None:
    """Waits until so many seconds before a Unix time; not at all where that has passed."""
    left_s = (wall_ns - time.time_ns()) / NS_PER_S - before_s
    if left_s > 0:
        progress(f"waiting {left_s:.0f} s before the ranks are asked")
        time.sleep(left_s)


def _ask_once(
    run: RunPaths, asked: Sequence[Member], options: Mapping[str, Any], *,
    ranks: tuple[int, ...] | None, timeout_s: float | None, lead_s: float, progress: Progress,
) -> tuple[TraceNow, Answers]:  # fmt: skip
    """One request and its answers, before the traces are written."""
    window = next_window(run)  # reads the run: before the ranks say how far they are
    statuses = ask(run, "status", timeout_s=STATUS_S, ranks=ranks).replies.values()
    pace = _pace(statuses)
    length_s = float(options.get("time_s") or 0) or int(options.get("count") or 1) * pace
    wait_s = timeout_s or lead_s + 3 * length_s + 5 * pace + GRACE_S
    ranks_of = "1 rank" if len(asked) == 1 else f"{len(asked)} ranks"
    progress(f"asking {ranks_of} for a trace; waiting up to {wait_s:.0f} s")
    needed = 1 if read_members(run) else len(asked)  # nodes apart could not agree on it themselves
    # A rank alone begins at the next steps: with nobody to agree with it is never too late.
    agreed = not options.get("time_s") and (len(asked) > 1 or ranks is not None)
    # A step that no rank reaches before all have the request; a rank that has recorded for less
    # than a second knows no pace yet.
    steps = [reply.get("job_step") for reply in statuses if reply.get("step_ns")]
    known = [step for step in steps if type(step) is int]
    is_told = agreed and len(known) >= needed
    first = max(known) + round(lead_s / pace) + LEAD_STEPS if is_told else None
    arguments = {
        **options, "window": window, "first": first, "ahead_s": lead_s, "valid_s": wait_s,
    }  # fmt: skip

    answers = ask(
        run, "trace", arguments, timeout_s=wait_s, ranks=ranks,
        progress=lambda done, of: progress(f"{done} of {of} ranks are done") if done else None,
    )  # fmt: skip
    return TraceNow(
        run=str(run.root), window=window,
        ranks=tuple(_rank_trace(member, answers) for member in asked),
        counted_alike=all(reply.get("counts_all", True) is True for reply in statuses),
        notes=find_missing_ranks(run).notes if ranks is None else (),
    ), answers  # fmt: skip


def _pace(statuses: Iterable[Mapping[str, Any]]) -> float:
    """Seconds that a step takes, as the slowest rank says; 1 where none knows."""
    known = [reply.get("step_ns") for reply in statuses]
    return max((ns / 1e9 for ns in known if isinstance(ns, int) and ns > 0), default=1.0)


def next_window(run: RunPaths) -> int:
    """The number of the next trace window of a run."""
    windows = RunFrames(run.root).windows()
    highest = windows["window"].max() if windows.height else None
    return highest + 1 if isinstance(highest, int) else 0


def _rank_trace(member: Member, answers: Answers) -> RankTrace:
    reply = answers.replies.get(member.name, {})
    state, reason = str(reply.get("state")), text(reply.get("reason"))
    if member in answers.silent:
        late = "took the request, and did not reach the steps in time"
        state, reason = "silent", late if state == "accepted" else "no answer"
    steps = reply.get("steps")
    is_pair = isinstance(steps, list) and [*map(type, steps)] == [int, int]
    two = (steps[0], steps[1]) if steps and is_pair else None
    return RankTrace(
        rank=member.rank, host=member.host, state=state, reason=reason, path=None,
        steps=two, stall_ns=integer(reply.get("stall_ns")),
    )  # fmt: skip


def wait_for_files(paths: Sequence[Path], limit_s: float, progress: Progress) -> None:
    """Waits until the traces are compressed, or the time for that is up."""
    limit, told = time.monotonic() + limit_s, False
    while not all(path.is_file() for path in paths) and time.monotonic() <= limit:
        if not told:
            progress("the traces are being compressed")
        told = True
        time.sleep(_POLL_S)


def failures(found: TraceNow) -> Sequence[RankTrace]:
    """Ranks without a trace."""
    return [rank for rank in found.ranks if rank.state != "done"]


DRAIN_S = 2.5
"""Ranks write once a second, agents sample once a second: what happened is in the files then."""
_ANSWER_S = 5.0
_TALK_S = 10.0


def collect(
    run: RunPaths, time_s: float, *, trace: Mapping[str, Any] | None = None,
    trace_timeout_s: float | None = None, progress: Progress = lambda _: None,
) -> tuple[tuple[int, int], TraceNow | None]:  # fmt: skip
    """Waits until the next seconds of a job, or what it still trains of them, are in its files."""
    since, limit, traced = time.time_ns(), time.monotonic() + time_s, None
    progress(f"watching the job for {time_s:g} s")
    if trace is not None:
        traced = trace_now(run, trace, timeout_s=trace_timeout_s, progress=progress)
    wait(lambda: not members(run), limit, progress)
    until = time.time_ns()
    ask(run, "collectives", {"entries": True}, timeout_s=_ANSWER_S)
    time.sleep(DRAIN_S)
    return (since, until), traced


def wait(done: Callable[[], bool], limit_s: float, progress: Progress) -> None:
    """Waits for a condition or a monotonic time; reports the remaining time at intervals."""
    told = time.monotonic()
    while not done() and time.monotonic() < limit_s:
        time.sleep(_POLL_S)
        if time.monotonic() > told + _TALK_S:
            told = time.monotonic()
            progress(f"up to {limit_s - told:.0f} s more")
