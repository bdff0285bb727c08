"""Starts real jobs, bare and under haiprof, and keeps what came out of them."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from haiprof import Analyzer
from haiprof.__main__ import main

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
PYTHON = sys.executable
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")  # standalone: any free port
TWO_RANKS = ("python", str(REPOSITORY / "tests/process/ranks.py"), "2")
"""In front of a script: without torchrun, where nobody looks at what starts the ranks."""
TIMEOUT_S = 240
_TRAINING = """
import os, sys, time, torch; torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
{before}
{loop}
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    {each}
{after}
"""
_RANKS = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
{before}
for step in range(1_000_000):
    if step == 20 and rank == 0:
        print("TRAINS", flush=True)
    {first}
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    {each}
"""
SIMULATED_GPU = f"""
import os, sys
libraries = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages")
if not os.path.exists(libraries):  # no line of the simulated GPU is one of the job's own
    os.mkdir(libraries)
    os.symlink({str(REPOSITORY / "tests")!r}, os.path.join(libraries, "tests"))
sys.path.insert(0, libraries)
import torch
from tests.simulated import gpu as simulated
simulated.install(torch)
"""
"""The first lines of a script: a simulated GPU is in the place of torch.cuda's."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that has ended."""

    folder: Path
    """Its working directory: whatever it wrote itself."""
    log_dir: Path | None
    """Where haiprof wrote; None for a bare job."""
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def logs(self) -> Path:
        """Where haiprof wrote."""
        assert self.log_dir is not None
        return self.log_dir

    def analyzer(self) -> Analyzer:
        return Analyzer(self.logs)


def training(
    loop: str, *, before: str = "", each: str = "time.sleep(0.01)", after: str = ""
) -> str:
    """A script that trains a small model; `each` is a line at the end of each step, line 10."""
    return _TRAINING.format(loop=loop, before=before, each=each, after=after)


def ranks_training(*, before: str = "", first: str = "", each: str = "time.sleep(0.04)") -> str:
    """A script whose ranks train without end; `first` and `each` are lines of each step."""
    return _RANKS.format(before=before, first=first, each=each)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' own environment without haiprof's variables; one thread, so that bits repeat."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HAIPROF_")}
    kept["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{kept.get('PATH', '')}"
    kept["PYTHONPATH"] = str(REPOSITORY)
    kept["OMP_NUM_THREADS"] = "1"
    kept["HF_HUB_OFFLINE"] = "1"
    kept["PYTHONDONTWRITEBYTECODE"] = "1"
    return {**kept, **(extra or {})}


def haiprof_command(command: Sequence[str], *, log_dir: Path, options: Sequence[str]) -> list[str]:
    return [PYTHON, "-m", "haiprof", "run", "--log-dir", str(log_dir), *options, "--", *command]


def run_job(
    command: Sequence[str],
    *,
    folder: Path,
    haiprof: bool,
    options: Sequence[str] = (),
    extra_environment: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Job:
    """Runs a command in a new folder, under haiprof or bare, and waits for it."""
    folder.mkdir(parents=True)
    logs = (log_dir or folder / "logs") if haiprof else None
    command = [PYTHON if word == "python" else word for word in command]
    if logs is not None:
        command = haiprof_command(command, log_dir=logs, options=options)
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(extra_environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Job(
        folder=folder,
        log_dir=logs,
        returncode=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
        seconds=time.monotonic() - began,
    )


def run_script(
    folder: Path,
    source: str,
    *words: str,
    haiprof: bool = True,
    options: Sequence[str] = ("--quiet",),
    **how: Any,
) -> Job:
    """Runs a script of one process, `train.py` of a folder, under haiprof or bare."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(source)
    place, command = folder / ("job" if haiprof else "bare"), (str(folder / "train.py"), *words)
    return run_job(("python", *command), folder=place, haiprof=haiprof, options=options, **how)


def run_command(
    words: Sequence[str], *, folder: Path, extra_environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a haiprof command in this process, which has read the modules that it needs.

    As a process of its own it would spend most of a second on that, and answer the same:
    tests/process/cli/test_commands.py compares the two.
    """
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    # Before anything else, and put back after it.
    variables = mock.patch.dict(os.environ, environment(extra_environment), clear=True)
    with variables, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.chdir(folder)
        try:
            status = main(list(words))
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(list(words), status, out.getvalue(), err.getvalue())


def succeeded(job: Job) -> Job:
    """The job, after a look at its exit status."""
    assert job.returncode == 0, f"exit {job.returncode}\n{job.stdout}\n{job.stderr}"
    return job


def rank_events(job: Job, kind: str) -> list[dict[str, Any]]:
    """Lines of one type that the hook wrote, of all ranks."""
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run
    from haiprof.run_format.reader import read_lines

    assert job.log_dir is not None
    folders = RunPaths(newest_run(job.log_dir)).rank_folders()
    lines = [line for _, _, paths in folders for line in read_lines(paths.events)[0]]
    return [line for line in lines if line.get("type") == kind]
