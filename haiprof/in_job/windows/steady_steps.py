"""Steps that are all alike, followed at a fraction of the price: only what differs is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from haiprof.in_job.windows.step_counter import Snapshot, StepCounter, Tell, batch_count
from haiprof.run_format.schema import BACKWARD, DATA, FORWARD, OPTIMIZER

ALIKE_STEPS = 3  # in a row, before the next one is taken to be the same
LONGEST = 256  # spans of a step that are compared
_SIMPLE = (DATA, FORWARD, BACKWARD, OPTIMIZER)
_NONE = -1  # no kind of a span

End = Callable[[], Any]


class SteadySteps:
    """Stands in for the counter while each step has the spans of the step before, in order."""

    def __init__(
        self, counter: StepCounter, tell: Tell, *, otherwise: Callable[[int, Any], End | None],
        ended: End, failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._counter = counter
        self._boundary = tell
        self._otherwise = otherwise
        self._ended = ended
        self._failed = failed
        self._open = counter.stack
        self._close: End = counter.stack.clear
        self.follows = False  # whether steps are alike at this moment
        self.interrupted = False  # the next span is to be looked at; any thread may say so
        self.asleep_until = 0  # edges of steps before this one interest nobody
        self._step: list[tuple[int, int]] = []
        self._last: Sequence[tuple[int, int]] = ()
        self._alike = 0
        self._seen: list[Snapshot] = []
        self._kinds: tuple[int, ...] = ()
        self._ids: tuple[int, ...] = ()
        self._by_loader = False
        self._batches: int | None = None
        self._place = self._done = self._number = 0

    def edge(self, begins: bool) -> None:
        """The counter saw an edge of a step."""
        step, self._step = self._step, []
        if begins and step and step == self._last:
            self._alike += 1
        else:
            self._alike, self._last, self._seen = 0, step if begins else (), []

    def saw(self, kind: int, target: Any) -> None:
        """The counter has received a span."""
        if len(self._open) != 1 or kind not in _SIMPLE or len(self._step) >= LONGEST:
            self._step, self._last, self._alike = [(_NONE, 0)], (), 0
        self._step.append((kind, id(target)))

    def begins(self, kind: int, target: Any) -> bool:
        """Whether this span is the first of a step from which on this one follows."""
        last = self._last
        if self._alike < ALIKE_STEPS or (kind, id(target)) != last[0] or self._open:
            return False
        by_loader = kind == DATA
        if self._step != (last if by_loader else []):
            return False
        self._seen = [*self._seen[-2:], self._counter.snapshot()]
        if not self._is_settled(by_loader):
            return False
        self._kinds = (*(kind for kind, _ in last), _NONE)
        self._ids = (*(target for _, target in last), 0)
        self._by_loader, self._batches = by_loader, batch_count(target)
        self._place, self._done, self._number = 0, 0, self._counter.count
        self.follows = True
        return True

    def _is_settled(self, by_loader: bool) -> bool:
        """Whether the last steps moved the counter by the same amount each, and one number."""
        kinds = [kind for kind, _ in self._last]
        if len(self._seen) < 3 or kinds[-1] != OPTIMIZER or (DATA in kinds) != by_loader:
            return False
        first, second, third = self._seen
        same_shape = first.shape == second.shape == third.shape
        gain = third.since(second)
        return (
            same_shape and third.is_steady and gain == second.since(first)
            and third.steps == second.steps + 1
        )  # fmt: skip

    def expect_nothing(self) -> None:
        """Whatever span comes next is looked at."""
        self._ids = (_NONE,) * len(self._ids)

    def follow(self, kind: int, target: Any) -> End | None:
        """A span begins; what it returns is called when the span ends."""
        place = self._place
        try:
            if (
                kind != self._kinds[place] or id(target) != self._ids[place]
                or self._open or self.interrupted
                or (not place and self._by_loader and self._ends_loader(target))
            ):  # fmt: skip
                self.leave()
                return self._otherwise(kind, target)
            if not place and self._by_loader:
                self._tell()
            self._open.append(kind)
            self._place = place + 1
        except Exception as error:
            self._failed(error)
            return None
        return self._optimizer_ends if kind == OPTIMIZER else self._close

    def _ends_loader(self, iterator: Any) -> bool:
        """Whether this may be no fetch for a step of the training."""
        if not self._counter.is_grad_enabled():
            return True
        return self._batches is not None and iterator._num_yielded >= self._batches

    def _tell(self) -> None:
        number = self._number + self._done
        if number >= self.asleep_until:
            self._boundary(number, True)

    def _optimizer_ends(self) -> None:
        try:
            if not self.follows:
                self._ended()
                return
            self._close()
            if self._kinds[self._place] == _NONE:
                self._place = 0
                self._done += 1
                if not self._by_loader:
                    self._tell()
        except Exception as error:
            self._failed(error)

    def leave(self) -> None:
        """Brings the counter up to date; it counts again."""
        # Such a step moves the counter by the same amount each time, so that many of them are one
        # addition. It is made, and the counter told the spans of the step under way, as soon as
        # something else comes. Steps are taken whose spans hold no others; what ends a loader is
        # not.
        if not self.follows:
            return
        self.follows = False
        last, place, under_way = self._last, self._place, list(self._open)
        gain = self._seen[2].since(self._seen[1])
        self._step, self._last, self._alike, self._seen = list(last[:place]), (), 0, []
        self._kinds, self._ids, self._place = (_NONE,), (0,), 0  # should `follow` still be called
        self._counter.advance(gain, self._done)
        for number, (kind, target) in enumerate(last[:place], start=1):
            self._counter.repeat(kind, target, ended=number < place or not under_way)
