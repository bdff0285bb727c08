"""A figure as one HTML file that opens anywhere: plotly's own script is inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.errors import UsageError
from haiprof.report.figures import one_rank_picture, overview_picture
from haiprof.report.source import RunData

if TYPE_CHECKING:
    import plotly.graph_objects as go

CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False}


def write_overview_page(data: RunData, path: Path) -> Path:
    """Writes the overview figure; returns the path.

    Raises:
        UsageError: The file cannot be written.
    """
    return write_page(overview_picture(data), path)


def write_rank_page(data: RunData, rank: int, path: Path) -> Path:
    """Writes the figure of one rank; returns the path.

    Raises:
        UsageError: The file cannot be written.
        MissingDataError: The run has no such rank.
    """
    return write_page(one_rank_picture(data, rank), path)


def write_page(figure: go.Figure, path: Path) -> Path:
    """Writes one figure as a page without any reference to the network.

    Raises:
        UsageError: The file cannot be written.
    """
    page = figure.to_html(include_plotlyjs=True, full_html=True, config=CONFIG)
    return write_text(path, page.replace("<head>", "<head><title>haiprof</title>", 1))


def write_text(path: Path, text: str) -> Path:
    """Writes a file that the user named.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
