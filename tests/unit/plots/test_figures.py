from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from haiprof.base.units import NS_PER_MS
from haiprof.show.figures.run_figures import one_rank_picture, overview_picture
from haiprof.show.figures.style import PHASE_COLORS
from haiprof.show.summary import overview_summary
from tests.unit.report.fake_run import START_NS, empty_run, two_rank_run


def texts(figure: object) -> str:
    return " ".join(note.text for note in figure.layout.annotations)  # type: ignore[attr-defined]


def test_overview_figure_has_the_terminals_numbers(tmp_path: Path) -> None:
    data = two_rank_run(tmp_path)
    forward = next(t for t in overview_picture(data).data if t.name == "forward")
    expected = [(r.split_ns["forward"] or 0) / NS_PER_MS for r in overview_summary(data).ranks]
    assert list(forward.x) == expected
    assert forward.marker.color == PHASE_COLORS["forward"]


def test_overview_figure_names_what_is_missing_below_its_panels(tmp_path: Path) -> None:
    figure = overview_picture(two_rank_run(tmp_path))
    assert re.search(r"GPU, .*: not measured: ", texts(figure))
    assert "GPU power" not in texts(figure)


def test_overview_figure_with_gpu_has_its_panels(tmp_path: Path) -> None:
    figure = overview_picture(two_rank_run(tmp_path, gpu=True))
    assert "GPU power (W)" in texts(figure)
    (note,) = [x.text for x in figure.layout.annotations if "not measured" in x.text]
    assert note.startswith("GPU units, GPU links, InfiniBand")


def test_overview_figure_of_nothing_recorded_can_be_drawn(tmp_path: Path) -> None:
    assert "not measured" in texts(overview_picture(empty_run(tmp_path)))


def test_one_rank_figure_stacks_only_phases_that_were_seen(tmp_path: Path) -> None:
    data = two_rank_run(tmp_path)
    for row in data.step_rows:
        row["dataloader_host_ns"] = None
    areas = [t.name for t in one_rank_picture(data, 0).data if t.stackgroup]
    assert areas == ["forward", "backward", "optimizer", "other"]


def test_one_rank_figure_of_a_long_run_is_thinned_and_keeps_the_slow_step(tmp_path: Path) -> None:
    data, end_ns = empty_run(tmp_path), START_NS
    data.add_rank(0)
    for step in range(12_000):
        slow = 50.0 if step == 7_777 else 1.0
        end_ns = data.add_step(0, step, end_ns, (slow, 1.0, 1.0, 1.0, 1.0))
    area = next(t for t in one_rank_picture(data, 0).data if t.name == "dataloader")
    assert len(area.x) <= 5000
    assert np.nanmax(area.y) == 50.0


def test_figure_title_escapes_the_jobs_name(tmp_path: Path) -> None:
    figure = overview_picture(empty_run(tmp_path, name="<script>alert(1)</script>"))
    assert "<script>" not in figure.layout.title.text
