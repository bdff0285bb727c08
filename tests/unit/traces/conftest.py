"""Caches of these tests go to a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.trace_format.kineto import load as native


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.with_name(f"{tmp_path.name}-cache")))


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads with the compiled scanner, and as where it could not be built."""
    if request.param == "python":
        monkeypatch.setattr(native, "_compiled", None)
    elif not native.is_compiled():
        pytest.skip("the scanner was not built")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test writes its trace."""
    return tmp_path / "trace.json"
