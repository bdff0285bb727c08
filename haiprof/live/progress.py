"""Progress of running jobs: steps, their time and split, ranks that have reported in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from haiprof.base.errors import HaiprofError
from haiprof.live.find import RunningJob
from haiprof.live.follow import JobNow, LiveJob


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """One running job, as a list shows it."""

    id: str
    name: str
    path: str
    host: str
    pid: int
    start_wall_ns: int
    elapsed_ns: int
    world_size: int | None
    """From the ranks' reports; None until one has reported in."""
    ranks: int
    """Ranks that have reported in."""
    hosts: tuple[str, ...]
    """Their hosts."""
    step: int | None
    """Last whole step of the rank that is farthest; None before the first."""
    step_ns: float | None
    """Median of the last steps; the median rank's."""
    split: dict[str, float | None]
    """Mean share of each phase in those steps; None where a phase was never seen."""
    idle_ns: int | None
    """Since the last whole step ended on the rank that is farthest."""
    cpu_cores: float | None
    """Latest, ranks together."""
    gpu_ratio: float | None
    """Latest, mean over GPUs."""
    recording: bool
    stopped: tuple[int, ...]
    """Ranks that a signal has stopped, as far as this node can tell."""
    suspended: bool
    """Whether those are all of them."""
    verdict: str | None
    """The verdict so far in one line; None if not requested, or before the first."""
    problem: str | None
    """Why something of it cannot be read."""


def job_progress(job: RunningJob, *, verdict: str | None = None) -> JobProgress:
    """Reads how far a job is from the ends of its files; what cannot be read is None."""
    live, problem = LiveJob(job), None
    try:
        now = live.look()
    except HaiprofError as error:
        now, problem = live.nothing(), str(error)
    return JobProgress(
        **{name: getattr(now, name) for name in ("id", "name", "path", "host", "pid")},
        **{name: getattr(now, name) for name in ("elapsed_ns", "world_size")},
        **{name: getattr(now, name) for name in ("step", "step_ns", "split")},
        **{name: getattr(now, name) for name in ("stopped", "suspended")},
        **_of_ranks(now),
        start_wall_ns=job.manifest.start_wall_ns,
        verdict=verdict,
        problem=problem,
    )


def _of_ranks(now: JobNow) -> dict[str, Any]:
    stepped = [rank for rank in now.ranks if rank.step is not None]
    farthest = max(stepped, key=lambda rank: rank.step or 0, default=None)
    cores = [r.counters["cpu_cores"] for r in now.ranks if "cpu_cores" in r.counters]
    gpus = [r.counters["utilization_ratio"] for r in now.ranks if "utilization_ratio" in r.counters]
    return {
        "ranks": sum(rank.pid is not None for rank in now.ranks),
        "hosts": tuple(sorted({rank.host for rank in now.ranks if rank.host is not None})),
        "idle_ns": None if farthest is None else farthest.idle_ns,
        "cpu_cores": sum(cores) if cores else None,
        "gpu_ratio": sum(gpus) / len(gpus) if gpus else None,
        "recording": any(rank.recording and rank.pid is not None for rank in now.ranks),
    }
