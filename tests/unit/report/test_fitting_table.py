"""Tables that leave out columns: whole cells in a narrow terminal, not the beginnings of all."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from haiprof.show.views.blocks import FittingTable

ROWS = [("4711", "12.3 ms", "3 of 4", "training_of_a_large_model-20261123")]
TABLE = FittingTable(
    ("pid", "time", "samples", "id"), ROWS, left=("id",), first_to_go=("samples", "time")
)


@pytest.mark.parametrize(
    ("width", "titles", "last"),
    [
        (80, ["pid", "time", "samples", "id"], "training_of_a_large_model-20261123"),
        (50, ["pid", "time", "samples", "id"], "training_of_a_large_model…"),
        (40, ["pid", "time", "id"], "training_of_a_large_mode…"),
        (30, ["pid", "id"], "training_of_a_large_mod…"),
        (12, ["pid", "id"], "train…"),
    ],
)
def test_columns_that_fit_are_whole(width: int, titles: list[str], last: str) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(TABLE)
    head, row = out.getvalue().splitlines()
    assert head.split() == titles
    assert row.split()[0] == "4711"
    assert row.rstrip().endswith(last)
    assert max(map(len, (head, row))) <= width
