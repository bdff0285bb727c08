"""Counts what repeats in a process that has not trained, and the job's own calls of step()."""

from __future__ import annotations

from collections.abc import Callable

from haiprof.in_job.windows.step_cycles import Cycles

LOADER_CUTS = 2  # as run_analysis.steps
MIN_REPEATS = 2  # as run_analysis.steps
SURE_STEPS = 3
SURE_CALLS = 512  # root calls after a fetch: the loader is used no more
NOTHING, FETCHES, CALLS, COLLECTIVES = range(4)


class Repeats:
    """Steps of a process, as `run_analysis.steps` counts them afterwards.

    It receives outermost calls only, and only until an optimizer steps: after that the job's
    steps are those of its training, and only calls of `haiprof.step()` come before them.
    """

    def __init__(self) -> None:
        self.listener: Callable[[int], None] | None = None
        """Told on the training thread of the number of the step that begins."""
        self.marks = 0
        """Calls of `haiprof.step()`."""
        self.trained = False
        """Whether there was a backward pass or an optimizer step."""
        self.backwards = 0
        """Backward passes before the first optimizer step."""
        self._calls = Cycles()
        self._collectives = Cycles()
        self._batches = self._segments = self._cuts = 0
        self._called_since = self._fetched_since = False
        self._fresh = True  # no root call since the last cut

    @property
    def count(self) -> int:
        """Steps so far, the running one included; 0 in a process that trains and marks none."""
        if self.marks or self.trained:
            return self.marks
        return self._source[1]

    @property
    def settled(self) -> bool:
        """Whether it is clear what repeats: what comes later does not change the count."""
        if self.marks:
            return True
        if self.trained or self.count < SURE_STEPS:
            return False
        by_loader = self._source[0] == FETCHES
        return by_loader or not self._batches or self._calls.total > SURE_CALLS

    @property
    def _source(self) -> tuple[int, int]:
        """What repeats, and how many steps that makes."""
        called = self._calls.total
        cut = self._cuts >= LOADER_CUTS or not called
        batches = (self._segments if called else self._batches) if cut else 0
        counts = ((FETCHES, batches), (CALLS, called), (COLLECTIVES, self._collectives.total))
        return next((pair for pair in counts if pair[1] >= MIN_REPEATS), (NOTHING, 0))

    def mark(self) -> None:
        """`haiprof.step()`: a step has ended."""
        self.marks += 1
        self._tell()

    def fetch(self) -> None:
        """A loader is asked: for a batch, or to begin."""
        called, self._called_since = self._called_since, False
        fetched, self._fetched_since = self._fetched_since, False
        if called:
            self._cuts += 1
            self._fresh = True
        if called if self._calls.total else fetched:
            self._tell_repeated(FETCHES)

    def batch(self) -> None:
        """The loader gave one."""
        self._batches += 1
        self._fetched_since = True

    def call(self, tag: int) -> None:
        """A root module's call is over."""
        self._called_since = True
        self._segments += self._fresh
        self._fresh = False
        if self._calls.close(tag, holds_work=False):
            self._tell_repeated(CALLS)

    def collective(self, tag: int) -> None:
        """A call of torch.distributed is over."""
        if self._collectives.close(tag, holds_work=False):
            self._tell_repeated(COLLECTIVES)

    def _tell_repeated(self, by: int) -> None:
        if not self.marks and not self.trained and self._source[0] == by:
            self._tell()

    def _tell(self) -> None:
        if self.listener is not None:
            self.listener(self.count)
