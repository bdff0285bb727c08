"""Which counters are shown, as one table of rows and panels, and their labels; no plotly."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from haiprof.base.units import BYTES_PER_GIB
from haiprof.run_analysis.counters import OwnerSeries, SeriesReader, sort_series

_OWNER = ["host", "rank", "gpu", "entity"]
"""Columns of `Analyzer.counters()` that identify a series."""


def entity_label(
    host: object, rank: object, gpu: object, entity: object, *, many_hosts: bool = False
) -> str:
    """The label of a counter: the rank if known, else GPU or entity, else the host."""
    if rank is not None:
        return f"rank {rank}"
    name = f"GPU {gpu}" if gpu is not None else entity
    if name is None:
        return str(host)
    return f"{host} {name}" if many_hosts else str(name)


def frame_reader(counters: pl.DataFrame) -> SeriesReader:
    """The series of a frame of counters."""

    def read(source: str, metric: str) -> list[OwnerSeries]:
        mine = counters.filter(
            (pl.col("source") == source)
            & (pl.col("metric") == metric)
            & pl.col("value").is_finite()
        ).sort("time_ns", maintain_order=True)
        return sort_series(
            OwnerSeries(
                owner=(key[0], key[1], key[2], key[3]),
                time_ns=samples["time_ns"].to_numpy(),
                values=samples["value"].to_numpy(),
            )
            for key, samples in mine.group_by(_OWNER, maintain_order=True)
        )

    return read


def label_series(read: SeriesReader, spec: CounterSpec) -> list[tuple[str, OwnerSeries]]:
    """Each series of a counter that has a value, with its label."""
    found = read(spec.source, spec.metric)
    many_hosts = len({each.owner[0] for each in found}) > 1
    return [(entity_label(*each.owner, many_hosts=many_hosts), each) for each in found]


BYTES_PER_MIB = 1 << 20
PERCENT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSpec:
    """One counter in a panel."""

    source: str
    metric: str
    word: str = ""
    """Drawn dashed, to distinguish it from another counter of the panel."""
    dash: str = "solid"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelSpec:
    """One panel of counters."""

    title: str
    unit: str
    """As a figure shows it."""
    scale: float
    """Base units per shown unit."""
    base_unit: str
    counters: tuple[CounterSpec, ...]
    top: float | None = None
    """Upper end of its axis where it has one, in shown units."""
    terminal: str | None = None
    """Its name in the terminal, before the counter's own; None shows it in figures only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelRow:
    """One row of related panels."""

    title: str
    recorder: str
    """The recorder that enables it."""
    sources: tuple[str, ...]
    """Record files that fill it."""
    panels: tuple[PanelSpec, ...]


def _pair(source: str, metrics: tuple[str, str], words: tuple[str, str]) -> tuple[CounterSpec, ...]:
    """Two directions of one thing: a solid and a dotted line."""
    return (
        CounterSpec(source=source, metric=metrics[0], word=words[0]),
        CounterSpec(source=source, metric=metrics[1], word=words[1], dash="dot"),
    )


def _rate(
    title: str,
    source: str,
    metrics: tuple[str, str],
    words: tuple[str, str],
    *,
    terminal: str | None = None,
) -> PanelSpec:
    return PanelSpec(
        title=title,
        unit="MiB/s",
        scale=BYTES_PER_MIB,
        base_unit="bytes/s",
        counters=_pair(source, metrics, words),
        terminal=terminal,
    )


def _share(
    title: str, *counters: CounterSpec, top: float | None = 105, terminal: str | None = None
) -> PanelSpec:
    return PanelSpec(
        title=title,
        unit="%",
        scale=PERCENT,
        base_unit="ratio",
        counters=counters,
        top=top,
        terminal=terminal,
    )


_SCALES = {"GiB": BYTES_PER_GIB, "GHz": 1e9, "G/s": 1e9, "M/s": 1e6, "MiB/s": BYTES_PER_MIB}


def _plain(
    title: str, unit: str, base_unit: str, *counters: CounterSpec, terminal: str | None = None
) -> PanelSpec:
    return PanelSpec(
        title=title,
        unit=unit,
        scale=_SCALES.get(unit, 1.0),
        base_unit=base_unit,
        counters=counters,
        terminal=terminal,
    )


_RANKS = PanelRow(
    title="processes",
    recorder="process",
    sources=("process", "placement"),
    panels=(
        _plain("CPU of ranks", "cores", "cores",
               CounterSpec(source="process", metric="cpu_cores"), terminal="CPU of ranks"),
        _plain("Memory of ranks", "GiB", "bytes",
               CounterSpec(source="process", metric="memory_rss_bytes"),
               terminal="memory of ranks"),
        _rate("Read and write of ranks", "process", ("read_bytes_per_s", "write_bytes_per_s"),
              ("read", "write"), terminal=""),
        _share("Waiting for a core",
               CounterSpec(source="process", metric="run_queue_wait_ratio"), top=None),
    ),
)  # fmt: skip
_NODES = PanelRow(
    title="node",
    recorder="host",
    sources=("host", "cgroup"),
    panels=(
        _share("CPU of nodes", CounterSpec(source="host", metric="cpu_utilization_ratio"),
               terminal="CPU of node"),
        _plain("CPU power", "W", "joules/s",
               CounterSpec(source="host", metric="cpu_energy_joules_per_s", word="CPU"),
               CounterSpec(source="host", metric="memory_energy_joules_per_s", word="memory",
                           dash="dash")),
        _share("Pressure stall (PSI), some",
               CounterSpec(source="host", metric="pressure_cpu_some_ratio", word="CPU"),
               CounterSpec(source="host", metric="pressure_memory_some_ratio", word="memory",
                           dash="dash"),
               CounterSpec(source="host", metric="pressure_io_some_ratio", word="I/O", dash="dot"),
               CounterSpec(source="cgroup", metric="cpu_throttled_ratio", word="throttled",
                           dash="dashdot"),
               top=None),
        _rate("Disks of nodes", "host", ("disk_read_bytes_per_s", "disk_write_bytes_per_s"),
              ("read", "write")),
        _rate("Network of nodes", "host",
              ("network_receive_bytes_per_s", "network_transmit_bytes_per_s"),
              ("receive", "transmit"), terminal="net"),
    ),
)  # fmt: skip
_GPUS = PanelRow(
    title="GPU",
    recorder="gpu",
    sources=("gpu",),
    panels=(
        _share("GPU utilization", CounterSpec(source="gpu", metric="utilization_ratio"),
               terminal="GPU utilization"),
        _plain("GPU memory", "GiB", "bytes",
               CounterSpec(source="gpu", metric="memory_used_bytes"), terminal="GPU memory"),
        _plain("GPU power", "W", "watts", CounterSpec(source="gpu", metric="power_watts"),
               terminal="GPU power"),
        _plain("GPU clock", "GHz", "hz", CounterSpec(source="gpu", metric="sm_clock_hz")),
    ),
)  # fmt: skip
_GPU_UNITS = PanelRow(
    title="GPU units",
    recorder="gpu",
    sources=("gpu", "dcgm"),
    panels=(
        _share("SMs active", CounterSpec(source="gpu", metric="sm_active_ratio"),
               CounterSpec(source="dcgm", metric="sm_active_ratio", word="DCGM"),
               terminal="SMs active"),
        _share("Tensor cores active", CounterSpec(source="gpu", metric="tensor_active_ratio"),
               CounterSpec(source="dcgm", metric="tensor_active_ratio", word="DCGM"),
               terminal="tensor cores"),
        _share("GPU memory busy", CounterSpec(source="gpu", metric="dram_active_ratio"),
               CounterSpec(source="dcgm", metric="dram_active_ratio", word="DCGM"),
               terminal="GPU mem. busy"),
        _share("GPU throttled",
               CounterSpec(source="gpu", metric="throttle_power_ratio", word="power"),
               CounterSpec(source="gpu", metric="throttle_thermal_ratio", word="heat",
                           dash="dot")),
    ),
)  # fmt: skip
_GPU_LINKS = PanelRow(
    title="GPU links",
    recorder="gpu",
    sources=("gpu",),
    panels=(
        _rate("PCIe of GPUs", "gpu", ("pcie_receive_bytes_per_s", "pcie_transmit_bytes_per_s"),
              ("receive", "transmit")),
        _rate("NVLink of GPUs", "gpu",
              ("nvlink_receive_bytes_per_s", "nvlink_transmit_bytes_per_s"),
              ("receive", "transmit")),
    ),
)  # fmt: skip
_INFINIBAND = PanelRow(
    title="InfiniBand",
    recorder="infiniband",
    sources=("infiniband",),
    panels=(
        _rate("InfiniBand", "infiniband", ("receive_bytes_per_s", "transmit_bytes_per_s"),
              ("receive", "transmit"), terminal="IB"),
        _plain("InfiniBand waiting to send", "ticks/s", "count/s",
               CounterSpec(source="infiniband", metric="transmit_wait_count_per_s")),
        _plain("Congestion and loss", "packets/s", "count/s",
               CounterSpec(source="infiniband", metric="ecn_marked_count_per_s", word="ECN"),
               CounterSpec(source="infiniband", metric="out_of_sequence_count_per_s",
                           word="out of order", dash="dot")),
    ),
)  # fmt: skip
_MEMORY = PanelRow(
    title="memory bandwidth",
    recorder="numa",
    sources=("memory_bandwidth", "remote_memory"),
    panels=(
        _plain("Memory bandwidth", "MiB/s", "bytes/s",
               CounterSpec(source="memory_bandwidth", metric="total_bytes_per_s"),
               CounterSpec(source="memory_bandwidth", metric="write_bytes_per_s", word="write",
                           dash="dot"),
               terminal="memory traffic"),
        _plain("Between NUMA nodes", "MiB/s", "bytes/s",
               CounterSpec(source="memory_bandwidth", metric="remote_bytes_per_s"),
               terminal="between NUMA"),
        _rate("Memory reads of ranks", "remote_memory",
              ("local_dram_bytes_per_s", "remote_dram_bytes_per_s"), ("near", "far")),
        _plain("Instructions of ranks", "G/s", "count/s",
               CounterSpec(source="remote_memory", metric="instruction_count_per_s")),
        _plain("Cache and TLB misses of ranks", "M/s", "count/s",
               CounterSpec(source="remote_memory", metric="cache_miss_count_per_s", word="cache"),
               CounterSpec(source="remote_memory", metric="tlb_miss_count_per_s", word="TLB",
                           dash="dash")),
    ),
)  # fmt: skip
_FILES = PanelRow(
    title="network file systems",
    recorder="filesystem",
    sources=("filesystem",),
    panels=(
        _rate("Network file systems", "filesystem", ("read_bytes_per_s", "write_bytes_per_s"),
              ("read", "write"), terminal="NFS"),
    ),
)  # fmt: skip

PANEL_ROWS = (
    _RANKS, _NODES, _GPUS, _GPU_UNITS, _GPU_LINKS, _INFINIBAND, _MEMORY, _FILES,
)  # fmt: skip


def row_metrics(row: PanelRow) -> set[tuple[str, str]]:
    """(source, metric) of all that a row shows."""
    return {(spec.source, spec.metric) for panel in row.panels for spec in panel.counters}
