"""Sparklines: a series over time in one line of text; what is missing is a gap, not a zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

LEVELS = "▁▂▃▄▅▆▇"  # no full block: lines above one another stay apart
GAP = " "
_MIN_WIDTH, _MAX_WIDTH = 8, 120

Values = Sequence[float | None]


def sparkline(values: Values, *, top: float | None = None) -> str:
    """One character per value, from 0 at the lowest block to `top` at the highest."""
    present = [v for v in values if v is not None]
    limit = top or max(present, default=0.0)
    return "".join(GAP if v is None else LEVELS[_level(v, limit)] for v in values)


def fit_width(values: Values, width: int) -> list[float | None]:
    """The series at another length: means of neighbours if it shrinks, repeats if it grows."""
    count = len(values)
    if not count:
        return [None] * width
    cells: list[float | None] = []
    for cell in range(width):
        start = cell * count // width
        end = max(start + 1, (cell + 1) * count // width)
        present = [v for v in values[start:end] if v is not None]
        cells.append(sum(present) / len(present) if present else None)
    return cells


def _level(value: float, limit: float) -> int:
    if limit <= 0:
        return 0
    return min(len(LEVELS) - 1, max(0, round(value / limit * (len(LEVELS) - 1))))


class Sparkline:
    """A sparkline that takes the width it is given."""

    def __init__(self, values: Values, *, top: float | None = None, color: str = "") -> None:
        self.values = values
        self.top = top
        self.color = color

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_MIN_WIDTH, min(_MAX_WIDTH, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = min(options.max_width, _MAX_WIDTH)
        text = sparkline(fit_width(self.values, width), top=self.top)
        yield Segment(text, Style(color=self.color) if self.color else None)
        yield Segment.line()
