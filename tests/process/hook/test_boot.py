"""The injected sitecustomize: inert without torch, chained, and silent when it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from haiprof.run_format.boot import boot_entries
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import read_records
from haiprof.run_format.schema import BACKWARD, FORWARD, GC, MARK, OPTIMIZER, PHASES, TAG_MASK
from tests.sampling import first_of

TRAIN = """
import torch
m = torch.nn.Linear(2, 1)
o = torch.optim.SGD(m.parameters(), lr=.1)
for _ in range(3):
    m(torch.ones(1, 2)).sum().backward()
    o.step()
print("trained")
"""


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    """A run's boot folder as the launcher makes it."""
    folder = tmp_path / "run" / "boot"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "ranks").mkdir()
    config = {"time": 0, "warmup": 0, "recorder": ["phases"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pythonpath(*path: Path) -> str:
    """With what the launcher puts in for the boot folder of a run."""
    words: list[str] = []
    for folder in path:
        run = RunPaths(folder.parent)
        words += boot_entries(run) if folder == run.boot else [str(folder)]
    return os.pathsep.join(words)


def python(code: str, *path: Path, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": pythonpath(*path)}
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True, text=True, env=environ, timeout=120, check=False,
    )  # fmt: skip


def test_step_is_there_where_the_jobs_python_has_no_haiprof(boot: Path) -> None:
    code = """
import os, sys
sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, "haiprof"))]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f)]
import haiprof
for _ in range(3):
    haiprof.step()
import torch
for _ in range(3):
    haiprof.step()
print("stepped")
"""
    done = python(code, boot)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stepped\n", "")
    words = read_records(boot.parent / "ranks" / "0" / "phases.rec").data
    kinds = [word & TAG_MASK for (word, _) in PHASES.struct.iter_unpack(words)]
    assert [kind for kind in kinds if kind != GC] == [MARK] * 3


def test_process_without_torch_loads_nothing_of_ours(boot: Path) -> None:
    done = python("import sys; print([m for m in sys.modules if m.startswith('haiprof')])", boot)
    assert done.stdout == "[]\n"
    assert not list((boot.parent / "ranks").iterdir())


def test_shadowed_sitecustomize_still_runs(boot: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import builtins; builtins.theirs_ran = __file__\n")
    done = python("import sitecustomize; print(theirs_ran, sitecustomize.__file__)", boot, theirs)
    assert done.stdout.split() == [str(theirs / "sitecustomize.py")] * 2


def test_raising_sitecustomize_is_reported_as_without_us(boot: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    with_us = python("print(1)", boot, theirs)
    without = python("print(1)", theirs)
    assert (with_us.stdout, with_us.stderr) == (without.stdout, without.stderr)


@pytest.mark.parametrize("content", first_of(["", "{}", "[1]", '{"recorder": 1}'], "[1]"))
def test_damaged_config_is_noted_and_the_job_runs(boot: Path, content: str) -> None:
    (boot / "config.json").write_text(content)
    done = python(TRAIN, boot)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert "pid" in (boot / "failures.log").read_text()


@pytest.mark.proof
def test_missing_boot_files_leave_the_job_alone(boot: Path) -> None:
    shutil.rmtree(boot)
    done = python(TRAIN, boot)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


def test_failing_import_of_torch_stays_an_import_error(boot: Path, tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise ImportError('libcudart.so.12 not found')\n")
    done = python("import torch", boot, fake.parent)
    assert done.stderr.endswith("ImportError: libcudart.so.12 not found\n")
    assert done.stderr.count("Error") == 2  # the line that raises it, and the last one


@pytest.mark.proof
def test_torch_keeps_its_real_loader(boot: Path) -> None:
    code = (
        "import torch, importlib.machinery as m\n"
        "loader = torch.__loader__\n"
        "print(type(loader) is m.SourceFileLoader, 'exec_module' in vars(loader))"
    )
    assert python(code, boot).stdout == "True False\n"


def test_spawned_rank_is_recorded_to_its_last_step(boot: Path, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        "import torch.multiprocessing as mp\n"
        "def rank(index):\n"
        + "".join(f"    {line}\n" for line in TRAIN.strip().splitlines())
        + "if __name__ == '__main__':\n    mp.spawn(rank, nprocs=1)\n"
    )
    environ = {**os.environ, "PYTHONPATH": pythonpath(boot)}
    subprocess.run([sys.executable, str(script)], env=environ, check=True, timeout=120)
    rank = boot.parent / "ranks" / "0"
    records = read_records(rank / "phases.rec")
    kinds = [word & TAG_MASK for word, _ in PHASES.struct.iter_unpack(records.data)]
    assert [kind for kind in kinds if kind != GC] == [FORWARD, BACKWARD, OPTIMIZER] * 3
    assert "record_end" in (rank / "events.jsonl").read_text()
    assert list(rank.parent.iterdir()) == [rank], (
        "its parent only imports torch, and writes nothing"
    )
