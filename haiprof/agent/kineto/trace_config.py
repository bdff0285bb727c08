"""The text of a Kineto configuration: what is to be recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.base.errors import UsageError

_UNREADABLE = "\n\r#"  # Kineto's parser: lines, and comments
_SWITCHES = {
    "stacks": "PROFILE_WITH_STACK",
    "shapes": "PROFILE_REPORT_INPUT_SHAPES",
    "memory": "PROFILE_PROFILE_MEMORY",
    "flops": "PROFILE_WITH_FLOPS",
    "modules": "PROFILE_WITH_MODULES",
    "sync": "ACTIVITIES_DISPLAY_CUDA_SYNC_WAIT_EVENTS",
}
"""Options of a trace by name, with Kineto's key. Source: libkineto Config.cpp; dynolog's client."""
WARMUP_S = 1
WARMUP_STEPS = 3
"""Kineto's own thread needs some steps to start; without them the first ones are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoWindow:
    """One window for some processes."""

    steps: int = 5
    """Optimizer steps."""
    roundup: int = 1
    """It begins at a multiple of this iteration, so that ranks begin at the same one."""
    time_s: float = 0.0
    """Seconds in place of steps."""
    start_wall_ns: int = 0
    """When a window of seconds begins, on all ranks; 0 is at once."""
    options: Mapping[str, Any]
    """Switches: `stacks`, `shapes`, `memory`, `flops`, `modules`, `sync`."""

    def text(self, log_file: str) -> str:
        """As Kineto reads it."""
        if any(character in log_file for character in _UNREADABLE):
            raise UsageError(
                f"{log_file!r}: Kineto cannot take a path with a line break or a '#' in it"
            )
        lines = [f"ACTIVITIES_LOG_FILE={log_file}"]
        if self.time_s:
            lines += [
                f"PROFILE_START_TIME={self.start_wall_ns // 1_000_000}",
                f"ACTIVITIES_WARMUP_PERIOD_SECS={WARMUP_S}",
                f"ACTIVITIES_DURATION_MSECS={max(round(self.time_s * 1000), 1)}",
            ]
        else:
            lines += [
                "PROFILE_START_ITERATION=0",
                f"PROFILE_START_ITERATION_ROUNDUP={self.roundup}",
                f"ACTIVITIES_WARMUP_ITERATIONS={WARMUP_STEPS}",
                f"ACTIVITIES_ITERATIONS={self.steps}",
            ]
        lines += [f"{key}=true" for name, key in _SWITCHES.items() if self.options.get(name)]
        return "\n".join(lines) + "\n"
