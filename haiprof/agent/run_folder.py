"""Has a long run's old records folded once an hour, by one child process at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from haiprof.agent.trace_finisher import Helper
from haiprof.run_format.layout import RunPaths

EVERY_S = 3600.0
_PROGRAM = (
    "from haiprof.agent.finish_traces import step_back; step_back(); "
    "from haiprof.run_analysis.folding import main; main(sys.argv[1:])"
)


class RunFolder:
    """Folds what one host's ranks and samplers have written, while the job runs.

    The child has the lowest priority, and is what the kernel ends first where memory runs out: what
    it had not put in place by then is folded an hour later.
    """

    def __init__(
        self,
        run: RunPaths,
        host: str,
        detail_h: float,
        *,
        in_child: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words = (str(run.root), host, str(detail_h))
        self._clock = clock
        task = f"fold old records of {run.root}"
        self._helper = Helper(_PROGRAM, in_child, task=task, otherwise="they are kept")
        detail_s = detail_h * 3600.0
        self._every_s = min(EVERY_S, detail_s)
        self._due_s = clock() + detail_s + self._every_s

    def tick(self) -> None:
        """Starts a child when it is due, and none runs."""
        if not self._helper.is_working() and self._clock() >= self._due_s:
            self._due_s = self._clock() + self._every_s
            self._helper.start(self._words)

    def close(self) -> None:
        """Ends a child that still works, at the end of the job."""
        self._helper.end()
