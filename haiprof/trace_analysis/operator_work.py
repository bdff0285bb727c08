"""The work of one call of an operator: FLOPs and bytes, from the shapes of its tensors."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from haiprof.base.errors import UsageError, convert_os_errors
from haiprof.base.options import read_toml

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
PRECISIONS = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8",
    "float8_e5m2fnuz": "fp8",
}  # fmt: skip
_SPELLINGS = {
    "double": "float64", "float": "float32", "half": "float16", "long int": "int64",
    "long": "int64", "int": "int32", "short": "int16", "short int": "int16", "char": "int8",
    "signed char": "int8", "unsigned char": "uint8", "byte": "uint8", "complex<float>": "complex64",
    "complex<double>": "complex128", "complexhalf": "complex32", "complexfloat": "complex64",
    "complexdouble": "complex128",
}  # fmt: skip
"""Types as profilers write them, in small letters and without `c10::` or `torch.`."""
_SIZE_LIMIT = 1 << 48  # of one dimension: beyond it, it is no shape
_DIMENSIONS_LIMIT = 32


def type_of(name: object) -> str:
    """A type as torch names it, `float32`, of a name as a profiler writes it."""
    plain = str(name).lower().removeprefix("c10::").removeprefix("torch.")
    return _SPELLINGS.get(plain, plain)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a call."""

    shape: tuple[int, ...]
    type: str  # as torch names it: `float32`, `bfloat16`

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int | None:
        """Size of its elements; None of an unknown type."""
        size = ITEM_BYTES.get(self.type)
        return None if size is None else self.count * size


Argument = Tensor | tuple[Tensor, ...] | None  # a tensor, a list of tensors, or anything else


def arguments_of(dims: str | None, types: str | None) -> tuple[Argument, ...]:
    """What an operator was called with."""
    shapes, names = _list_of(dims), _list_of(types)
    if shapes is None or names is None:
        return ()
    return tuple(map(_argument, shapes, names))


def _list_of(text: str | None) -> list[object] | None:
    """A list as JSON or as Python writes it, `[(4, 8), ()]`."""
    plain = re.sub(r",(?=\s*\])", "", (text or "").replace("(", "[").replace(")", "]"))
    return _list_in(plain.replace("'", '"'))


def _list_in(text: str | None) -> list[object] | None:
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def values_of(concrete: str | None) -> tuple[str, ...]:
    """The arguments that are no tensors, as text; an empty text where it is one."""
    return tuple(map(str, _list_in(concrete) or ()))


def _argument(shape: object, name: object) -> Argument:
    if name == "TensorList" and isinstance(shape, list):
        # The profiler notes no types of a list's tensors: parameters and their states, in fp32.
        found = [_shape(one) for one in shape]
        return tuple(Tensor(one, "float32") for one in found if one is not None)
    own = _shape(_list_of(shape) if isinstance(shape, str) else shape)
    kind = type_of(name)
    return Tensor(own, kind) if kind in ITEM_BYTES and own is not None else None


def _shape(shape: object) -> tuple[int, ...] | None:
    is_shape = isinstance(shape, list) and len(shape) <= _DIMENSIONS_LIMIT and all(
        type(size) is int and 0 <= size < _SIZE_LIMIT for size in shape
    )  # fmt: skip
    return tuple(shape) if is_shape else None  # type: ignore[arg-type]


GEMM, CONVOLUTION, ATTENTION, MOE = "gemm", "convolution", "attention", "mixture of experts"
NORMALISATION, ELEMENTWISE, EMBEDDING = "normalisation", "elementwise", "embedding"
OPTIMIZER = "optimizer"
MATRIX = (GEMM, CONVOLUTION, ATTENTION, MOE)
"""Whose FLOPs are those of MFU: what is not a matrix product is not counted there (PaLM,
arXiv 2204.02311, appendix B; torch.utils.flop_counter)."""
_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one call."""

    kind: str
    flops: int  # that are executed
    bytes: int | None
    """Each input read and each output written once; None of an unknown type. Where the shapes leave
    open how much is read, what is most likely."""
    precision: str | None
    model_flops: int = -1  # without recomputation inside the operator
    least_bytes: int | None = None  # where the shapes leave it open
    rows: int | None = None
    """Of a matrix product: rows, or tokens, for which its weights are read once."""


class Call:
    """The arguments of a call: tensors, and the texts of all others."""

    def __init__(self, arguments: Sequence[Argument], values: Sequence[str]) -> None:
        self.arguments, self.values = arguments, values

    def tensor(self, at: int) -> Tensor:
        """The tensor at a place; a LookupError where there is none."""
        found = self.arguments[at]
        if not isinstance(found, Tensor):
            raise LookupError(at)
        return found

    def tensors(self) -> list[Tensor]:
        """All tensors with at least one dimension."""
        return [each for each in self.arguments if isinstance(each, Tensor) and each.shape]

    def lists(self) -> list[tuple[Tensor, ...]]:
        """All lists of tensors."""
        return [each for each in self.arguments if isinstance(each, tuple)]

    def numbers(self, at: int) -> list[int]:
        """A list of whole numbers such as `[2, 2]`; a LookupError where there is none."""
        text = self.values[at]
        if not text.startswith(("[", "(")):
            raise LookupError(at)
        return [int(part) for part in text.strip("[]()").split(",") if part.strip()]

    def flag(self, at: int) -> bool:
        """A truth value."""
        if self.values[at] not in ("True", "False"):
            raise LookupError(at)
        return self.values[at] == "True"

    def flags(self, at: int) -> list[bool]:
        """A list of truth values such as `[True, False]`."""
        return [part.strip() == "True" for part in self.values[at].strip("[]()").split(",")]


def work_of(
    name: str, arguments: Sequence[Argument], values: Sequence[str] = (),
    formulas: Mapping[str, Formula] | None = None,
) -> Work | None:  # fmt: skip
    """The work of one call; None where it is not known."""
    formula = (FORMULAS if formulas is None else formulas).get(name)
    if formula is None:
        return None
    try:
        found = formula(Call(arguments, values))
    except (LookupError, ValueError, TypeError, ArithmeticError):
        return None
    if not 0 <= found.flops < _LIMIT or (found.bytes or 0) >= _LIMIT:
        return None
    return found if found.model_flops >= 0 else replace(found, model_flops=found.flops)


Formula = Callable[[Call], Work]
_Options = ParamSpec("_Options")


def _family(work: Callable[Concatenate[Call, _Options], Work]) -> Callable[_Options, Formula]:
    """Makes the formula for some values of the arguments behind the call."""
    return lambda *args, **named: lambda call: work(call, *args, **named)


def _size(*tensors: Tensor) -> int | None:
    sizes = [tensor.bytes for tensor in tensors]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _work(kind: str, flops: int, *tensors: Tensor, rows: int | None = None) -> Work:
    """Work that reads or writes each of the tensors once, in the precision of the first."""
    return Work(kind, flops, _size(*tensors), PRECISIONS.get(tensors[0].type), rows=rows)


def _same(inner: int, other: int) -> int:
    """The inner dimension of a product of matrices, which both must have."""
    if inner != other:
        raise ValueError("no product of these shapes")
    return inner


@_family
def _gemm(call: Call, first: int, *, bias: bool = False) -> Work:
    """A product of matrices whose left one is the argument at `first`."""
    left, right = call.tensor(first), call.tensor(first + 1)
    *batch, rows, inner = left.shape
    out = Tensor((*batch, rows, right.shape[-1]), left.type)
    read = [left, right, *([call.tensor(0)] if bias and first else [])]
    return _work(GEMM, 2 * out.count * _same(inner, right.shape[-2]), *read, out, rows=rows)


@_family
def _vector_product(call: Call, first: int) -> Work:
    left, right = call.tensor(first), call.tensor(first + 1)
    out = Tensor(left.shape[:-1], left.type)
    return _work(GEMM, 2 * left.count, left, right, out)


def _convolution(call: Call) -> Work:
    """aten::convolution(input, weight, bias, stride, padding, dilation, transposed, ...)."""
    data, weight = call.tensor(0), call.tensor(1)
    batch, places = data.shape[0], data.shape[2:]
    # Stride, padding, dilation, output padding: one number may stand for all dimensions.
    listed = [call.numbers(at) for at in (3, 4, 5, 7)]
    numbers = [found if len(found) > 1 else found * len(places) for found in listed]
    by_dimension = zip(places, weight.shape[2:], *numbers, strict=True)
    if call.flag(6):
        sizes = [(size - 1) * step - 2 * pad + wide * (kernel - 1) + more + 1
                 for size, kernel, step, pad, wide, more in by_dimension]  # fmt: skip
        out = Tensor((batch, weight.shape[1] * int(call.values[8]), *sizes), data.type)
    else:
        sizes = [(size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
                 for size, kernel, step, pad, wide, _ in by_dimension]  # fmt: skip
        out, places = Tensor((batch, weight.shape[0], *sizes), data.type), tuple(sizes)
    flops = 2 * batch * math.prod(places) * weight.count
    return _work(CONVOLUTION, flops, data, weight, out)


def _convolution_alone(call: Call) -> Work:
    """aten::conv2d(input, weight, bias, stride, padding, dilation, groups) and its like."""
    more = (*call.values[:6], "False", "[0]", *call.values[6:7])
    return _convolution(Call(call.arguments, more))


def _linear(call: Call) -> Work:
    """aten::linear(input, weight, bias): the weight is (columns, inner)."""
    data, weight = call.tensor(0), call.tensor(1)
    columns, inner = weight.shape
    out = Tensor((*data.shape[:-1], columns), data.type)
    rows = math.prod(data.shape[:-1])
    return _work(GEMM, 2 * out.count * _same(inner, data.shape[-1]), data, weight, out, rows=rows)


def _quantised_linear(call: Call) -> Work:
    """vllm::gemm_with_dynamic_quant: (rows, inner) by (columns, inner), packed or not."""
    data, weight = [each for each in call.tensors() if len(each.shape) == 2][:2]
    if data.shape[1] not in (weight.shape[1], 2 * weight.shape[1]):
        raise ValueError("no product of these shapes")
    out = Tensor((data.shape[0], weight.shape[0]), data.type)
    return Work(GEMM, 2 * out.count * data.shape[1], _size(data, weight, out), None,
                rows=data.shape[0])  # fmt: skip


def _te_gemm(call: Call) -> Work:
    """tex_ts::te_gemm_ts of Transformer Engine 1: A at 0, B at 5, transposed or not at 4 and 9."""
    left, right, out = call.tensor(0), call.tensor(5), call.tensor(10)
    transposed = [call.values[at] in ("1", "True") for at in (4, 9)]
    inner, rows = reversed(left.shape) if transposed[0] else left.shape
    columns, again = reversed(right.shape) if transposed[1] else right.shape
    flops = 2 * rows * columns * _same(inner, again)
    return _work(GEMM, flops, left, right, out, rows=columns)


def _convolution_backward(call: Call) -> Work:
    """aten::convolution_backward(grad_output, input, weight, ..., transposed at 7, mask at 10)."""
    grad, data, weight = (call.tensor(at) for at in range(3))
    wanted = call.flags(10)[:2]
    positions = data if call.flag(7) else grad
    once = 2 * positions.shape[0] * math.prod(positions.shape[2:]) * weight.count
    moved = (grad, weight, data) * sum(wanted)  # for each gradient two are read, one is written
    return Work(CONVOLUTION, once * sum(wanted), _size(*moved), PRECISIONS.get(data.type))


@_family
def _attention(
    call: Call, first: int, causal: int, *, backward: bool = False, heads_last: bool = False
) -> Work:
    """Query, key and value, each (batch, heads, length, width), from the argument at `first` on.

    Backward are four products, and the first again, which is recomputation (arXiv 2205.14135). Of
    causal attention the half that is masked is not counted, as kernels leave it out.
    """
    query, key, value = (call.tensor(first + at) for at in range(3))
    batch, heads, length, width = query.shape
    keys, value_width = key.shape[-2], value.shape[-1]
    if heads_last:
        heads, length, keys = length, heads, key.shape[1]
    # Otherwise a multiplication and an addition for each pair.
    steps = 2 * length * keys
    if call.flag(causal):  # pairs that are not masked; of equal lengths half, as all count
        short = min(length, keys)
        several = short * (short + 1) + 2 * max(0, length - keys) * keys
        steps = length * keys if length == keys else several
    scores, mix = (batch * heads * steps * size for size in (width, value_width))
    out = Tensor((batch, heads, length, value_width), query.type)  # in whatever order
    precision = PRECISIONS.get(query.type)
    if not backward:
        return Work(ATTENTION, scores + mix, _size(query, key, value, out), precision)
    size = _size(query, key, value, out, out, query, key, value)
    return Work(ATTENTION, 3 * scores + 2 * mix, size, precision, 2 * scores + 2 * mix)


def _fused_moe(call: Call) -> Work:
    """(tokens, up, down, weights of the chosen experts, ...), as vLLM's and AITER's operators.

    Shapes do not tell the routing: experts are as likely as in TraceLens's FusedMoE.bytes_func.
    """
    tokens, up, down, weights_of_chosen = (call.tensor(at) for at in range(4))
    chosen = weights_of_chosen.shape[1]
    experts, wide, packed = up.shape
    if down.shape[0] != experts or not 0 < chosen <= experts:
        raise ValueError("no experts of these shapes")
    packing = down.shape[1] // packed
    inner = down.shape[2] * packing
    if packing < 1 or wide not in (inner, 2 * inner) or down.shape[1] != tokens.shape[1] * packing:
        raise ValueError("no experts of these shapes")
    flops = 2 * tokens.shape[0] * chosen * tokens.shape[1] * packing * (wide + inner)
    weights, ends = _size(up, down), _size(tokens, tokens)
    if weights is None or ends is None:
        return Work(MOE, flops, None, PRECISIONS.get(tokens.type), rows=tokens.shape[0])
    even = 1 - (1 - chosen / experts) ** tokens.shape[0]
    return Work(MOE, flops, ends + round(weights * even), PRECISIONS.get(tokens.type),
                least_bytes=ends + weights * chosen // experts, rows=tokens.shape[0])  # fmt: skip


@_family
def _elementwise(call: Call, flops: int, inputs: int) -> Work:
    """So many FLOPs per element of the result; the tensors are broadcast to each other."""
    found = call.tensors()[:inputs]
    if not found:
        raise LookupError(0)
    shapes = [tensor.shape for tensor in found]
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    shape = tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))
    out = Tensor(shape, found[0].type)
    return _work(ELEMENTWISE, flops * out.count, *found, out)


@_family
def _moves(call: Call, kind: str, *places: int) -> Work:
    """An operator that reads or writes the tensors at some places, and computes nothing."""
    return Work(kind, 0, _size(*map(call.tensor, places)), None)


def triton_work(name: str) -> Formula:
    """A kernel that Inductor wrote: all its tensors are arguments, most used once."""
    kind = ELEMENTWISE if name.startswith("triton_poi_") else "reduction"
    return lambda call: Work(kind, 0, _size(*call.tensors()), None, least_bytes=0)


@_family
def _rows(call: Call, kind: str, flops: int, at: int, sizes: int) -> Work:
    """An operator that reads or writes tensors of one size so many times, and small ones."""
    data = call.tensor(at)
    return _work(kind, flops * data.count, *[data] * sizes)


@_family
def _resize(call: Call, flops: int, *, backward: bool = False) -> Work:
    """(input, output size, ...); of the gradient (gradient, output size, input size, ...)."""
    data = call.tensor(0)
    sizes = call.numbers(2) if backward else (*data.shape[:2], *call.numbers(1))
    other = Tensor(tuple(sizes), data.type)
    return _work(ELEMENTWISE, flops * (data if backward else other).count, data, other)


def _embedding(call: Call) -> Work:
    """aten::embedding(weight, indices): rows read and written."""
    weight, indices = call.tensor(0), call.tensor(1)
    rows = Tensor((indices.count, weight.shape[1]), weight.type)
    return Work(EMBEDDING, 0, _size(indices, rows, rows), None)


def _gather(call: Call) -> Work:
    """(data, dimension, indices): of gather an element for each index, of index_select a slice."""
    data, indices = call.tensor(0), call.tensor(2)
    count = indices.count
    if len(indices.shape) < len(data.shape):
        count *= data.count // data.shape[int(call.values[1])]
    found = Tensor((count,), data.type)
    return Work(EMBEDDING, 0, _size(indices, found, found), None)


def _embedding_bag(call: Call) -> Work:
    """aten::_embedding_bag(weight, indices, offsets): rows are read and added up by bag."""
    weight, indices, offsets = (call.tensor(at) for at in range(3))
    rows = Tensor((indices.count, weight.shape[1]), weight.type)
    bags = Tensor((offsets.count, weight.shape[1]), weight.type)
    return _work(EMBEDDING, rows.count, rows, indices, offsets, bags)


def _embedding_backward(call: Call) -> Work:
    """(gradient, indices, ...): a row of the gradient is added to the row of each index."""
    grad, indices = call.tensor(0), call.tensor(1)
    rows = Tensor((indices.count, grad.shape[-1]), grad.type)
    return _work(EMBEDDING, rows.count, grad, indices, rows, rows)


@_family
def _foreach(call: Call, flops: int, *, written: int = 1) -> Work:
    """All lists are read, and so many written, in fp32; optimizers and clipping call these."""
    lists = call.lists()
    count = sum(tensor.count for tensor in lists[0])
    return Work(OPTIMIZER, flops * count, 4 * count * (len(lists) + written), "fp32")


@_family
def _fused_optimizer(call: Call, flops: int, lists: int, written: int) -> Work:
    """So many lists of equal shapes are read, and some written; fp32, as no trace says."""
    found = call.lists()[:lists]
    count = sum(tensor.count for tensor in found[0])
    if len(found) < lists or not count or any(not t.shape for t in found[0]):
        raise LookupError(0)
    return Work(OPTIMIZER, flops * count, 4 * count * (lists + written), "fp32")


_ONE = ("add", "sub", "mul", "div", "maximum", "minimum", "rsub", "eq", "ne", "lt", "le", "gt",
        "ge", "bitwise_and", "bitwise_or", "threshold_backward", "sigmoid_backward",
        "tanh_backward", "silu_backward", "gelu_backward", "masked_fill", "where")  # fmt: skip
_UNARY = ("relu", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "neg", "abs",
          "pow", "cos", "sin", "clamp", "clamp_min", "reciprocal", "hardtanh", "leaky_relu",
          "bernoulli", "erf", "square")  # fmt: skip
_REDUCTIONS = ("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "prod", "any",
               "all", "var", "std", "norm", "linalg_vector_norm")  # fmt: skip
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
                "_batch_norm_with_update")  # fmt: skip
_RESIZES = {
    **{f"{name}{n}d": 0 for name in ("upsample_nearest", "_upsample_nearest_exact")
       for n in (1, 2, 3)},
    "upsample_linear1d": 4, "upsample_bilinear2d": 8, "upsample_trilinear3d": 16,
    "upsample_bicubic2d": 32,
}  # fmt: skip
"""FLOPs per element: a product and a sum for each element that it is made of."""
_NORMALISATIONS = {
    "_softmax": (5, 2), "_log_softmax": (5, 2), "_softmax_backward_data": (4, 3),
    "_log_softmax_backward_data": (4, 3), "native_layer_norm": (7, 2),
    "native_layer_norm_backward": (14, 3), "_fused_rms_norm": (5, 2),
    "_fused_rms_norm_backward": (10, 3), "native_group_norm": (7, 2),
    "native_group_norm_backward": (14, 3), **dict.fromkeys(_BATCH_NORMS, (7, 2)),
    **{f"{name}_backward": (14, 3) for name in _BATCH_NORMS},
}  # fmt: skip
"""FLOPs per element, and how many tensors of its size are read or written."""
_FOREACH = ("add", "sub", "mul", "div", "sqrt", "neg", "abs", "reciprocal", "rsqrt", "pow", "sign",
            "maximum", "minimum", "clamp_min", "clamp_max")  # fmt: skip


def _both(names: tuple[str, ...], formula: Formula) -> dict[str, Formula]:
    """Under the operator's name and that of its form in place."""
    return {f"aten::{name}{end}": formula for name in names for end in ("", "_")}


_COMPOSED: dict[str, Formula] = {
    "linear": _linear, "matmul": _gemm(0),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution_alone),
    "scaled_dot_product_attention": _attention(0, 5),
    "softmax": _rows(NORMALISATION, 5, 0, 2), "log_softmax": _rows(NORMALISATION, 5, 0, 2),
    "layer_norm": _rows(NORMALISATION, 7, 0, 2), "rms_norm": _rows(NORMALISATION, 5, 0, 2),
    "group_norm": _rows(NORMALISATION, 7, 0, 2), "batch_norm": _rows(NORMALISATION, 7, 0, 2),
}  # fmt: skip
COMPOSED = frozenset(f"aten::{name}" for name in _COMPOSED)
"""Operators that call others: they count only where none of known work is inside of them."""

FORMULAS: dict[str, Formula] = {
    **{f"aten::{name}": _gemm(0) for name in (
        "mm", "bmm", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2",
    )},
    **dict.fromkeys(("vllm::rocm_aiter_fused_moe", "aiter::fused_moe", "aiter::fused_moe_",
                     "vllm::outplace_fused_experts", "vllm::inplace_fused_experts"), _fused_moe),
    **_both(("addmm", "baddbmm"), _gemm(1, bias=True)),
    "aten::_addmm_activation": _gemm(1, bias=True),
    "aten::mv": _vector_product(0), "aten::addmv": _vector_product(1),
    "aten::dot": _vector_product(0),
    "aten::convolution": _convolution, "aten::_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention(0, 4),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 6),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 6),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 11, backward=True),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 11, backward=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, backward=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        _attention(1, 7, backward=True),
    "aten::_flash_attention_forward": _attention(0, 8, heads_last=True),
    "flash_attn::_flash_attn_forward": _attention(0, 5, heads_last=True),
    "flash_attn::_flash_attn_backward": _attention(1, 11, backward=True, heads_last=True),
    "aiter::_flash_attn_forward": _attention(0, 5, heads_last=True),
    "aiter::_flash_attn_backward": _attention(1, 12, backward=True, heads_last=True),
    **dict.fromkeys(("FlashAttnFunc", "aiter::mha_fwd", "aiter::fmha_v3_fwd"),
                    _attention(0, 5, heads_last=True)),
    "flash_attn_3::fwd": _attention(0, 24, heads_last=True),
    "aiter::wrapper_fmha_v3_fwd": _attention(1, 6, heads_last=True),
    "aiter::mha_bwd": _attention(1, 8, backward=True, heads_last=True),
    "aiter::wrapper_fmha_v3_bwd": _attention(1, 9, backward=True, heads_last=True),
    "trtllm::cublas_scaled_mm": _gemm(0), "vllm::gemm_with_dynamic_quant": _quantised_linear,
    "tex_ts::te_gemm_ts": _te_gemm,
    **_both(_ONE, _elementwise(1, 2)), **_both(_UNARY, _elementwise(1, 1)),
    **_both(("addcmul", "addcdiv", "lerp"), _elementwise(3, 3)),
    "aten::copy_": _moves(ELEMENTWISE, 0, 1),
    "aten::fill_": _moves(ELEMENTWISE, 0), "aten::zero_": _moves(ELEMENTWISE, 0),
    "aten::native_dropout": _elementwise(2, 1), "aten::native_dropout_backward": _elementwise(2, 2),
    **{f"aten::{name}": _rows(ELEMENTWISE, 1, 0, 1) for name in _REDUCTIONS},
    **{f"aten::{name}": _rows(ELEMENTWISE, 1, 0, 2) for name in ("cumsum", "cumprod")},
    **{f"aten::{name}": _rows(ELEMENTWISE, 0, 0, 2) for name in ("tril", "triu", "flip", "roll")},
    **{f"aten::{name}": _resize(flops) for name, flops in _RESIZES.items()},
    **{f"aten::{name}_backward": _resize(flops, backward=True) for name, flops in _RESIZES.items()},
    "aten::index_select": _gather, "aten::gather": _gather,
    # (data, indices, values): read are values, and what they replace or are added to.
    "aten::_index_put_impl_": _moves(EMBEDDING, 2, 2, 2),
    **{f"aten::{name}": _rows(NORMALISATION, flops, 0, sizes)
       for name, (flops, sizes) in _NORMALISATIONS.items()},
    **{f"aten::{name}": formula for name, formula in _COMPOSED.items()},
    "aten::embedding": _embedding, "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_dense_backward": _embedding_backward,
    **_both(tuple(f"_foreach_{name}" for name in _FOREACH), _foreach(1)),
    **_both(("_foreach_addcmul", "_foreach_addcdiv", "_foreach_lerp"), _foreach(3)),
    "aten::_foreach_norm": _foreach(2, written=0),
    "aten::_fused_adam_": _fused_optimizer(12, 4, 3),
    "aten::_fused_adamw_": _fused_optimizer(14, 4, 3),
    "aten::_fused_sgd_": _fused_optimizer(4, 3, 2),
}  # fmt: skip
"""By operator. What is not here is unknown, and so is what lacks the shapes that it needs.

Convolutions, attention and lists of tensors count at the level of ATen, not once more in the
operators inside, such as cuDNN's. Per element: normalisation 7 forward and 14 backward, softmax 5
and 4, other functions 1; none of them counts for MFU."""
_WITH_VALUES = r"conv|scaled_dot_product|flash_att|FlashAttn|mha|te_gemm|index_select|upsample"
NEED_VALUES = tuple(name for name in FORMULAS if re.search(_WITH_VALUES, name))
"""Whose work depends on arguments that are no tensors."""


OwnFormulas = Mapping[str, Mapping[str, str]]
"""By operator: `flops`, and where they are given `bytes`, `kind` and `precision`, as texts."""

_KINDS = (*MATRIX, ELEMENTWISE, NORMALISATION, EMBEDDING, OPTIMIZER)
_KEYS = ("flops", "bytes", "kind", "precision")
_FILE_BYTES, _CHARS, _MOST = 1 << 20, 500, 1 << 60
_HINT = '["my::attention"]\\nflops = "4 * dim(0, 0) * dim(0, 1) * dim(1, 1)"\\nbytes = "bytes(0)"'
_OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "dim": (2, lambda call, at, place: call.tensor(at).shape[place]),
    "dims": (1, lambda call, at: len(call.tensor(at).shape)),
    "count": (1, lambda call, at: call.tensor(at).count),
    "bytes": (1, lambda call, at: call.tensor(at).bytes),  # of an unknown type no number
    "value": (1, lambda call, at: float(call.values[at])),
    "min": (2, lambda call, left, right: min(left, right)),
    "max": (2, lambda call, left, right: max(left, right)),
    "ceil": (1, lambda call, number: math.ceil(number)),
}
"""By name: how many arguments it takes, and what it gives of a call."""


def read_formulas(path: Path | None) -> OwnFormulas | None:
    """Reads and checks a file of formulas.

    Args:
        path: TOML, a table per operator. `flops` is an expression of numbers, `+ - * / // %`,
            parentheses, and of argument N (from 0): `dim(N, I)` a dimension's size (-1 is the
            last), `dims(N)` how many it has, `count(N)` its elements, `bytes(N)` its size,
            `value(N)` a number; `min(a, b)`, `max(a, b)`, `ceil(a)`. `bytes` is one, too; `kind`
            is `gemm` (default) or another of `operator_work`; `precision` as in `--peak`. None is
            no file.
    """
    if path is None:
        return None
    with convert_os_errors(UsageError, str(path)), open(path, "rb") as file:
        content = file.read(_FILE_BYTES + 1)
    if len(content) > _FILE_BYTES:
        raise UsageError(f"{path}: more than 1 MiB: no file of formulas", hint=_HINT)
    found = {name: _check(path, name, table) for name, table in read_toml(path, content).items()}
    if not found:
        raise UsageError(f"{path}: no formula in it", hint=_HINT)
    return found


def _check(path: Path, name: str, table: object) -> dict[str, str]:
    def refuse(why: str) -> UsageError:
        return UsageError(f"{path}: [{name!r}]: {why}", hint=_HINT)

    if not isinstance(table, dict) or "flops" not in table:
        raise refuse("expected a table with flops")
    if unknown := sorted(set(table) - set(_KEYS)):
        raise refuse(f"{unknown[0]} is not one of {', '.join(_KEYS)}")
    if not all(type(value) in (str, int) for value in table.values()):
        raise refuse("expected texts")
    texts = {key: str(value) for key, value in table.items()}
    try:
        for key in ("flops", "bytes"):
            _evaluate(_parse(texts.get(key, "0")), None)
    except (ValueError, RecursionError) as error:
        raise refuse(str(error)) from None
    if texts.get("kind", GEMM) not in _KINDS:
        raise refuse(f"kind {texts['kind']} is not one of {', '.join(_KINDS)}")
    precisions = sorted(set(PRECISIONS.values()))
    if texts.get("precision", "bf16") not in precisions:
        raise refuse(f"precision {texts['precision']} is not one of {', '.join(precisions)}")
    return texts


def formula_of(texts: Mapping[str, str]) -> Formula:
    """The work of a call by one's own formula."""
    flops = _parse(texts["flops"])
    size = _parse(texts["bytes"]) if "bytes" in texts else None

    def formula(call: Call) -> Work:
        types = [tensor.type for tensor in call.tensors()]
        return Work(
            texts.get("kind", GEMM),
            _whole(_evaluate(flops, call)),
            None if size is None else _whole(_evaluate(size, call)),
            texts.get("precision") or (PRECISIONS.get(types[0]) if types else None),
        )

    return formula


def _whole(number: float) -> int:
    if not 0 <= number < _MOST:  # not a number, too
        raise ValueError(number)
    return round(number)


def _parse(text: str) -> ast.expr:
    if len(text) > _CHARS:
        raise ValueError(f"longer than {_CHARS} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no expression") from None


def _evaluate(node: ast.expr, call: Call | None) -> Any:  # noqa: ANN401 - a number of either kind
    """The value for a call; without one only whether all of it is allowed (then 1)."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner, call)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            sides = _evaluate(left, call), _evaluate(right, call)
            found = 1 if call is None else _OPERATIONS[type(operation)](*sides)
            if abs(found) > _MOST * _MOST:
                raise ValueError("too large a number")
            return found
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS:
            count, function = _FUNCTIONS[name]
            values = [_evaluate(each, call) for each in given]
            if len(values) != count:
                raise ValueError(f"{name} takes {count} arguments")
            return 1 if call is None else function(call, *values)
    raise ValueError(f"{ast.unparse(node)[:60]} is not one of +, -, *, /, //, % and "
                     f"{', '.join(_FUNCTIONS)}")  # fmt: skip
