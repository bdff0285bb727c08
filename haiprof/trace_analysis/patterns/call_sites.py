"""Call sites: the operator, module, and line of user code around a call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.call_tree import CallTree, innermost, nest
from haiprof.trace_format.kineto.rank_trace import Trace

_MODULE = "nn.Module: "
_ATEN = "aten::"
_LINE = r"\.py\(\d+\): "
# Python files that are not the user's: installed packages, the standard library, built-ins.
_LIBRARY = (
    r"^(?:torch|torchvision|numpy|transformers|accelerate|lightning|pytorch_lightning|apex|"
    r"deepspeed|triton|contextlib|threading|multiprocessing|concurrent|importlib|typing|"
    r"functools|queue|_weakrefset|weakref|enum|abc|copy|collections|runpy|logging|"
    r"haiprof)[/\\.]|site-packages|dist-packages|[/\\]lib[/\\]python\d|^<"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSites:
    """The operators and Python functions of a trace, indexed to look up call sites."""

    operators: CallTree
    is_aten: npt.NDArray[np.bool_]
    python: CallTree
    is_module: npt.NDArray[np.bool_]
    is_line: npt.NDArray[np.bool_]

    def around(self, calls: pl.DataFrame) -> pl.DataFrame:
        """The call site of each call.

        One row per call, in the same order: `operator`, the outermost of the `aten::` ones
        directly around each other; `module`, the innermost nn.Module; `line`, the innermost
        Python function of the user's (`train.py(45): step`). Null where there is none or no
        stacks were recorded.
        """
        known = calls.select("pid", "tid", "ts_ns", "dur_ns").with_row_index("at").drop_nulls()
        at = known["at"].to_numpy()
        operator = self._outermost_aten(innermost(self.operators, known))
        inner = innermost(self.python, known)
        module = self.python.climb(inner, self.is_module)
        line = self.python.climb(inner, self.is_line)
        return pl.DataFrame({
            "operator": _names(self.operators, operator, at, len(calls)),
            "module": _names(self.python, module, at, len(calls)).str.strip_prefix(_MODULE),
            "line": _names(self.python, line, at, len(calls)),
        })  # fmt: skip

    def _outermost_aten(self, rows: Ints) -> Ints:
        rows = rows.copy()
        active = np.flatnonzero(rows >= 0)
        while len(active):
            above = self.operators.parent[rows[active]]
            higher = (above >= 0) & self.is_aten[above]
            active = active[higher]
            rows[active] = above[higher]
        return rows


def call_sites(trace: Trace) -> CallSites:
    """Operators and Python functions of one rank."""
    operators, python = nest(trace.ops), nest(trace.python)
    return CallSites(
        operators=operators,
        is_aten=_matching(operators, f"^{_ATEN}"),
        python=python,
        is_module=_matching(python, f"^{_MODULE}"),
        is_line=_matching(python, _LINE) & ~_matching(python, _LIBRARY),
    )


def _matching(tree: CallTree, pattern: str) -> npt.NDArray[np.bool_]:
    """Which spans have such a name; the pattern is tried once per name."""
    names = tree.spans["name"].unique()
    wanted = names.filter(names.cast(pl.String).str.contains(pattern))
    found: npt.NDArray[np.bool_] = tree.spans["name"].is_in(wanted.implode()).to_numpy()
    return found


def _names(tree: CallTree, rows: Ints, at: Ints, count: int) -> pl.Series:
    """Names of some rows at some of the places; null elsewhere."""
    found = np.full(count, -1, dtype=np.int64)
    found[at] = rows
    places = pl.Series(found)
    known = pl.select(pl.when(places >= 0).then(places)).to_series()
    return tree.spans["name"].gather(known).cast(pl.String)
