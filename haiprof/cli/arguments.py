"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        help="A run directory, or a log directory whose newest run is taken. "
        "Left out: the log directory that a job started here would write to.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON, and nothing else.")]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write the interactive picture into one self-contained HTML file.",
        show_default=False,
    ),
]
