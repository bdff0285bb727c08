"""Counts steps while the job runs: by what closes them; without training, by what repeats."""

from __future__ import annotations

from collections.abc import Callable

MIN_SEGMENTS = 4  # as run_analysis.steps: from here on, regular segments are one step each
REGULAR_RATIO = 0.8
LOADER_CUTS = 2  # as run_analysis.steps
MIN_REPEATS = 2  # as run_analysis.steps
SURE_STEPS = 3
SURE_CALLS = 512  # root calls after a fetch: the loader is used no more
NOTHING, FETCHES, CALLS, COLLECTIVES = range(4)


class Cycles:
    """Training steps so far, by the optimizer steps that close them."""

    def __init__(self) -> None:
        self.total = 0  # steps by that rule alone
        self.pattern: tuple[int, ...] | None = None  # the last whole step's optimizers, in order
        self.expected = 0  # the optimizer that a scaler that skipped would have stepped
        self.open_work = False  # whether there was forward or backward since the last closing token
        self._cuts = 0
        self._fresh = True  # the segment has no closing token yet
        self._in_segment = 0
        self._sizes: dict[int, int] = {}
        self._full = 0
        self._regular = True  # until enough segments are seen, an inner loop is taken for one
        self._any_work = False
        self._before: set[int] = set()
        self._run: set[int] = set()
        self._run_heads = False
        self._closings: list[int] = []
        self._followers: dict[int, int] = {}
        self._last = 0

    @property
    def count(self) -> int:
        """Steps so far: segments where these are regular (an inner loop), else by the rule."""
        if self._cuts and self._regular:
            return self._full + (self._in_segment > 0)
        return self.total

    @property
    def numbers(self) -> tuple[int, int, int]:
        """What grows from step to step."""
        return self.total, self._cuts, self._full

    @property
    def is_steady(self) -> bool:
        """Whether more steps like the last one change none of the rules above."""
        usual = max(self._sizes.values(), default=0)
        settled = self._full >= MIN_SEGMENTS and self._sizes.get(self._in_segment, 0) == usual
        return not self._cuts or (settled and self._regular)

    def shape(self) -> tuple[object, ...]:
        """Everything else that is known."""
        return (
            self.pattern, self.expected, self.open_work, self._fresh, self._in_segment,
            self._regular, self._any_work, frozenset(self._before), frozenset(self._run),
            self._run_heads, tuple(self._closings), tuple(self._followers.items()), self._last,
        )  # fmt: skip

    def advance(self, gain: tuple[int, ...], steps: int) -> None:
        """So many steps more, each of which made `numbers` grow by so much."""
        self.total += gain[0] * steps
        self._cuts += gain[1] * steps
        self._full += gain[2] * steps
        if gain[2]:
            self._sizes[self._in_segment] = self._sizes.get(self._in_segment, 0) + gain[2] * steps

    def work(self) -> None:
        """Forward or backward of the training."""
        self.open_work = self._any_work = True

    def cut(self) -> None:
        """A new segment begins."""
        if self._in_segment:
            self._sizes[self._in_segment] = self._sizes.get(self._in_segment, 0) + 1
            self._full += 1
            usual = max(self._sizes.values())
            self._regular = self._full < MIN_SEGMENTS or usual >= REGULAR_RATIO * self._full
        self._cuts += 1
        self._in_segment = 0
        self._fresh = True

    def close(self, tag: int, *, holds_work: bool) -> bool:
        """An optimizer stepped; whether the step is now as long as the last whole one."""
        # A segment is what lies between two cuts: a batch after an optimizer step. A run of closing
        # tokens without work between them opens a step when one of its optimizers has stepped in
        # the step before, or when its segment is new.
        fresh, self._fresh = self._fresh, False
        new_run = fresh or holds_work or self.open_work or not self._any_work
        if new_run:
            self._before |= self._run
            self._run, self._run_heads = set(), False
        if not self._run_heads and (fresh or not self.total or tag in self._before):
            self._run_heads = True
            self._before = set()
            if self.total:
                self.pattern = tuple(self._closings)
            self._closings = []
            self.total += 1
            self._in_segment += 1
        self._run.add(tag)
        self._closings.append(tag)
        self._followers[self._last] = tag
        self._last, self.expected = tag, self._followers.get(tag, tag)
        self.open_work = False
        self._any_work |= holds_work
        return tuple(self._closings) == self.pattern


class Repeats:
    """Steps of a process that has not trained, and the job's own calls of step().

    They are counted as `run_analysis.steps` counts them afterwards. This receives outermost calls
    only, and only until an optimizer steps: after that the job's steps are those of its training,
    and only calls of `haiprof.step()` come before them.
    """

    def __init__(self) -> None:
        self.listener: Callable[[int], None] | None = None  # told of the step that begins
        self.marks = 0  # calls of `haiprof.step()`
        self.trained = False  # whether there was a backward pass or an optimizer step
        self.backwards = 0  # backward passes before the first optimizer step
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
