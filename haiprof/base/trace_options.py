"""How an option is declared; trace windows as options, and the limits of reactions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeVar

from haiprof.base.errors import UsageError

DEFAULT_STEPS = 5
EXPLAIN_STEPS = 2
STEP_LIMIT = 10_000  # a step of a small model is a megabyte of trace
REPEAT_LIMIT = 10_000
SPACING = 10  # steps from one window's start to the next, in lengths of a window
DEFAULT_LIMIT_MB = 1000.0
_BYTES_PER_MB = 1_000_000
DEFAULT_LIMIT_BYTES = round(DEFAULT_LIMIT_MB * _BYTES_PER_MB)
T = TypeVar("T")
_WHAT = ("stacks", "shapes", "memory", "flops", "modules", "sync")

Check = tuple[bool, str, str]  # what must hold, else what is said, and what to do


def check(checks: Iterable[Check]) -> None:
    """Raises UsageError for the first that does not hold."""
    for holds, why, hint in checks:
        if not holds:
            raise UsageError(why, hint=hint)


@dataclass(frozen=True)
class OptionSpec:
    """One option as users write it."""

    name: str  # `--NAME`, `profile.NAME`, and the key in `[tool.haiprof]`
    field: str  # the field of `Options`
    parse: Callable[[str], object]  # parses the text; raises ValueError
    env: str  # its environment variable
    metavar: str  # what the help shows for its value; empty for a switch
    help: str  # one line


def parse_switch(text: str) -> bool:
    """`1`, `true`, `yes`, `on` and their opposites."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def declare(
    spelling: str, default: T, help: str, parse: Callable[[str], object] | None = None,
    env: str = "",
) -> T:  # fmt: skip
    """A field of the options and how users write it: `time SECONDS`, or `trace` for a switch.

    `{default}` in the help stands for the default; its type parses the text, unless told.
    """
    name, _, metavar = spelling.partition(" ")
    return field(default=default, metadata={
        "name": name, "metavar": metavar, "help": help.format(default=default),
        "parse": parse or (parse_switch if default is False else type(default)),
        "env": env or f"HAIPROF_{name.upper().replace('-', '_')}",
    })  # fmt: skip


def specs_of(options: type) -> list[OptionSpec]:
    """The options that a class declares, by their fields."""
    return [OptionSpec(field=f.name, **f.metadata) for f in fields(options) if f.metadata]


def parse_steps(text: str) -> tuple[int, int]:
    """`A:B` as Python slices: A to B-1; `:B` begins at 0."""
    first, colon, after = text.partition(":")
    if not colon or not (first or "0").isdecimal() or not after.isdecimal():
        raise ValueError("expected two step numbers: 100:105 is the five steps 100 to 104")
    steps = int(first or "0"), int(after)
    if steps[0] >= steps[1]:
        raise ValueError("no step in it: 100:105 is the five steps 100 to 104")
    return steps


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Which steps of the job torch.profiler records beside haiprof's phases, and what of them."""

    # fmt: off
    trace: bool = declare("trace", False, "trace some steps with torch.profiler on every rank")
    steps: tuple[int, int] | None = declare(
        "steps A:B", None, "trace steps A to B-1; implies --trace", parse_steps)
    """First step and the one after the last, counted from 0 at the rank's first training step."""
    trace_steps: int | None = declare(
        "trace-steps N", None, f"trace N steps (default: {DEFAULT_STEPS})", int)
    """Length of a window in steps; None is 5, or what `steps` or `time_s` say."""
    trace_stacks: bool = declare(
        "trace-stacks", False, "with Python call stacks; implies --trace")
    trace_shapes: bool = declare("trace-shapes", False, "with the shapes of operators' inputs")
    trace_memory: bool = declare("trace-memory", False, "with allocations and releases")
    trace_flops: bool = declare(
        "trace-flops", False, "with floating point operations, estimated")
    trace_modules: bool = declare(
        "trace-modules", False, "with the modules of TorchScript (of others: --trace-stacks)")
    trace_sync: bool = declare("trace-sync", False, "with CUDA synchronisation events")
    execution_trace: bool = declare(
        "execution-trace", False, "also an execution trace of the same steps; implies --trace")
    explain: bool = declare(
        "explain", False,
        "trace two steps with the lines that call operators: what backward does has a line")
    repeat: int = declare("repeat N", 1, "trace N windows (default: {default})")
    """How many windows; with `keep_slow`, how many slow ones are kept at the most."""
    repeat_every: int | None = declare(
        "repeat-every STEPS", None,
        "steps between the starts of two windows (default: ten times the window)", int)
    keep_slow: bool = declare(
        "keep-slow", False,
        "trace a few steps repeatedly, and keep windows with a slow step; implies --trace")
    slow_ratio: float = declare(
        "slow-ratio RATIO", 1.5,
        "a slow step takes RATIO times the typical step (default: {default})")
    slow_cost: float = declare(
        "slow-cost RATIO", 0.05, "maximum overhead of --keep-slow (default: {default})")
    trace_limit_mb: float = declare(
        "trace-limit MB", DEFAULT_LIMIT_MB,
        "largest raw trace of a rank and window (default: {default:g})")
    """In MB of 1,000,000 bytes."""
    # fmt: on

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
        window_s = 0.0 if self._says_steps() else time_s
        length = None if window_s else self._length()
        return {
            "steps": None if self.steps is None else list(self.steps), "count": self._length(),
            "time_s": window_s, "warmup_s": warmup_s,
            **{name: getattr(self, f"trace_{name}") for name in _WHAT}, "lines": self.explain,
            "execution_trace": self.execution_trace, "repeat": self.repeat,
            "repeat_every": self.repeat_every or (length and SPACING * length),
            "keep_slow": self.keep_slow, "slow_ratio": self.slow_ratio, "slow_cost": self.slow_cost,
            "limit_bytes": round(self.trace_limit_mb * _BYTES_PER_MB),
        }  # fmt: skip

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

    def trace_checks(self, time_s: float, warmup_s: float, *, phases: bool) -> list[Check]:
        """What must hold of the values."""
        length, every, by_time = (
            self._length(), self.repeat_every, time_s and not self._says_steps(),
        )  # fmt: skip
        how = {"repeat": self.repeat != 1, "repeat-every": every is not None}
        given_steps = self.trace_steps is not None
        which = {"--time": time_s, "--warmup": warmup_s, "--trace-steps": given_steps}
        return [
            (1 <= length <= STEP_LIMIT,
             f"a trace window of {length} steps: it must be 1 to {STEP_LIMIT}",
             "several short windows: --trace-steps 5 --repeat 10 --repeat-every 1000"),
            (1 <= self.repeat <= REPEAT_LIMIT, f"repeat must be 1 to {REPEAT_LIMIT} windows", ""),
            (every is None or every >= 1, "repeat-every must be 1 step or more", ""),
            (1 < self.slow_ratio < math.inf,
             "slow-ratio must be more than 1: how many times the normal step", ""),
            (0 < self.slow_cost < math.inf,
             "slow-cost must be more than 0: a share of the run's time", ""),
            (1 <= self.trace_limit_mb < math.inf, "trace-limit must be 1 MB or more", ""),
            *((self.traces, f"--{name} says how to trace, but no trace is asked for", "add --trace")
              for name, given in how.items() if given),
            (phases or not self.traces, "--trace needs the recorder phases, which finds the steps",
             "add phases to --recorder"),
            *((self.steps is None, f"--steps and {other} both say which steps to trace",
               "--steps 100:105 alone, or --trace --warmup 120 --trace-steps 5")
              for other, given in [*which.items(), ("--keep-slow", self.keep_slow)] if given),
            (not every or bool(by_time) or every >= length or not self.traces,
             f"--repeat-every {every} is shorter than a window of {length} steps", ""),
        ]  # fmt: skip

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


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class HangLimit(NamedTuple):
    """How long without a step until a job counts as hanging."""

    seconds: float = 0.0  # seconds; 0 where `factor` applies
    factor: float = 5.0  # times the longest so far without a step, an evaluation or a save

    def __str__(self) -> str:
        return f"{self.seconds:g}" if self.seconds else f"{self.factor:g}x"


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
