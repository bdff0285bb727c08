"""The split bar: phases of a step as blocks whose lengths are their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from haiprof.show.figures.style import PHASE_COLORS, PHASES

BLOCK = "█"
# Where there is no colour, the filling tells the phases apart.
FILLINGS = {"dataloader": "▒", "forward": "█", "backward": "▓", "optimizer": "░", "other": "·"}
_MIN_WIDTH, _MAX_WIDTH = 10, 100


def filling(phase: str, *, colored: bool) -> str:
    """The character that a phase is drawn with."""
    return BLOCK if colored else FILLINGS[phase]


def block_lengths(split_ns: Mapping[str, float | None], width: int) -> dict[str, int]:
    """Characters per phase; they add up to `width`, and no phase above zero is lost.

    Source:
        Largest remainders, as seats are given in proportional elections.
    """
    present = {p: split_ns[p] or 0.0 for p in PHASES if split_ns.get(p)}
    total = sum(present.values())
    if total <= 0:
        return {}
    exact = {phase: ns / total * width for phase, ns in present.items()}
    lengths = {phase: max(1, int(length)) for phase, length in exact.items()}
    by_remainder = sorted(exact, key=lambda p: exact[p] - lengths[p], reverse=True)
    for phase in by_remainder[: max(0, width - sum(lengths.values()))]:
        lengths[phase] += 1
    while sum(lengths.values()) > width:
        lengths[max(lengths, key=lambda p: lengths[p])] -= 1
    return lengths


class SplitBar:
    """Phases as coloured blocks; as different fillings where the terminal has no colour."""

    def __init__(self, split_ns: Mapping[str, float | None], *, scale: float = 1.0) -> None:
        self.split_ns = split_ns
        self.scale = scale

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_MIN_WIDTH, min(_MAX_WIDTH, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        full = min(options.max_width, _MAX_WIDTH)
        width = max(len(PHASES), round(full * min(1.0, self.scale)))
        colored = console.color_system is not None and not console.no_color
        for phase, length in block_lengths(self.split_ns, width).items():
            style = Style(color=PHASE_COLORS[phase]) if colored else None
            yield Segment(filling(phase, colored=colored) * length, style)
        yield Segment.line()
