"""Chakra files of a recorded job."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from haiprof.cli.app import run_command
from haiprof.trace_analysis.execution_link import link, pairs
from tests.conftest import Once
from tests.unit.analysis.trace.shared import traces
from tests.unit.traces.execution import record, record_pair
from tests.unit.traces.test_chakra import (
    COMM_COLL,
    COMM_RECV,
    COMM_SEND,
    DLRM,
    DLRM_ET,
    attributes,
    chakra,
    check_order,
    read,
)


@pytest.mark.proof
@pytest.mark.slow
def test_a_recorded_ddp_job_has_its_collectives_sends_and_receives(
    tmp_path: Path, once: Once
) -> None:
    recorded = once(("record_pair",), record_pair)
    assert chakra(recorded, "-o", tmp_path / "out") == 0
    for rank, (kind, peer) in enumerate([(COMM_SEND, "comm_dst"), (COMM_RECV, "comm_src")]):
        _, nodes = read(tmp_path / "out" / f"chakra.{rank}.et")
        check_order(nodes)
        talks = [each for each in nodes.values() if each.type in (COMM_SEND, COMM_RECV, COMM_COLL)]
        names = Counter(each.name for each in talks)
        assert names["gloo:all_reduce"] == names["gloo:broadcast"] == names["gloo:all_gather"] == 2
        assert {attributes(each)["pg_name"] for each in talks} == {"0"}
        sizes = {each.name: attributes(each).get("comm_size") for each in talks}
        assert sizes["gloo:all_gather"] == 3 * 4
        assert sizes["gloo:broadcast"] == 7 * 4
        pairwise = [attributes(each) for each in talks if each.type == kind]
        assert [(said[peer], said["comm_tag"], said["comm_size"]) for said in pairwise] == [
            (1 - rank, 7, 20)
        ] * 2


@pytest.mark.parametrize("name", ["chakra_converter", "chakra_jsonizer"])
def test_chakras_own_tools_read_what_is_written(tmp_path: Path, name: str) -> None:
    folder = os.environ.get("HAIPROF_CHAKRA")
    if not folder:
        pytest.skip("HAIPROF_CHAKRA names no folder with mlc-chakra's commands")
    source = record(tmp_path)
    assert run_command(["link", str(source), "-o", str(source / "linked.json")]) == 0
    assert chakra(source / "linked.json", "-o", source) == 0
    linked = str(source / "linked.json")
    arguments: dict[str, list[str]] = {
        "chakra_converter": ["PyTorch", "--input", linked, "--output", str(source / "x")],
        "chakra_jsonizer": ["--input_filename", str(source / "chakra.0.et"),
                            "--output_filename", str(source / "x")],
    }  # fmt: skip
    subprocess.run([Path(folder) / name, *arguments[name]], check=True, timeout=200)
    ours = read(source / "chakra.0.et")[1]
    if name == "chakra_jsonizer":
        assert (source / "x").read_text().count('"durationMicros"') > 50
        return
    theirs = read(source / "x")[1]
    assert set(theirs) <= set(ours)
    durations = {each.id: each.duration_micros for each in theirs.values()}
    assert {number: ours[number].duration_micros for number in durations
            if "Optimizer.step" not in ours[number].name}.items() <= durations.items()  # fmt: skip


def test_graph_shows_a_step_and_folds_what_is_deeper(tmp_path: Path, once: Once) -> None:
    source = once(("record",), record)
    path = tmp_path / "graph.graphml"
    assert chakra(source, "--graph", path, "--steps", 2, "--max-nodes", 60) == 0
    space = {"g": "http://graphml.graphdrawing.org/xmlns"}
    root = ElementTree.parse(path).getroot()
    shown = root.findall(".//g:node", space)
    names = [each.findtext("g:data[@key='name']", namespaces=space) for each in shown]
    assert "ProfilerStep#2" in names
    assert "ProfilerStep#3" not in names
    assert 20 < len(names) <= 60
    numbers = {each.get("id") for each in shown}
    edges = [(each.get("source"), each.get("target")) for each in root.findall(".//g:edge", space)]
    assert {end for edge in edges for end in edge} <= numbers
    _, step = (
        link(pairs(source)[0][0]),
        sum(
            int(each.findtext("g:data[@key='folded_count']", namespaces=space) or 0) + 1
            for each in shown
        ),
    )
    times = link(pairs(source)[0][0]).nodes.drop_nulls("ts_ns")
    mark = times.filter(times["name"] == "ProfilerStep#2").row(0, named=True)
    inside = times["ts_ns"].is_between(mark["ts_ns"], mark["ts_ns"] + mark["dur_ns"] - 1)
    assert step == inside.sum()  # nothing of the step is lost by folding


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize(
    ("ending", "magic"),
    [(".pdf", b"%PDF"), pytest.param(".png", b"\x89PNG", marks=pytest.mark.proof)],
)
def test_graph_is_drawn_by_graphviz(tmp_path: Path, ending: str, magic: bytes) -> None:
    source = [traces(DLRM), "--et", traces(DLRM_ET), "--rank", 0]
    assert chakra(*source, "--graph", tmp_path / f"graph{ending}", "--max-nodes", 40) == 0
    assert (tmp_path / f"graph{ending}").read_bytes().startswith(magic)
