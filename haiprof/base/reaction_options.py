"""Reactions as options: what haiprof does by itself when steps get slow or cease."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from haiprof.base.errors import UsageError

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

    def react_json(self) -> dict[str, object]:
        """The options as plain JSON values, by their names on the command line."""
        return {
            "react": self.react,
            "slow_limit": self.slow_limit,
            "hang_limit": str(self.hang_limit),
            "react_times": self.react_times,
        }


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
