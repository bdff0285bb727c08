"""What is installed in the job, as the recorder calls it: one object; by default nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from haiprof.in_job.commands import Handler


def do_nothing() -> None:
    """What there is to do before anything is installed."""


def _never() -> bool:
    return False


def _cost_unknown() -> tuple[float, float]:
    return 0.0, 0.0


def _no_thread() -> int:
    return 0


def _no_lines(last: bool) -> Iterable[dict[str, Any]]:
    return ()


def _no_steps() -> dict[str, Any]:
    return {"step": None, "job_step": None, "counts_all": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The wrappers and the trace windows, as far as the recorder needs them."""

    uninstall: Callable[[], None] = do_nothing
    """Puts the job's own functions back."""
    restart_in_fork: Callable[[], None] = do_nothing
    """In a forked child, which names its own modules and optimizers."""
    calibrate: Callable[[], tuple[float, float]] = _cost_unknown
    """Measures what one event, and one call of a module, cost in ns."""
    steps: Callable[[], Mapping[str, Any]] = _no_steps
    """What is known of the steps now: `step`, `job_step`, `counts_all`."""
    settings_lines: Callable[[bool], Iterable[dict[str, Any]]] = _no_lines
    """Looks at the process's settings, and gives what is to be written of them now; of (last)."""
    training_thread: Callable[[], int] = _no_thread
    """Which thread trains: the one whose spans are taken."""
    works_untrained: Callable[[], bool] = _never
    """Whether steps are what repeats in this process: it has not trained, and will not soon."""
    must_stay: Callable[[], bool] = _never
    """Whether the hooks must stay in after the recording's time: for a trace window."""
    leaves_by_itself: Callable[[], bool] = _never
    """Whether a trace window that runs takes the hooks out, at the job's next span."""
    end_window: Callable[[], None] = do_nothing
    """Ends a trace window before the files are closed."""
    requests: Mapping[str, Handler] = field(default_factory=dict)
    """What answers requests that concern more than the recorder, by kind."""
