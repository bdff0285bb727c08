"""Execution traces and Flight Recorder dumps are read whole; hostile ones end in one error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import TraceFormatError
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.trace_format.execution import load_execution_trace, write_linked
from haiprof.trace_format.flight_recorder import read_torch_dump
from tests.unit.analysis.test_deaths import Job
from tests.unit.analysis.trace.shared import traces
from tests.unit.traces.execution import node, write_execution


def test_old_schema_is_read_node_by_node() -> None:
    path = traces("dlrm_v100_8ranks_et") / "dlrm_eg_0.json.gz"
    told = {each["id"]: each for each in json.loads(gzip.decompress(path.read_bytes()))["nodes"]}
    found = load_execution_trace(path)
    assert (found.schema, found.pid) == ("1.0.1", 59811)
    assert found.report.notes == []
    assert len(found.nodes) == len(told) == 1675
    for row in found.nodes.iter_rows(named=True):
        said = told[row["node"]]
        own = (row["name"], row["record_function_id"], row["tid"], row["op_schema"] or "")
        assert own == tuple(said[key] for key in ("name", "rf_id", "tid", "op_schema"))
        assert row["parent"] == (said["parent"] if said["id"] != 1 else None)
        assert json.loads(row["input_values"]) == said["inputs"]
        assert json.loads(row["output_shapes"]) == said["output_shapes"]


def test_written_and_read_again_is_the_same(tmp_path: Path) -> None:
    once = load_execution_trace(traces("dlrm_v100_8ranks_et") / "dlrm_eg_3.json.gz")
    write_linked(tmp_path / "again.json.gz", once.nodes, {"pid": once.pid})
    again = load_execution_trace(tmp_path / "again.json.gz")
    assert again.schema == "1.1.1-chakra.0.0.4"
    kept = [name for name in once.nodes.columns if name not in ("attributes", "output_strides")]
    plain = once.nodes.select(kept).fill_null(0).fill_null("")
    assert again.nodes.select(kept).fill_null(0).fill_null("").equals(plain)


@pytest.mark.parametrize(("content", "said"), [
    (b"", "cannot be read as JSON"),
    (b'{"schema": "1.0.1", "nodes": [{"id": 1', "cannot be read as JSON"),
    (b"[" * 100_000, "cannot be read as JSON|no list of nodes"),
    (b"[1, 2]", "no list of nodes"),
    (b'{"traceEvents": []}', "no list of nodes"),
    (b'{"nodes": {"id": 1}}', "no list of nodes"),
    (b"\x1f\x8b\x08\x00broken", "cannot be read"),
    (b'{"nodes": "\xff\xfe"}', "no list of nodes|cannot be read"),
])  # fmt: skip
def test_other_files_end_in_one_error_that_names_them(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=f"bad.json.*({said})"):
        load_execution_trace(path)


def test_missing_file_and_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TraceFormatError, match=path.name):
            load_execution_trace(path)


def test_nodes_that_cannot_be_are_counted(tmp_path: Path) -> None:
    strange: list[Any] = [
        node(1, "[pytorch|profiler|execution_trace|process]", 1), node("7", parent=1),
        node(7, "again"), node("seven"), node(2**70), 5, None, node(8, parent=99),
        node(10, parent=11), node(11, parent=12), node(12, parent=10), node(13, parent=12),
        {"id": 14, "name": None, "ctrl_deps": [1], "attrs": {"a": 1}},
    ]  # fmt: skip
    found = load_execution_trace(write_execution(tmp_path / "et.json", strange))
    assert found.nodes["node"].to_list() == [1, 7, 8, 10, 11, 12, 13, 14]
    parents = dict(found.nodes.select("node", "parent").iter_rows())
    assert parents == {1: None, 7: 1, 8: None, 10: None, 11: None, 12: None, 13: 12, 14: 1}
    report = found.report
    assert (report.lost_count, report.repeated_count) == (4, 1)
    assert (report.orphan_count, report.cycle_count) == (1, 3)
    assert len(report.notes) == 4


def test_a_chain_of_many_nodes_is_read(tmp_path: Path) -> None:
    nodes = [node(number, parent=max(1, number - 1)) for number in range(1, 3_001)]
    found = load_execution_trace(write_execution(tmp_path / "deep.json", nodes))
    assert len(found.nodes) == 3_000
    assert found.report.cycle_count == 1  # node 1 is its own parent, and no root


DUMPS = Path(__file__).parents[2] / "data/flight_recorder"
STEP = ["all_reduce", "broadcast", "all_gather", "scatter", "gather", "reduce", "barrier"]


@pytest.mark.parametrize("suffix", ["pickle", "json"])
def test_dump_of_torch_is_read_as_it_was_issued(suffix: str) -> None:
    entries = read_torch_dump(DUMPS / f"gloo_0.{suffix}").entries
    assert entries["group_name"].to_list() == ["default_pg"] * 7 + ["pair", "default_pg"]
    assert entries["kind"].to_list() == [*STEP, "all_reduce", "all_reduce"]
    assert entries["sequence"].to_list() == [*range(1, 8), 1, 8]
    assert entries["element_count"].to_list() == [12, 12, 12, 24, 12, 12, 0, 5, 7]
    assert entries["dtype"].to_list() == ["Float"] * 6 + [None, "Double", "Float"]
    assert entries["created_ns"].is_sorted()
    assert entries["completed_ns"].null_count() == 9, "gloo does not tell"


def test_both_forms_of_a_dump_say_the_same() -> None:
    for rank in range(2):
        pickled = read_torch_dump(DUMPS / f"gloo_{rank}.pickle").entries
        assert pickled.equals(read_torch_dump(DUMPS / f"gloo_{rank}.json").entries)


def test_scatter_without_inputs_on_all_but_one_rank_is_no_contradiction(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=2)
    job.run.flight.mkdir()
    for rank in range(2):
        dump = (DUMPS / f"gloo_{rank}.pickle").read_bytes()
        (job.run.flight / f"rank_{rank}").write_bytes(dump)
        job.over(rank, 1, number=6)
    (death,) = RunFrames(job.run.root).deaths()
    assert (death.cause, death.ranks) == ("hang", (1,))
    assert "it never came to all_reduce 8" in death.headline
