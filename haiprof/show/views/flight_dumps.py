"""What `haiprof trace flight-recorder` shows: what does not match, and where each rank is."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.run_analysis.collectives import FlightVerdict
from haiprof.show.frame_table import frame_table
from haiprof.show.text import printable
from haiprof.show.views.blocks import notes_block, section

_COLUMNS = (
    ("group_name", "group"), ("rank", "rank"), ("kind", "collective"), ("sequence", "number"),
    ("state", "state"), ("element_count", "elements"), ("dtype", "type"), ("name", "enqueued at"),
)  # fmt: skip
_AGREE = "all ranks are at the same collective of each group, and none is known to wait"


def flight_view(verdict: FlightVerdict) -> RenderableType:
    """The whole view."""
    last = verdict.last.rename({"line": "name"})
    known = [(name, head) for name, head in _COLUMNS if last[name].count()]
    return Group(
        *(Text(printable(text), style="bold") for text in verdict.findings or (_AGREE,)),
        section("The last collective of each rank", *frame_table(last, known, limit=40)),
        notes_block(verdict.notes),
    )
