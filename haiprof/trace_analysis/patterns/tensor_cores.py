"""Recognizes matrix products, and their use of tensor cores, by kernel names."""

from __future__ import annotations

import re

# TensorBoard's list: kineto tb_plugin, torch_tb_profiler/profiler/tensor_core.py
# (TC_Allowlist.allowlist), with the names of cuBLAS and CUTLASS for Hopper and Blackwell beside.
_ON = re.compile(
    r"h884|s884|h1688|s1688|hmma|i8816|16816|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|"
    r"conv2d_c1_k1|direct_group|xmma_implicit_gemm|xmma_sparse_conv|xmma_gemm|xmma_sparse_gemm|"
    r"xmma_warp_specialized_implicit_gemm|c1688|i16832|i16864|gmma|tensorop|nvjet|tensor16x8"
)
_MATRIX = re.compile(
    r"gemm|conv(?:2d|3d)?_|convolve|scudnn|cudnn.*(?:fprop|dgrad|wgrad)|winograd", re.IGNORECASE
)
# Kernels that are known to multiply on the ordinary cores.
_OFF = re.compile(r"(?<![a-z])[sd]gemm|simt|ffma|scudnn")
_SURELY_OFF = re.compile(r"simt|ffma")  # xmma_gemm with ordinary multiply-adds has both


def is_matrix_work(name: str) -> bool:
    """Whether tensor cores could do it: whether it is a matrix product or convolution by name."""
    return bool(_MATRIX.search(name) or _ON.search(name.lower()))


def uses_tensor_cores(name: str) -> bool | None:
    """Whether it runs on tensor cores; None where its name does not say."""
    plain = name.lower()
    if _ON.search(plain) and not _SURELY_OFF.search(plain):
        return True
    return False if _OFF.search(plain) else None
