"""Shifts the text of a trace's times by whole nanoseconds, without rounding a digit."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, localcontext

_DIGITS_LIMIT = 40
"""A number with more digits than this is not a time and stays unchanged."""
_NS_DIGITS = 3  # of a microsecond
_PLAIN_FROM_NS = 1000  # from here on there is a digit before the dot


def shift_time(us: bytes, shift_ns: int) -> bytes:
    """Shifts a time."""
    whole, dot, part = us.partition(b".")
    if len(part) == _NS_DIGITS and whole.isdigit() and part.isdigit() and len(us) < _DIGITS_LIMIT:
        ns = int(whole + part) + shift_ns  # as profilers write it
        if ns >= _PLAIN_FROM_NS:
            text = b"%d" % ns
            return text[:-_NS_DIGITS] + b"." + text[-_NS_DIGITS:]
    if not whole.isdigit() or (dot and not part.isdigit()) or len(us) > _DIGITS_LIMIT:
        return _shift_slowly(us, shift_ns)
    digits = max(_NS_DIGITS, len(part))
    value = int(whole + part.ljust(digits, b"0")) + shift_ns * 10 ** (digits - _NS_DIGITS)
    text = b"%0*d" % (digits + 1, abs(value))
    return (b"-" if value < 0 else b"") + text[:-digits] + b"." + text[-digits:]


def us_text(ns: int) -> str:
    """Nanoseconds as a trace writes times: us with three digits behind the dot."""
    return f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def _shift_slowly(us: bytes, shift_ns: int) -> bytes:
    """The same of negative numbers, exponents and numbers in quotes."""
    try:
        value = Decimal(us.strip(b'"').decode())
    except (InvalidOperation, UnicodeDecodeError):
        return us
    if not value.is_finite() or len(us) > _DIGITS_LIMIT or abs(value.adjusted()) > _DIGITS_LIMIT:
        return us
    with localcontext() as context:
        context.prec = 4 * _DIGITS_LIMIT
        return f"{value + Decimal(shift_ns) / 1000:f}".encode()
