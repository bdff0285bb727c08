"""Traffic of links by direction: NVLink, PCIe and the network, and its share of what they carry."""

from __future__ import annotations

import polars as pl

SENT, RECEIVED = "sent", "received"
NVLINK, PCIE, NETWORK = "NVLink", "PCIe", "network"

LINKS_SCHEMA: dict[str, type[pl.DataType]] = {
    "host": pl.String,
    "source": pl.String,
    "entity": pl.String,
    "rank": pl.Int64,
    "gpu": pl.Int64,
    "link": pl.String,
    "direction": pl.String,
    "sample_count": pl.Int64,
    "mean_bytes_per_s": pl.Float64,
    "max_bytes_per_s": pl.Float64,
    "peak_bytes_per_s": pl.Float64,
    "mean_ratio": pl.Float64,
    "max_ratio": pl.Float64,
    "missing": pl.String,
}
_KEYS = ("host", "source", "entity", "rank", "gpu")
_TRAFFIC = {
    "nvlink_transmit_bytes_per_s": (NVLINK, SENT),
    "nvlink_receive_bytes_per_s": (NVLINK, RECEIVED),
    "pcie_transmit_bytes_per_s": (PCIE, SENT),
    "pcie_receive_bytes_per_s": (PCIE, RECEIVED),
    "transmit_bytes_per_s": (NETWORK, SENT),
    "receive_bytes_per_s": (NETWORK, RECEIVED),
    "network_transmit_bytes_per_s": (NETWORK, SENT),
    "network_receive_bytes_per_s": (NETWORK, RECEIVED),
}
_RATIOS = {
    "nvlink_transmit_ratio": (NVLINK, SENT),
    "nvlink_receive_ratio": (NVLINK, RECEIVED),
    "pcie_transmit_ratio": (PCIE, SENT),
    "pcie_receive_ratio": (PCIE, RECEIVED),
}
_PCIE_LANE_BYTES_PER_S = {
    1: 0.25e9, 2: 0.5e9, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130, 6: 64e9 / 8 * 242 / 256,
}  # fmt: skip
"""One direction of one lane, by generation. Source: PCI Express Base Specification: 8b/10b coding
until generation 2, 128b/130b until 5, 242 bytes of each FLIT of 256 in 6."""
_NO_PEAK = {
    NVLINK: "how many NVLinks the GPU has is not recorded; `--burst` tells the share",
    PCIE: "the PCIe link's generation and lanes were not recorded",
    NETWORK: "the port's rate was not recorded",
}


def link_traffic(counters: pl.DataFrame, bursts: pl.DataFrame | None = None) -> pl.DataFrame:
    """What each link carried in each direction."""
    parts = [pl.DataFrame(schema=LINKS_SCHEMA), _rates(counters)]
    if bursts is not None:
        parts.append(_shares(bursts))
    found = pl.concat(parts, how="diagonal").select(list(LINKS_SCHEMA))
    return found.sort(*_KEYS, "link", "direction", nulls_last=True)


def _rates(counters: pl.DataFrame) -> pl.DataFrame:
    rates = _by_direction(counters, _TRAFFIC, "bytes_per_s")
    peaks = _pcie_peaks(counters)
    with_pcie = rates.join(peaks, on=["host", "gpu"], how="left", nulls_equal=True)
    joined = with_pcie.join(_port_peaks(counters), on=["host", "entity"], how="left")
    peak = (
        pl.when(pl.col("link") == PCIE)
        .then("pcie_peak")
        .when(pl.col("link") == NETWORK)
        .then("port_peak")
    )
    known = joined.with_columns(peak_bytes_per_s=peak)
    missing = pl.col("link").replace_strict(_NO_PEAK, return_dtype=pl.String)
    return known.with_columns(
        mean_ratio=pl.col("mean_bytes_per_s") / pl.col("peak_bytes_per_s"),
        max_ratio=pl.col("max_bytes_per_s") / pl.col("peak_bytes_per_s"),
        missing=pl.when(pl.col("peak_bytes_per_s").is_null()).then(missing),
    ).drop("pcie_peak", "port_peak")


def _shares(bursts: pl.DataFrame) -> pl.DataFrame:
    return _by_direction(bursts, _RATIOS, "ratio")


def _by_direction(
    samples: pl.DataFrame, metrics: dict[str, tuple[str, str]], suffix: str
) -> pl.DataFrame:
    known = samples.filter(pl.col("metric").is_in(list(metrics))).drop_nulls("value")
    parts = {
        name: pl.col("metric").replace_strict(
            {metric: pair[at] for metric, pair in metrics.items()}, return_dtype=pl.String
        )
        for at, name in enumerate(("link", "direction"))
    }
    value = pl.col("value")
    return known.with_columns(**parts).group_by(*_KEYS, "link", "direction").agg(
        pl.len().cast(pl.Int64).alias("sample_count"),
        value.mean().alias(f"mean_{suffix}"),
        value.max().alias(f"max_{suffix}"),
    )  # fmt: skip


def _pcie_peaks(counters: pl.DataFrame) -> pl.DataFrame:
    """`host`, `gpu`, `pcie_peak` of one direction: of the link as it can be, idle ones are less."""
    widest = {
        name: pl.col("value").filter(pl.col("metric") == metric).max()
        for name, metric in (
            ("generation", "pcie_generation_max"),
            ("lanes", "pcie_lane_max_count"),
        )
    }
    found = counters.drop_nulls("gpu").group_by("host", "gpu").agg(**widest)
    lane = pl.col("generation").cast(pl.Int64).replace_strict(
        _PCIE_LANE_BYTES_PER_S, default=None, return_dtype=pl.Float64
    )  # fmt: skip
    return found.select("host", "gpu", pcie_peak=lane * pl.col("lanes"))


def _port_peaks(counters: pl.DataFrame) -> pl.DataFrame:
    """`host`, `entity`, `port_peak`."""
    rates = counters.filter(pl.col("metric") == "link_rate_bytes_per_s")
    return rates.group_by("host", "entity").agg(port_peak=pl.col("value").max())
