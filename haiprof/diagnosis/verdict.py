"""The verdict: what a run was found to be, with all that a card or a script needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from haiprof.base.ledger import Ledger
from haiprof.diagnosis.finding import Finding
from haiprof.diagnosis.step_work import StepWork
from haiprof.run_analysis.before_death import GpuMemoryAtEnd, MemoryAtEnd
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.restarts import Goodput, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Interruptions of one kind, over all ranks."""

    count: int
    total_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What haiprof itself took, measured in this run."""

    hook_ns_per_step: float | None
    """Inside the job, the costliest rank; None where no cost was recorded."""
    hook_ratio: float | None
    """The same as a share of the recorded time."""
    agent_cpu_ratio: float | None
    """CPU time of the node agent per elapsed time, the busiest node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in one run."""

    run: str
    """The run directory."""
    name: str
    """The job's name."""
    headline: str
    """One line: the first problem, that nothing stands out, or that there is nothing to judge."""
    split: Mapping[str, float | None]
    """Host time in ns per phase of the mean step; None where a phase is not measured."""
    step_ns: float | None
    """The mean step after warm-up, with what is paid between steps: the sum of `split`."""
    work: StepWork | None
    """FLOPs and MFU of the mean step; None where no window was traced with shapes."""
    step_count: int
    """Steps of all ranks, of the last attempt of each."""
    ranks: tuple[int, ...]
    """Ranks that have steps."""
    findings: tuple[Finding, ...]
    """A hang first, then opportunities by their gain, then facts."""
    abstained: tuple[tuple[str, str], ...]
    """(rule, why it could not be judged)."""
    not_measured: tuple[tuple[str, str], ...]
    """(what, why)."""
    evaluation_ns: int | None
    """Time in evaluations without compiling, the rank with the most; None where none is known."""
    compile_ns: int | None
    """Time in which torch.compile worked, the rank with the most; None where none tells."""
    events: Mapping[str, Events]
    """`gc` and `save`, where there were any."""
    cost: Cost
    next_command: str
    """What to run next."""
    notes: tuple[str, ...]
    """What was damaged or left out while reading."""
    ledger: Ledger | None = None
    """The accounts of the mean step; None without judged steps."""
    run_time: Mapping[str, int] = field(default_factory=dict)
    """The run's wall time in ns by what passed, from start to end; empty where it has no end."""
    most_steps: int = 0
    """Steps of the rank that has most, in all its attempts, as `haiprof list` shows them."""
    end_wall_ns: int | None = None
    """Unix time of the job's end; None where it still ran, or its end was not noted."""
    death: Death | None = None
    """Why the job died; None where it has not."""
    memory_at_end: tuple[MemoryAtEnd, ...] = ()
    """Memory of the ranks that the death began with, where it may be the reason."""
    gpu_memory_at_end: tuple[GpuMemoryAtEnd, ...] = ()
    """GPU memory of the same ranks, where it ran out."""
    starts: tuple[Start, ...] = ()
    """Each start of the job's ranks, and why it ended; empty where the only one did not die."""
    goodput: Goodput | None = None
    """The share of the run's wall time in steps that counted."""
    checked: tuple[str, ...] = ()
    """Rules beside the ledger that had their data and found nothing."""
    traces: tuple[str, ...] = ()
    """What was traced, and why the rest was not; empty where no trace was asked for."""
    reactions: tuple[str, ...] = ()
    """What haiprof noticed while the job ran, and did by itself."""
