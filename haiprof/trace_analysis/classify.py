"""Classifies GPU events as computation, communication or memory: by category, then name."""

from __future__ import annotations

import polars as pl

COMPUTATION, COMMUNICATION, MEMORY = "computation", "communication", "memory"
KINDS = (COMPUTATION, COMMUNICATION, MEMORY)

MEMORY_CATEGORIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
# MTIA has one category for all that runs on the device; HTA knows copies by this name too.
MTIA_CATEGORY, MTIA_COPIES = "mtia_ccp_events", r"(?i)^dma(?:[^a-z]|$)"
COMMUNICATION_NAMES = "|".join(
    (
        # NCCL's are ncclKernel_* up to 2.18 and ncclDevKernel_* since, ncclSymDevKernel_* on
        # symmetric memory; RCCL's have the same names. HCCL is Habana's and Huawei's.
        r"^(?:nccl|rccl|hccl)",
        r"nccl(?:Sym)?(?:Dev)?Kernel",
        r"mscclKernel|mscclpp",
        # oneCCL, as its SYCL kernels are called.
        r"\b(?:oneccl|ccl::)",
        # PyTorch's symmetric memory (CUDASymmetricMemoryOps.cu) and what came before it
        # (intra_node_comm.cu); NVSHMEM's own and PyTorch's on top of it.
        r"\bmultimem_(?:one_shot_)?(?:all_reduce|reduce|all_gather|reduce_scatter)",
        r"\b(?:one|two)_shot_(?:all_reduce|reduce_scatter|all_to_all)",
        r"\b(?:one|two)ShotAllReduceKernel|\bhybridCubeMeshAllReduceKernel",
        r"\bnvshmem",
        # Inference engines reduce small tensors themselves: vLLM and SGLang, AITER, quick reduce.
        r"\bcross_device_reduce|\bquickreduce::|\ballreduce_prototype",
        # DeepEP's exchange between experts.
        r"\bdeep_ep::",
    )
)
"""Names of kernels that move data between GPUs, or wait for another GPU to do it.

A kernel whose event names a collective is one whatever its own name. Kernels that fuse a collective
with computing (`allreduce_fusion_kernel`) count as computing: no name says how they share the time.
"""


def with_kind(gpu: pl.DataFrame) -> pl.DataFrame:
    """GPU events with their kind.

    The same with the column `kind`, one of `KINDS`. HTA takes names alone: any `hip...` is
    communication there, and names with `Sync`, `dma` or `Memset` in them are left out (D13 in
    docs/hta-differences.md); of communication it knows the kernels of NCCL and HCCL, as
    TensorBoard's plugin knows those of NCCL, so that an all-reduce on symmetric memory or of
    an inference engine is computing there (D25).
    """
    names = gpu.select(pl.col("name").unique()).to_series()
    collective = names.cast(pl.String).str.contains(COMMUNICATION_NAMES)
    talking = pl.col("name").is_in(names.filter(collective).implode()) | (
        pl.col("collective").cast(pl.String) != ""
    )
    dma = names.filter(names.cast(pl.String).str.contains(MTIA_COPIES))
    of_mtia = pl.col("category").cast(pl.String) == MTIA_CATEGORY
    copying = of_mtia & pl.col("name").is_in(dma.implode())
    return gpu.with_columns(
        kind=pl.when(pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES) | copying)
        .then(pl.lit(MEMORY))
        .when(talking)
        .then(pl.lit(COMMUNICATION))
        .otherwise(pl.lit(COMPUTATION))
    )
