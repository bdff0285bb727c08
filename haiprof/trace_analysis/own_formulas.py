"""A file of one's own formulas for FLOPs and bytes: expressions over shapes, never run as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from haiprof.base.errors import UsageError
from haiprof.base.options import read_toml
from haiprof.trace_analysis.operator_work import (
    ELEMENTWISE,
    EMBEDDING,
    GEMM,
    MATRIX,
    NORMALISATION,
    OPTIMIZER,
    PRECISIONS,
    Call,
    Formula,
    Work,
)

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
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
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
