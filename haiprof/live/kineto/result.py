"""The result of a trace request through Kineto, process by process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STEP_SHARE = 0.5
"""Ranks are at the same step if their optimizers' first steps ended within half a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTrace:
    """The result of the request for one process."""

    rank: int | None
    host: str
    pid: int
    state: str
    """`done`, `silent` or `failed`."""
    reason: str | None = None
    """Why there is no trace."""
    path: str | None = None
    steps: tuple[int, int] | None = None
    """First step and the one after the last, where haiprof recorded the steps beside it."""
    steps_reason: str | None = None
    """Why the steps are not known."""
    optimizer_step_count: int | None = None
    """Optimizer steps in the trace."""
    start_wall_ns: int | None = None
    end_wall_ns: int | None = None
    first_optimizer_wall_ns: int | None = None
    """End of the first optimizer step in it."""
    step_ns: int | None = None
    """Usual time from the end of one optimizer step to the next; None with fewer than two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTraces:
    """The result of a request."""

    folder: str
    """Where the traces are."""
    backend: str
    """`kineto` or `dynolog`."""
    processes: tuple[ProcessTrace, ...]

    @property
    def done(self) -> tuple[ProcessTrace, ...]:
        """Processes with a trace."""
        return tuple(each for each in self.processes if each.state == "done")

    @property
    def aligned(self) -> bool | None:
        """Whether all of them recorded the same steps; None if not known.

        By the steps' numbers where they are known; else by when the first optimizer step in each
        trace ended, since ranks of one job step together.
        """
        numbers = {each.steps for each in self.done}
        if len(self.done) < 2:
            return True if self.done else None
        if None not in numbers:
            return len(numbers) == 1
        firsts = [each.first_optimizer_wall_ns for each in self.done]
        known = [first for first in firsts if first is not None]
        steps = [each.step_ns for each in self.done if each.step_ns is not None]
        if len(known) < len(firsts) or not steps:
            return None
        counts = {each.optimizer_step_count for each in self.done}
        return len(counts) == 1 and max(known) - min(known) < STEP_SHARE * max(steps)

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "folder": self.folder,
            "backend": self.backend,
            "aligned": self.aligned,
            "processes": [asdict(each) for each in self.processes],
        }
