"""Colours and layout of figures, the same in the terminal; pictures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from haiprof.base.errors import UsageError, convert_os_errors
from haiprof.base.safe_files import named_file, whole_file
from haiprof.base.units import NS_PER_MS, NS_PER_S

PHASES = ("dataloader", "forward", "backward", "optimizer", "other")

# Okabe and Ito, "Color Universal Design" (2008): told apart with every common colour blindness.
ORANGE, SKY, PURPLE, GREEN = "#E69F00", "#56B4E9", "#CC79A7", "#009E73"
BLUE, VERMILLION, YELLOW, GREY = "#0072B2", "#D55E00", "#F0E442", "#999999"
DARK_GREY, BROWN = "#555555", "#8C6D31"

PHASE_COLORS = {
    "dataloader": ORANGE, "forward": SKY, "backward": PURPLE, "optimizer": GREEN, "other": GREY,
}  # fmt: skip
SERIES_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, DARK_GREY, BROWN)
_DASHES = ("solid", "dash", "dot", "dashdot")

FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, GRID = "#222222", "#E8E8E8"
LEGEND_TOP_PX = 54


def series_color(index: int) -> str:
    """The colour of the n-th rank, host or GPU; they repeat after eight."""
    return SERIES_COLORS[index % len(SERIES_COLORS)]


def series_dash(index: int) -> str:
    """The dashes of the n-th line: each time that the colours repeat others."""
    return _DASHES[index // len(SERIES_COLORS) % len(_DASHES)]


def time_unit(ns: float | None) -> tuple[str, float]:
    """(name, in ns) of the unit in which times about so long are easy to read."""
    if ns is None or NS_PER_MS / 2 <= ns < 2 * NS_PER_S:
        return "ms", NS_PER_MS
    return ("s", NS_PER_S) if ns >= NS_PER_S else ("µs", 1e3)


def figure_layout(title: str, *, height: int) -> dict[str, Any]:
    """Layout that every figure shares."""
    top = {"x": 0, "yref": "container", "yanchor": "top"}
    return {
        "title": {**top, "text": title, "xref": "paper", "y": 1, "pad": {"t": 14},
                  "font": {"size": 16}},
        "legend": {**top, "orientation": "h", "xanchor": "left", "y": 1 - LEGEND_TOP_PX / height,
                   "font": {"size": 11}, "traceorder": "normal"},
        "height": height, "margin": {"l": 64, "r": 24, "t": 112, "b": 36},
        "paper_bgcolor": "white", "plot_bgcolor": "white",
        "font": {"family": FONT, "size": 12, "color": INK},
        "hoverlabel": {"font": {"family": FONT, "size": 12}}, "barmode": "stack",
    }  # fmt: skip


AXIS = {
    "gridcolor": GRID, "zerolinecolor": GRID, "linecolor": "#BBBBBB", "ticks": "outside",
    "exponentformat": "none",
}  # fmt: skip
TIME_AXIS = {**AXIS, "ticksuffix": " s"}

CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False}


def write_text(path: Path, text: str, *, below: Path | None = None) -> Path:
    """Writes a file."""
    target = named_file(path) if below is None else whole_file(path, below=below)
    with convert_os_errors(UsageError, f"{path}: cannot be written"), target as file:
        file.write(text.encode())
    return path
