from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import sampling
from tests.conftest import Once
from tests.process.jobs import Job, run_job, succeeded
from tests.process.loops import LOOPS, OF_TWO_RANKS, loop_command

RunLoop = Callable[..., Job]


@pytest.fixture(scope="session")
def job_cache(once: Once) -> Callable[..., Job]:
    """Runs a command once per session and way of running; later calls get the same job."""

    def run(*command: str, haiprof: bool, options: tuple[str, ...] = ()) -> Job:
        def make(folder: Path) -> Job:
            return succeeded(run_job(command, folder=folder, haiprof=haiprof, options=options))

        job: Job = once((command, haiprof, options), make)
        return job

    return run


@pytest.fixture(scope="session")
def run_loop(job_cache: Callable[..., Job], once: Once) -> RunLoop:
    """Runs one of `loops.LOOPS`."""

    def write(folder: Path) -> Path:
        folder.mkdir()
        for name, source in LOOPS.items():
            (folder / f"loop_{name}.py").write_text(source)
        return folder

    scripts: Path = once(("loops",), write)

    def run(name: str, *, haiprof: bool) -> Job:
        ranks = 2 if name in OF_TWO_RANKS else 1
        command = loop_command(scripts / f"loop_{name}.py", ranks=ranks)
        return job_cache(*command, haiprof=haiprof, options=("--quiet",) if haiprof else ())

    return run


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests of one file on one worker: their jobs have one name, and are found by it."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if "PYTEST_XDIST_WORKER" in os.environ and not sampling.PROOFS:
        # Files of slow tests first: at the end no worker waits for one.
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
