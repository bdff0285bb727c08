"""Compact encodings of a picture's numbers: half floats, fixed-point positions, base64."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from haiprof.base.arrays import Floats

_HALF_TOP = 32768.0
_PLACES = 65535
_MARKUP = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def half_floats(values: Floats) -> dict[str, Any]:
    """Values with three digits, whatever their size: scaled so that the largest fits.

    Half floats keep 11 bits, 0.05 %, over a range of 10^8 below the largest value. A picture shows
    less; what is stated as a number elsewhere on the page is exact.

    `scale` and `f2`, base64 of little-endian half floats; NaN is what is missing.
    """
    finite = np.abs(values[np.isfinite(values)])
    top = float(finite.max()) if finite.size else 0.0
    scale = top / _HALF_TOP if top else 1.0
    return {"scale": scale, "f2": _base64((values / scale).astype("<f2"))}


def single_floats(values: Floats) -> dict[str, Any]:
    """Values with seven digits: `f4`, base64 of little-endian floats."""
    return {"f4": _base64(values.astype("<f4"))}


def on_axis(values: Floats, *, low: float, high: float) -> dict[str, Any]:
    """Positions on an axis to 1/65535 of its length, which no screen resolves.

    `low`, `step` and `u2`, base64 of little-endian integers.
    """
    step = (high - low) / _PLACES or 1.0
    codes = np.clip(np.round((values - low) / step), 0, _PLACES)
    return {"low": low, "step": step, "u2": _base64(codes.astype("<u2"))}


def json_for_script(content: object) -> str:
    """JSON that can stand inside a script element: no text in it can end that element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_MARKUP)


def squeeze(text: str) -> str:
    """Text as base64 of gzip; the same text gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
