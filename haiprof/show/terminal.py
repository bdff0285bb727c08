"""Parts of terminal views: the console, sparklines, the split bar and its legend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from haiprof.base.units import SPACES, visible
from haiprof.show.figures.style import PHASE_COLORS, PHASES


class SafeConsole(Console):
    """A console for text that others wrote: names in traces and runs, command lines, errors.

    Control characters, escape sequences and marks that turn the direction of writing are shown as
    U+FFFD, wherever a view took the text from. Neither is `[...]` or `:name:` in it read as rich's
    markup: a name could hide text behind a link, or end the command by an error.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - rich's own
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Makes every piece of text safe on its way to the terminal; colours are added later."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text, keep=SPACES), style, control)


LEVELS = "▁▂▃▄▅▆▇"  # no full block: lines above one another stay apart
GAP = " "
_MIN_WIDTH, _MAX_WIDTH = 8, 120

Values = Sequence[float | None]


def sparkline(values: Values, *, top: float | None = None) -> str:
    """One character per value, from 0 at the lowest block to `top` at the highest."""
    present = [v for v in values if v is not None]
    limit = top or max(present, default=0.0)
    last, cells = len(LEVELS) - 1, []
    for value in values:
        level = round((value or 0.0) / limit * last) if limit > 0 else 0
        cells.append(GAP if value is None else LEVELS[min(last, max(0, level))])
    return "".join(cells)


def fit_width(values: Values, width: int) -> list[float | None]:
    """The series at another length: means of neighbours if it shrinks, repeats if it grows."""
    count, cells = len(values), list[float | None]()
    for cell in range(width):
        start = cell * count // width
        end = max(start + 1, (cell + 1) * count // width)
        present = [v for v in values[start:end] if v is not None]
        cells.append(sum(present) / len(present) if present else None)
    return cells


@dataclass(frozen=True, slots=True)
class Sparkline:
    """A sparkline that takes the width it is given."""

    values: Values
    top: float | None = None
    color: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_MIN_WIDTH, min(_MAX_WIDTH, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = min(options.max_width, _MAX_WIDTH)
        text = sparkline(fit_width(self.values, width), top=self.top)
        yield Segment(text, Style(color=self.color) if self.color else None)
        yield Segment.line()


BLOCK = "█"
# Where there is no colour, the filling tells the phases apart.
FILLINGS = {"dataloader": "▒", "forward": "█", "backward": "▓", "optimizer": "░", "other": "·"}
PHASE_OF = {
    "input": "dataloader", "forward": "forward", "backward": "backward", "optimizer": "optimizer"
}  # fmt: skip
"""The phase that a position of the ledger is drawn as; others are `other`."""
_SPLIT_BAR_MIN_WIDTH, _SPLIT_BAR_MAX_WIDTH = 10, 100


def shows_colors(console: Console) -> bool:
    """Whether colours tell phases apart: of 16 colours two phases would have the same."""
    return console.color_system in ("256", "truecolor", "windows") and not console.no_color


def filling(phase: str, *, colored: bool) -> str:
    """The character that a phase is drawn with."""
    return BLOCK if colored else FILLINGS[phase]


def block_lengths(split_ns: Mapping[str, float | None], width: int) -> dict[str, int]:
    """Characters per phase by largest remainder; no phase above zero is lost."""
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


@dataclass(frozen=True, slots=True)
class SplitBar:
    """Phases as coloured blocks; as different fillings where the terminal has no colour."""

    split_ns: Mapping[str, float | None]
    scale: float = 1.0

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_SPLIT_BAR_MIN_WIDTH, min(_SPLIT_BAR_MAX_WIDTH, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        full = min(options.max_width, _SPLIT_BAR_MAX_WIDTH)
        width = max(len(PHASES), round(full * min(1.0, self.scale)))
        colored = shows_colors(console)
        for phase, length in block_lengths(self.split_ns, width).items():
            style = Style(color=PHASE_COLORS[phase]) if colored else None
            yield Segment(filling(phase, colored=colored) * length, style)
        yield Segment.line()


_FULL_NAMES_WIDTH = 72
_SHORT = {"dataloader": "data", "forward": "fwd", "backward": "bwd", "optimizer": "optim"}


def phase_heading(phase: str, width: int) -> str:
    """The phase's name, shortened on a narrow terminal."""
    return phase if width >= _FULL_NAMES_WIDTH else _SHORT.get(phase, phase)


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """One character in the phase's colour, or its filling where there is no colour."""

    phase: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        colored = shows_colors(console)
        style = Style(color=PHASE_COLORS[self.phase]) if colored else None
        yield Segment(filling(self.phase, colored=colored), style)


class SplitLegend:
    """All phases in one line, each behind its mark."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for phase in PHASES:
            yield from PhaseMark(phase).__rich_console__(console, options)
            yield Segment(f" {phase_heading(phase, options.max_width)}  ")
        yield Segment.line()
