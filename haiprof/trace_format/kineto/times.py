"""Start and duration of events in integer nanoseconds, exact for every timestamp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Floats, Ints

# Above this many us a float no longer resolves 1 ns: such a timestamp is read from its text.
EXACT_ABOVE_US = float(1 << 42)
TIME_LIMIT_NS = 1 << 61
"""73 years before or after the clock's zero: beyond the Unix time of any trace."""
DURATION_LIMIT_NS = 1 << 51
"""26 days: no profiler window lasts that long. Corrupted CUPTI records have been seen with
durations of 236 years (HTA PR 325)."""

Flags = npt.NDArray[np.bool_]

_NEWLINE, _DOT = ord("\n"), ord(".")
_DIGITS_LIMIT = 19  # of a number that fits 64 bits, unless it begins with a 9
_POWERS: Ints = 10 ** np.arange(4, dtype=np.int64)


def times(heads: Sequence[Any]) -> tuple[Ints, Ints, Flags] | None:
    """Start and duration of each event in ns, and whether it has usable ones.

    None where a timestamp has more digits than a float holds to 1 ns: see `exact_times`.
    """
    start, durations = _from_numbers([head.ts for head in heads]), [head.dur for head in heads]
    dur = _from_numbers(durations)
    if dur is not None and not dur[1].all() and None in durations:
        durations = [0 if head.dur is None and head.ph != "X" else head.dur for head in heads]
        dur = _from_numbers(durations)
    return None if start is None or dur is None else _check_times(start, dur)


def exact_times(heads: Sequence[Any]) -> tuple[Ints, Ints, Flags]:
    """The same for events with times as text."""
    durations = [bytes(head.dur) for head in heads]
    if b"null" in durations:
        durations = [
            b"0" if dur == b"null" and head.ph != "X" else dur
            for dur, head in zip(durations, heads, strict=True)
        ]
    return _check_times(exact_ns([bytes(head.ts) for head in heads]), exact_ns(durations))


def _check_times(start: tuple[Ints, Flags], dur: tuple[Ints, Flags]) -> tuple[Ints, Ints, Flags]:
    ts_ns, has_ts = start
    dur_ns, has_dur = dur
    return ts_ns, dur_ns, has_ts & has_dur & (dur_ns >= 0) & (dur_ns < DURATION_LIMIT_NS)


def _from_numbers(us: list[Any]) -> tuple[Ints, Flags] | None:
    """Times in ns, and which are usable; None where floats are too coarse for them."""
    try:
        whole = pl.Series(us, dtype=pl.Int64)
    except (TypeError, OverflowError):
        return _from_floats(us)
    if whole.null_count():
        return _from_floats(us)
    values: Ints = whole.to_numpy()
    limit = TIME_LIMIT_NS // 1000
    if len(values) and -limit < values.min() and values.max() < limit:
        return values * 1000, np.ones(len(values), dtype=bool)
    good = (values < limit) & (values > -limit)
    return np.where(good, values, 0) * 1000, good


def _from_floats(us: list[Any]) -> tuple[Ints, Flags] | None:
    values = as_floats(us)
    good = np.isfinite(values)
    good[good] = np.abs(values[good]) < TIME_LIMIT_NS / 1000
    values = np.where(good, values, 0.0)
    if (np.abs(values) > EXACT_ABOVE_US).any():
        return None
    # Whole us and their fraction apart, so that neither loses digits.
    whole = np.floor(values)
    fraction: Ints = np.rint((values - whole) * 1000).astype(np.int64)
    return whole.astype(np.int64) * 1000 + fraction, good


def as_floats(values: list[Any]) -> Floats:
    """Numbers, and texts of numbers; NaN for everything else."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(value) for value in values], dtype=np.float64)


def _float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def exact_ns(us: list[bytes]) -> tuple[Ints, Flags]:
    """Times in ns of texts in us, and which are usable; only digits below 1 ns are rounded."""
    text = b"\n".join([*us, b""])
    data = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(data == _NEWLINE)
    if len(ends) != len(us):  # some value is a list or an object over several lines
        return _one_by_one(us)
    plain, fraction_digits = _plain(data, ends)
    if not plain.all():
        ns, good = exact_ns([each if fine else b"0" for each, fine in zip(us, plain, strict=True)])
        odd = np.flatnonzero(~plain)
        ns[odd], good[odd] = _one_by_one([us[at] for at in odd.tolist()])
        return ns, good
    digits = data[data != _DOT].tobytes()
    values: Ints = np.fromstring(digits, dtype=np.int64, sep="\n")
    ns = values * _POWERS[3 - fraction_digits]
    return ns, values < TIME_LIMIT_NS // 1000 * 10**fraction_digits


def _plain(data: npt.NDArray[np.uint8], ends: Ints) -> tuple[Flags, Ints]:
    """Which lines are digits with at most three decimals, and how many decimals they have."""
    lengths = np.diff(ends, prepend=-1) - 1
    dots = np.flatnonzero(data == _DOT)
    line_of_dot = np.searchsorted(ends, dots)
    fraction_digits = np.zeros(len(ends), dtype=np.int64)
    fraction_digits[line_of_dot] = ends[line_of_dot] - dots - 1
    digits = lengths - np.bincount(line_of_dot, minlength=len(ends))
    plain = (digits > 0) & (digits <= _DIGITS_LIMIT) & (fraction_digits <= 3)
    plain &= (digits < _DIGITS_LIMIT) | (data[ends - lengths] < ord("9"))
    plain[line_of_dot[1:][line_of_dot[1:] == line_of_dot[:-1]]] = False
    plain[line_of_dot[dots == (ends - lengths)[line_of_dot]]] = False  # nothing before the dot
    is_other = ((data - ord("0")) > 9) & (data != _DOT) & (data != _NEWLINE)
    plain[np.searchsorted(ends, np.flatnonzero(is_other))] = False
    return plain, np.where(plain, fraction_digits, 0)


def _one_by_one(us: list[bytes]) -> tuple[Ints, Flags]:
    found = [_exact_ns(each) for each in us]
    good = np.array([ns is not None for ns in found], dtype=bool)
    return np.array([ns or 0 for ns in found], dtype=np.int64), good


def _exact_ns(us: bytes) -> int | None:
    text = us.strip(b'" ').decode("ascii", "replace")
    try:
        value = Decimal(text) * 1000
        return int(value.to_integral_value()) if abs(value) < TIME_LIMIT_NS else None
    except (InvalidOperation, ValueError, OverflowError):
        return None
