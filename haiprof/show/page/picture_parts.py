"""Pictures of traces as a page holds them: a title, a height, and numbers for its script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from haiprof.show.text import printable
from haiprof.show.trace_pictures import TracePicture, all_pictures
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

_TITLE_PX = 100
"""What a figure's own title and legend take; on the page they stand above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePicture:
    """One picture of the page."""

    name: str
    title: str
    height: int
    figure: Any
    """Plain JSON values, as plotly's script takes them."""


def page_pictures(
    traces: TraceQuestions, steps: Steps = None
) -> tuple[tuple[PagePicture, ...], tuple[tuple[str, str], ...]]:
    """All pictures of traces, and of those that cannot be drawn the reasons."""
    drawn, missing = all_pictures(traces, steps)
    return tuple(_part(name, each) for name, each in drawn.items()), tuple(missing.items())


def figure_data(pictures: Sequence[PagePicture]) -> dict[str, Any]:
    """The numbers of pictures, by the name that their places on the page have."""
    return {picture.name: picture.figure for picture in pictures}


def plain_figure(figure: go.Figure) -> Any:  # noqa: ANN401 - any JSON value
    """A figure without plotly's own colours: the page has its own."""
    figure.update_layout(template=None)
    return json.loads(figure.to_json())


def _part(name: str, picture: TracePicture) -> PagePicture:
    return PagePicture(
        name=f"trace-{name.replace('_', '-')}",
        title=printable(picture.title),
        height=picture.figure.layout.height - _TITLE_PX,
        figure=plain_figure(picture.figure),
    )
