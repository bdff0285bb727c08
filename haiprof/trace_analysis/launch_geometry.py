"""Launch geometry: the same kernel with another grid or block is another function, if asked."""

from __future__ import annotations

import json
import math

import polars as pl

_SIGN = " <<<"
_DIMENSIONS = 3
_LIMIT = 1 << 31
"""Of one dimension, in CUDA; beyond it, it is none."""


def with_geometry(gpu: pl.DataFrame) -> pl.DataFrame:
    """Kernels under their names with grid and block, as CUDA writes a launch.

    Source: PerfTracker (seed 001), where name, grid and block make a kernel.
    """
    triple = ("name", "grid", "block")
    kinds = gpu.select(triple).unique()
    names = [_launch_name(*(str(part or "") for part in row)) for row in kinds.iter_rows()]
    table = kinds.with_columns(pl.Series("launched", names, dtype=pl.Enum(sorted(set(names)))))
    found = gpu.join(table, on=triple, how="left", nulls_equal=True, maintain_order="left")
    return found.with_columns(name="launched").select(gpu.columns)


def block_counts(gpu: pl.DataFrame) -> pl.Series:
    """Blocks of each launch; null where its grid was not recorded."""
    grids = gpu["grid"].cast(pl.String)
    known = {text: _product(text) for text in grids.unique() if text is not None}
    return grids.replace_strict(known, default=None, return_dtype=pl.Int64)


def _product(text: str) -> int | None:
    sizes = _sizes(text)
    count = math.prod(sizes) if sizes else 0
    return count if 0 < count < _LIMIT**2 else None


def split_geometry(name: str) -> tuple[str, str]:
    """A kernel's own name, and its geometry as it is behind it; empty where there is none."""
    plain, sign, rest = name.partition(_SIGN)
    return plain, sign + rest


def _launch_name(name: str, grid: str, block: str) -> str:
    sizes = _size_text(grid), _size_text(block)
    return f"{name}{_SIGN}{sizes[0]}, {sizes[1]}>>>" if all(sizes) else name


def _size_text(text: str) -> str | None:
    sizes = _sizes(text)
    if sizes is None:
        return None
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(map(str, sizes))


def _sizes(text: str) -> list[int] | None:
    """Three dimensions or fewer, each at least 1; None for anything else."""
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sizes, list) or not 0 < len(sizes) <= _DIMENSIONS:
        return None
    return sizes if all(type(size) is int and 0 < size < _LIMIT for size in sizes) else None
