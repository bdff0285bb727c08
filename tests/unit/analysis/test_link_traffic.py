"""Traffic of links by direction, and its share of what they carry where that is recorded."""

from __future__ import annotations

import polars as pl
import pytest

from haiprof.run_analysis.counter_sources import link_traffic
from haiprof.run_analysis.counters import COUNTER_SCHEMA


def rows(source: str, entity: str | None, metric: str, *values: float) -> pl.DataFrame:
    gpu = 0 if source.startswith(("gpu", "burst")) else None
    unit = "ratio" if metric.endswith("_ratio") else "bytes/s"
    content = [
        {"time_ns": at, "host": "node0", "source": source, "entity": entity, "rank": gpu,
         "gpu": gpu, "metric": metric, "unit": unit, "value": value, "flag": None}
        for at, value in enumerate(values)
    ]  # fmt: skip
    return pl.DataFrame(content, schema=COUNTER_SCHEMA)


def test_pcie_has_its_share_of_generation_and_lanes() -> None:
    found = link_traffic(pl.concat([
        rows("gpu", "gpu 0", "pcie_receive_bytes_per_s", 10e9, 20e9),
        rows("gpu", "gpu 0", "pcie_transmit_bytes_per_s", 1e9, 1e9),
        rows("gpu_health", "gpu 0", "pcie_generation_max", 4),
        rows("gpu_health", "gpu 0", "pcie_lane_max_count", 16),
    ]))  # fmt: skip
    received, sent = found.rows(named=True)
    assert (received["link"], received["direction"], sent["direction"]) == (
        "PCIe", "received", "sent",
    )  # fmt: skip
    # PCIe 4.0 x16: 16 GT/s, 128b/130b, 16 lanes: 31.5 GB/s each way.
    assert received["peak_bytes_per_s"] == pytest.approx(31.508e9, rel=1e-4)
    assert received["mean_ratio"] == pytest.approx(15e9 / 31.508e9, rel=1e-4)
    assert received["max_ratio"] == pytest.approx(20e9 / 31.508e9, rel=1e-4)
    assert received["missing"] is None


def test_port_has_the_share_of_its_rate() -> None:
    found = link_traffic(pl.concat([
        rows("infiniband", "mlx5_0/1", "transmit_bytes_per_s", 5e9, 15e9),
        rows("infiniband_health", "mlx5_0/1", "link_rate_bytes_per_s", 25e9),
        rows("host", None, "network_receive_bytes_per_s", 1e6),
    ]))  # fmt: skip
    by_source = {row["source"]: row for row in found.rows(named=True)}
    assert by_source["infiniband"]["mean_ratio"] == pytest.approx(0.4)
    assert by_source["host"]["mean_ratio"] is None
    assert "rate was not recorded" in by_source["host"]["missing"]


def test_link_without_a_known_peak_has_no_share_but_a_burst_has() -> None:
    counters = rows("gpu", "gpu 0", "nvlink_transmit_bytes_per_s", 100e9)
    bursts = rows("burst", "gpu 0", "nvlink_transmit_ratio", 0.2, 0.6)
    burst, counted = link_traffic(counters, bursts).rows(named=True)
    assert (counted["mean_bytes_per_s"], counted["mean_ratio"]) == (100e9, None)
    assert "`--burst` tells the share" in counted["missing"]
    assert (burst["link"], burst["direction"]) == ("NVLink", "sent")
    assert burst["mean_ratio"] == pytest.approx(0.4)
    assert burst["max_ratio"] == 0.6


def test_missing_generation_is_no_share() -> None:
    (row,) = link_traffic(rows("gpu", "gpu 0", "pcie_receive_bytes_per_s", 1e9)).rows(named=True)
    assert row["mean_ratio"] is None
    assert row["missing"] == "the PCIe link's generation and lanes were not recorded"
