"""What is installed in the job, as the recorder calls it: one object; by default nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from haiprof.in_job.commands import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The wrappers and the trace windows, as far as the recorder needs them."""

    uninstall: Callable[[], None] = lambda: None
    """Puts the job's own functions back."""
    restart_in_fork: Callable[[], None] = lambda: None
    """In a forked child, which names its own modules and optimizers."""
    calibrate: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    """Measures what one event, and one call of a module, cost in ns."""
    steps: Callable[[], Mapping[str, Any]] = lambda: {
        "step": None, "job_step": None, "counts_all": False
    }  # fmt: skip
    """What is known of the steps now: `step`, `job_step`, `counts_all`."""
    settings_lines: Callable[[bool], Iterable[dict[str, Any]]] = lambda _last: ()
    """Looks at the process's settings, and gives what is to be written of them now; of (last)."""
    training_thread: Callable[[], int] = lambda: 0
    """Which thread trains: the one whose spans are taken."""
    works_untrained: Callable[[], bool] = lambda: False
    """Whether steps are what repeats in this process: it has not trained, and will not soon."""
    must_stay: Callable[[], bool] = lambda: False
    """Whether the hooks must stay in after the recording's time: for a trace window."""
    leaves_by_itself: Callable[[], bool] = lambda: False
    """Whether a trace window that runs takes the hooks out, at the job's next span."""
    end_window: Callable[[], None] = lambda: None
    """Ends a trace window before the files are closed."""
    requests: Mapping[str, Handler] = field(default_factory=dict)
    """What answers requests that concern more than the recorder, by kind."""
