"""What names of kernels and operators say: normalized names, geometry, tensor cores, kinds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import polars as pl

FULL, SHORT, GENERIC = "full", "short", "generic"
STYLES = (FULL, SHORT, GENERIC)

_COPY = re.compile(r"(?:hip)?Mem(?:cpy|set)")
_CLONE = re.compile(r"\s*\[clone [^\]]*\]$")  # what rocprofiler-sdk writes behind names
_COLLECTIVE = re.compile(
    r"^(?:n|r)ccl(?:Symk?)?(?:Dev)?Kernel_(?:Generic_?)?(?!Generic(?:_\d|$))([A-Z][A-Za-z]+)"
)
_ANONYMOUS = "(anonymous namespace)::"
# Generations of GPUs as cuBLAS, cuDNN and CUTLASS write them.
_GENERATION = re.compile(
    r"(?:maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell|sm\d{2,3}[a-z]?|gfx[0-9a-f]{3,4})_"
    r"|(?<=cutlass)_\d{2,3}(?=_)"
)
_TILE = re.compile(r"_\d+x\d+(?:x\d+)*")


def name_normalizer(style: str, *, is_kernel: bool) -> Callable[[str], str]:
    """The function that normalizes a name for a comparison."""
    if style not in STYLES:
        raise ValueError(f"no names {style!r}: they are one of {', '.join(STYLES)}")
    if style == FULL:
        return lambda name: name
    if not is_kernel:
        return lambda name: _without(name, "<>")
    return short_kernel_name if style == SHORT else generic_kernel_name


def short_kernel_name(name: str) -> str:
    """`void at::native::kernel<4, float>(int) [clone .kd]` is `at::native::kernel`.

    Parentheses first: in template arguments they hold comparisons, `enable_if<((8)>(0))>`.
    """
    name = _CLONE.sub("", name)
    if _COPY.match(name) or not ("<" in name or "(" in name):
        return name
    plain = _without(_without(name.replace(_ANONYMOUS, ""), "()"), "<>").split()
    return plain[-1] if plain else name


def generic_kernel_name(name: str) -> str:
    """`volta_sgemm_64x64_nn` and `ampere_sgemm_128x64_nn` are `sgemm_nn`."""
    short = short_kernel_name(name)
    collective = _COLLECTIVE.match(short)
    if collective:
        return f"nccl {collective[1]}"
    return _TILE.sub("", _GENERATION.sub("", short)) or short


def _without(name: str, brackets: str) -> str:
    """Removes brackets with their content; unchanged where they do not match."""
    depth, kept = 0, []
    for place, letter in enumerate(name):
        if letter == brackets[0]:
            depth += 1
        elif letter == brackets[1] and not name.startswith("->", place - 1):
            depth -= 1
            if depth < 0:
                return name
        elif not depth:
            kept.append(letter)
    return name if depth else "".join(kept)


_SIGN = " <<<"
_DIMENSIONS = 3
_LIMIT = 1 << 31  # of one dimension, in CUDA; beyond it, it is none


def with_geometry(gpu: pl.DataFrame) -> pl.DataFrame:
    """Kernels under their names with grid and block, as CUDA writes a launch."""
    triple = ("name", "grid", "block")
    kinds = gpu.select(triple).unique()
    names = []
    for name, *geometry in kinds.iter_rows():
        # Each such as `32x4`; empty where it is none.
        texts = ["x".join(map(str, _sizes(str(part or "")) or ())) for part in geometry]
        sizes = [re.sub("(?<=.)(?:x1)+$", "", text) for text in texts]
        names.append((name or "") + (f"{_SIGN}{', '.join(sizes)}>>>" if all(sizes) else ""))
    table = kinds.with_columns(pl.Series("launched", names, dtype=pl.Enum(sorted(set(names)))))
    found = gpu.join(table, on=triple, how="left", nulls_equal=True, maintain_order="left")
    return found.with_columns(name="launched").select(gpu.columns)


def block_counts(gpu: pl.DataFrame) -> pl.Series:
    """Blocks of each launch; null where its grid was not recorded."""
    grids = gpu["grid"].cast(pl.String)
    counts = {text: math.prod(_sizes(text) or [0]) for text in grids.drop_nulls().unique()}
    known = {text: count for text, count in counts.items() if 0 < count < _LIMIT**2}
    return grids.replace_strict(known, default=None, return_dtype=pl.Int64)


def split_geometry(name: str) -> tuple[str, str]:
    """A kernel's own name, and its geometry as it is behind it; empty where there is none."""
    plain, sign, rest = name.partition(_SIGN)
    return plain, sign + rest


def _sizes(text: str) -> list[int] | None:
    """Three dimensions or fewer, each at least 1; None for anything else."""
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sizes, list) or not 0 < len(sizes) <= _DIMENSIONS:
        return None
    return sizes if all(type(size) is int and 0 < size < _LIMIT for size in sizes) else None


# TensorBoard's list: kineto tb_plugin, torch_tb_profiler/profiler/tensor_core.py
# (TC_Allowlist.allowlist), with the names of cuBLAS and CUTLASS for Hopper and Blackwell beside.
_ON = re.compile(
    r"h884|s884|h1688|s1688|hmma|i8816|16816|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|"
    r"conv2d_c1_k1|direct_group|xmma_implicit_gemm|xmma_sparse_conv|xmma_gemm|xmma_sparse_gemm|"
    r"xmma_warp_specialized_implicit_gemm|c1688|i16832|i16864|gmma|tensorop|nvjet|tensor16x8"
)
_FUSED_EXPERTS = re.compile(r"fused_?moe|fused_experts")
_MATRIX_KINDS = ("gemm", "convolution", "attention")
_KERNEL_KINDS = (
    ("layout conversion", r"nchwtonhwc|nhwctonchw|batched_transpose|tensor_?transform"),
    ("copy or cast", r"copy_kernel|copykernel"),
    ("mixture of experts", r"(?<![a-z])moe(?![a-z])|fused_experts"),
    ("attention", r"flash|fmha|attention|attn|sdpa|mem_eff"),
    ("convolution", r"conv(?!ert)|dgrad|wgrad|fprop|winograd|scudnn|igemm|im2col|col2im"),
    ("normalisation", r"(?<!vector_)(?<!foreach_)(?<!clip)(?<!clip_)(?<!lp)norm"
                      r"(?!al(?!i)|(?:zero|one|two)?ops)|softmax|\bbn_|::bn"),
    ("gemm", r"gemm|gemv|cutlass|cublas|nvjet|cijk_|xmma|gmma|hmma|matmul|884|1688|16816|splitk"
             r"|[ab]?b?mm\b|bmm_|aten::linear|dot_kernel"),
    ("foreach", r"multi_tensor|foreach|fused_?(?:adam|sgd|adagrad|lamb)"),
    ("indexing", r"embedding|index|gather|scatter|sort|cat(?:array|_)|permute|transpose|roll"),
    ("reduction", r"reduc|norm(?!al)|scan|cumsum|triton_(?:per|red)|mean|argmax|topk|loss"),
    ("elementwise", r"elementwise|vectorized|unrolled|pointwise|triton_poi|fill|copy|dropout|cast|"
                    r"distribution|normal|uniform|activation|relu|gelu|silu|add|mul"),
)  # fmt: skip
"""What a kernel works on by its name, which is all that a trace has: the first that fits, else
`other`."""
# Kernels that are known to multiply on the ordinary cores.
_OFF = re.compile(r"(?<![a-z])[sd]gemm|simt|ffma|scudnn")
_SURELY_OFF = re.compile(r"simt|ffma")  # xmma_gemm with ordinary multiply-adds has both


def work_kind(name: str, operator: str | None = None) -> str:
    """What a kernel, or an operator of the host, works on; cuDNN's are told by their operator."""
    plain = name.lower()
    kind = next((kind for kind, sign in _KERNEL_KINDS if re.search(sign, plain)), "other")
    return "convolution" if kind == "gemm" and "conv" in (operator or "") else kind


def is_matrix_work(name: str) -> bool:
    """Whether tensor cores could do it: matrix products, convolutions, attention by name."""
    is_known = any(sign.search(name.lower()) for sign in (_FUSED_EXPERTS, _ON))
    return is_known or work_kind(name) in _MATRIX_KINDS


def uses_tensor_cores(name: str) -> bool | None:
    """Whether it runs on tensor cores; None where its name does not say."""
    plain = name.lower()
    if _ON.search(plain) and not _SURELY_OFF.search(plain):
        return True
    return False if _OFF.search(plain) else None


# NCCL's and RCCL's names of algorithms as they stand in kernel names (nccl/src/include/device.h,
# ncclAlgoStr): Tree, Ring, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT.
_ALGORITHMS = (
    (r"nvls_?tree", "NVLS tree"), (r"nvls", "NVLS"), (r"collnet", "CollNet"), (r"_pat_", "PAT"),
    (r"send_?recv", "send/recv"), (r"_tree", "tree"), (r"_ring", "ring"),
)  # fmt: skip


def transfer_type(kind: str, name: str) -> str:
    """Such as `ring all_reduce`, `send/recv all_to_all`; the collective alone if names differ."""
    plain = name.lower()
    how = next((word for sign, word in _ALGORITHMS if re.search(sign, plain)), None)
    what = "send/recv" if kind == "send_receive" else kind
    return what if how is None or how == what else f"{how} {what}"


GPU_COMPUTE, COMMUNICATION, MEMORY, RUNTIME, PYTHON = (
    "gpu-compute", "communication", "memory", "runtime", "python",
)  # fmt: skip
PRIORITY = (GPU_COMPUTE, COMMUNICATION, MEMORY, RUNTIME, PYTHON)
"""What runs at the same time counts for the first of these only.

Source: EROICA (arXiv 2506.08528), where GPU computation comes first and Python last, so that what
something above hides costs nothing. Of the kinds between, PerfTracker's reports (seed 001) take
away overlap with computation; here a copy beside communication counts as communication, as the
collective is what other ranks wait for. CUDA runtime calls are a kind of their own, as there.
"""
