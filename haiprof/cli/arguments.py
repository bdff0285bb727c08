"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from haiprof.cli.target import name_log_dir

RunDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        help="A run directory, or a log directory whose newest run is taken. "
        "Left out: the log directory that a job started here would write to.",
        show_default=False,
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        "--log-dir",
        metavar="DIR",
        help="The log directory whose newest run is taken, instead of the default one.",
        show_default=False,
        is_eager=True,
        callback=name_log_dir,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON, and nothing else.")]
Everything = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Also all numbers, what could not be measured or judged, and what haiprof cost.",
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write this as a part of the report page, into one self-contained HTML file.",
        show_default=False,
    ),
]
