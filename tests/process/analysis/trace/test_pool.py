from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal

import haiprof
from haiprof import Analyzer
from haiprof.base.errors import HaiprofError, MissingExtraError, TraceFormatError, UsageError
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import as_document
from haiprof.run_format.layout import RunPaths
from haiprof.trace_analysis.pool import DaskCluster, LocalProcesses, Pool, Serial, cluster_pool
from haiprof.trace_analysis.report import standard_report
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.process.jobs import run_command
from tests.unit.analysis.trace.shared import kernel, rank_file, traces
from tests.unit.report.many_ranks import write_many

pytestmark = pytest.mark.xdist_group("dask")  # one cluster for all of them


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    """Two ranks; the second one's kernel is twice as long."""
    return [rank_file(tmp_path, rank, [kernel("gemm", 10, 5 * (rank + 1))]) for rank in (0, 1)]


@pytest.fixture(scope="module")
def dask_address() -> Iterator[str]:
    """A Dask cluster of two worker processes."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        yield cluster.scheduler_address


def busy_ns(trace: Trace, factor: int = 1) -> int:
    return factor * int(trace.gpu["dur_ns"].sum())


def busy_ns_where(trace: Trace, factor: int) -> tuple[int, int]:
    return busy_ns(trace, factor), os.getpid()


def broken(trace: Trace) -> int:
    if trace.rank == 1:
        raise ZeroDivisionError("nothing to divide")
    return 0


def killed(trace: Trace) -> int:
    if trace.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def pools(address: str) -> list[Pool]:
    return [Serial(), LocalProcesses(2), DaskCluster(address)]


def test_pools_answer_alike_and_in_order_from_other_processes_but_for_serial(
    ranks: list[Path], dask_address: str
) -> None:
    told: list[tuple[int, int]] = []
    processes = []
    for pool in pools(dask_address):
        found = pool.map(busy_ns_where, ranks, {"factor": 2}, lambda *so_far: told.append(so_far))
        assert [ns for ns, _ in found] == [10_000, 20_000]
        processes.append({pid for _, pid in found})
    assert told == [(1, 2), (2, 2)] * 3
    serial, local, dask = processes
    assert serial == {os.getpid()}
    assert os.getpid() not in local | dask


def test_pools_name_the_file_of_an_error(ranks: list[Path], dask_address: str) -> None:
    for pool in pools(dask_address):
        with pytest.raises(HaiprofError) as caught:
            pool.map(broken, ranks, {})
        assert str(caught.value) == f"{ranks[1]}: broken: ZeroDivisionError: nothing to divide"
        assert "HAIPROF_DEBUG" in caught.value.hint


def test_pools_pass_known_errors_on(ranks: list[Path], dask_address: str) -> None:
    ranks[0].write_text("no trace")
    for pool in pools(dask_address):
        with pytest.raises(TraceFormatError, match=ranks[0].name):
            pool.map(busy_ns, ranks, {})


def test_a_killed_process_is_an_error_that_names_the_files(ranks: list[Path]) -> None:
    with pytest.raises(HaiprofError, match=r"killed.*rank1\.json"):
        LocalProcesses(1).map(killed, ranks, {})


def test_real_ranks_have_the_same_report_in_every_pool(dask_address: str) -> None:
    folder = traces("dlrm_v100_8ranks")
    reports = [standard_report(folder, pool=pool) for pool in pools(dask_address)]
    first = reports[0]
    assert first.ranks == tuple(range(8))
    for report in reports[1:]:
        assert (report.missing, report.notes) == (first.missing, first.notes)
        assert list(report.tables) == list(first.tables)
        for name, table in first.tables.items():
            assert_frame_equal(report.tables[name], table, check_exact=True)


def test_a_run_is_judged_alike_in_every_pool(tmp_path: Path, dask_address: str) -> None:
    """Twelve ranks, one of which left nothing that can be read."""
    root = write_many(tmp_path / "run", ranks=12, steps=60)
    RunPaths(root).rank(7).phases.write_bytes(b"no records")
    here, *others = [
        Analyzer(root, pool=pool) for pool in (None, *pools(dask_address), LocalProcesses(1))
    ]
    expected = as_document(diagnose(here))
    assert any("rank 7" in note for note in expected["notes"])
    for there in others:
        assert as_document(diagnose(there)) == expected
        assert_frame_equal(there.steps(), here.steps(), check_exact=True)
        assert_frame_equal(there.phases(), here.phases(), check_exact=True)
    said = run_command(["verdict", "--json", str(root), "--cluster", dask_address], folder=tmp_path)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["step"] == json.loads(json.dumps(expected["step"]))


@pytest.mark.proof
def test_a_script_without_main_guard_is_not_run_again(tmp_path: Path, ranks: list[Path]) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "from haiprof import TraceAnalysis\n"
        "from haiprof.trace_analysis.pool import LocalProcesses\n"
        "print('once')\n"
        f"print(TraceAnalysis({str(tmp_path)!r}, pool=LocalProcesses(2))"
        ".temporal_breakdown()['compute_ns'].to_list())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(haiprof.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split("\n")[:2] == ["once", "[5000, 10000]"], done.stderr


def test_cluster_address_says_what_it_cannot_take() -> None:
    assert isinstance(cluster_pool("tcp://head:8786"), DaskCluster)
    with pytest.raises(UsageError, match="not an address"):
        cluster_pool("head")


def test_cluster_that_is_not_there_is_named(ranks: list[Path]) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(UsageError, match="tcp:"):
        DaskCluster("tcp://127.0.0.1:1", timeout_s=1).map(busy_ns, ranks, {})


def test_cluster_without_dask_names_the_extra(
    ranks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError) as caught:
        DaskCluster("tcp://127.0.0.1:1").map(busy_ns, ranks, {})
    assert "haiprof[dask]" in caught.value.hint
