from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.integration.jobs import Job, run_job, succeeded
from tests.integration.loops import LAUNCHED_BY_TORCHRUN, LOOPS, loop_command

RunLoop = Callable[..., Job]


@pytest.fixture(scope="session")
def job_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """Runs a command once per session and way of running; later calls get the same job."""
    jobs: dict[tuple[object, ...], Job] = {}
    root = tmp_path_factory.mktemp("jobs")
    number = count()

    def run(*command: str, haiprof: bool, options: tuple[str, ...] = ()) -> Job:
        key = (command, haiprof, options)
        if key not in jobs:
            folder = root / f"{next(number):03d}-{'haiprof' if haiprof else 'bare'}"
            jobs[key] = succeeded(run_job(command, folder=folder, haiprof=haiprof, options=options))
        return jobs[key]

    return run


@pytest.fixture(scope="session")
def run_loop(job_cache: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> RunLoop:
    """Runs one of `loops.LOOPS`."""
    scripts = tmp_path_factory.mktemp("loops")

    def run(name: str, *, haiprof: bool) -> Job:
        script: Path = scripts / f"loop_{name}.py"
        if not script.exists():
            script.write_text(LOOPS[name])
        command = loop_command(script, ranks=2 if name in LAUNCHED_BY_TORCHRUN else 1)
        return job_cache(*command, haiprof=haiprof, options=("--quiet",) if haiprof else ())

    return run
