"""Saves a verdict: JSON and text in the run directory, and the card as a picture."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import RenderableType

from haiprof.base.errors import HaiprofError
from haiprof.base.safe_files import make_folder, write_file
from haiprof.base.units import visible
from haiprof.diagnosis.document import as_document
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import write_json
from haiprof.show.card import MAX_WIDTH, verdict_card
from haiprof.show.console import SafeConsole
from haiprof.show.figures.html_file import write_text
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header

if TYPE_CHECKING:
    from haiprof.diagnosis.verdict import Verdict

# rich's own format loads its font from a content network; ours needs no network. Characters have
# fixed widths (textLength), so that any monospace font fits.
_SVG_FORMAT = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def save_verdict(verdict: Verdict, header: RunHeader, run: RunPaths) -> None:
    """Writes report/verdict.json and report/verdict.txt."""
    try:
        make_folder(run.report, below=run.root)
        write_json(run.verdict_json, as_document(verdict), below=run.root)
        text = view_text(verdict_card(verdict, header, everything=True), width=MAX_WIDTH)
        write_file(run.verdict_text, text.encode(), below=run.root)
    except OSError as error:
        raise HaiprofError(
            f"{run.report}: the verdict cannot be saved: {error.strerror or error}"
        ) from None


def save_card_svg(verdict: Verdict, header: RunHeader, path: Path) -> Path:
    """Writes the card as a picture of a terminal; returns the path, or raises UsageError."""
    return write_text(path, view_svg(verdict_card(verdict, header), title=f"haiprof {header.name}"))


def verdict_text(verdict: Verdict) -> str:
    """The card without colour, 100 columns wide."""
    run = RunPaths(Path(verdict.run))
    return view_text(verdict_card(verdict, run_header(run, manifest_or_none(run))), width=MAX_WIDTH)


def view_text(view: RenderableType, *, width: int) -> str:
    """A view without colour."""
    console = SafeConsole(
        file=io.StringIO(), width=width, color_system=None,
        force_jupyter=False,  # a notebook would show an empty output beside the text
    )  # fmt: skip
    with console.capture() as capture:
        console.print(view, crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def view_svg(view: RenderableType, *, title: str, width: int = MAX_WIDTH) -> str:
    """A view in colour, as it looks in a terminal of so many columns."""
    console = SafeConsole(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor",
        force_jupyter=False,
    )  # fmt: skip
    console.print(view)
    return console.export_svg(title=visible(title), code_format=_SVG_FORMAT)
