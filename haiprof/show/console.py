"""The console of all views for people: text on it cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from haiprof.base.units import SPACES, visible


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
