from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Columns of read-only traces go to one folder of the test session."""
    cache = tmp_path_factory.getbasetemp() / "haiprof-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache
