"""NCCL's RAS as a second witness: whom it names, and what is said where it cannot be asked."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import MissingDataError
from haiprof.live.standstill import RankState, ask_ras, find_address, parse_ras, ras_suspects
from haiprof.run_analysis.run_files import open_run
from tests.fake_ras import fake_ras
from tests.unit.analysis.recorded import spans_of, write_rank, write_run

HEAD = """NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH

Errors
======

"""
ONE_BEHIND = f"""{HEAD}Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 6650
  Rank 2 has launched up to operation 6649 -- GPU 2 managed by process 102 on node 172.16.64.210

"""
TWO_BEHIND = f"""{HEAD}Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  2 ranks have launched up to operation 66
  2 ranks have not launched any operations
  Rank 1 -- GPU 1 (NVML 3) managed by process 101 on node 172.16.64.210
  Rank 3 -- [process information not found]

"""
STOPPED = f"""{HEAD}INCOMPLETE
  Missing communicator data from 1 job process
  Process 103 on node 172.16.64.213 managing GPU 3

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 3 -- GPU 3 managed by process 103 on node 172.16.64.213

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""
WELL = f"{HEAD}Warnings\n========\n\n"


def as_json(counts: Sequence[int], missing: Sequence[Mapping[str, Any]] = ()) -> str:
    return json.dumps({"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [{
        "hash": "0xae94423cfbb2ef4a", "size": len(counts) + len(missing),
        "ranks_count": len(counts), "missing_ranks_count": len(missing),
        "ranks": [
            {"rank": rank, "host": "172.16.64.245", "pid": 100 + rank, "cuda_dev": rank,
             "nvml_dev": rank, "status": {"init_state": 0, "async_error": 0},
             "collective_counts": {"Broadcast": 3, "AllReduce": count}}
            for rank, count in enumerate(counts)
        ],
        "missing_ranks": list(missing),
    }], "ras": {"collection_time_sec": 0.0, "timeouts_count": 0}})  # fmt: skip


GONE = {"rank": 3, "host": "h", "pid": 103, "status": {"unresponsive": True}}
APART = {"rank": 3, "host": "unknown", "pid": -1, "status": {"unresponsive": False}}
STATES = [RankState(rank=rank, host="a", pid=100 + rank, process_state="S") for rank in range(4)]


@pytest.mark.parametrize(
    ("answer", "named", "said"),
    [
        (ONE_BEHIND, [2], "it has begun 6649 AllReduce, others 6650, as NCCL's RAS tells"),
        (TWO_BEHIND, [1, 3], "it has begun 0 collective, others 66, as NCCL's RAS tells"),
        (STOPPED, [3], "its process is not reached by NCCL's RAS"),
        (as_json([7, 7, 6, 7]), [2], "it has begun 6 AllReduce, others 7, as NCCL's RAS tells"),
        (as_json([7, 7, 7], [GONE]), [3], "its process is not reached by NCCL's RAS"),
        (as_json([7, 7, 7], [APART]), [3], "it has not joined a communicator of 4 ranks"),
        (WELL, [], ""),
        (as_json([7, 7, 7, 7]), [], ""),
    ],
)
def test_rank_that_did_not_join_is_named(answer: str, named: list[int], said: str) -> None:
    is_json = answer.startswith("{")
    with fake_ras(answer, knows_json=is_json) as server:
        found = ras_suspects(STATES, server.address, between_s=0)
    assert [suspect.rank for suspect in found] == named
    assert {suspect.reason for suspect in found} == ({said} if said else set())
    assert all(suspect.certain for suspect in found)
    asked = ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]
    assert server.heard == asked * 2


def test_rank_that_only_trails_while_all_move_is_not_named() -> None:
    with fake_ras(as_json([7, 7, 6, 7]), as_json([9, 9, 8, 9])) as server:
        assert ras_suspects(STATES, server.address, between_s=0) == []


def test_job_of_somebody_else_on_this_port_is_not_taken_for_this_one() -> None:
    others = [replace(state, pid=9000 + state.rank) for state in STATES]
    with (
        fake_ras(as_json([7, 6])) as server,
        pytest.raises(MissingDataError, match="no process of this job"),
    ):
        ras_suspects(others, server.address, between_s=0)


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("silent", "no whole answer in time"), ("other", "something else listens"),
        ("endless", "no answer of NCCL's"),
    ],
)  # fmt: skip
def test_what_does_not_answer_is_said_in_time(breaks: str, said: str) -> None:
    begun = time.monotonic()
    with fake_ras(ONE_BEHIND, breaks=breaks) as server, pytest.raises(MissingDataError, match=said):
        ask_ras(server.address, timeout_s=60 if breaks == "endless" else 1)
    assert time.monotonic() - begun < 30


def test_refused_connection_is_said() -> None:
    with fake_ras("") as server:
        address = server.address
    with pytest.raises(MissingDataError, match=f"RAS on port {address[1]}: .*refused"):
        ask_ras(address, timeout_s=2)


@pytest.mark.parametrize("answer", [ONE_BEHIND, as_json([7, 7, 6, 7]), "", "{", "x\n" * 99])
def test_half_an_answer_names_nobody(answer: str) -> None:
    with (
        fake_ras(answer, breaks="half") as server,
        pytest.raises(MissingDataError, match="an answer that is cut"),
    ):
        ras_suspects(STATES, server.address, between_s=0)


@pytest.mark.parametrize(
    ("device", "variables", "address"),
    [
        ("cuda", {}, ("localhost", 28028)),
        ("cpu", {}, None),
        ("cuda", {"NCCL_RAS_ADDR": "127.0.0.1:4000"}, ("127.0.0.1", 4000)),
        ("cuda", {"NCCL_RAS_ADDR": "[::1]:4000"}, ("::1", 4000)),
        ("cuda", {"NCCL_RAS_ADDR": "10.0.0.7:4000"}, None),
        ("cuda", {"NCCL_RAS_ADDR": "localhost:x"}, None),
        ("cuda", {"NCCL_RAS_ENABLE": "0"}, None),
    ],
)
def test_only_this_machine_is_asked_and_only_of_a_job_that_uses_nccl(
    tmp_path: Path, device: str, variables: Mapping[str, str], address: Any
) -> None:
    run = write_run(tmp_path / "run")
    lines = [{"type": "environment", "variables": variables}]
    write_rank(run, spans_of("F B O"), device=device, lines=lines)
    assert find_address(open_run(run.root)) == address


def test_parsing_keeps_to_what_the_text_says() -> None:
    (one,) = parse_ras(ONE_BEHIND)
    assert (one.rank, one.size, one.pid) == (2, 4, 102)
