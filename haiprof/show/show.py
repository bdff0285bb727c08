"""Shows a run in a notebook (a part of its page) or in a terminal (tables and sparklines)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from haiprof.show.terminal import SafeConsole
from haiprof.show.views.blocks import section

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from haiprof.run_analysis.run_frames import RunFrames
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

_MIN_WIDTH, _MAX_WIDTH = 60, 200
_ROW_LIMIT = 20
_PAGE_PX = 720


def overview(data: RunFrames, **part: Any) -> None:  # noqa: ANN401 - as `page_part` takes them
    """Shows the whole job."""
    if in_notebook():
        _show_page(data, **part)
        return
    from haiprof.show.summary import overview_summary
    from haiprof.show.views.run import overview_view

    _print(lambda width: overview_view(overview_summary(data), width=width))


def ranks(data: RunFrames) -> None:
    """Shows all ranks over time, and how late each begins its collectives."""
    overview(data, only=("verdict", "overview", "ranks", "collectives"))


def one_rank(data: RunFrames, rank: int) -> None:
    """Shows one rank over time."""
    if in_notebook():
        _show_page(data, rank=rank)
        return
    from haiprof.show.rank_summary import one_rank_summary
    from haiprof.show.views.run import rank_view

    _print(lambda _: rank_view(one_rank_summary(data, rank)))


def comparison(data: RunFrames, baseline: str | Path) -> None:
    """Shows what changed against another run."""
    if in_notebook():
        _show_page(data, only=("comparison",), baseline=str(baseline))
        return
    from haiprof.diagnosis.compare.compared_run import baseline_named, open_compared_run
    from haiprof.diagnosis.compare.comparison import compare_runs
    from haiprof.show.views.compare import compare_view

    after = open_compared_run(data)
    chosen = baseline_named(str(baseline), after)
    found = compare_runs(chosen.side, after)
    _print(lambda _: compare_view(found, chosen=chosen.why))


def trace_picture(
    traces: TraceQuestions, name: str, steps: tuple[int, int] | None,
    **options: Any,  # noqa: ANN401 - whatever the picture takes
) -> None:  # fmt: skip
    """Shows one answer about traces."""
    from haiprof.show.trace_pictures import PICTURES

    picture = PICTURES[name](traces, steps, **options)
    if in_notebook():
        display_figure(picture.figure)
        return
    from haiprof.show.frame_table import plain_frame

    rows = plain_frame(picture.frame, picture.columns, limit=_ROW_LIMIT)
    _print(lambda _: section(picture.title, *rows))


def in_notebook() -> bool:
    """Whether this Python is a Jupyter kernel; IPython in a terminal is not."""
    return getattr(_shell(), "kernel", None) is not None


def _shell() -> Any:  # noqa: ANN401 - IPython's own
    """The shell of IPython that runs this Python; None without any."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def page_frame(page: str, title: str) -> str:
    """A page as HTML in a frame of its own, for a notebook."""
    size = f"width: 100%; height: {_PAGE_PX}px; border: 0"
    return f'<iframe title="{escape(title)}" style="{size}" srcdoc="{escape(page)}"></iframe>'


def _show_page(data: RunFrames, **part: Any) -> None:  # noqa: ANN401 - as `page_part` takes them
    """Displays a part of the run's page in the notebook."""
    from IPython.display import display

    from haiprof.show.page.render import page_part

    name = data.run.root.name
    html = page_frame(page_part(data, **part), name)
    display({"text/html": html, "text/plain": f"<haiprof page: {name}>"}, raw=True)


def display_figure(figure: go.Figure) -> None:
    """Displays a figure in the notebook; its script comes from the installed plotly package.

    One cell of a notebook brings plotly's own script (4.6 MB), so that the saved notebook opens
    without a network; the figures of other cells use it. Where the front end does not tell cells
    apart, each execution brings it, as that cell may be the one that is run again; not where a
    notebook is executed as a whole (nbconvert, papermill), which runs each cell once.
    """
    from IPython.display import display

    from haiprof.show.figures.style import CONFIG

    drawn = figure.to_html(include_plotlyjs=_brings_script(), full_html=False, config=CONFIG)
    text = figure.layout.title.text.split("<br>")[0]
    label = escape(re.sub("<[^>]*>", "", text))
    html = f'<div role="figure" aria-label="{label}">{drawn}</div>'
    display({"text/html": html, "text/plain": f"<haiprof figure: {text}>"}, raw=True)


_SCRIPT_CELLS: list[tuple[object, object]] = []
"""Cell and execution of the figure that brought plotly's script into this notebook."""


def _brings_script() -> bool:
    """Whether this figure has to bring plotly's script."""
    shell = _shell()
    parent = getattr(shell, "get_parent", dict[str, Any])()
    cell = parent.get("metadata", {}).get("cellId")
    execution = getattr(shell, "execution_count", None)
    is_whole = parent.get("content", {}).get("allow_stdin") is False  # nobody watches it
    for known_cell, known_execution in _SCRIPT_CELLS:
        is_same = execution is not None and execution == known_execution  # another of its figures
        is_other = None not in (cell, known_cell) and cell != known_cell
        if is_same or is_other or (cell is None and is_whole):
            return False
    _SCRIPT_CELLS[:] = [(cell, execution)]
    return True


def _print(view: Callable[[int], RenderableType]) -> None:
    """Prints a view for a terminal of so many columns."""
    console = SafeConsole()
    console.width = min(_MAX_WIDTH, max(_MIN_WIDTH, console.width))
    console.print(view(console.width))
