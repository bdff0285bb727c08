"""The tensors that an operator was called with, from the shapes and types that a trace records."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

ITEM_BYTES = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4,
    "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8,
    "c10::complex<double>": 16, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1,
}  # fmt: skip
PRECISIONS = {
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16",
    "signed char": "int8", "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8", "c10::Float8_e5m2fnuz": "fp8",
}  # fmt: skip
_SIZE_LIMIT = 1 << 48  # of one dimension: beyond it, it is no shape
_DIMENSIONS_LIMIT = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a call."""

    shape: tuple[int, ...]
    type: str
    """As the profiler writes it: `float`, `c10::BFloat16`."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int | None:
        """Size of its elements; None of an unknown type."""
        size = ITEM_BYTES.get(self.type)
        return None if size is None else self.count * size


Argument = Tensor | tuple[Tensor, ...] | None
"""A tensor, a list of tensors, or anything else."""


def arguments_of(dims: str | None, types: str | None) -> tuple[Argument, ...]:
    """What an operator was called with."""
    try:
        shapes, names = json.loads(dims or "[]"), json.loads(types or "[]")
    except (ValueError, RecursionError):
        return ()
    if not isinstance(shapes, list) or not isinstance(names, list):
        return ()
    return tuple(map(_argument, shapes, names))


def values_of(concrete: str | None) -> tuple[str, ...]:
    """The arguments that are no tensors, as text; an empty text where it is one."""
    try:
        found = json.loads(concrete or "[]")
    except (ValueError, RecursionError):
        return ()
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _argument(shape: object, name: object) -> Argument:
    if name == "TensorList" and isinstance(shape, list):
        # The profiler notes no types of a list's tensors: parameters and their states, in fp32.
        found = [_shape(one) for one in shape]
        return tuple(Tensor(one, "float") for one in found if one is not None)
    own = _shape(shape)
    is_tensor = isinstance(name, str) and name in ITEM_BYTES
    return Tensor(own, str(name)) if is_tensor and own is not None else None


def _shape(shape: object) -> tuple[int, ...] | None:
    if not isinstance(shape, list) or len(shape) > _DIMENSIONS_LIMIT:
        return None
    if not all(type(size) is int and 0 <= size < _SIZE_LIMIT for size in shape):
        return None
    return tuple(shape)
