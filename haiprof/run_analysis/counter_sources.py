"""Counters apart from their frame: as they were read, of links by direction, and of bursts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Ints
from haiprof.base.version import read_data
from haiprof.run_analysis.counters import (
    COUNTER_SCHEMA,
    SourceSamples,
    is_known,
    notes_of,
    record_files,
    reports_by_host,
    samples_of,
)
from haiprof.run_analysis.run_files import NodeFiles, RunFiles, entries, integer
from haiprof.run_format.entities import Key, entities_by_key, plain_uuid, ranks_by_key
from haiprof.run_format.reader import read_records
from haiprof.run_format.schema import Column, counter_end
from haiprof.run_format.tables import COUNTER_TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSeries:
    """One metric of one entity, at the samples that have a value."""

    host: str
    source: str  # the table, such as `host` or `gpu`
    keys: tuple[str, ...]  # names of the table's key columns
    key: Key  # their values; empty for the node
    entity: Mapping[str, Any]  # what the recording says of it: `name`, and details such as a `uuid`
    rank: int | None  # of a process; of a GPU that one rank uses
    column: Column
    time_ns: Ints  # Unix time
    values: npt.NDArray[Any]  # as stored, integers or floats: of a counter, its count so far
    start_ns: Ints  # of a counter: the first sample since it was last seen to go back; Unix time

    def take(self, at: slice | npt.NDArray[np.bool_]) -> RawSeries:
        """Some of its samples."""
        times, values, starts = (each[at] for each in (self.time_ns, self.values, self.start_ns))
        return replace(self, time_ns=times, values=values, start_ns=starts)


def raw_counters(run: RunFiles) -> tuple[list[RawSeries], tuple[str, ...]]:
    """Every series of every node, and notes on files that could not be read."""
    # A counter keeps its own count, also where it wrapped, was set back or has stopped at its end.
    found, reports = list(record_files(run)), reports_by_host(run)
    series = [each for node, records in found if not isinstance(records, str)
              for each in _of_source(samples_of(reports, node, records))]  # fmt: skip
    return series, notes_of(records for _, records in found)


def _of_source(samples: SourceSamples) -> Iterator[RawSeries]:
    table = next(table for table in COUNTER_TABLES if table.name == samples.source)
    ends = np.searchsorted(samples.owner, np.arange(len(samples.keys)), side="right").tolist()
    columns = [column for column in table.metrics if column.name in samples.columns]
    for owner, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        at = slice(start, end)
        for column in columns:
            values = samples.column(column.name)[at]
            known = is_known(values)
            if counter_end(column.kind) is not None:
                known &= values >= 0  # a count below 0 is damage
            if not known.any():
                continue
            time_ns = samples.time_ns[at][known]
            counted = values[known]
            back = np.append(False, counted[1:] < counted[:-1])
            since = np.maximum.accumulate(np.where(back, np.arange(len(counted)), 0))
            yield RawSeries(
                host=samples.host, source=table.name, keys=table.keys, key=samples.keys[owner],
                entity=samples.known[owner], rank=samples.ranks[owner], column=column,
                time_ns=time_ns, values=counted, start_ns=time_ns[since],
            )  # fmt: skip


SENT, RECEIVED = "sent", "received"
NVLINK, PCIE, NETWORK = "NVLink", "PCIe", "network"

LINKS_SCHEMA: dict[str, type[pl.DataType]] = {
    "host": pl.String, "source": pl.String, "entity": pl.String, "rank": pl.Int64, "gpu": pl.Int64,
    "link": pl.String, "direction": pl.String, "sample_count": pl.Int64,
    "mean_bytes_per_s": pl.Float64, "max_bytes_per_s": pl.Float64, "peak_bytes_per_s": pl.Float64,
    "mean_ratio": pl.Float64, "max_ratio": pl.Float64, "missing": pl.String,
}  # fmt: skip
_KEYS = ("host", "source", "entity", "rank", "gpu")
_LINKS = {"nvlink_": NVLINK, "pcie_": PCIE, "": NETWORK, "network_": NETWORK}
_DIRECTIONS = {"transmit": SENT, "receive": RECEIVED}
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
    parts += [] if bursts is None else [_by_direction(bursts, "ratio")]
    found = pl.concat(parts, how="diagonal").select(list(LINKS_SCHEMA))
    return found.sort(*_KEYS, "link", "direction", nulls_last=True)


def _rates(counters: pl.DataFrame) -> pl.DataFrame:
    rates = _by_direction(counters, "bytes_per_s")
    # `host`, `gpu`, `pcie_peak` of one direction: of the link as it can be, idle ones are less.
    generation, lanes = (
        pl.col("value").filter(pl.col("metric") == metric).max()
        for metric in ("pcie_generation_max", "pcie_lane_max_count")
    )
    lane = generation.cast(pl.Int64).replace_strict(
        _PCIE_LANE_BYTES_PER_S, default=None, return_dtype=pl.Float64
    )  # fmt: skip
    peaks = counters.drop_nulls("gpu").group_by("host", "gpu").agg(pcie_peak=lane * lanes)
    with_pcie = rates.join(peaks, on=["host", "gpu"], how="left", nulls_equal=True)
    rated = counters.filter(pl.col("metric") == "link_rate_bytes_per_s")
    ports = rated.group_by("host", "entity").agg(port_peak=pl.col("value").max())
    joined = with_pcie.join(ports, on=["host", "entity"], how="left")
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


def _by_direction(samples: pl.DataFrame, suffix: str) -> pl.DataFrame:
    metrics = [
        (f"{prefix}{word}_{suffix}", link, direction)
        for prefix, link in _LINKS.items()
        for word, direction in _DIRECTIONS.items()
    ]
    links = pl.DataFrame(metrics, schema=["metric", "link", "direction"], orient="row")
    known = samples.drop_nulls("value").join(links, on="metric", maintain_order="left")
    value = pl.col("value")
    return known.group_by(*_KEYS, "link", "direction").agg(
        pl.len().cast(pl.Int64).alias("sample_count"), value.mean().alias(f"mean_{suffix}"),
        value.max().alias(f"max_{suffix}"),
    )  # fmt: skip


SOURCE = "burst"
CLOCK_LIMIT_NS = 2_000_000_000  # what nsys takes to start; more is another clock than ours
_TIME_LIMIT_NS = 1 << 61  # beyond this is damage, and would overflow as Unix time
_GPU_MASK = 0xFF
_EVERY_RATIO = " [Throughput %]"  # newer versions say so, older ones give the bare name

METRICS: Mapping[str, str] = read_data("run_analysis/burst_metrics.json")
"""By Nsight Systems' name. Clocks and counts are left out: they are no ratios."""

_SAMPLE = np.dtype([("time_ns", "<i8"), ("type", "<i8"), ("metric_id", "<i8"), ("value", "<f8")])
_OWNER_SCHEMA = {"number": pl.Int64, "entity": pl.String, "gpu": pl.Int64, "rank": pl.Int64}


def burst_frame(run: RunFiles) -> pl.DataFrame:
    """GPU metrics of all nodes' bursts by time; empty where there was none.

    Of `source` `burst` and `entity` `gpu 0` (`nsys gpu 0` where it is unknown which one that is).
    An NVLink metric that is full in every sample is null with the flag `saturated`: Nsight Systems
    shows links that are down like that. Values outside 0 to 100 % are left out.
    """
    frames = [pl.DataFrame(schema=COUNTER_SCHEMA)]
    for node in (node for node in run.nodes if node.paths.burst_export.exists()):
        samples, gpus = read_export(node.paths.burst_export)
        _check_clock(node.paths.burst_export, samples["time_ns"], node)
        entities: dict[Key, Any] = {(n,): {"uuid": u} for n, (u, _) in gpus.items()}
        reports = [(r.rank, r.report) for r in run.ranks if r.report.get("host") == node.host]
        ranks = ranks_by_key(reports, ("gpu",), entities)
        known, owners = _recorded_gpus(node), []
        for number in samples["number"].unique().to_list():  # that was sampled
            uuid, bus = gpus.get(number, ("", ""))
            index = known.get(plain_uuid(uuid), known.get(_bus(bus)))
            name = f"nsys gpu {number}" if index is None else f"gpu {index}"
            owners.append((number, name, index, ranks.get((number,))))
        of_gpu = pl.DataFrame(owners, schema=_OWNER_SCHEMA, orient="row")
        full = (pl.col("value") == 1).all().over("type", "metric_id")
        full &= pl.col("metric").str.starts_with("nvlink_")
        whole = samples.join(of_gpu, on="number", maintain_order="left").with_columns(
            host=pl.lit(node.host), source=pl.lit(SOURCE), unit=pl.lit("ratio"),
            value=pl.when(~full).then("value"), flag=pl.when(full).then(pl.lit("saturated")),
        )  # fmt: skip
        frames.append(whole.select(*COUNTER_SCHEMA))
    return pl.concat(frames).sort("time_ns", maintain_order=True)


def read_export(path: Path) -> tuple[pl.DataFrame, dict[int, tuple[str, str]]]:
    """What an export says of GPU metrics: samples, by type and metric; and `_identities`.

    Columns: `time_ns` (Unix time), `type`, `number` (of the GPU), `metric_id`, `metric` (our name)
    and `value`, from 0 to 1.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            start = database.execute(
                "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME"
            ).fetchone()
            epoch_ns = integer(start[0]) if start else None
            if epoch_ns is None or not 0 < epoch_ns < _TIME_LIMIT_NS:
                raise RunFormatError(f"{path}: says no Unix time of its start")
            names = database.execute(
                "SELECT typeId, metricId, metricName FROM TARGET_INFO_GPU_METRICS"
            )
            metrics = {
                (int(kind), int(metric)): METRICS[bare]
                for kind, metric, name in names
                if isinstance(name, str) and (bare := name.removesuffix(_EVERY_RATIO)) in METRICS
            }
            ids = ",".join(str(metric) for metric in sorted({metric for _, metric in metrics}))
            rows = database.execute(
                "SELECT timestamp, typeId, metricId, value FROM GPU_METRICS "
                f"WHERE metricId IN ({ids}) AND value BETWEEN 0 AND 100 "
                f"AND timestamp BETWEEN 0 AND {_TIME_LIMIT_NS}"
            )
            table, gpus = np.fromiter(rows, dtype=_SAMPLE), _identities(database)
            named = pl.DataFrame(
                [(*key, name) for key, name in metrics.items()],
                schema={"type": pl.Int64, "metric_id": pl.Int64, "metric": pl.String}, orient="row",
            )  # fmt: skip
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise RunFormatError(f"{path}: not an export of GPU metrics by nsys: {error}") from None
    samples = pl.DataFrame({name: table[name] for name in table.dtype.names or ()})
    found = samples.join(named, on=["type", "metric_id"]).sort(
        "type", "metric_id", maintain_order=True
    )
    return found.with_columns(
        pl.col("time_ns") + epoch_ns, pl.col("value") / 100, number=pl.col("type") & _GPU_MASK
    ), gpus


def _identities(database: sqlite3.Connection) -> dict[int, tuple[str, str]]:
    """UUID and PCI address by GPU number."""
    # The number is called `id`, and `pwGpuId` where that is a column; where the two differ, it
    # cannot be told which of them the samples mean.
    columns = {row[1] for row in database.execute("PRAGMA table_info(TARGET_INFO_GPU)")}
    if not {"id", "uuid"} <= columns:
        return {}
    other = "pwGpuId" if "pwGpuId" in columns else "id"
    bus = "busLocation" if "busLocation" in columns else "NULL"
    rows = database.execute(f"SELECT id, {other}, uuid, {bus} FROM TARGET_INFO_GPU").fetchall()
    if any(number != also for number, also, _, _ in rows if also is not None):
        return {}
    return {number: (str(uuid or ""), str(at or "")) for number, _, uuid, at in rows}


def _check_clock(path: Path, time_ns: pl.Series, node: NodeFiles) -> None:
    """Whether the samples are of the time in which the launcher let nsys sample."""
    done = [line for line in node.of_type("burst") if line.get("status") == "recorded"]
    start, end = (
        integer(done[-1].get(name)) if done else None for name in ("start_wall_ns", "end_wall_ns")
    )
    if start is None or end is None or time_ns.is_empty():
        return
    middle_ns = int(np.median(time_ns))
    off_ns = max(start - middle_ns, middle_ns - end)
    if off_ns > CLOCK_LIMIT_NS:
        raise RunFormatError(
            f"{path}: its samples are {off_ns / 1e9:.1f} s off the time in which they were taken: "
            "nsys used another clock, and they cannot be put beside the steps"
        )


def _recorded_gpus(node: NodeFiles) -> dict[str, int]:
    """NVML index by UUID and by PCI address, from the header of gpu.rec."""
    try:
        header = read_records(node.paths.records("gpu"), limit=0).header
    except RunFormatError:
        return {}  # there is none, or Analyzer.counters() says so
    found: dict[str, int] = {}
    for key, entity in entities_by_key(entries(header.get("entities"))).items():
        if len(key) == 1:
            words = (plain_uuid(entity.get("uuid")), _bus(str(entity.get("bus_id") or "")))
            found |= {word: key[0] for word in words if word}
    return found


def _bus(address: str) -> str:
    """A PCI address with a domain of four digits, as /sys has it."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""
