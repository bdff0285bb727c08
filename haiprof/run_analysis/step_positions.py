"""Where in its step a training thread was at each moment, by the order of its spans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.intervals import Bools, Intervals, Ints, union
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.nesting import Spans
from haiprof.run_analysis.steps import EVAL_LOADER_PHASE, EVAL_PHASE, PHASES, Segmentation
from haiprof.run_format import schema

(
    INPUT, PREPARE, FORWARD, LOSS, BACKWARD, GRADIENTS, OPTIMIZER, AFTER_STEP, EVALUATION,
    CHECKPOINT, COMPILE, BETWEEN_STEPS,
) = range(len(POSITIONS))  # fmt: skip
_OF_PHASE = np.array([INPUT, FORWARD, BACKWARD, OPTIMIZER, -1])
_INPUT, _FORWARD, _BACKWARD, _OPTIMIZER, _NONE = range(len(PHASES) + 1)


def _gap_table() -> Ints:
    """[span before, span after] of a gap in a step: its position."""
    table = np.full((5, 5), AFTER_STEP)
    table[:, _FORWARD] = PREPARE
    table[:, _BACKWARD] = LOSS
    table[_INPUT, [_FORWARD, _BACKWARD]] = PREPARE
    table[_NONE, _FORWARD] = BETWEEN_STEPS  # no loader: what follows a step, or makes a batch
    table[_FORWARD, [_FORWARD, _OPTIMIZER, _NONE, _INPUT]] = LOSS
    table[:, _OPTIMIZER] = GRADIENTS
    table[_BACKWARD, [_BACKWARD, _INPUT]] = GRADIENTS  # between micro-batches
    return table


_GAPS = _gap_table()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPositions:
    """The time from the first step's begin to the last one's end, cut where something changes.

    A step's period is the time from its begin to the next one's: evaluations, checkpoints and all
    else that lies between two steps belong to the period of the first.
    """

    start_ns: Ints
    """Begin of each interval, ascending, on the clock of the spans; it ends where the next one
    begins, the last one at `end_ns`."""
    end_ns: int
    position: Ints  # index into POSITIONS
    around_closure: Bools  # whether it is an optimizer's time, outside of the spans of its closure
    collecting: Bools  # whether the garbage collector had stopped the thread
    period: Ints  # the step in whose period it lies; from 0, or under the numbers of the whole run
    step_count: int

    def at(self, time_ns: Ints) -> Ints:
        """The interval that holds each moment; -1 outside of all steps."""
        place = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        return np.where(time_ns < self.end_ns, place, -1)

    def between(self, time_ns: Ints, kind: Ints, count: int) -> Ints:
        """[kind, gap]: how long each kind of interval was between one moment and the next."""
        length = np.diff(self.start_ns, append=self.end_ns)
        place = np.clip(self.at(time_ns), 0, None)
        passed = np.clip(time_ns - self.start_ns[place], 0, length[place])
        found = np.zeros((count, max(len(time_ns) - 1, 0)), dtype=np.int64)
        for number in np.flatnonzero(np.bincount(kind)).tolist():
            own = kind == number
            before = np.cumsum(np.where(own, length, 0))[place] - own[place] * length[place]
            found[number] = np.diff(before + own[place] * passed)
        return found

    def sums(self) -> tuple[Ints, Ints]:
        """[position, step]: nanoseconds of each period without collections, and in these."""
        length = np.diff(self.start_ns, append=self.end_ns)
        count = len(POSITIONS)
        cell = (self.collecting * count + self.position) * self.step_count + self.period
        # Sums stay below 2**53 ns, 104 days: exact as floating-point numbers.
        sums = np.bincount(cell, length, minlength=2 * count * self.step_count)
        plain, collected = sums.astype(np.int64).reshape(2, count, self.step_count)
        return plain, collected


def step_positions(
    found: Segmentation, events: Spans, compiled: Intervals | None = None
) -> StepPositions:
    """Cuts a rank's time into positions; `compiled`: when torch.compile worked, where known."""
    steps, nested = found.steps, found.nested
    spans = nested.spans
    count = len(steps.start_ns)
    first, end = (int(steps.start_ns[0]), int(steps.end_ns[-1])) if count else (0, 0)
    saves, pauses = (events.take(events.kind == kind) for kind in (schema.SAVE, schema.GC))
    parts = [
        spans.start_ns, spans.end_ns, steps.start_ns, steps.end_ns, *found.evaluations,
        saves.start_ns, saves.end_ns, pauses.start_ns, pauses.end_ns, *(compiled or ()),
    ]  # fmt: skip
    edges = np.sort(np.concatenate(parts), kind="stable")  # runs; np.unique is 50 times slower
    edges = edges[np.append(True, edges[1:] > edges[:-1])[: len(edges)]]
    start = edges[(edges >= first) & (edges < end)]
    period = np.searchsorted(steps.start_ns, start, side="right") - 1
    row = _innermost(found, start)
    phase = np.append(found.phase.astype(np.int64), _NONE)[row]
    evaluated = (phase == EVAL_PHASE) | (phase == EVAL_LOADER_PHASE)
    evaluated |= is_inside(*found.evaluations, start)
    major = np.where((phase < len(PHASES)) & ~evaluated, phase, _NONE)
    in_step = start < steps.end_ns[period]
    evaluated |= _only_looks(major, period, count)
    major = np.where(evaluated, _NONE, major)
    around, searched = _around_closures(found, row, major)
    major = np.where(around & ~searched, _NONE, major)  # it has the position that its code gives it
    # Positions of what lies between spans, by the spans before and after it in the same step.
    before, after = _neighbours((major < _NONE) & in_step)
    kinds, periods = np.append(major, _NONE), np.append(period, -1)
    of_before = np.where(periods[before] == period, kinds[before], _NONE)
    of_after = np.where(periods[after] == period, kinds[after], _NONE)
    position = np.where(major < _NONE, _OF_PHASE[major], _GAPS[of_before, of_after])
    position = np.where(in_step, position, BETWEEN_STEPS)
    position = np.where(is_inside(*union(*saves.times), start), CHECKPOINT, position)
    position = np.where(evaluated, EVALUATION, position)
    if compiled is not None:
        position = np.where(is_inside(*compiled, start), COMPILE, position)
    return StepPositions(
        start_ns=start, end_ns=end, position=position, around_closure=around,
        collecting=is_inside(*union(*pauses.times), start), period=period, step_count=count,
    )  # fmt: skip


def _only_looks(major: Ints, period: Ints, count: int) -> Bools:
    """Whether a forward follows the last backward and optimizer of a step with a batch of its own.

    No gradient comes of it: `accuracy(model(x), y)` after `optimizer.step()`.
    """
    places = np.arange(len(major))
    last = np.full((_NONE + 1, count), -1)
    last[major, period] = places  # the last one stays
    is_whole = (last[_INPUT] >= 0) & (last[_OPTIMIZER] > last[_INPUT])
    after = np.where(is_whole, np.maximum(last[_OPTIMIZER], last[_BACKWARD]), len(major))
    found: Bools = (major == _FORWARD) & (places > after[period])
    return found


def innermost_phase(found: Segmentation, time_ns: Ints) -> Ints:
    """Index into SPAN_PHASES of the innermost span around each moment; -1: none."""
    return np.append(found.phase.astype(np.int64), -1)[_innermost(found, time_ns)]


def _innermost(found: Segmentation, time_ns: Ints) -> Ints:
    """Row of the innermost span of a phase or an evaluation around each moment; -1: none."""
    spans, parent = found.nested.spans, np.append(found.nested.parent, -1)
    counts = (found.phase < len(PHASES)) | np.isin(found.phase, (EVAL_PHASE, EVAL_LOADER_PHASE))
    end = np.append(np.where(counts, spans.end_ns, np.iinfo(np.int64).min), np.iinfo(np.int64).max)
    row = np.searchsorted(spans.start_ns, time_ns, side="right") - 1
    over = np.arange(len(row))
    while len(over := over[end[row[over]] <= time_ns[over]]):
        row[over] = parent[row[over]]
    return row


def _neighbours(mark: Bools) -> tuple[Ints, Ints]:
    """Per place: the last marked one before or at it, and the next; -1 and the length: none."""
    places = np.arange(len(mark))
    before = np.maximum.accumulate(np.where(mark, places, -1))
    return before, np.minimum.accumulate(np.where(mark, places, len(mark))[::-1])[::-1]


def _around_closures(found: Segmentation, row: Ints, major: Ints) -> tuple[Bools, Bools]:
    """Whether moments are around the spans of an optimizer's closure; and its own time, too."""
    # What comes after the last backward is the optimizer's, as are searches between two closures
    # (LBFGS); before it the closure's code has the position that it would have without one.
    parent, top = found.nested.parent, np.append(found.nested.top, -1)
    inner = np.flatnonzero((parent >= 0) & (found.phase < _OPTIMIZER))
    holders = np.zeros(len(parent) + 1, dtype=np.bool_)
    holders[found.nested.top[inner]] = True
    around = (major == _OPTIMIZER) & holders[top[row]]
    if not around.any():
        return around, around
    before, after = _neighbours(major < _OPTIMIZER)
    kinds, tops = np.append(major, _NONE), np.append(top[row], -2)
    of_before = np.where(tops[before] == top[row], kinds[before], _NONE)
    of_after = np.where(tops[after] == top[row], kinds[after], _NONE)
    searched = (of_after == _FORWARD) & (of_before == _BACKWARD)
    return around, around & (searched | (of_after == _NONE))


def place_in(start: Ints, end: Ints, time_ns: Ints) -> Ints:
    """Which of some intervals, sorted and apart, holds each moment; -1: none."""
    if not len(start):
        return np.full(len(time_ns), -1)
    place = np.searchsorted(start, time_ns, side="right") - 1
    return np.where((place >= 0) & (time_ns < end[place]), place, -1)


def is_inside(start: Ints, end: Ints, time_ns: Ints) -> Bools:
    """Whether one of some intervals, sorted and apart, holds each moment."""
    held: Bools = place_in(start, end, time_ns) >= 0
    return held
