"""Records of counters, one a minute for each entity: growth is exact, gauges are means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Bools
from haiprof.base.units import NS_PER_S
from haiprof.run_format import schema

MINUTE_NS = 60 * NS_PER_S
_REASONS = "_reasons"
"""Ends the names of bit fields; other packed numbers are codes."""
Rows = npt.NDArray[Any]


def fold_rows(
    rows: Rows, columns: Sequence[tuple[str, str, str, str]], whole: Bools | None = None
) -> Rows:
    """The last record of each minute of each entity, by time; gauges are the means of the minute.

    So growth between two of them is that of all between. A counter that went back (a reset, a
    wrap) is kept on both sides, as is a code that changed. Of reasons all that were given are set.
    Those that `whole` marks stay as they are.
    """
    keys = [name for name, _, _, kind in columns if kind == "key"]
    order = np.lexsort((rows["time_ns"], *(rows[key] for key in reversed(keys))))
    rows = rows[order]
    same = np.ones(max(len(rows) - 1, 0), dtype=np.bool_)
    for key in keys:
        same &= rows[key][1:] == rows[key][:-1]
    head = np.append(True, ~same)[: len(rows)]
    minute = rows["time_ns"] // MINUTE_NS
    alone = head.copy()  # growth counts from the first one on
    head[1:] |= minute[1:] != minute[:-1]
    for name, kind, unit, what in columns:
        if schema.counter_end(what) is not None:
            values = rows[name]
            known = values != schema.NULL_I64 if kind == "i64" else np.isfinite(values)
            with np.errstate(invalid="ignore"):
                back = same & known[1:] & known[:-1] & (values[1:] < values[:-1])
            alone[1:] |= back
            alone[:-1] |= back
        elif unit == "packed" and what == "gauge" and not name.endswith(_REASONS):
            head[1:] |= rows[name][1:] != rows[name][:-1]
    if whole is not None:
        alone |= whole[order]
    head |= alone
    head[1:] |= alone[:-1]
    heads = np.flatnonzero(head)
    if not len(heads):
        return rows
    last = np.append(heads[1:], len(rows)) - 1
    folded = rows[last].copy()
    for name, kind, unit, what in columns:
        if what == "gauge":
            folded[name] = _join_groups(rows[name], heads, kind=kind, packed=unit == "packed")
    ordered: Rows = folded[np.argsort(folded["time_ns"], kind="stable")]
    return ordered


def _join_groups(values: Rows, heads: npt.NDArray[np.int64], *, kind: str, packed: bool) -> Rows:
    """Means of the known values of each group; bits that were set in any."""
    known = values != schema.NULL_I64 if kind == "i64" else np.isfinite(values)
    count = np.add.reduceat(known.astype(np.int64), heads)
    if packed and kind == "i64":
        bits: Rows = np.bitwise_or.reduceat(np.where(known, values, 0), heads)
        return np.where(count > 0, bits, schema.NULL_I64)
    total = np.add.reduceat(np.where(known, values, 0).astype(np.float64), heads)
    mean: Rows = np.divide(total, count, out=np.full(len(heads), np.nan), where=count > 0)
    if kind != "i64":
        return mean
    return np.where(count > 0, np.rint(np.nan_to_num(mean)), schema.NULL_I64).astype(np.int64)
