"""The number of the training step while it runs, as run_analysis/steps.py counts afterwards.

Steps that are all alike are followed at a fraction of the price: only what differs is looked at.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from haiprof.in_job.repeats import Cycles
from haiprof.run_format.schema import (
    BACKWARD,
    DATA,
    DATA_ITER,
    FORWARD,
    FORWARD_EVAL,
    OPTIMIZER,
    SCALER,
)

# Without any optimizer step, backward passes are the steps; so many of them make that sure.
SURE_BACKWARDS = 32
SURE_BACKWARDS_COMPILED = 8  # where torch.compile has compiled something
SURE_WITHOUT_FETCH = 16  # optimizer steps without a batch: the loader is used no more

_LOADER = (DATA, DATA_ITER)

_now = time.perf_counter_ns


Tell = Callable[[int, bool], None]
"""Receives the edges of steps, on the training thread: the number of the next step, and whether it
begins now."""


class Snapshot(NamedTuple):
    """What a counter knows between two steps."""

    steps: int  # `StepCounter.count`
    numbers: tuple[int, ...]  # what grows from step to step
    shape: tuple[object, ...]  # all else: the same after each of several steps that are alike
    is_steady: bool  # whether it stays the same through any number of such steps

    def since(self, earlier: Snapshot) -> tuple[int, ...]:
        """How much the numbers have grown."""
        return tuple(now - then for now, then in zip(self.numbers, earlier.numbers, strict=True))


class StepCounter:
    """Follows the spans of the training thread as they begin and end.

    The rules are those of `run_analysis.steps`; what those know of the whole run is known here of
    the past alone. With a loader a step begins with the first fetch after an optimizer step, else
    behind the optimizer that ended the step before. A fetch for an evaluation begins no step: its
    loader has served no training, and the model has left the mode in which it trains.
    """

    def __init__(
        self, tell: Tell, is_grad_enabled: Callable[[], bool], *, sure: bool = False
    ) -> None:
        self._tell = tell
        self.is_grad_enabled = is_grad_enabled
        self._sure = sure
        self._by_optimizer = Cycles()
        self._by_backward: Cycles | None = Cycles()
        self.stack: list[int] = []  # kinds of the spans that are open
        self._inner_work = False
        self._inner_tag: int | None = None
        self._optimizer_tag = 0
        self._held_steps = self._open = self._fetched = False
        self._since_fetch = 0
        self._exhausted = self._closed = False
        self._dataset = 0
        self._training_datasets: set[int] = set()
        self._module: Any = None
        self._module_mode = True
        self.trained_ns: int | None = None  # when the first backward pass or optimizer step began
        self.ends: dict[int, Callable[[], None]] = {
            OPTIMIZER: self._optimizer_ends, SCALER: self._scaler_ends,
            BACKWARD: self._backward_ends,
        }  # fmt: skip

    @property
    def count(self) -> int:
        """Steps that have had an optimizer step, the running one included."""
        return self._cycles().count

    def begin(self, kind: int, target: Any) -> None:
        """A span begins; `ends[kind]`, or else `pop`, must be called when it ends."""
        if self.trained_ns is None and kind in (BACKWARD, OPTIMIZER):
            self.trained_ns = _now()
        if self.stack:
            self._begin_inner(kind, target)
        elif kind in _LOADER:
            self._fetch(kind, target)
        elif kind in (FORWARD, FORWARD_EVAL, BACKWARD):
            self._work(kind, target)
        if kind == OPTIMIZER:
            self._optimizer_tag = id(target)
        self.stack.append(kind)

    def saw_end_of_step(self, after_last: int) -> bool:
        """Whether the step before `after_last` has had its last optimizer step, as far as known."""
        cycles = self._cycles()
        return self._closed and cycles.count >= after_last and not cycles.open_work

    def snapshot(self) -> Snapshot:
        """What is known at this moment, between two spans."""
        cycles = self._by_optimizer
        shape = (
            self._held_steps, self._open, self._fetched, self._exhausted, self._closed,
            self._dataset, len(self._training_datasets), self._module, self._module_mode,
            self._inner_work, self._inner_tag, self._optimizer_tag, cycles.shape(),
        )  # fmt: skip
        by_optimizer = self._by_backward is None and cycles.pattern is not None
        is_steady = by_optimizer and not self.stack and cycles.is_steady
        return Snapshot(cycles.count, cycles.numbers, shape, is_steady)

    def advance(self, gain: tuple[int, ...], steps: int) -> None:
        """So many steps were like the last ones, each of which made the numbers grow by so much."""
        self._by_optimizer.advance(gain, steps)

    def repeat(self, kind: int, target: int, *, ended: bool) -> None:
        """A span of such a step, whose edges are known."""
        tell, self._tell = self._tell, lambda *_: None
        try:
            if kind == DATA:
                self._fetch_for_training()
            elif kind != OPTIMIZER:
                self._work(BACKWARD, None)  # of the module that is known
            else:
                self._optimizer_tag = target
                if ended:
                    self._closing(self._by_optimizer, target)
        finally:
            self._tell = tell

    def _begin_inner(self, kind: int, target: Any) -> None:
        if kind == OPTIMIZER and self.stack[-1] == OPTIMIZER:
            self.stack.pop()  # it steps another one inside, or the last one raised
            if not self.stack:
                return
        if kind in _LOADER and OPTIMIZER in self.stack:
            self.stack.clear()  # an optimizer that raised has no end
            self._fetch(kind, target)
            return
        if kind in (FORWARD, FORWARD_EVAL, BACKWARD):
            self._inner_work = True
        elif kind == OPTIMIZER:
            self._inner_tag = id(target)

    def pop(self) -> None:
        """A span ends that nothing follows from."""
        if self.stack:
            self.stack.pop()

    def _pop_to(self, kind: int) -> bool:
        """Ends the innermost span of a kind; whether it was outermost."""
        while self.stack and self.stack.pop() != kind:
            pass  # what was inside and has no end of its own: an optimizer that raised
        return not self.stack

    def _fetch(self, kind: int, target: Any) -> None:
        dataset = id(getattr(target, "dataset" if kind == DATA_ITER else "_dataset", None))
        count = batch_count(target) if kind == DATA and self._closed else None
        exhausted = count is not None and target._num_yielded >= count
        if exhausted and dataset == self._dataset:
            self._exhausted = True
        if exhausted or self._for_evaluation(dataset):
            if self._closed and self._open:
                self._open = False
                self._tell(self._cycles().count, False)
            return
        self._dataset = dataset
        self._fetch_for_training()

    def _fetch_for_training(self) -> None:
        self._exhausted = False
        if self._closed:
            self._cut()
        self._fetched, self._since_fetch = True, 0
        self._begin_step()

    def _for_evaluation(self, dataset: int) -> bool:
        if not self.is_grad_enabled():
            return True
        if dataset in self._training_datasets or self._module is None:
            return False
        module = self._module()
        return module is not None and bool(module.training) != self._module_mode

    def _work(self, kind: int, target: Any) -> None:
        if kind == FORWARD_EVAL and (self._module is None or self._module_mode):
            return  # it may be an evaluation; the backward will tell
        if self._closed and self._exhausted:
            self._cut()  # the last batch had been fetched ahead of the loader's end
        elif self._closed and not self._fetched and self._cycles().pattern is None:
            self._open = False
        self._exhausted = False
        self._training_datasets.add(self._dataset)
        if kind != BACKWARD:
            self._module, self._module_mode = weakref.ref(target), bool(target.training)
            if self._by_backward is not None:
                self._by_backward.work()
        self._by_optimizer.work()
        self._begin_step()

    def _begin_step(self) -> None:
        if not self._open:
            self._open = True
            self._tell(self._cycles().count, True)

    def _cut(self) -> None:
        self._closed = self._open = False
        self._by_optimizer.cut()
        if self._by_backward is not None:
            self._by_backward.cut()

    def _optimizer_ends(self) -> None:
        if self._pop_to(OPTIMIZER):
            self._closing(self._by_optimizer, self._optimizer_tag)

    def _scaler_ends(self) -> None:
        if self._pop_to(SCALER):
            tag = self._inner_tag
            self._closing(self._by_optimizer, self._by_optimizer.expected if tag is None else tag)

    def _backward_ends(self) -> None:
        outermost, cycles = self._pop_to(BACKWARD), self._by_backward
        if not outermost or cycles is None:
            return
        held = self._inner_tag is not None
        if held and not self._held_steps:
            self._held_steps = True
            self._by_backward = cycles = Cycles()  # only those that hold the optimizer count
        if held or not self._held_steps:
            self._closing(cycles, 0)
        else:
            self._inner_tag, self._inner_work = None, False

    def _closing(self, cycles: Cycles, tag: int) -> None:
        if cycles is self._by_optimizer:
            self._by_backward = None
        complete = cycles.close(tag, holds_work=self._inner_work and cycles is self._by_optimizer)
        self._inner_tag, self._inner_work = None, False
        if cycles is not self._cycles():
            return
        self._closed = True
        self._since_fetch += 1
        if complete and (not self._fetched or self._since_fetch > SURE_WITHOUT_FETCH):
            self._fetched = False
            self._open = True
            self._tell(cycles.count, True)

    def _cycles(self) -> Cycles:
        cycles = self._by_backward
        if cycles is None or not cycles.total:
            return self._by_optimizer
        utils = sys.modules.get("torch._dynamo.utils")
        is_compiled = utils is not None and utils.counters["frames"]["ok"] > 0
        enough = SURE_BACKWARDS_COMPILED if is_compiled else SURE_BACKWARDS
        sure = self._sure or self._held_steps or cycles.total >= enough
        return cycles if sure else self._by_optimizer


def batch_count(iterator: Any) -> int | None:
    """How many batches a loader's iterator gives; None where that is not known."""
    try:
        count: int = iterator._num_yielded * 0 + len(iterator._index_sampler)
    except Exception:  # no loader, one of its own kind, or one without a length
        return None
    return count


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
