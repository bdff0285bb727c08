"""One thing that is odd about a trace: what was seen, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GPU_TIME = ("temporal", "overlap", "kernel_types", "kernels", "idle", "steps")
LAUNCHES = ("launches", "queue", "idle", "critical-path", "what-if")
ALL_RANKS = ("process_groups", "lateness", "stragglers", "clock_offsets")
OF_EACH_RANK = (*GPU_TIME, *LAUNCHES)
"""What the events of each rank answer by themselves."""
EVERYTHING = tuple(dict.fromkeys((*GPU_TIME, *LAUNCHES, *ALL_RANKS, "efficiency")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is odd about a trace."""

    check: str
    """Name of the check, such as `covering_kernels`."""
    count: int
    """Of events, ranks or whatever was counted."""
    text: str
    """What was seen, with its numbers."""
    effect: str
    """What becomes of the answers: what was corrected or left out, or what they cannot say."""
    answers: tuple[str, ...]
    """Tables of the report, and commands, that rest on it."""
    is_fault: bool = True
    """False where it is so by design, and nothing is wrong."""

    @property
    def line(self) -> str:
        """Both texts, for people."""
        return f"{self.text}: {self.effect}"


def faults_of(findings: Iterable[Finding], answer: str) -> list[Finding]:
    """The faults that an answer rests on."""
    return [each for each in findings if each.is_fault and answer in each.answers]


def milliseconds(ns: float) -> str:
    """A duration or an offset for a sentence."""
    us = ns / 1e3
    return f"{us:,.1f} µs" if abs(us) < 1000 else f"{us / 1e3:,.3f} ms"


def count_text(count: int, noun: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
