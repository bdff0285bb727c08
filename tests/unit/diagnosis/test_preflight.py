"""Which ranks, nodes and links a preflight names, of measurements that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from haiprof.diagnosis.preflight import judge_preflight
from haiprof.in_job.preflight_probe import cpu_limit, nfs_limits


def measured(count: int, *, per_node: int = 2) -> list[dict[str, Any]]:
    """Ranks that differ by up to a tenth."""
    ranks = range(count)
    return [
        {
            "rank": rank, "host": f"n{rank // per_node}", "gpu_count": 0,
            "limits": {"cpu_cores": None, "ulimit_nofile": 1024},
            "rates": {"cpu_loops_per_s": 1e7 * (1 + 0.03 * (rank % 4))},
            "sends": {str(to): [1e9, 1e-4] for to in ranks if to != rank},
            "all_reduce": [5e8, 1e-4],
        }
        for rank in ranks
    ]  # fmt: skip


def test_ranks_that_differ_by_a_tenth_are_no_suspects() -> None:
    found = judge_preflight(measured(8))
    assert (found.suspects, found.leave_out, found.slurm) == ((), (), "")


@pytest.mark.parametrize("count", [2, 3, 4, 8, 64])
def test_slow_rank_is_named_with_its_node(count: int) -> None:
    ranks = measured(count, per_node=1)
    ranks[1]["rates"]["cpu_loops_per_s"] /= 3
    (suspect,) = judge_preflight(ranks).suspects
    assert (suspect.rank, suspect.host, suspect.against) == (1, "n1", "peers")
    assert judge_preflight(ranks).slurm == "--exclude=n1"


def test_node_that_most_slow_links_share_is_left_out() -> None:
    ranks = measured(8)
    for own in ranks:
        for to in own["sends"]:
            if (own["host"] == "n2") != (int(to) // 2 == 2):
                own["sends"][to] = [1e7, 1e-4]
    found = judge_preflight(ranks)
    assert found.leave_out == ("n2",)
    assert all("n2" in (one.host, one.to_host) for one in found.suspects)


def test_one_slow_link_blames_neither_of_its_nodes() -> None:
    ranks = measured(4)
    for own in ranks[2:]:
        own["sends"] |= {"0": [1e7, 1e-4], "1": [1e7, 1e-4]}
    found = judge_preflight(ranks)
    assert [(one.host, one.to_host) for one in found.suspects] == [("n1", "n0")]
    assert found.leave_out == ()


def test_limit_that_peers_do_not_have_is_named() -> None:
    ranks = measured(4)
    ranks[2]["limits"]["ulimit_nofile"] = 256
    ranks[3]["limits"]["cpu_cores"] = 0.2
    found = {(one.what, one.rank, one.usual) for one in judge_preflight(ranks).suspects}
    assert found == {("limit ulimit_nofile", 2, 1024), ("limit cpu_cores", 3, None)}


def test_what_all_ranks_lost_is_told_by_the_baseline() -> None:
    rates = judge_preflight(measured(4)).rates
    ranks = measured(4)
    for own in ranks:
        own["rates"]["cpu_loops_per_s"] /= 2
        own["all_reduce"] = [1e8, 1e-4]
    assert judge_preflight(ranks).suspects == ()
    found = judge_preflight(ranks, rates)
    assert {one.against for one in found.suspects} == {"baseline"}
    assert {one.what for one in found.suspects} == {"cpu_loops_per_s", "all_reduce_bytes_per_s"}
    assert found.leave_out == ()  # it is all of them


def test_few_requests_to_nfs_at_once_are_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "proc" / "sys" / "sunrpc" / "tcp_max_slot_table_entries"
    path.parent.mkdir(parents=True)
    path.write_text("65536\n")
    usual = nfs_limits(tmp_path)
    assert usual == {"nfs_rpc_slots": None, "nfs_max_rpc_slots": 65536, "nfs_session_slots": None}
    path.write_text("2\n")
    ranks = measured(4)
    for own in ranks:
        own["limits"] = nfs_limits(tmp_path) if own["rank"] == 3 else usual
    (suspect,) = judge_preflight(ranks).suspects
    assert (suspect.what, suspect.host, suspect.value, suspect.usual) == (
        "limit nfs_max_rpc_slots", "n1", 2, 65536,
    )  # fmt: skip


def test_cpu_limit_is_read_of_both_kinds_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.max").write_text("50000 100000\n")
    assert cpu_limit("0::/job\n", tmp_path) == 0.5
    (tmp_path / "job" / "cpu.max").write_text("max 100000\n")
    assert cpu_limit("0::/job\n", tmp_path) is None
    own = tmp_path / "cpu" / "job"
    own.mkdir(parents=True)
    (own / "cpu.cfs_quota_us").write_text("20000")
    (own / "cpu.cfs_period_us").write_text("100000")
    assert cpu_limit("4:memory:/job\n3:cpu,cpuacct:/job\n", tmp_path) == 0.2
    (own / "cpu.cfs_quota_us").write_text("-1")
    assert cpu_limit("3:cpu,cpuacct:/job\n", tmp_path) is None
