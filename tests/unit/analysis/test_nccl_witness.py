"""NCCL's own files as a witness: who is behind, bandwidth against others, what was waited for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import TraceFormatError
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import as_document
from haiprof.live.standstill import RankState, file_suspects
from haiprof.run_analysis.nccl_witness import NcclReport, nccl_report
from haiprof.run_analysis.run_files import open_run
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.summary import overview_summary
from haiprof.trace_format.nccl_files import read_nccl_file
from tests import fake_nccl_files as nccl
from tests.commands import Run
from tests.unit.analysis.recorded import CLOCK, spans_of, write_rank, write_run

STATES = [
    RankState(rank=rank, host="node0", pid=100 + rank, process_state="S") for rank in range(4)
]


def recorded(tmp_path: Path, variables: Mapping[str, str], *, ranks: int = 4) -> Path:
    run = write_run(tmp_path / "run")
    for rank in range(ranks):
        lines = [{"type": "environment", "variables": variables}]
        write_rank(run, spans_of("F B O " * 12), rank=rank, lines=lines,
                   gpu_uuid=f"GPU-0000000{rank}-aaaa")  # fmt: skip
    return run.root


def inspected(tmp_path: Path, files: Mapping[str, str]) -> Path:
    """A run whose job was told to write Inspector's files there."""
    folder = tmp_path / "nccl"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    variables = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": str(folder)}
    return recorded(tmp_path, variables)


def report_of(root: Path) -> NcclReport:
    return nccl_report(open_run(root))


def log(rank: int) -> str:
    return f"node0-pid{100 + rank}.log"


@pytest.mark.parametrize("version", ["v4.0", "v4.1", "v4.2", "v4.3", "v4.4"])
def test_inspector_says_numbers_and_bandwidth_of_each_rank(tmp_path: Path, version: str) -> None:
    speeds = (200.0, 200.0, 50.0, 202.0)
    root = inspected(tmp_path, {
        log(rank): nccl.inspector_of(rank, 41 - (rank == 2), gbs=gbs, version=version)
        for rank, gbs in enumerate(speeds)
    })  # fmt: skip
    report = report_of(root)
    rows = report.collectives.select("rank", "member", "size", "sequence", "record_count").rows()
    assert rows == [(0, 0, 4, 41, 10), (1, 1, 4, 41, 10), (2, 2, 4, 40, 10), (3, 3, 4, 41, 10)]
    assert report.collectives["bus_bytes_per_s"].to_list() == [gbs * 1e9 for gbs in speeds]
    assert report.collectives["bus_ratio"][2] == pytest.approx(0.25)
    assert report.collectives["exec_ns"].to_list() == [400e3] * 4
    assert report.collectives["message"].unique().to_list() == ["25.0 MiB"]
    (said,) = report.lines()
    assert said.startswith("AllReduce of 4 ranks, 25.0 MiB: 186 GiB/s of bus bandwidth, from 46.6")
    assert "rank 2, 25 % of the others' median" in said
    assert "the last one is 40 on rank 2, 41 at most" in said
    assert not report.notes


def test_rates_are_of_one_message_size_and_numbers_of_all(tmp_path: Path) -> None:
    large = [{"coll_perf": nccl.collective(n)} for n in range(5)]
    small = [{"coll_perf": nccl.collective(n, size=9000, gbs=1.0)} for n in range(5, 8)]
    root = inspected(tmp_path, {log(r): nccl.inspector(r, [*large, *small]) for r in range(4)})
    row = report_of(root).collectives.row(0, named=True)
    assert (row["message"], row["bus_bytes_per_s"]) == ("25.0 MiB", 200e9)
    assert (row["record_count"], row["sequence"]) == (8, 7)


def test_time_that_is_not_of_the_kernel_gives_no_rate(tmp_path: Path) -> None:
    payloads = [{"coll_perf": nccl.collective(1, timing="collective_cpu")},
                {"coll_perf": nccl.collective(2, exec_us=0, gbs=0.0)},
                {"p2p_perf": nccl.p2p(3)}]  # fmt: skip
    root = inspected(tmp_path, {log(0): nccl.inspector(0, payloads)})
    rows = report_of(root).collectives
    assert rows.select("kind", "sequence", "exec_ns", "bus_bytes_per_s", "bus_ratio").rows() == [
        ("AllReduce", 2, None, None, None), ("Send", None, 40e3, 26.2e9, None),
    ]  # fmt: skip


def test_waits_of_the_network_proxy_are_split(tmp_path: Path) -> None:
    payloads = [
        nccl.proxy("send", [nccl.SEND_STEP, nccl.SEND_STEP]),
        nccl.proxy("recv", [], record_type="proxy_step", **nccl.RECEIVE_STEP),
        nccl.proxy("recv", [], record_type="proxy_op_start", is_final=False),
    ]
    root = inspected(tmp_path, {log(1): nccl.inspector(1, payloads, version="v4.4")})
    (row,) = report_of(root).waits.iter_rows(named=True)
    assert (row["rank"], row["step_count"]) == (1, 3)
    known = [row[f"{name}_ns"] for name in ("gpu", "peer", "send", "receive", "flush")]
    assert known == [24e3, 10e3, 40e3, 60e3, 1e3]


@pytest.mark.parametrize("quoted", [True, False], ids=["NCCL 2.30", "NCCL 2.28"])
def test_profiler_plugin_says_numbers_and_waits(tmp_path: Path, quoted: bool) -> None:
    for rank in range(4):
        name = f"prof_{nccl.COMM_HASH}_{rank}.json"
        text = nccl.profiler(rank, 41 - (rank == 1), quoted=quoted)
        (tmp_path / name).write_text(text)
    (tmp_path / "other.json").write_text("[\n")
    root = recorded(tmp_path, {"NCCL_PROFILE_DUMP_FILE": str(tmp_path / "prof")})
    report = report_of(root)
    rows = report.collectives.select("rank", "communicator", "kind", "sequence", "record_count")
    assert rows.row(1) == (1, f"0x{nccl.COMM_HASH:x}", "AllReduce", 40, 3)
    assert rows["sequence"].to_list() == [41, 40, 41, 41]
    waits = report.waits.row(0, named=True)
    known = [waits[f"{name}_ns"] for name in ("gpu", "peer", "send", "receive", "flush")]
    assert known == pytest.approx([42e3, 15e3, 60e3, 180e3, 3e3])
    assert waits["step_count"] == 6
    assert any("14 % for the own GPU" in line and "60 % for data" in line
               for line in report.lines())  # fmt: skip
    assert not report.notes


def test_wait_that_had_not_ended_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "p_1_0.json").write_text(nccl.profiler(0, 0, waits={"RecvWait": -1}))
    report = report_of(recorded(tmp_path, {"NCCL_PROFILE_DUMP_FILE": str(tmp_path / "p")}))
    assert report.waits["receive_ns"].to_list() == [0.0]
    assert report.waits["send_ns"].to_list() == pytest.approx([20e3])


def test_prometheus_form_is_told_by_gpu(tmp_path: Path) -> None:
    files = {f"nccl_inspector_metrics_0000000{r}-aaaa.prom": nccl.prometheus(100.0 + 100 * (r > 0))
             for r in range(4)}  # fmt: skip
    report = report_of(inspected(tmp_path, files))
    assert report.collectives.select("rank", "bus_bytes_per_s", "message").row(0) == (
        0, 100e9, "25-26MB",
    )  # fmt: skip
    assert report.collectives["bus_ratio"][0] == pytest.approx(0.5)
    assert report.collectives["exec_ns"][0] == pytest.approx(9498.47e3)
    assert report.collectives["record_count"].to_list() == [None] * 4
    assert report.collectives["sequence"].to_list() == [None] * 4


def test_prometheus_forms_are_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "nccl_inspector_metrics_00000001-aaaa.prom"
    path.write_text(nccl.prometheus_2_29(1, 40, 200.0) + 'nccl_collectives_total{a="b"} 7\n')
    row = read_nccl_file(path).collectives.row(0, named=True)
    assert (row["communicator"], row["member"], row["sequence"]) == (nccl.COMMUNICATOR, 1, 40)
    assert not read_nccl_file(path).notes
    other = nccl.prometheus(300.0).replace("Ring_ll", "Tree_ll")
    path.write_text(nccl.prometheus(100.0) + other)
    (row,) = read_nccl_file(path).collectives.iter_rows(named=True)
    assert (row["bus_bytes_per_s"], row["record_count"]) == (200e9, None)
    odd = nccl.prometheus(200.0).replace("DP Group 0", 'x",nranks="9')
    path.write_text(odd.replace("n_nodes", 'y"z="",n_nodes') + nccl.prometheus(100.0))
    found = read_nccl_file(path)
    assert found.collectives["bus_bytes_per_s"].to_list() == [100e9]
    assert found.notes == (f"{path}: 2 damaged lines left out",)


def test_truncated_last_line_is_left_out_and_its_file_named(tmp_path: Path) -> None:
    whole = nccl.inspector_of(0, 41)
    root = inspected(tmp_path, {log(0): whole[:-40], log(1): nccl.inspector_of(1, 41)})
    report = report_of(root)
    assert report.collectives["sequence"].to_list() == [40, 41]
    assert report.notes == (f"{tmp_path / 'nccl' / log(0)}: 1 damaged lines left out",)


def test_line_whose_context_is_damaged_is_of_nobody(tmp_path: Path) -> None:
    first = nccl.inspector_of(0, 5, version="v4.4")
    second = nccl.inspector(0, [{"coll_perf": nccl.collective(99)}], version="v4.4")
    path = tmp_path / log(0)
    path.write_text(first + "{" + second)
    found = read_nccl_file(path)
    assert found.collectives["sequence"].to_list() == [5]
    assert found.notes == (f"{path}: 2 damaged lines left out",)
    more = json.dumps({"coll_perf": nccl.collective(99)})  # than the context counts
    path.write_text(f"{first}{more}\n")
    assert read_nccl_file(path).collectives["sequence"].to_list() == [5]


@pytest.mark.parametrize(("content", "said"), [
    (nccl.inspector_of(0, 4, version="v5.0"), "version 'v5.0' of NCCL's Inspector is"),
    ("", "nothing is in it yet"),
    ("step 1 loss 3.2\nstep 2 loss 3.1\n", "no file of NCCL's Inspector or profiler plugin"),
    ("{}\n" * 5, "no file of NCCL's Inspector or profiler plugin"),
    ('{"header": ' + "[" * 100_000, "no file of NCCL's Inspector or profiler plugin"),
    (json.dumps({"header": nccl.header(-1, 4), "metadata": nccl.metadata(0),
                 "coll_perf": nccl.collective(3)}), "no file of NCCL's Inspector"),
    (json.dumps({"header": nccl.header(0, 4), "metadata": nccl.metadata(0),
                 "coll_perf": nccl.collective(1 << 70)}), "no file of NCCL's Inspector"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_error_with_its_file(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / log(0)
    path.write_text(content)
    with pytest.raises(TraceFormatError, match=said) as error:
        read_nccl_file(path)
    assert str(path) in str(error.value)
    (tmp_path / "x").mkdir()
    root = inspected(tmp_path / "x", {log(0): content, log(1): nccl.inspector_of(1, 41)})
    report = report_of(root)
    assert report.collectives["rank"].to_list() == [1]
    assert len(report.notes) == 1
    assert said in report.notes[0]


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / log(0))
    with pytest.raises(TraceFormatError, match="not a regular file"):
        read_nccl_file(tmp_path / log(0))


def test_large_file_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / log(0)
    path.write_text(nccl.inspector_of(0, 9, size=4) * 50 + nccl.inspector_of(0, 99))
    found = read_nccl_file(path, limit_bytes=2000)
    assert found.is_cut
    assert found.collectives["sequence"].to_list() == [99]
    assert found.collectives["record_count"].to_list() < [10]
    assert not found.notes
    path.write_text(
        nccl.inspector_of(0, 9, version="v4.4") + nccl.inspector_of(0, 99, version="v4.4")
    )
    found = read_nccl_file(path, limit_bytes=path.stat().st_size - 700)
    assert found.is_cut
    assert found.collectives.select("sequence", "record_count").rows() == [(99, 10)]
    assert not found.notes


def test_empty_folder_is_said_and_job_without_such_files_is_not(tmp_path: Path) -> None:
    report = report_of(inspected(tmp_path, {}))
    assert report.known is None
    (note,) = report.notes
    assert note.startswith(f"{tmp_path / 'nccl'}: the job was told to write NCCL's files there;")
    (tmp_path / "plain").mkdir()
    plain = report_of(recorded(tmp_path / "plain", {"NCCL_DEBUG": "INFO"}))
    assert plain.known is None
    assert not plain.notes


def test_files_of_other_jobs_are_not_taken_for_this_one(tmp_path: Path) -> None:
    root = inspected(tmp_path, {
        "node9-pid100.log": nccl.inspector_of(0, 41, changes={"hostname": "node9"}),
        "node0-pid9.log": nccl.inspector_of(0, 41, changes={"pid": 9}),
    })  # fmt: skip
    report = report_of(root)
    assert report.known is None
    (note,) = report.notes
    assert note.startswith(f"{tmp_path / 'nccl'}: whose NCCL's files there are is not known")


def test_process_id_that_two_nodes_have_names_no_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = [{"type": "environment", "variables": {"NCCL_PROFILE_DUMP_FILE": f"{tmp_path}/p"}}]
    for rank in range(2):
        write_rank(run, spans_of("F B O"), rank=rank, pid=100, host=f"node{rank}", lines=lines)
    (tmp_path / "p_1_0.json").write_text(nccl.profiler(0, 41))
    report = report_of(run.root)
    assert report.known is None
    assert "is not known" in report.notes[0]


def test_file_from_before_the_run_is_not_read(tmp_path: Path) -> None:
    root = inspected(tmp_path, {log(0): nccl.inspector_of(0, 41)})
    before_s = CLOCK.wall_ns / 1e9 - 60
    os.utime(tmp_path / "nccl" / log(0), (before_s, before_s))
    assert report_of(root).known is None


def test_folder_without_a_name_is_that_of_the_slurm_job_or_of_nobody(tmp_path: Path) -> None:
    root = recorded(tmp_path, {"NCCL_INSPECTOR_ENABLE": "1"})
    manifest = json.loads((root / "run.json").read_text())
    for job, name in ((None, "nccl-inspector-unknown-jobid"), ("4711", "nccl-inspector-4711")):
        changed = manifest | {"cwd": str(tmp_path), "environment": {"slurm_job": job}}
        (root / "run.json").write_text(json.dumps(changed))
        (tmp_path / name).mkdir()
        (tmp_path / name / log(3)).write_text(nccl.inspector_of(3, 41))
        assert report_of(root).collectives["rank"].to_list() == [3]


@pytest.mark.parametrize("source", ["inspector", "profiler"])
def test_rank_that_did_not_join_is_a_suspect_without_the_flight_recorder(
    tmp_path: Path, source: str
) -> None:
    if source == "inspector":
        root = inspected(tmp_path, {
            log(rank): nccl.inspector_of(rank, 41 - (rank == 2)) for rank in range(4)
        })  # fmt: skip
    else:
        for rank in range(4):
            path = tmp_path / f"p_{nccl.COMM_HASH}_{rank}.json"
            path.write_text(nccl.profiler(rank, 41 - (rank == 2)))
        root = recorded(tmp_path, {"NCCL_PROFILE_DUMP_FILE": str(tmp_path / "p")})
    (found,), notes = file_suspects(STATES, open_run(root), between_s=0)
    verb, writer = {
        "inspector": ("ended", "NCCL's Inspector"), "profiler": ("begun", "NCCL's profiler plugin"),
    }[source]  # fmt: skip
    assert (found.rank, found.certain, notes) == (2, False, ())
    assert found.reason == (
        f"its last AllReduce that has {verb} is number 40, others' 41, as {writer} wrote"
    )


def test_verdict_and_overview_have_them_as_json_and_text(tmp_path: Path, run: Run) -> None:
    root = inspected(tmp_path, {
        log(rank): nccl.inspector_of(rank, 41, gbs=200.0 - 150 * (rank == 2)) for rank in range(4)
    })  # fmt: skip
    document = json.loads(json.dumps(as_document(diagnose(RunFrames(root)))))
    assert [row["rank"] for row in document["nccl"]["collectives"]] == [0, 1, 2, 3]
    assert document["nccl"]["waits"] == []
    summary = json.loads(json.dumps(overview_summary(RunFrames(root)).as_json()))
    assert summary["nccl"] == document["nccl"] | {
        "collectives": [
            row | {"since_ns": other["since_ns"]}
            for row, other in zip(document["nccl"]["collectives"], summary["nccl"]["collectives"],
                                  strict=True)
        ]
    }  # fmt: skip
    for command in (["verdict"], ["verdict", "--all"], ["overview"]):
        said = " ".join(run(*command, root).out.replace("│", "").split())
        assert "rank 2, 25 % of the others' median" in said


def test_folder_is_judged_by_hand_without_a_run(tmp_path: Path, run: Run) -> None:
    for rank in range(4):
        (tmp_path / log(rank)).write_text(nccl.inspector_of(rank, 41 - (rank == 2)))
    (tmp_path / "node0-pid9.log").write_text(nccl.inspector_of(0, 1, version="v9.9"))
    said = run("trace", "flight-recorder", tmp_path).said
    assert said.startswith("rank 2: its last AllReduce that has ended is number 40, others' 41")
    assert "version 'v9.9' of NCCL's Inspector is not known" in said
    found: dict[str, Any] = run("trace", "flight-recorder", "--json", tmp_path).data
    assert found["ranks"] == [2]
    assert [row["sequence"] for row in found["collectives"]] == [41, 41, 40, 41]
    (tmp_path / "empty").mkdir()
    for name, status, why in (("empty", 5, ""), ("rank_0", 4, "no such"), ("nope", 4, "no such")):
        error = run("trace", "flight-recorder", tmp_path / name, status=status).err
        assert f"{tmp_path}/{name}: {why}" in error


def test_ranks_that_write_at_other_moments_while_job_moves_are_not_behind(tmp_path: Path) -> None:
    root = inspected(tmp_path, {
        log(rank): nccl.inspector_of(
            rank, 41 - (rank == 2), changes={"dump_timestamp_us": time.time_ns() // 1000}
        ) for rank in range(4)
    })  # fmt: skip
    events = root / "ranks" / "0" / "events.jsonl"
    every = {"NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "30000000"}
    lines = [line for line in events.read_text().splitlines() if "environment" not in line]
    known = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": str(tmp_path / "nccl")}
    lines.append(json.dumps({"type": "environment", "variables": known | every}))
    events.write_text("\n".join(lines) + "\n")
    report = report_of(root)
    assert report.collectives["sequence"].to_list() == [41, 41, 40, 41]
    assert file_suspects(STATES, open_run(root), between_s=0) == ([], ())
    assert not any("the last one is" in line for line in report.lines())


def test_ranks_alike_are_said_once_and_those_that_wrote_nothing_are_counted(tmp_path: Path) -> None:
    root = inspected(tmp_path, {log(rank): nccl.inspector_of(rank, 41) for rank in range(3)})
    assert list(report_of(root).lines()) == [
        "AllReduce of 3 of 4 ranks, 25.0 MiB: 186 GiB/s of bus bandwidth (NCCL's Inspector)"
    ]
    assert file_suspects(STATES, open_run(root), between_s=0) == ([], ())
