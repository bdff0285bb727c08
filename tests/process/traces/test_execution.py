"""What torch writes here, read back."""

from __future__ import annotations

import json

from haiprof.trace_format.execution import load_execution_trace
from tests.conftest import Once
from tests.unit.traces.execution import record


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
