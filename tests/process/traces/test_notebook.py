"""The example notebooks on traces run to their last cell and draw their figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import haiprof
from tests.unit.analysis.trace.shared import REPOSITORY, traces


@pytest.mark.parametrize(
    ("name", "figure_count", "cell_count"), [("traces", 11, 5), ("causes", 3, 3)]
)
def test_the_example_notebook_draws_every_picture(
    name: str, figure_count: int, cell_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    root = str(Path(haiprof.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TRACES", str(traces("dlrm_v100_8ranks")))
    notebook = nbformat.read(REPOSITORY / "examples" / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
        and "haiprof figure" in output["data"]["text/plain"]
    ]
    assert len(shown) == figure_count
    pages = "".join(str(cell.get("outputs")) for cell in notebook.cells)
    assert pages.count("plotly.js v") == 1
    assert (
        sum("Plotly.newPlot" in str(cell.get("outputs")) for cell in notebook.cells) == cell_count
    )
    if name == "traces":
        assert (tmp_path / "traces.html").stat().st_size > 1 << 20
