"""Figures that HTA's methods draw: haiprof's own, loaded when the first one is drawn."""

from __future__ import annotations

from haiprof.show.figures.traces import (
    collective_figure,
    idle_figure,
    kernel_type_figure,
    launch_figure,
    overlap_figure,
    temporal_figure,
    top_kernels_figure,
)

__all__ = [
    "collective_figure",
    "idle_figure",
    "kernel_type_figure",
    "launch_figure",
    "overlap_figure",
    "temporal_figure",
    "top_kernels_figure",
]
