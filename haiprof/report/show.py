"""Shows a run where the reader is: a figure in a notebook, tables and sparklines in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from haiprof.report.source import RunData

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from haiprof.analysis.analyzer import Analyzer

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


def ranks(data: Analyzer) -> None:
    """Shows all ranks over time, and how late each begins its collectives.

    Args:
        data: Of the run.
    """
    if in_notebook():
        from haiprof.report.figures import late_ranks_picture, rank_map_picture

        for picture in (rank_map_picture(data), late_ranks_picture(data)):
            if picture is not None:
                display_figure(picture)
        return
    overview(data)


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


def comparison(data: Analyzer, baseline: str | Path) -> None:
    """Shows what changed against another run.

    Args:
        data: Of the run.
        baseline: A run directory, a log directory, or `last-good`.

    Raises:
        RunNotFoundError: There is no such run.
        MissingDataError: There is no last good run.
    """
    from haiprof.diagnosis.compare.baseline import baseline_named
    from haiprof.diagnosis.compare.comparison import compare_runs
    from haiprof.diagnosis.compare.side import side_of

    after = side_of(data)
    chosen = baseline_named(str(baseline), after)
    found = compare_runs(chosen.side, after)
    if in_notebook():
        from haiprof.report.figures import comparison_picture

        picture = comparison_picture(found)
        if picture is not None:
            display_figure(picture)
        return
    from haiprof.report.compare_view import compare_view

    _print(_console(), compare_view(found, chosen=chosen.why))


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
