"""Which ranks, nodes and links a preflight names, of measurements that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from haiprof.diagnosis.preflight import judge_preflight
from haiprof.in_job.preflight_probe import cpu_limit, nfs_limits, read_xids
from haiprof.show.views.prepare import suspect_text


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


HEALTHY_CLOCK = {"mhz": 1755.0, "max_mhz": 1980.0, "reasons": 0x4}  # at its power cap, as usual


def with_clocks(**changed: object) -> list[dict[str, Any]]:
    """Four ranks with GPUs; the clock of rank 1 is another one."""
    ranks = measured(4, per_node=1)
    for own in ranks:
        own["clock"] = {**HEALTHY_CLOCK, **(changed if own["rank"] == 1 else {})}
        if own["clock"]["mhz"] is not None:
            own["rates"]["gpu_load_clock_mhz"] = own["clock"]["mhz"]
    return ranks


def lines(ranks: list[dict[str, Any]]) -> list[str]:
    return [suspect_text(one) for one in judge_preflight(ranks).suspects]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mhz": 1700.0}, []),
        ({"mhz": 1095.0, "reasons": 0x4 | 0x40},
         ["rank 1 on n1: gpu_load_clock_mhz 1095, peers 1755: held down by its power cap, "
          "temperature (hardware)"]),
        ({"reasons": 0x80},  # which no healthy GPU has, at any clock
         ["rank 1 on n1: gpu_load_clock_mhz 1755, maximum 1980: held down by the power brake"]),
    ],
)  # fmt: skip
def test_clock_of_a_gpu_is_named_with_what_holds_it_down(
    changed: dict[str, object], said: list[str]
) -> None:
    assert lines(with_clocks(**changed)) == said


def test_clocks_of_all_gpus_below_half_of_their_maximum_are_named() -> None:
    ranks = with_clocks()
    for own in ranks:
        own["clock"] = {"mhz": 900.0, "max_mhz": 1980.0, "reasons": 0x2}
        own["rates"]["gpu_load_clock_mhz"] = 900.0
    assert [one.against for one in judge_preflight(ranks).suspects] == ["maximum"] * 4


def test_clock_that_is_not_known_is_said_and_no_suspect() -> None:
    ranks = with_clocks(mhz=None, max_mhz=None, reasons=None)
    ranks[1]["unread"] = {"clock of its GPU under load": "nvidia-smi: no answer in 20 s"}
    found = judge_preflight(ranks)
    assert found.suspects == ()
    assert found.unread == (
        "rank 1 on n1: clock of its GPU under load: not readable, because nvidia-smi: no answer in "
        "20 s",
    )


LOG = """\
4,100,5000000,-;nvidia 0000:1b:00.0: enabled
4,101,9000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off
4,102,9100000,-;NVRM: Xid (PCI:0000:1b:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9)
 SUBSYSTEM=pci
4,103,9200000,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, MMU Fault
a line that is none of the kernel's
"""


def test_xid_of_a_gpu_that_no_rank_has_names_its_node(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kmsg").write_text(LOG)
    xids, why = read_xids(tmp_path)
    assert why == ""
    assert [(xid["code"], xid["gpu"]) for xid in xids] == [
        (79, "0000:1b:00"), (94, "0000:1b:00 GPU-I:05"), (31, "0000:3b:00"),
    ]  # fmt: skip
    ranks = measured(4)
    ranks[2]["xids"] = [{**xid, "age_s": 7200.0} for xid in xids]
    found = judge_preflight(ranks)
    said = [suspect_text(one) for one in found.suspects]
    assert len(said) == 2, "31 is of the program"
    assert said[0].startswith(
        "node n1: xid_79 1, none is usual: GPU 0000:1b:00, last 120 min ago: pid="
    )
    assert said[0].endswith("GPU has fallen off")
    assert found.leave_out == ("n1",)


def test_xid_of_last_week_is_no_suspect() -> None:
    ranks = measured(2)
    ranks[0]["xids"] = [{"gpu": "0000:1b:00", "code": 48, "text": "DBE", "age_s": 7 * 86400.0}]
    assert judge_preflight(ranks).suspects == ()


def with_variables(*ranks: int, variables: dict[str, str]) -> list[Any]:
    found = measured(2)
    for own in found:
        here = variables if own["rank"] in ranks else {}
        own["timeouts"] = {"collective_s": 600.0, "set": here}
    return found


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"},
         "setting TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC 60, the timeout of collectives is 600 s: "
         "where the watchdog hangs in a call of CUDA or NCCL, the process is killed before its "
         "timeout tells which collective hangs"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"},
         "setting TORCH_NCCL_ASYNC_ERROR_HANDLING 0: a collective that fails or times out is "
         "not handled: the job hangs on"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
         "setting TORCH_NCCL_BLOCKING_WAIT 1: only one of it and "
         "TORCH_NCCL_ASYNC_ERROR_HANDLING should be set: the other is not used"),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
         "setting TORCH_NCCL_DUMP_ON_TIMEOUT 1: nothing is dumped with "
         "TORCH_NCCL_TRACE_BUFFER_SIZE=0"),
        ({"NCCL_IB_TIMEOUT": "25"},
         "setting NCCL_IB_TIMEOUT 25, the timeout of collectives is 600 s: NCCL gives a broken "
         "network up after 962 s: the watchdog ends the job before that tells which link it is"),
    ],
)  # fmt: skip
def test_settings_of_timeouts_that_work_against_each_other(
    variables: dict[str, str], said: str
) -> None:
    assert lines(with_variables(0, 1, variables=variables)) == [f"all ranks: {said}"]
    assert lines(with_variables(1, variables=variables)) == [f"rank 1: {said}"]
    assert judge_preflight(with_variables(1, variables=variables)).leave_out == ()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "TORCH_NCCL_ENABLE_MONITORING": "0"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "soon"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_ASYNC_ERROR_HANDLING": "0"},
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"},
        {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"},
        {"NCCL_IB_TIMEOUT": "2200000"},
    ],
)
def test_settings_of_timeouts_that_go_together(variables: dict[str, str]) -> None:
    assert lines(with_variables(0, 1, variables=variables)) == []
