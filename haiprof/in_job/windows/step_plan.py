"""Which steps are to be traced, the same ones on every rank; and how long steps take."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from haiprof.base.medians import upper_median
from haiprof.base.safe_files import make_folder, write_file
from haiprof.in_job.identity import rank_and_world, restart
from haiprof.in_job.threads import hold_size_signal
from haiprof.in_job.windows.step_counter import StepCounter
from haiprof.run_format.control import is_count, read_object
from haiprof.run_format.layout import AGREED_PREFIX
from haiprof.run_format.schema import EVAL, NOGRAD, SAVE

STEPS_BEFORE = 10  # of a plan that says no start
LEAD_STEPS = 3  # rehearsal, warm-up of Kineto, and the step in between
AGREE_S = 1.0  # ranks learn from the run directory which step is the first; it must be ahead
SPACING = 10
KEPT_STEPS = 101
USUAL_AFTER = 5  # steps before there is a usual time
OTHER_WORK = (EVAL, NOGRAD, SAVE)
# Windows in the first series, the second and so on: what they cost is soon known, and settled anew.
_SERIES = (1, 8, 64, 512)
_SERIES_ALONE = (1, 4, 16)
_MIX = 0x9E3779B1  # Knuth's multiplicative hash: the same places on every rank
_NS_PER_S = 1_000_000_000
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
_now = time.perf_counter_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWindow:
    """One window."""

    window: int
    first: int
    after_last: int | None  # None until its time is up
    until_ns: int | None  # when its time is up, monotonic
    reason: str
    request: str | None


class StepTimes:
    """The steps' times from one start to the next, ns."""

    def __init__(self, counter: StepCounter) -> None:
        self.counter = counter
        self.last: tuple[int, int, bool] | None = None
        """(number, ns, whether it was training alone) of the step that has just ended."""
        self._plain: deque[int] = deque(maxlen=KEPT_STEPS)
        self._number: int | None = None
        self._start_ns = 0
        self.other_work = False  # whether the step that runs has had an evaluation or a checkpoint
        self.ours_ns = 0  # so much of the running step is haiprof's own
        self._kept = 0
        self.usual_ns = 0  # median of the last plain steps; 0 while there are few

    def boundary(self, number: int, begins: bool) -> None:
        """An edge of a step."""
        now = _now()
        self.last = None
        if self._number is not None and number > self._number:
            ns = now - self._start_ns - self.ours_ns
            pure = number == self._number + 1 and not self.other_work
            self.last = (self._number, ns, pure)
            self._number = None
        if begins and self._number is None:
            self._number, self._start_ns = number, now
            self.other_work, self.ours_ns = False, 0

    def keep(self, ns: int) -> None:
        """A plain step's time, for the usual one."""
        self._plain.append(ns)
        self._kept += 1
        if len(self._plain) >= USUAL_AFTER and self._kept % USUAL_AFTER == 0:
            self.usual_ns = upper_median(self._plain)


class Agreement:
    """Numbers that all ranks take from the run directory: the first one decides, nobody waits."""

    def __init__(self, folder: Path, *, about: str = "") -> None:
        self._folder, self._run_root = folder, folder.parents[1]
        self._about = about
        self._known: dict[str, tuple[int, ...]] = {}

    def find(self, name: str) -> int | None:
        """The number, if it is settled."""
        found = self._find(name)
        return None if found is None else found[0]

    def settle(self, name: str, number: int) -> int:
        """The number: ours, where no rank has settled it before."""
        return self.settle_all(name, (number,))[0]

    def settle_all(self, name: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The same for numbers that belong together."""
        if rank_and_world()[1] > 1:
            path = self._path(name)
            text = json.dumps({"steps": numbers}).encode()
            make_folder(self._folder, below=self._run_root, trusted=True)
            try:  # whole or not there, and only once
                with hold_size_signal():
                    write_file(path, text, below=self._run_root, replace=False)
            except FileExistsError:
                found = self._find(name) or ()
                numbers = found if len(found) == len(numbers) else numbers
        self._known[name] = numbers
        return numbers

    def _find(self, name: str) -> tuple[int, ...] | None:
        if name not in self._known and rank_and_world()[1] > 1:
            try:
                content = read_object(self._path(name).read_bytes())
            except OSError:
                return None
            numbers = (content or {}).get("steps")
            if not (numbers and isinstance(numbers, list) and all(map(is_count, numbers))):
                return None  # damaged: as if no rank had settled it
            self._known[name] = tuple(numbers)
        return self._known.get(name)

    def _path(self, name: str) -> Path:
        job = "/".join(os.environ.get(variable, "") for variable in _JOB_VARIABLES)
        key = hashlib.sha256(f"{job}/{restart()}/{self._about}".encode()).hexdigest()[:12]
        return self._folder / f"{AGREED_PREFIX}{key}-{name}.json"


class Meeting:
    """Where ranks that hear of a request at different steps take up the same number."""

    def __init__(self, config: Mapping[str, Any], agreement: Agreement, *, joined: int) -> None:
        # How often its optimizers have stepped is the same on every rank between two steps; how
        # many of them make up a step is not known, and is learned from there on.
        steps, pace_ns = config.get("steps"), int(config.get("step_ns") or 0)
        ahead_ns = round(float(config.get("ahead_s") or AGREE_S) * _NS_PER_S)
        self.joined = joined
        self._agreement = agreement
        self._place = None if steps is None else int(steps[0]) - LEAD_STEPS
        self._ahead = 2 + (ahead_ns // pace_ns if pace_ns > 0 else STEPS_BEFORE)

    def agree_on_count(self, count: int) -> int:
        """How often they will have stepped there; a rank that joins later is too late."""
        if self._place is None:
            self._place = self._agreement.settle("meeting", count + self._ahead)
        return self._place


class Plan:
    """The windows of a run, one after the other."""

    def __init__(self, config: Mapping[str, Any], agreement: Agreement) -> None:
        self._agreement = agreement
        steps, count = config.get("steps"), int(config.get("count") or 1)
        self._warmup_ns = round(float(config.get("warmup_s") or 0) * _NS_PER_S)
        self._time_ns = round(float(config.get("time_s") or 0) * _NS_PER_S)
        self._repeat = int(config.get("repeat") or 1)
        self._every: int | None = config.get("repeat_every")
        self.window = int(config.get("window") or 0)  # number of the window that comes next or runs
        self._after_last_window = self.window + self._repeat
        self._request: str | None = config.get("request")
        self._ahead_s = float(config.get("ahead_s") or AGREE_S)
        self._pace_ns = int(config.get("step_ns") or 0)
        self._count = count
        self._wanted: PlannedWindow | None = None
        if steps is not None:
            self._count = int(steps[1]) - int(steps[0])
            self._want(int(steps[0]), int(steps[1]))
        elif not self._warmup_ns and not self._time_ns and self._request is None:
            self._want(STEPS_BEFORE, STEPS_BEFORE + count)

    def _want(self, first: int, after_last: int | None, *, until_ns: int | None = None) -> None:
        self._wanted = PlannedWindow(
            window=self.window, first=first, after_last=after_last, until_ns=until_ns,
            reason="option" if self._request is None else "request", request=self._request,
        )  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether no window is left."""
        return self.window >= self._after_last_window

    @property
    def upcoming(self) -> PlannedWindow | None:
        """The window that comes next or runs; None before it is known and after the last."""
        return None if self.over else self._wanted

    def find(self, number: int, times: StepTimes) -> PlannedWindow | None:
        """The same at the begin of a step, where the first window may become known."""
        trained_ns = times.counter.trained_ns
        if not self.over and self._wanted is None and trained_ns is not None:
            due_ns = trained_ns + self._warmup_ns
            first = self._agree("first", number, due_ns, times, least=LEAD_STEPS)
            if first is not None and self._time_ns:
                self._want(first, None, until_ns=due_ns + self._time_ns)
            elif first is not None:
                self._want(first, first + self._count)
        return self.upcoming

    def ends_at(self, number: int, times: StepTimes) -> int | None:
        """The step after the window that runs; None while that is open."""
        # A window in seconds ends on the same step on every rank: one of the next.
        wanted = self._wanted
        if wanted is None or wanted.until_ns is None or wanted.after_last is not None:
            return None if wanted is None else wanted.after_last
        found = self._agree(f"{self.window}-end", number, wanted.until_ns, times, least=0)
        if found is not None:
            self._wanted = replace(wanted, after_last=found)
        return found

    def advance(self) -> None:
        """The window is over, whatever became of it."""
        wanted, self._wanted = self._wanted, None
        self.window += 1
        if wanted is None or self.over:
            return
        length = self._count if wanted.after_last is None else wanted.after_last - wanted.first
        first = wanted.first + (self._every or SPACING * length)
        self._want(first, first + length)

    def _agree(
        self, name: str, number: int, due_ns: int, times: StepTimes, *, least: int
    ) -> int | None:
        """A step that all ranks take, settled from a time on: at least so many steps ahead."""
        # By then every rank has looked into the run directory.
        found = self._agreement.find(name)
        if found is None and _now() >= due_ns:
            step_ns, ahead = times.usual_ns or self._pace_ns, 0
            if rank_and_world()[1] > 1:
                pace = round(self._ahead_s * _NS_PER_S) // step_ns if step_ns > 0 else STEPS_BEFORE
                ahead = 2 + pace
            found = self._agreement.settle(name, number + max(least, ahead))
        return found


class RollingSchedule:
    """Where the rolling windows of --keep-slow lie."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._series = -1
        self._count = self._place = self._begin = 0
        self._period = 1
        self.length = 1  # steps in a window of this series
        self.window_count = 0  # windows that the ranks have kept: the number of the next one

    def next_first(self, number: int, *, pace: Callable[[], tuple[int, int]], usual_ns: int) -> int:
        """First step of the next window, not before `number`."""
        # They come in series: length and period of one are settled when it begins, by the first
        # rank. Where in a period a window lies changes, so that no rhythm of the job hides.
        while True:
            if self._place >= self._count:
                self._settle(number, pace(), usual_ns)
            room = max(1, self._period - self.length + 1)
            mixed = ((self._series << 10) + self._place) * _MIX & 0xFFFFFFFF
            first = self._begin + self._place * self._period + mixed % room
            if first >= number:
                return first
            self._place += 1

    def advance(self) -> None:
        """The window that came next is over, or nothing came of it."""
        self._place += 1

    def is_kept(self, first: int, *, slow: bool) -> bool:
        """Whether the window that begins with this step is the next one that all ranks keep."""
        while True:
            name = f"kept-{self.window_count}"
            found = self._agreement.settle(name, first) if slow else self._agreement.find(name)
            if found is None or found > first:
                return False
            if found == first:
                return True
            self.window_count += 1  # the others kept one that this rank did not record

    def _settle(self, number: int, pace: tuple[int, int], usual_ns: int) -> None:
        alone = rank_and_world()[1] == 1
        ahead = 0 if alone else 2 + round(AGREE_S * _NS_PER_S) // max(1, usual_ns)
        begin = max(number + ahead, self._begin + self._count * self._period)
        sizes = _SERIES_ALONE if alone else _SERIES
        self._series += 1
        self._count, self._place = sizes[min(self._series, len(sizes) - 1)], 0
        self._begin, self.length, self._period = self._agreement.settle_all(
            f"series-{self._series}", (begin, *pace)
        )
