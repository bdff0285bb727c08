"""Which steps are to be traced: given as steps, or found when the warm-up is over."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from haiprof.base.safe_files import make_folder, write_file
from haiprof.in_job.identity import rank_and_world, restart
from haiprof.in_job.threads import hold_size_signal
from haiprof.run_format.control import is_count, read_object
from haiprof.run_format.layout import AGREED_PREFIX

STEPS_BEFORE = 10  # of a plan that says no start
LEAD_STEPS = 3  # rehearsal, warm-up of Kineto, and the step in between
AGREE_S = 1.0  # ranks learn from the run directory which step is the first; it must be ahead
SPACING = 10
_NS_PER_S = 1_000_000_000
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWindow:
    """One window."""

    window: int
    first: int
    after_last: int | None
    """Null until its time is up."""
    until_ns: int | None = None
    """When its time is up, monotonic."""
    reason: str = "option"
    request: str | None = None


class UsualTime(Protocol):
    """Knows how long a step usually takes."""

    usual_ns: int
    """Median of a step, ns; 0 while that is not known."""


class Agreement:
    """Numbers that all ranks of the job take, from the run directory: who comes first decides.

    No rank waits for another; a rank alone decides for itself.
    """

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
    """Where ranks that hear of a request at different steps take up the same number.

    How often its optimizers have stepped is the same on every rank between two steps; how many of
    them make up a step is not known, and is learned from there on.
    """

    def __init__(self, config: Mapping[str, Any], agreement: Agreement, *, joined: int) -> None:
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
        self.window = int(config.get("window") or 0)
        """Number of the window that comes next or runs."""
        self._after_last_window = self.window + self._repeat
        self._request: str | None = config.get("request")
        self._ahead_s = float(config.get("ahead_s") or AGREE_S)
        self._pace_ns = int(config.get("step_ns") or 0)
        self._count = count
        self._wanted: PlannedWindow | None = None
        if steps is not None:
            self._count = int(steps[1]) - int(steps[0])
            self._wanted = PlannedWindow(
                window=self.window, first=int(steps[0]), after_last=int(steps[1]),
                reason=self._reason, request=self._request,
            )  # fmt: skip
        elif not self._warmup_ns and not self._time_ns and self._request is None:
            self._wanted = PlannedWindow(
                window=0, first=STEPS_BEFORE, after_last=STEPS_BEFORE + count
            )

    @property
    def _reason(self) -> str:
        return "option" if self._request is None else "request"

    @property
    def over(self) -> bool:
        """Whether no window is left."""
        return self.window >= self._after_last_window

    def current(
        self, *, number: int, trained_ns: int | None, times: UsualTime
    ) -> PlannedWindow | None:
        """The window that comes next or runs; None before it is known and after the last."""
        if self.over:
            return None
        if self._wanted is None and trained_ns is not None:
            self._find_first(number, trained_ns, times)
        return self._wanted

    def ends_at(self, number: int, times: UsualTime) -> int | None:
        """The step after the window that runs; None while that is open.

        A window in seconds ends on the same step on every rank: one of the next.
        """
        wanted = self._wanted
        if wanted is None or wanted.until_ns is None or wanted.after_last is not None:
            return None if wanted is None else wanted.after_last
        name = f"{self.window}-end"
        found = self._agreement.find(name)
        if found is None and time.perf_counter_ns() >= wanted.until_ns:
            alone = rank_and_world()[1] == 1
            found = self._agreement.settle(
                name, number + (0 if alone else self._steps_in(times.usual_ns))
            )
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
        self._wanted = PlannedWindow(
            window=self.window, first=first, after_last=first + length, reason=self._reason,
            request=self._request,
        )  # fmt: skip

    def _find_first(self, number: int, trained_ns: int, times: UsualTime) -> None:
        name = "first"
        first = self._agreement.find(name)
        now_ns = time.perf_counter_ns()
        if first is None and now_ns >= trained_ns + self._warmup_ns:
            alone = rank_and_world()[1] == 1
            ahead = LEAD_STEPS if alone else max(LEAD_STEPS, self._steps_in(times.usual_ns))
            first = self._agreement.settle(name, number + ahead)
        if first is None:
            return
        self._wanted = PlannedWindow(
            window=self.window,
            first=first,
            after_last=None if self._time_ns else first + self._count,
            until_ns=trained_ns + self._warmup_ns + self._time_ns if self._time_ns else None,
            reason=self._reason,
            request=self._request,
        )

    def _steps_in(self, usual_ns: int) -> int:
        """Steps in which every rank has looked into the run directory."""
        step_ns = usual_ns or self._pace_ns
        if step_ns <= 0:
            return 2 + STEPS_BEFORE
        return 2 + round(self._ahead_s * _NS_PER_S) // step_ns
