from __future__ import annotations

from tests.unit.traces.conftest import _own_cache, file, way

__all__ = ["_own_cache", "file", "way"]
