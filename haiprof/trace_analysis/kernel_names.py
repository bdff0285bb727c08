"""Normalizes names of kernels and operators across builds, GPUs and data types."""

from __future__ import annotations

import re
from collections.abc import Callable

FULL, SHORT, GENERIC = "full", "short", "generic"
STYLES = (FULL, SHORT, GENERIC)

_COPY = re.compile(r"(?:hip)?Mem(?:cpy|set)")
_COLLECTIVE = re.compile(r"^(?:n|r)ccl(?:Dev)?Kernel_(?:Generic_?)?([A-Z][A-Za-z]+)")
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
    """`void at::native::kernel<4, float>(int)` is `at::native::kernel`."""
    if _COPY.match(name) or not ("<" in name or "(" in name):
        return name
    plain = _without(_without(name.replace(_ANONYMOUS, ""), "<>"), "()").split()
    return plain[-1] if plain else name


def generic_kernel_name(name: str) -> str:
    """`volta_sgemm_64x64_nn` and `ampere_sgemm_128x64_nn` are `sgemm_nn`."""
    collective = _COLLECTIVE.match(name)
    if collective:
        return f"nccl {collective[1]}"
    short = short_kernel_name(name)
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
