"""Chakra files, read back by Google's protobuf with Chakra's schema; the graph as a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from haiprof.cli.app import run_command
from haiprof.trace_analysis.chakra import in_circles
from haiprof.trace_analysis.execution_link import link, pairs
from haiprof.trace_format.chakra import varint
from tests.unit.analysis.trace.shared import REPOSITORY, traces
from tests.unit.traces.execution import node, write_execution

SCHEMA = REPOSITORY / "tests" / "data" / "chakra" / "et_def.desc"
DLRM, DLRM_ET = "dlrm_v100_8ranks", "dlrm_v100_8ranks_et"
METADATA, MEM_LOAD, MEM_STORE, COMP, COMM_SEND, COMM_RECV, COMM_COLL = range(1, 8)


def messages() -> tuple[Any, Any]:
    """GlobalMetadata and Node of Chakra's own schema."""
    pool = pytest.importorskip("google.protobuf.descriptor_pool").DescriptorPool()
    factory = pytest.importorskip("google.protobuf.message_factory")
    pool.AddSerializedFile(SCHEMA.read_bytes())
    found = [factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
             for name in ("GlobalMetadata", "Node")]  # fmt: skip
    return found[0], found[1]


def parts(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            size, shift, at = size | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                break
        yield data[at : at + size]
        at += size


def read(path: Path) -> tuple[dict[str, Any], dict[int, Any]]:
    """Attributes of the file, and its nodes by number."""
    kind, node_kind = messages()
    first, *rest = parts(path.read_bytes())
    nodes = [node_kind.FromString(each) for each in rest]
    assert len({each.id for each in nodes}) == len(nodes)
    return attributes(kind.FromString(first)), {each.id: each for each in nodes}


def attributes(message: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in message.attr}


def check_order(nodes: dict[int, Any]) -> None:
    """Every dependency exists, and taking nodes whose dependencies are over takes them all."""
    left = {number: {*each.ctrl_deps, *each.data_deps} for number, each in nodes.items()}
    assert set().union(*left.values()) <= set(nodes)
    waiting: dict[int, list[int]] = {}
    for number, before in left.items():
        for each in before:
            waiting.setdefault(each, []).append(number)
    ready = [number for number, before in left.items() if not before]
    for number in ready:
        for after in waiting.get(number, []):
            left[after].discard(number)
            if not left[after]:
                ready.append(after)
    assert len(ready) == len(nodes)


def chakra(*arguments: object) -> int:
    return run_command(["chakra", *map(str, arguments)])


def test_dlrm_as_chakra_is_what_the_timeline_says(tmp_path: Path) -> None:
    assert chakra(traces(DLRM), "--et", traces(DLRM_ET), "-o", tmp_path, "--rank", 2) == 0
    around, nodes = read(tmp_path / "chakra.2.et")
    assert (around["rank"], around["schema"]) == (2, "1.0.1")
    linked = link(pairs(traces(DLRM), traces(DLRM_ET), rank=2)[0][0])
    assert len(nodes) == len(linked.nodes) == 1675 + 262
    for row in linked.nodes.iter_rows(named=True):
        found, said = nodes[row["node"]], attributes(nodes[row["node"]])
        assert found.name == row["name"]
        assert list(found.ctrl_deps) == ([] if row["parent"] is None else [row["parent"]])
        assert said.get("ts_ns") == row["ts_ns"]
        assert said["is_cpu_op"] == (row["category"] is None)
        if row["ts_ns"] is not None:
            assert found.start_time_micros == row["ts_ns"] // 1000
            assert found.duration_micros == row["self_ns"] // 1000
            assert said["self_ns"] == row["self_ns"]
            assert said["dur_ns"] == row["dur_ns"]
    check_order(nodes)


def test_dlrm_collectives_have_kind_and_size(tmp_path: Path) -> None:
    assert chakra(traces(DLRM), "--et", traces(DLRM_ET), "-o", tmp_path, "--rank", 0) == 0
    _, nodes = read(tmp_path / "chakra.0.et")
    collectives = [each for each in nodes.values() if each.type == COMM_COLL]
    found = Counter((said["comm_type"], said["comm_size"]) for said in map(attributes, collectives))
    all_reduce, all_to_all = 0, 6
    assert found == Counter({
        (all_to_all, 6144 * 4): 2, (all_to_all, 24 * 8): 1, (all_to_all, 384 * 4): 1,
        (all_to_all, 3392 * 4): 1, (all_reduce, 394241 * 4): 1, (all_reduce, 112 * 4): 1,
        (all_reduce, 226960 * 4): 1,
    })  # fmt: skip
    copies = [each for each in nodes.values() if each.type in (MEM_LOAD, MEM_STORE)]
    assert {each.name.split(" ")[0] for each in copies} <= {"Memcpy", "Memset"}
    assert all("HtoD" in each.name for each in copies if each.type == MEM_LOAD)
    assert all(attributes(each)["tensor_size"] > 0 for each in copies if "Memcpy" in each.name)


@pytest.mark.proof
def test_what_was_linked_before_gives_the_same_file(tmp_path: Path) -> None:
    source = [traces(DLRM), "--et", traces(DLRM_ET), "--rank", 4]
    assert run_command(["link", *map(str, source), "-o", str(tmp_path / "linked.json")]) == 0
    assert chakra(*source, "-o", tmp_path / "direct") == 0
    assert chakra(tmp_path, "-o", tmp_path / "later") == 0
    direct = read(tmp_path / "direct" / "chakra.4.et")[1]
    later = read(tmp_path / "later" / "chakra.4.et")[1]
    assert [each.SerializeToString() for each in direct.values()] == [
        each.SerializeToString() for each in later.values()
    ]


def test_hostile_nodes_end_without_circles(tmp_path: Path) -> None:
    nodes = [node(1, "[pytorch|profiler|execution_trace|process]", 1, rf_id=0)]
    nodes += [{**node(number, "a \"&<\x00\n" * 3, parent), "ts": 10.0 - number,
               "inclusive_dur": 3, "exclusive_dur": -1, "inter_thread_dep": 12 - number,
               "sync_dep": [number, 2, "x", 99]}
              for number, parent in [(2, 3), (3, 4), (4, 2), (5, 1), (6, 77), (7, 6)]]  # fmt: skip
    path = write_execution(tmp_path / "linked.json", nodes, start_ts=-5, time={"a": 1})
    assert chakra(path, "-o", tmp_path) == 0
    check_order(read(tmp_path / "chakra.0.et")[1])
    for picture in ("graph.dot", "graph.graphml"):
        assert chakra(path, "--graph", tmp_path / picture) == 0


def test_without_graphviz_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = write_execution(tmp_path / "linked.json", [node(2)])
    assert chakra(path, "--graph", tmp_path / "graph.pdf") == 6
    assert "apt-get install graphviz" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status", "said"), [
    (["et.json"], 2, "-o DIR"),
    (["et.json", "--graph", "x.gif"], 2, "a graph ends in"),
    (["et.json", "--graph", "x.dot", "--steps", "9"], 5, "no profiler step 9"),
    (["et.json", "-o", "out", "--rank", "3"], 5, "no execution trace of rank 3"),
    (["none", "-o", "out"], 4, "none"),
    (["bad.json", "-o", "out"], 4, "bad.json"),
])  # fmt: skip
def test_what_cannot_be_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_execution(tmp_path / "et.json", [node(2)])
    (tmp_path / "bad.json").write_text("{")
    assert chakra(*arguments) == status
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_json_says_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_execution(tmp_path / "et.json", [node(2), node(3)])
    assert chakra(tmp_path / "et.json", "-o", tmp_path / "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ranks"][0]["types"] == {"COMP": 2}
    assert "no times" in said["notes"][-1]


@pytest.mark.parametrize(
    ("number", "written"), [(0, "00"), (127, "7f"), (300, "ac02"), (-1, "ff" * 9 + "01")]
)
def test_varints_are_those_of_protobuf(number: int, written: str) -> None:
    assert varint(number).hex() == written


def test_circles_and_what_waits_for_them_are_found() -> None:
    before, after = np.array([0, 1, 2, 3, 2]), np.array([1, 2, 1, 0, 4])
    assert in_circles(5, before, after).tolist() == [False, True, True, False, True]
