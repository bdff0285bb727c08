"""Trace windows and reactions as options: what is recorded, and what happens by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from haiprof.base.errors import UsageError

DEFAULT_STEPS = 5
EXPLAIN_STEPS = 2
STEP_LIMIT = 10_000  # a step of a small model is a megabyte of trace
REPEAT_LIMIT = 10_000
SPACING = 10  # steps from one window's start to the next, in lengths of a window
DEFAULT_SLOW_RATIO = 1.5
DEFAULT_SLOW_COST = 0.05
DEFAULT_LIMIT_MB = 1000.0
_BYTES_PER_MB = 1_000_000
DEFAULT_LIMIT_BYTES = round(DEFAULT_LIMIT_MB * _BYTES_PER_MB)
_WHAT = ("stacks", "shapes", "memory", "flops", "modules", "sync")


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Which steps of the job torch.profiler records beside haiprof's phases, and what of them."""

    trace: bool = False
    """A torch.profiler window of every rank; `steps`, `execution_trace`, `keep_slow`, `explain` and
    what says how to trace imply it."""
    steps: tuple[int, int] | None = None
    """First step and the one after the last, counted from 0 at the rank's first training step."""
    trace_steps: int | None = None
    """Length of a window in steps; None is 5, or what `steps` or `time_s` say."""
    trace_stacks: bool = False
    """Python call stacks."""
    trace_shapes: bool = False
    """Shapes of the operators' inputs."""
    trace_memory: bool = False
    """Allocations and releases."""
    trace_flops: bool = False
    """Floating point operations of matrix products and convolutions, estimated by torch."""
    trace_modules: bool = False
    """Which module an operator belongs to."""
    trace_sync: bool = False
    """CUDA synchronisation events."""
    execution_trace: bool = False
    """An execution trace (ExecutionTraceObserver) of the same window."""
    explain: bool = False
    """Also the lines of the job that call operators, so that what backward does has a line; implies
    `trace`, of two steps unless it is said of which."""
    repeat: int = 1
    """How many windows; with `keep_slow`, how many slow ones are kept at the most."""
    repeat_every: int | None = None
    """Steps from the start of one window to the start of the next; None is ten times its length."""
    keep_slow: bool = False
    """Trace in rolling windows, and keep those in which a step was slow."""
    slow_ratio: float = DEFAULT_SLOW_RATIO
    """What is slow: a step that takes so many times the run's normal one."""
    slow_cost: float = DEFAULT_SLOW_COST
    """Share of the run's time that `keep_slow` may take: it limits how many steps are traced."""
    trace_limit_mb: float = DEFAULT_LIMIT_MB
    """Largest raw trace of one rank and window, in MB (1,000,000 bytes)."""

    @property
    def traces(self) -> bool:
        """Whether anything is traced."""
        implied = self.steps is not None or self.execution_trace or self.keep_slow or self.explain
        return self.trace or implied

    @property
    def says_how(self) -> bool:
        """Whether it is said how to trace."""
        return self.trace_steps is not None or any(getattr(self, f"trace_{x}") for x in _WHAT)

    def window(self, *, time_s: float, warmup_s: float) -> dict[str, object] | None:
        """The options that the hook reads, as JSON; None without tracing.

        `steps` ([first, after last] or null), `count` (steps of a window that `steps` and
        `time_s` leave open), `time_s` (its length in seconds; 0: `steps` or `count` say),
        `warmup_s` (0: after ten steps), a switch for each of `stacks`, `shapes`, `memory`,
        `flops`, `modules`, `sync`, `lines`, `execution_trace`, `keep_slow`; `repeat`,
        `repeat_every` (null: ten times the length that a window of `time_s` turned out to have),
        `slow_ratio`, `limit_bytes`.
        """
        if not self.traces:
            return None
        in_steps = self._says_steps()
        window_s = 0.0 if in_steps else time_s
        length = None if window_s else self._length()
        return {
            "steps": None if self.steps is None else list(self.steps),
            "count": self._length(),
            "time_s": window_s,
            "warmup_s": warmup_s,
            **{name: getattr(self, f"trace_{name}") for name in _WHAT},
            "lines": self.explain,
            "execution_trace": self.execution_trace,
            "repeat": self.repeat,
            "repeat_every": self.repeat_every or (length and SPACING * length),
            "keep_slow": self.keep_slow,
            "slow_ratio": self.slow_ratio,
            "slow_cost": self.slow_cost,
            "limit_bytes": round(self.trace_limit_mb * _BYTES_PER_MB),
        }

    def trace_words(self, *, time_s: float) -> str:
        """Which steps are traced, for people."""
        if self.steps is not None:
            first, after = self.steps
            which = f"step {first}" if after - first == 1 else f"steps {first} to {after - 1}"
        elif self.keep_slow:
            which = f"steps {self.slow_ratio:g} times as slow as usual"
        elif time_s and not self._says_steps():
            which = "all of it"
        else:
            which = f"{self._length()} steps"
        return f"tracing {which}" + (f", {self.repeat} times" if self.repeat > 1 else "")

    def trace_now_words(self) -> list[str]:
        """What is recorded, as options of the command that traces a running job."""
        given = [f"--{name}" for name in _WHAT if getattr(self, f"trace_{name}")]
        return [*given, *(["--execution-trace"] if self.execution_trace else [])]

    def check_trace(self, *, time_s: float, warmup_s: float, phases: bool) -> None:
        """Checks the values."""
        if not 1 <= self._length() <= STEP_LIMIT:
            raise UsageError(
                f"a trace window of {self._length()} steps: it must be 1 to {STEP_LIMIT}",
                hint="several short windows: --trace-steps 5 --repeat 10 --repeat-every 1000",
            )
        if not 1 <= self.repeat <= REPEAT_LIMIT:
            raise UsageError(f"repeat must be 1 to {REPEAT_LIMIT} windows")
        if self.repeat_every is not None and self.repeat_every < 1:
            raise UsageError("repeat-every must be 1 step or more")
        if not math.isfinite(self.slow_ratio) or self.slow_ratio <= 1:
            raise UsageError("slow-ratio must be more than 1: how many times the normal step")
        if not math.isfinite(self.slow_cost) or self.slow_cost <= 0:
            raise UsageError("slow-cost must be more than 0: a share of the run's time")
        if not math.isfinite(self.trace_limit_mb) or self.trace_limit_mb < 1:
            raise UsageError("trace-limit must be 1 MB or more")
        if not self.traces:
            when = {"repeat": self.repeat != 1, "repeat-every": self.repeat_every is not None}
            for name in (name for name, given in when.items() if given):
                raise UsageError(
                    f"--{name} says how to trace, but no trace is asked for", hint="add --trace"
                )
            return
        if not phases:
            raise UsageError(
                "--trace needs the recorder phases, which finds the steps",
                hint="add phases to --recorder",
            )
        others = {
            "--time": bool(time_s),
            "--warmup": bool(warmup_s),
            "--trace-steps": self.trace_steps is not None,
            "--keep-slow": self.keep_slow,
        }
        for other, given in others.items():
            if given and self.steps is not None:
                raise UsageError(
                    f"--steps and {other} both say which steps to trace",
                    hint="--steps 100:105 alone, or --trace --warmup 120 --trace-steps 5",
                )
        by_time = time_s and not self._says_steps()
        if self.repeat_every is not None and not by_time and self.repeat_every < self._length():
            raise UsageError(
                f"--repeat-every {self.repeat_every} is shorter than a window of"
                f" {self._length()} steps"
            )

    def _length(self) -> int:
        """Steps of a window."""
        if self.steps is not None:
            return self.steps[1] - self.steps[0]
        if self.trace_steps is None:
            return EXPLAIN_STEPS if self.explain else DEFAULT_STEPS
        return self.trace_steps

    def _says_steps(self) -> bool:
        """Whether a window is as long as so many steps, whatever the recording's time."""
        given = self.steps is not None or self.trace_steps is not None
        return given or self.keep_slow or self.explain


def parse_steps(text: str) -> tuple[int, int]:
    """`A:B` as Python slices: A to B-1; `:B` begins at 0."""
    first, colon, after = text.partition(":")
    if not colon or not (first or "0").isdecimal() or not after.isdecimal():
        raise ValueError("expected two step numbers: 100:105 is the five steps 100 to 104")
    steps = int(first or "0"), int(after)
    if steps[0] >= steps[1]:
        raise ValueError("no step in it: 100:105 is the five steps 100 to 104")
    return steps


REACTIONS = ("snapshot", "trace", "both", "off")
DEFAULT_SLOW_LIMIT = 0.2
_TIMES_LIMIT = 1000
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class HangLimit(NamedTuple):
    """How long without a step until a job counts as hanging."""

    seconds: float = 0.0
    """Seconds; 0 where `factor` applies."""
    factor: float = 5.0
    """Multiple of the longest time so far without a step, an evaluation or a save."""

    def __str__(self) -> str:
        return f"{self.seconds:g}" if self.seconds else f"{self.factor:g}x"


DEFAULT_HANG_LIMIT = HangLimit()


@dataclass(frozen=True, kw_only=True)
class ReactOptions:
    """When haiprof looks into a running job by itself, and how."""

    react: str = "snapshot"
    """`snapshot` when no step ends, `trace` when steps get slower, `both`, or `off`."""
    slow_limit: float = DEFAULT_SLOW_LIMIT
    """How far the median step must rise above the rank's usual one, as a ratio."""
    hang_limit: HangLimit = DEFAULT_HANG_LIMIT
    """How long without a step is too long."""
    react_times: int = 2
    """Maximum number of reactions of each of the two kinds."""

    @property
    def reacts_with_trace(self) -> bool:
        """Whether a trace is made when steps become slower."""
        return self.react in ("trace", "both")

    def check_react(self) -> None:
        """Checks the values."""
        if self.react not in REACTIONS:
            raise UsageError(f"react must be one of {', '.join(REACTIONS)}")
        if not math.isfinite(self.slow_limit) or not 0.01 <= self.slow_limit <= 100:
            raise UsageError("slow-limit must be 1% or more")
        seconds, factor = self.hang_limit
        if seconds and not (math.isfinite(seconds) and seconds >= 1):
            raise UsageError("hang-limit must be 1 second or more, or 2x or more")
        if not seconds and not (math.isfinite(factor) and factor >= 2):
            raise UsageError("hang-limit must be 1 second or more, or 2x or more")
        if not 0 <= self.react_times <= _TIMES_LIMIT:
            raise UsageError(f"react-times must be 0 to {_TIMES_LIMIT}")


def parse_slow_limit(text: str) -> float:
    """`20%` or `0.2` as a ratio; raises ValueError for anything else."""
    word = text.strip()
    return float(word[:-1]) / 100 if word.endswith("%") else float(word)


def parse_hang_limit(text: str) -> HangLimit:
    """`300`, `300s`, `28m` or `5x`; raises ValueError for anything else."""
    word = text.strip().lower()
    if word.endswith("x"):
        return HangLimit(factor=float(word[:-1]))
    unit = word[-1:] if word[-1:] in _UNITS_S else ""
    seconds = float(word[: len(word) - len(unit)]) * _UNITS_S.get(unit, 1.0)
    if seconds <= 0:
        raise ValueError("expected seconds, or 5x")
    return HangLimit(seconds=seconds)
