"""Counts training steps by the optimizer steps that close them, while the job runs."""

from __future__ import annotations

MIN_SEGMENTS = 4  # as run_analysis.step_tokens: from here on, regular segments are one step each
REGULAR_RATIO = 0.8


class Cycles:
    """The steps so far.

    A segment is what lies between two cuts: a batch after an optimizer step. A run of closing
    tokens without work between them opens a step when one of its optimizers has stepped in the
    step before, or when its segment is new.
    """

    def __init__(self) -> None:
        self.total = 0
        """Steps by that rule alone."""
        self.pattern: tuple[int, ...] | None = None
        """The optimizers of the last whole step, in order."""
        self.expected = 0
        """The optimizer that a scaler that skipped would have stepped."""
        self.open_work = False
        """Whether there was forward or backward since the last closing token."""
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
        fresh, self._fresh = self._fresh, False
        new_run = fresh or holds_work or self.open_work or not self._any_work
        if new_run:
            self._before |= self._run
            self._run, self._run_heads = set(), False
        if not self._run_heads and (fresh or not self.total or tag in self._before):
            self._open_step()
        self._run.add(tag)
        self._closings.append(tag)
        self._followers[self._last] = tag
        self._last, self.expected = tag, self._followers.get(tag, tag)
        self.open_work = False
        self._any_work |= holds_work
        return tuple(self._closings) == self.pattern

    def _open_step(self) -> None:
        self._run_heads = True
        self._before = set()
        if self.total:
            self.pattern = tuple(self._closings)
        self._closings = []
        self.total += 1
        self._in_segment += 1
