"""What a GPU event is: computation, communication or memory; by category first, name second."""

from __future__ import annotations

import polars as pl

COMPUTATION, COMMUNICATION, MEMORY = "computation", "communication", "memory"
KINDS = (COMPUTATION, COMMUNICATION, MEMORY)

MEMORY_CATEGORIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
# NCCL's kernels are ncclKernel_* up to 2.18 and ncclDevKernel_* since; RCCL's have the same names.
# HCCL is Habana's and Huawei's. A kernel with a collective's name is one whatever its own name.
COMMUNICATION_NAMES = r"^(?:nccl|rccl|hccl)|ncclDevKernel|ncclKernel|mscclKernel"


def with_kind(gpu: pl.DataFrame) -> pl.DataFrame:
    """GPU events with their kind.

    Args:
        gpu: `Trace.gpu`.

    Returns:
        The same with the column `kind`, one of `KINDS`. HTA takes names alone: any `hip...` is
        communication there, and names with `Sync`, `dma` or `Memset` in them are left out
        (../shared/research/hta_dynolog.md, D13).
    """
    names = gpu.select(pl.col("name").unique()).to_series()
    collective = names.cast(pl.String).str.contains(COMMUNICATION_NAMES)
    talking = pl.col("name").is_in(names.filter(collective).implode()) | (
        pl.col("collective").cast(pl.String) != ""
    )
    return gpu.with_columns(
        kind=pl.when(pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES))
        .then(pl.lit(MEMORY))
        .when(talking)
        .then(pl.lit(COMMUNICATION))
        .otherwise(pl.lit(COMPUTATION))
    )
