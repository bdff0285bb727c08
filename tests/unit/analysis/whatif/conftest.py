from __future__ import annotations

from tests.unit.analysis.trace.conftest import _own_cache

__all__ = ["_own_cache"]
