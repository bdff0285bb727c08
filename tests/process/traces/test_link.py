"""Traces that torch writes here: links, execution traces, the example notebooks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import haiprof
from haiprof.trace_analysis.execution_link import link, pairs
from haiprof.trace_format.execution import load_execution_trace
from tests.conftest import Once
from tests.unit.analysis.trace.shared import REPOSITORY, traces
from tests.unit.traces.execution import record, record_pair
from tests.unit.traces.test_link import check_links, check_nesting, hosts


@pytest.mark.slow
def test_a_recorded_ddp_job_is_linked_rank_by_rank(once: Once) -> None:
    found, alone = pairs(once(("record_pair",), record_pair))
    assert [pair.rank for pair in found] == [0, 1]
    assert alone == []
    for pair in found:
        linked = link(pair)
        assert pair.execution.path.name == f"rank{pair.rank}.et.json"
        assert (linked.share.linked_ratio, linked.share.operator_linked_ratio) == (1.0, 1.0)
        check_links(linked)
        assert all(row["parent"] is not None for row in hosts(linked))


def test_a_recorded_model_is_linked_whole(once: Once) -> None:
    found, alone = pairs(once(("record",), record))
    linked = link(found[0])
    share = linked.share
    assert (alone, share.linked_by, share.not_linked) == ([], "record_function_id", {})
    assert (share.linked_ratio, share.operator_linked_ratio) == (1.0, 1.0)
    assert share.linked_count > 100
    assert (share.kernel_count, share.kernel_linked_ratio) == (0, None)
    check_links(linked)
    check_nesting(linked)


def test_what_torch_writes_here_is_read_node_by_node(once: Once) -> None:
    path = once(("record",), record) / "rank0.et.json"
    told = {each["id"]: each for each in json.loads(path.read_text())["nodes"]}
    found = load_execution_trace(path)
    assert found.report.notes == []
    assert set(found.nodes["node"]) == set(told)
    for row in found.nodes.iter_rows(named=True):
        said = told[row["node"]]
        attrs = {each["name"]: each["value"] for each in said["attrs"]}
        assert (row["name"], row["record_function_id"]) == (said["name"], attrs["rf_id"])
        assert json.loads(row["input_shapes"]) == said["inputs"]["shapes"]
        assert json.loads(row["attributes"]) == said["attrs"]


@pytest.mark.parametrize(
    ("name", "figure_count", "cell_count"),
    [pytest.param("traces", 11, 5, marks=pytest.mark.proof), ("causes", 3, 3)],
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
