"""`--cluster slurm`: what would be submitted, and, where Slurm can run here, the same answers."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal

from haiprof.base.errors import MissingExtraError, UsageError
from haiprof.trace_analysis.pool import SlurmCluster, SlurmOptions, cluster_pool
from haiprof.trace_analysis.report import standard_report
from tests.unit.analysis.trace.shared import kernel, rank_file, traces


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_options_are_read_from_the_address() -> None:
    pool = cluster_pool("slurm:jobs=2,partition=cpu,account=me,time=01:00:00,memory=8GB")
    assert isinstance(pool, SlurmCluster)
    assert pool.options == SlurmOptions(
        jobs=2, partition="cpu", account="me", time="01:00:00", memory="8GB"
    )
    assert SlurmOptions.parse_options("slurm") == SlurmOptions()


@pytest.mark.parametrize("text", ["slurm:nodes=2", "slurm:jobs=x", "slurm:jobs=0", "slurm:jobs"])
def test_options_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=text.partition(":")[2]):
        cluster_pool(text)


def test_job_script_asks_slurm_for_one_worker_that_speaks_tls() -> None:
    pytest.importorskip("dask_jobqueue")
    text = SlurmCluster(SlurmOptions(partition="cpu", account="me", memory="8GB")).job_script()
    lines = text.splitlines()
    for line in ("-J haiprof", "-p cpu", "-A me", "-n 1", "--cpus-per-task=1", "--mem=8G",
                 "-t 00:30:00", "--output=/dev/null"):  # fmt: skip
        assert f"#SBATCH {line}" in lines
    (worker,) = [line for line in lines if "dask_worker" in line]
    assert worker.startswith(f"{sys.executable} -m distributed.cli.dask_worker tls://")
    assert "--tls-key" in worker


def test_keys_can_be_read_by_their_owner_alone_and_go_with_the_cluster(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue")
    cluster = SlurmCluster()
    cluster.job_script()
    folder = tmp_path / "cache" / "haiprof" / "dask"
    made = [folder, *folder.rglob("*")]
    assert [path for path in made if path.name.endswith("key")]
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    del cluster
    gc.collect()
    assert list(folder.iterdir()) == []


def test_slurm_without_the_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(MissingExtraError) as caught:
        standard_report(rank_file(tmp_path, 0, [kernel("a", 1, 1)]), pool=SlurmCluster())
    assert "haiprof[dask]" in caught.value.hint


def test_machine_without_slurm_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dask_jobqueue")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="sbatch"):
        standard_report(rank_file(tmp_path, 0, [kernel("a", 1, 1)]), pool=SlurmCluster())


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_nodes_of_slurm_give_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = traces("dlrm_v100_8ranks")
    here = standard_report(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # nothing is kept there yet
    there = standard_report(
        folder, pool=cluster_pool(f"slurm:jobs=2,memory=2GB,wait=60,log={tmp_path}")
    )
    assert list(tmp_path.glob("haiprof-*.out"))
    assert (there.ranks, there.missing, there.notes) == (here.ranks, here.missing, here.notes)
    for name, table in here.tables.items():
        assert_frame_equal(there.tables[name], table, check_exact=True)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_what_slurm_refuses_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="partition"):
        standard_report(
            rank_file(tmp_path, 0, [kernel("a", 1, 1)]),
            pool=cluster_pool("slurm:partition=nowhere,memory=2GB"),
        )


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_command_ends_its_jobs(tmp_path: Path) -> None:
    for rank in (0, 1):
        rank_file(tmp_path, rank, [kernel("gemm", 10, 5 * (rank + 1))])
    words = ["trace-report", str(tmp_path), "--json", "--cluster", "slurm:jobs=2,memory=2GB"]
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["compute_ns"] for row in found["tables"]["temporal"]] == [5_000, 10_000]
    left = subprocess.run(["squeue", "-h"], capture_output=True, text=True, env=os.environ).stdout
    assert "RUNNING" not in left
    assert " R " not in left
