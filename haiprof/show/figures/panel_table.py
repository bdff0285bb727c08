"""Which counters are shown, as one table of rows and panels, and their labels; no plotly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from haiprof.base.units import BYTES_PER_GIB
from haiprof.run_analysis.counters import OwnerSeries, SeriesReader, sort_series

_OWNER = ["host", "rank", "gpu", "entity"]
"""Columns of `Analyzer.counters()` that identify a series."""


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
    """Each series of a counter that has a value; the rank if known, else GPU or entity, or host."""
    found = read(spec.source, spec.metric)
    many_hosts = len({each.owner[0] for each in found}) > 1
    labels = []
    for host, rank, gpu, entity in (each.owner for each in found):
        name = f"GPU {gpu}" if gpu is not None else entity
        own = str(host) if name is None else f"{host} {name}" if many_hosts else name
        labels.append(own if rank is None else f"rank {rank}")
    return list(zip(labels, found, strict=True))


_UNITS = {
    "cores": (1.0, "cores"), "GiB": (BYTES_PER_GIB, "bytes"), "MiB/s": (1 << 20, "bytes/s"),
    "%": (0.01, "ratio"), "W": (1.0, "watts"), "GHz": (1e9, "hz"), "G/s": (1e9, "count/s"),
    "M/s": (1e6, "count/s"), "ticks/s": (1.0, "count/s"), "packets/s": (1.0, "count/s"),
}  # fmt: skip
"""By unit as a figure shows it: base units per shown unit, and the base unit."""


class CounterSpec(NamedTuple):
    """One counter in a panel."""

    source: str
    metric: str
    word: str = ""
    dash: str = "solid"  # Its line, to distinguish it from another counter of the panel


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One panel of counters."""

    title: str
    unit: str  # As a figure shows it: one of `_UNITS`
    counters: tuple[CounterSpec, ...]
    terminal: str | None = None
    """Its name in the terminal, before the counter's own; None shows it in figures only."""
    top: float | None = None  # Upper end of its axis where it has one, in shown units

    @property
    def scale(self) -> float:
        """Base units per shown unit."""
        return _UNITS[self.unit][0]

    @property
    def base_unit(self) -> str:
        """Of the counters' values."""
        return _UNITS[self.unit][1]


@dataclass(frozen=True, slots=True)
class PanelRow:
    """One row of related panels."""

    title: str
    recorder: str  # The recorder that enables it
    sources: tuple[str, ...]  # Record files that fill it
    panels: tuple[PanelSpec, ...]


_FULL = 105  # Upper end of an axis of percent


def panel(
    title: str, unit: str, *counters: CounterSpec, terminal: str | None = None,
    top: float | None = None,
) -> PanelSpec:  # fmt: skip
    """A panel of any counters."""
    return PanelSpec(title, unit, counters, terminal, top)


def _rate(
    title: str, source: str, metrics: str, words: str, *, terminal: str | None = None
) -> PanelSpec:
    """Two directions of one thing, such as `read write`: a solid and a dotted line."""
    (first, second), (name, other) = metrics.split(), words.split()
    return panel(
        title, "MiB/s", CounterSpec(source, f"{first}_bytes_per_s", name),
        CounterSpec(source, f"{second}_bytes_per_s", other, "dot"), terminal=terminal,
    )  # fmt: skip


def _of_gpu_units(title: str, metric: str, terminal: str) -> PanelSpec:
    """A share that NVML's GPM or DCGM tells."""
    own = (CounterSpec("gpu", metric), CounterSpec("dcgm", metric, "DCGM"))
    return panel(title, "%", *own, terminal=terminal, top=_FULL)


PANEL_ROWS = (
    PanelRow("processes", "process", ("process", "placement"), (
        panel("CPU of ranks", "cores", CounterSpec("process", "cpu_cores"),
              terminal="CPU of ranks"),
        panel("Memory of ranks", "GiB", CounterSpec("process", "memory_rss_bytes"),
              terminal="memory of ranks"),
        panel("Read and written by ranks: cached files, pipes, sockets too", "MiB/s",
              CounterSpec("process", "read_bytes_per_s", "read"),
              CounterSpec("process", "write_bytes_per_s", "written", "dot"), terminal=""),
        panel("Waiting for a core", "%", CounterSpec("process", "run_queue_wait_ratio")),
    )),
    PanelRow("node", "host", ("host", "cgroup"), (
        panel("CPU of nodes", "%", CounterSpec("host", "cpu_utilization_ratio"),
              terminal="CPU of node", top=_FULL),
        panel("CPU power", "W", CounterSpec("host", "cpu_energy_joules_per_s", "CPU"),
              CounterSpec("host", "memory_energy_joules_per_s", "memory", "dash")),
        panel("Pressure stall (PSI), some", "%",
              CounterSpec("host", "pressure_cpu_some_ratio", "CPU"),
              CounterSpec("host", "pressure_memory_some_ratio", "memory", "dash"),
              CounterSpec("host", "pressure_io_some_ratio", "I/O", "dot"),
              CounterSpec("cgroup", "cpu_throttled_ratio", "throttled", "dashdot")),
        _rate("Disks of nodes", "host", "disk_read disk_write", "read write"),
        _rate("Network of nodes", "host", "network_receive network_transmit", "receive transmit",
              terminal="net"),
    )),
    PanelRow("GPU", "gpu", ("gpu",), (
        panel("GPU utilization", "%", CounterSpec("gpu", "utilization_ratio"),
              terminal="GPU utilization", top=_FULL),
        panel("GPU memory", "GiB", CounterSpec("gpu", "memory_used_bytes"), terminal="GPU memory"),
        panel("GPU power", "W", CounterSpec("gpu", "power_watts"), terminal="GPU power"),
        panel("GPU clock", "GHz", CounterSpec("gpu", "sm_clock_hz")),
    )),
    PanelRow("GPU units", "gpu", ("gpu", "dcgm"), (
        _of_gpu_units("SMs active", "sm_active_ratio", "SMs active"),
        _of_gpu_units("Tensor cores active", "tensor_active_ratio", "tensor cores"),
        _of_gpu_units("GPU memory busy", "dram_active_ratio", "GPU mem. busy"),
        panel("GPU throttled", "%", CounterSpec("gpu", "throttle_power_ratio", "power"),
              CounterSpec("gpu", "throttle_thermal_ratio", "heat", "dot"), top=_FULL),
    )),
    PanelRow("GPU links", "gpu", ("gpu",), (
        _rate("PCIe of GPUs", "gpu", "pcie_receive pcie_transmit", "receive transmit"),
        _rate("NVLink of GPUs", "gpu", "nvlink_receive nvlink_transmit", "receive transmit"),
    )),
    PanelRow("InfiniBand", "infiniband", ("infiniband",), (
        _rate("InfiniBand", "infiniband", "receive transmit", "receive transmit", terminal="IB"),
        panel("InfiniBand waiting to send", "ticks/s",
              CounterSpec("infiniband", "transmit_wait_count_per_s")),
        panel("Congestion and loss", "packets/s",
              CounterSpec("infiniband", "ecn_marked_count_per_s", "ECN"),
              CounterSpec("infiniband", "out_of_sequence_count_per_s", "out of order", "dot")),
    )),
    PanelRow("memory bandwidth", "numa", ("memory_bandwidth", "remote_memory"), (
        panel("Memory bandwidth", "MiB/s", CounterSpec("memory_bandwidth", "total_bytes_per_s"),
              CounterSpec("memory_bandwidth", "write_bytes_per_s", "write", "dot"),
              terminal="memory traffic"),
        panel("Between NUMA nodes", "MiB/s", CounterSpec("memory_bandwidth", "remote_bytes_per_s"),
              terminal="between NUMA"),
        _rate("Memory reads of ranks", "remote_memory", "local_dram remote_dram", "near far"),
        panel("Instructions of ranks", "G/s",
              CounterSpec("remote_memory", "instruction_count_per_s")),
        panel("Cache and TLB misses of ranks", "M/s",
              CounterSpec("remote_memory", "cache_miss_count_per_s", "cache"),
              CounterSpec("remote_memory", "tlb_miss_count_per_s", "TLB", "dash")),
    )),
    PanelRow("network file systems", "filesystem", ("filesystem",), (
        _rate("Network file systems", "filesystem", "read write", "read write", terminal="NFS"),
    )),
)  # fmt: skip

PANELS = tuple(each for row in PANEL_ROWS for each in row.panels)


def panel_metrics(panels: Iterable[PanelSpec] = PANELS) -> set[tuple[str, str]]:
    """Source and metric of all that some panels show."""
    return {(spec.source, spec.metric) for each in panels for spec in each.counters}
