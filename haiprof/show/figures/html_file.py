"""A figure as one HTML file that opens anywhere: plotly's own script is inside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.base.errors import UsageError
from haiprof.base.safe_files import named_file, whole_file

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from haiprof.show.source import RunData

# Control characters and marks of direction as plotly's JSON escapes them.
_UNSEEN = re.compile(r"\\u(?:00[0189][0-9a-f]|007f|00ad|061c|200[b-f]|202[a-e]|206[0-9a-f]|feff)")
CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False}


def write_overview_page(data: RunData, path: Path) -> Path:
    """Writes the overview figure; returns the path, or raises UsageError."""
    from haiprof.show.figures.run_figures import overview_picture  # takes a while to load

    return write_page(overview_picture(data), path)


def write_rank_page(data: RunData, rank: int, path: Path) -> Path:
    """Writes the figure of one rank; returns the path.

    Raises:
        UsageError: The file cannot be written.
        MissingDataError: The run has no such rank.
    """
    from haiprof.show.figures.run_figures import one_rank_picture  # takes a while to load

    return write_page(one_rank_picture(data, rank), path)


def write_page(figure: go.Figure, path: Path) -> Path:
    """Writes one figure as a page without any reference to the network, or raises UsageError."""
    page = figure.to_html(include_plotlyjs=True, full_html=True, config=CONFIG)
    own = page.rfind('<div id="')  # behind plotly's script; plotly escapes < in the figure's JSON
    page = page[:own] + _UNSEEN.sub(r"\\ufffd", page[own:])
    return write_text(path, page.replace("<head>", "<head><title>haiprof</title>", 1))


def write_text(path: Path, text: str, *, below: Path | None = None) -> Path:
    """Writes a file.

    Args:
        path: The file.
        text: All of it.
        below: The run directory that it is part of; None of a file that the user named.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        with named_file(path) if below is None else whole_file(path, below=below) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
