"""What makes a test a unit test: it starts no process, and torch is not loaded."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when polars is imported, which no conftest does. The frames of these tests are small: handing
# their work to threads took a tenth of all processor time (348 s, and 314 s without).
os.environ.setdefault("POLARS_MAX_THREADS", "1")

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
_seen: list[str] = []
_folders: list[str] = []


def _see(event: str, args: tuple[object, ...]) -> None:
    if event in _STARTS:
        _seen.append(f"{event}: {args[:2]}")
    elif event == "import" and args[0] == "torch":
        _seen.append("import torch")


sys.addaudithook(_see)


@pytest.fixture(autouse=True)
def _no_process_and_no_torch() -> Iterator[None]:
    _seen.clear()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    assert _seen == [], "a test for tests/process"
    # Processes of multiprocessing are started without an event; they have an end.
    assert resource.getrusage(resource.RUSAGE_CHILDREN) == before, "a test for tests/process"


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test; pytest's own lists the folders of all earlier tests to number it."""
    _folders.append(name := re.sub(r"\W", "_", request.node.name)[:20])
    return tmp_path_factory.mktemp(f"{name}-{len(_folders)}", numbered=False)


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Units that are run alone are collected without torch too."""
    if all("tests/unit/" in item.nodeid for item in items) and "torch" in sys.modules:
        raise pytest.UsageError(
            "a module of tests/unit imports torch; its tests go to tests/process"
        )
