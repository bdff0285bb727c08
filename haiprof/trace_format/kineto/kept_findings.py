"""What was found of a trace, kept in the user's cache: a sound one is checked once."""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass

import msgspec

from haiprof.trace_format.checks.finding import Finding
from haiprof.trace_format.kineto.user_cache import new_entry, read_entry

_VERSION = 3  # of the checks: findings of another one are worked out anew
_SIZE_LIMIT_BYTES = 1 << 20
_UNFIT = (OSError, ValueError, RecursionError)
"""What reading of a damaged entry raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFindings:
    """What was found of one trace."""

    findings: tuple[Finding, ...]
    corrected: frozenset[str]
    """Tables that hold something else than the file."""
    window: tuple[int, int] | None
    """First start and last end of calls and GPU events, or else of operators."""


def recall_findings(key: str) -> KeptFindings | None:
    """What was kept; None where nothing was, or something damaged."""
    with contextlib.suppress(*_UNFIT), read_entry(_name(key)) as file:
        data = file.read(_SIZE_LIMIT_BYTES)
        if int(data[:8], 16) != zlib.crc32(data[8:]):
            return None
        return msgspec.json.decode(data[8:], type=KeptFindings)
    return None


def keep_findings(key: str, kept: KeptFindings) -> None:
    """Keeps what was found, if anything can be kept."""
    body = msgspec.json.encode(kept, order="deterministic")
    if len(body) + 8 < _SIZE_LIMIT_BYTES:
        with contextlib.suppress(OSError), new_entry(_name(key)) as file:
            file.write(b"%08x" % zlib.crc32(body) + body)


def _name(key: str) -> str:
    return f"{key}-{_VERSION}.findings"
