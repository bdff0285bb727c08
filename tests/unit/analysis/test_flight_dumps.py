"""Dumps of the Flight Recorder of any job: who is to blame, in torch's own form and damaged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from haiprof.cli import main
from haiprof.run_analysis.flight_dumps import judge_dumps

DUMPS = Path(__file__).parents[2] / "data/flight_recorder"
Operation = tuple[str, int, str]
DONE = "completed"


def entry(number: int, operation: Operation) -> dict[str, Any]:
    name, size, state = operation
    begun, ended = state != "scheduled", state == DONE
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": 0 if name.startswith("send") else number + 1,
        "p2p_seq_id": number + 1 if name.startswith("send") else 0, "op_id": number + 1,
        "profiling_name": f"nccl2:{name}", "time_created_ns": 1_000 + number,
        "frames": [{"name": name, "filename": "/usr/site-packages/torch/c10d.py", "line": 9},
                   {"name": "step", "filename": "/home/me/train.py", "line": 40 + number}],
        "input_sizes": [[size]], "input_dtypes": ["Float"], "output_sizes": [[size]],
        "output_dtypes": ["Float"], "state": state, "retired": ended, "timeout_ms": 600_000,
        "time_discovered_started_ns": 2_000 if begun else None,
        "time_discovered_completed_ns": 3_000 if ended else None,
        "is_p2p": name.startswith("send"),
    }  # fmt: skip


def write(folder: Path, ranks: list[list[Operation]], *, form: str = "pickle") -> Path:
    folder.mkdir(exist_ok=True)
    members = str(list(range(len(ranks))))
    for rank, operations in enumerate(ranks):
        dump = {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": members}},
            "pg_status": {"0": {"last_enqueued_collective": len(operations)}},
            "entries": [entry(number, each) for number, each in enumerate(operations)],
        }
        content = pickle.dumps(dump) if form == "pickle" else json.dumps(dump).encode()
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
    return folder


FIRST = ("all_reduce", 16, DONE)
WAITS, BEGUN = ("all_reduce", 16, "scheduled"), ("all_reduce", 16, "started")
STORIES = {
    "agree": ([[FIRST, FIRST]] * 3, "", ()),
    "kind": ([[FIRST, BEGUN]] * 2 + [[FIRST, ("all_gather", 16, "started")]],
             "collective 2 of group default_pg does not match: ranks 0 and 1 all_reduce, rank 2 "
             "all_gather (kind differs, at train.py:41 in step)", (2,)),
    "size": ([[FIRST, BEGUN]] * 2 + [[FIRST, ("all_reduce", 17, "started")]],
             "all_reduce 2 of group default_pg does not match: ranks 0 and 1 16, rank 2 17", (2,)),
    "away": ([[FIRST, BEGUN], [FIRST], [FIRST, WAITS]],
             "rank 1 has not come to all_reduce 2 of group default_pg, in which ranks 0 and 2 "
             "wait, at train.py:41 in step; the last one of it there is all_reduce 1", (1,)),
    "ahead by a dump": ([[FIRST, FIRST], [FIRST]], "", ()),
    "busy": ([[FIRST, BEGUN], [FIRST, WAITS]], "waits on rank 1", (1,)),
    "stuck": ([[FIRST, BEGUN], [FIRST, BEGUN]], "has begun on all of its ranks", (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("story", STORIES)
def test_the_collective_and_the_ranks_are_named(tmp_path: Path, story: str, form: str) -> None:
    ranks, said, odd = STORIES[story]
    found = judge_dumps([write(tmp_path / "dumps", ranks, form=form)])
    assert [said in text for text in found.findings[:1]] == ([True] if said else [])
    assert found.ranks == odd


def test_rank_without_a_dump_and_a_send_that_waits_are_notes(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [[FIRST, ("send 0->2", 4, "scheduled")], [FIRST], [FIRST]])
    (folder / "nccl_trace_rank_2").unlink()
    found = judge_dumps([folder])
    assert not found.findings
    assert found.notes == (
        "no dump of rank 2 of group default_pg",
        "rank 0 has not completed send 0->2 of group default_pg",
    )


def test_dumps_that_torch_wrote_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["trace", "flight-recorder", *(str(DUMPS / f"gloo_{r}.pickle") for r in (0, 1))]) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("rank 1 has not come to all_reduce 8 of group default_pg")
    assert "barrier 7 at train.py:23 in step" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no dump of the Flight Recorder"),
        (b"{", "no dump of the Flight Recorder"),
        (b"{}", "it has no entries"),
        (b'{"entries": [{"collective_seq_id": "x"}]}', "no dump of the Flight Recorder"),
        (b'{"entries": 7}', "no dump of the Flight Recorder"),
        (pickle.dumps(OSError), "not one of plain values"),
        (pickle.dumps({"segments": []}), "it has no entries"),
    ],
)
def test_what_is_no_dump_is_one_error_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    assert main(["trace", "flight-recorder", str(path)]) != 0
    error = capsys.readouterr().err
    assert str(path) in error
    assert said in error
    assert "internal error" not in error


def test_truncated_dump_beside_whole_ones_is_a_note(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [[FIRST, BEGUN], [FIRST, BEGUN], [FIRST, BEGUN]])
    whole = (folder / "nccl_trace_rank_1").read_bytes()
    (folder / "nccl_trace_rank_1").write_bytes(whole[: len(whole) // 2])
    found = judge_dumps([folder])
    assert str(folder / "nccl_trace_rank_1") in found.notes[0]
    assert found.ranks == (0, 2)


@pytest.mark.parametrize("names", [("a_1", "b_1"), ("dump",), ()])
def test_files_that_cannot_be_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    words = [str(tmp_path / name) for name in names] or [str(tmp_path)]
    assert main(["trace", "flight-recorder", *words]) != 0
    assert str(tmp_path) in capsys.readouterr().err
