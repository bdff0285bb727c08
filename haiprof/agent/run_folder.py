"""Has a long run's old records folded once an hour, by one child process at a time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from haiprof.agent.trace_finisher import end_child, start_child
from haiprof.base.messages import print_message
from haiprof.base.version import PACKAGE
from haiprof.run_format.layout import RunPaths

EVERY_S = 3600.0
_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
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
        self._in_child, self._clock = in_child, clock
        detail_s = detail_h * 3600.0
        self._every_s = min(EVERY_S, detail_s)
        self._due_s = clock() + detail_s + self._every_s
        self._child: subprocess.Popen[bytes] | None = None

    def tick(self) -> None:
        """Starts a child when it is due, and none runs."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        if self._child is not None or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._every_s
        try:
            self._child = start_child(_PROGRAM, self._words, self._in_child)
        except (OSError, subprocess.SubprocessError) as error:
            print_message(f"cannot fold old records of {self._words[0]}: {error}; they are kept")

    def close(self) -> None:
        """Ends a child that still works, at the end of the job."""
        child, self._child = self._child, None
        if child is not None and child.poll() is None:
            end_child(child)
