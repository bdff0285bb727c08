"""A verdict kept: JSON and text in the run directory, and the card as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from haiprof.errors import HaiprofError
from haiprof.report.card import MAX_WIDTH, verdict_card
from haiprof.report.page import write_text
from haiprof.report.run_header import RunHeader
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.writer import write_json

if TYPE_CHECKING:
    from haiprof.diagnosis.verdict import Verdict


def save_verdict(verdict: Verdict, header: RunHeader, run: RunPaths) -> None:
    """Writes report/verdict.json and report/verdict.txt.

    Raises:
        HaiprofError: The run directory is gone, read-only or full.
    """
    try:
        run.report.mkdir(exist_ok=True)
        write_json(run.verdict_json, verdict.as_json())
        text = view_text(verdict_card(verdict, header), width=MAX_WIDTH)
        run.verdict_text.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HaiprofError(
            f"{run.report}: the verdict cannot be saved: {error.strerror or error}"
        ) from None


def save_card_svg(verdict: Verdict, header: RunHeader, path: Path) -> Path:
    """Writes the card as a picture of a terminal; returns the path.

    Raises:
        UsageError: The file cannot be written.
    """
    return write_text(path, view_svg(verdict_card(verdict, header), title=f"haiprof {header.name}"))


def view_text(view: RenderableType, *, width: int) -> str:
    """A view without colour."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(view)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def view_svg(view: RenderableType, *, title: str, width: int = MAX_WIDTH) -> str:
    """A view in colour, as it looks in a terminal of so many columns."""
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor"
    )
    console.print(view)
    return console.export_svg(title=title)
