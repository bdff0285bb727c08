"""Shows a run where the reader is: a figure in a notebook, tables and sparklines in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from haiprof.report.source import RunData

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MIN_WIDTH, _MAX_WIDTH = 60, 200


def overview(data: RunData) -> None:
    """Shows the whole job.

    Args:
        data: `haiprof.Analyzer` of the run.
    """
    if in_notebook():
        from haiprof.report.figures import overview_picture

        display_figure(overview_picture(data))
        return
    from haiprof.report.overview_view import overview_view
    from haiprof.report.summary import overview_summary

    console = _console()
    _print(console, overview_view(overview_summary(data), width=console.width))


def one_rank(data: RunData, rank: int) -> None:
    """Shows one rank over time.

    Args:
        data: `haiprof.Analyzer` of the run.
        rank: The rank.

    Raises:
        MissingDataError: The run has no such rank.
    """
    if in_notebook():
        from haiprof.report.figures import one_rank_picture

        display_figure(one_rank_picture(data, rank))
        return
    from haiprof.report.rank_summary import one_rank_summary
    from haiprof.report.rank_view import rank_view

    _print(_console(), rank_view(one_rank_summary(data, rank)))


def in_notebook() -> bool:
    """Whether this Python is a Jupyter kernel; IPython in a terminal is not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def display_figure(figure: go.Figure) -> None:
    """Displays a figure in the notebook; its script comes from the installed plotly package.

    The page holds plotly's own script, so that the saved notebook opens without a network. Front
    ends that draw plotly's own data type (Jupyter Lab, VS Code) take that.
    """
    from IPython.display import display

    from haiprof.report.page import CONFIG

    html = figure.to_html(include_plotlyjs=True, full_html=False, config=CONFIG)
    text = figure.layout.title.text.split("<br>")[0]
    display({"text/html": html, "text/plain": f"<haiprof figure: {text}>"}, raw=True)


def _console() -> Console:
    console = Console(highlight=False)
    console.width = min(_MAX_WIDTH, max(_MIN_WIDTH, console.width))
    return console


def _print(console: Console, view: RenderableType) -> None:
    console.print(view)
