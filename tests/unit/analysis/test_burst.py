"""Bursts: an export of Nsight Systems as a frame beside the steps."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.base.errors import RunFormatError
from haiprof.run_analysis.counters import COUNTER_SCHEMA
from haiprof.run_format.layout import NodePaths
from haiprof.run_format.tables import GPU
from tests.fake_nsys import Sample, write_export
from tests.unit.analysis.recorded import CLOCK, spans_of, write_rank, write_records, write_run

EPOCH_NS = CLOCK.wall_ns + 5_000_000_000
SM = "SMs Active [Throughput %]"
UUIDS = [f"GPU-00000000-0000-0000-0000-{n:012d}" for n in (0, 1)]
STEADY: list[Sample] = [(t, 0, SM, 80) for t in range(0, 1_000_000, 100_000)]


@pytest.fixture
def node(tmp_path: Path) -> NodePaths:
    run = write_run(tmp_path / "run")
    paths = run.node("node0")
    paths.bursts.mkdir(parents=True)
    return paths


def export(node: NodePaths, samples: Sequence[Sample], **more: Any) -> None:
    write_export(node.burst_export, samples, **{"epoch_ns": EPOCH_NS, **more})


def entities(**more: object) -> list[Mapping[str, object]]:
    return [
        {"key": [n], "name": f"gpu {n}", "uuid": uuid, "model": "NVIDIA H200", **more}
        for n, uuid in enumerate(UUIDS)
    ]


def bursts(node: NodePaths) -> pl.DataFrame:
    return Analyzer(node.root.parents[1]).bursts()


def test_burst_has_the_columns_of_counters_in_base_units(node: NodePaths) -> None:
    export(node, [(0, 0, SM, 0), (100_000, 0, SM, 37), (200_000, 0, SM, 100)])
    frame = bursts(node)
    assert dict(frame.schema) == COUNTER_SCHEMA
    assert frame["time_ns"].to_list() == [EPOCH_NS, EPOCH_NS + 100_000, EPOCH_NS + 200_000]
    assert frame["value"].to_list() == [0.0, 0.37, 1.0]
    for column, value in {
        "host": "node0", "source": "burst", "metric": "sm_active_ratio", "unit": "ratio",
        "flag": None,
    }.items():  # fmt: skip
        assert frame[column].unique().to_list() == [value]


def test_gpus_are_named_by_uuid_not_by_nsyss_order(node: NodePaths) -> None:
    write_records(node.records("gpu"), GPU, [], entities=entities())
    run = Analyzer(node.root.parents[1]).run
    write_rank(
        run, spans_of("D F B O"), rank=3, host="node0", gpu_uuid=UUIDS[1].removeprefix("GPU-")
    )
    export(node, [(0, 0, SM, 10), (0, 1, SM, 20)])
    rows = {row["gpu"]: row for row in bursts(node).iter_rows(named=True)}
    assert (rows[1]["entity"], rows[1]["value"], rows[1]["rank"]) == ("gpu 1", 0.1, 3)
    assert (rows[0]["entity"], rows[0]["value"], rows[0]["rank"]) == ("gpu 0", 0.2, None)


def test_gpu_is_found_by_its_pci_address_where_uuids_are_missing(node: NodePaths) -> None:
    write_records(
        node.records("gpu"), GPU, [], entities=[{**entities()[0], "bus_id": "0000:0f:00.0"}]
    )
    export(node, STEADY, gpus=[(0, "", "00000000:0F:00.0")])
    assert bursts(node)["gpu"].unique().to_list() == [0]


def test_gpu_that_cannot_be_told_is_nobodys(node: NodePaths) -> None:
    write_records(node.records("gpu"), GPU, [], entities=entities())
    export(node, STEADY)
    with sqlite3.connect(node.burst_export) as database:  # the two numbers of a GPU differ
        database.execute("UPDATE TARGET_INFO_GPU SET pwGpuId = 1 - id")
    database.close()
    frame = bursts(node)
    assert frame["entity"].unique().to_list() == ["nsys gpu 0"]
    assert frame["gpu"].null_count() == frame["rank"].null_count() == frame.height


def test_names_of_older_versions_mean_the_same_and_strangers_are_left_out(node: NodePaths) -> None:
    export(
        node,
        [(0, 0, "DRAM Read Throughput", 5), (0, 0, "PCIe TX Throughput [Throughput %]", 6),
         (0, 0, "GPC Clock Frequency [MHz]", 50), (0, 0, "Tensor Active / FP16 Active", 7),
         (0, 0, "Compute Warps in Flight [Avg Warps per Cycle]", 8)],
    )  # fmt: skip
    values = dict(bursts(node).select("metric", "value").iter_rows())
    assert values == {"dram_read_ratio": 0.05, "pcie_transmit_ratio": 0.06}


def test_values_and_times_that_cannot_be_are_left_out(node: NodePaths) -> None:
    export(node, [(-5, 0, SM, 50), (0, 0, SM, -3), (1, 0, SM, 101), (2, 0, SM, 60)])
    assert bursts(node)["value"].to_list() == [0.6]


def test_links_that_are_always_full_are_down(node: NodePaths) -> None:
    received, sent = "NVLink RX Requests User Data [Throughput %]", "NVLink TX Throughput"
    export(
        node, [(t, 0, received, 100) for t in range(4)] + [(t, 0, sent, 97 + t) for t in range(4)]
    )
    frame = bursts(node)
    down = frame.filter(pl.col("metric") == "nvlink_receive_request_data_ratio")
    assert down["value"].null_count() == 4
    assert down["flag"].to_list() == ["saturated"] * 4
    up = frame.filter(pl.col("metric") == "nvlink_transmit_ratio")
    assert up["value"].to_list() == [0.97, 0.98, 0.99, 1.0]


def test_run_without_a_burst_has_an_empty_frame_of_the_same_columns(node: NodePaths) -> None:
    frame = bursts(node)
    assert frame.height == 0
    assert dict(frame.schema) == COUNTER_SCHEMA
    export(node, STEADY, leave_out=["TARGET_INFO_GPU"])
    assert bursts(node)["entity"].unique().to_list() == ["nsys gpu 0"]


def test_burst_of_every_node_is_in_the_frame(node: NodePaths) -> None:
    export(node, STEADY)
    other = Analyzer(node.root.parents[1]).run.node("node1")
    other.bursts.mkdir(parents=True)
    write_export(other.burst_export, STEADY, epoch_ns=EPOCH_NS + 1_000_000)
    frame = bursts(node)
    assert sorted(frame["host"].unique()) == ["node0", "node1"]
    assert frame["time_ns"].is_sorted()


@pytest.mark.parametrize(
    "table", ["GPU_METRICS", "TARGET_INFO_GPU_METRICS", "TARGET_INFO_SESSION_START_TIME"]
)
def test_export_that_lacks_a_table_is_named(node: NodePaths, table: str) -> None:
    export(node, STEADY, leave_out=[table])
    with pytest.raises(RunFormatError, match=f"gpu.sqlite: .*{table}"):
        bursts(node)


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"x" * 5000, None])
def test_foreign_or_cut_file_is_named(node: NodePaths, content: bytes | None) -> None:
    export(node, [(t, 0, SM, t % 100) for t in range(20_000)])
    whole = node.burst_export.read_bytes()
    node.burst_export.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(RunFormatError, match=r"gpu\.sqlite"):
        bursts(node)


@pytest.mark.parametrize("value", ["'many'", "x'00'", "NULL"])
def test_value_that_is_no_number_is_not_taken_for_one(node: NodePaths, value: str) -> None:
    export(node, STEADY, leave_out=["GPU_METRICS"])
    with sqlite3.connect(node.burst_export) as database:
        database.execute("CREATE TABLE GPU_METRICS (timestamp, typeId, metricId, value)")
        database.execute(f"INSERT INTO GPU_METRICS SELECT 5, typeId, metricId, {value} "
                         "FROM TARGET_INFO_GPU_METRICS")  # fmt: skip
    database.close()
    assert bursts(node).height == 0


@pytest.mark.parametrize("start", [None, 0, -7, "yesterday", 1 << 62])
def test_export_without_a_start_time_is_refused(node: NodePaths, start: object) -> None:
    export(node, STEADY)
    with sqlite3.connect(node.burst_export) as database:
        database.execute("UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = ?", (start,))
    database.close()
    with pytest.raises(RunFormatError, match=r"gpu\.sqlite: says no Unix time"):
        bursts(node)


@pytest.mark.parametrize(
    ("off_s", "fits"), [(0.0, True), (1.0, True), (60.0, False), (-60.0, False)]
)
def test_samples_of_another_clock_are_refused(node: NodePaths, off_s: float, fits: bool) -> None:
    window = {"start_wall_ns": EPOCH_NS - 100_000_000, "end_wall_ns": EPOCH_NS + 200_000_000}
    line = {"type": "burst", "status": "recorded", **window}
    node.events.write_text(json.dumps(line) + "\n")
    export(node, STEADY, epoch_ns=EPOCH_NS + int(off_s * 1e9))
    if fits:
        assert bursts(node).height == len(STEADY)
    else:
        with pytest.raises(RunFormatError, match="another clock"):
            bursts(node)
