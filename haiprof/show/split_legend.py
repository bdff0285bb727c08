"""Names of the phases beside their colours."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from haiprof.show.figures.style import PHASE_COLORS, PHASES
from haiprof.show.split_bar import filling

_FULL_NAMES_WIDTH = 72
_SHORT = {"dataloader": "data", "forward": "fwd", "backward": "bwd", "optimizer": "optim"}


def phase_heading(phase: str, width: int) -> str:
    """The phase's name, shortened on a narrow terminal."""
    return phase if width >= _FULL_NAMES_WIDTH else _SHORT.get(phase, phase)


class PhaseMark:
    """One character in the phase's colour, or its filling where there is no colour."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        colored = console.color_system is not None and not console.no_color
        style = Style(color=PHASE_COLORS[self.phase]) if colored else None
        yield Segment(filling(self.phase, colored=colored), style)


class PhaseName:
    """The phase behind its mark, shortened where there is no room for it."""

    def __init__(self, phase: str, *, width: int = _FULL_NAMES_WIDTH) -> None:
        self.phase = phase
        self.name = phase_heading(phase, width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(self.name) + 2, len(self.name) + 2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from PhaseMark(self.phase).__rich_console__(console, options)
        yield Segment(f" {self.name}")


class SplitLegend:
    """All phases in one line, each behind its mark."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for phase in PHASES:
            yield from PhaseName(phase, width=options.max_width).__rich_console__(console, options)
            yield Segment("  ")
        yield Segment.line()
