"""Deaths as tickets, from dumps of the Flight Recorder, and of GPU memory that ran out."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from haiprof.run_analysis.before_death import GpuMemoryAtEnd
from haiprof.run_analysis.collectives import judge_dumps
from haiprof.run_analysis.gpu_memory import GpuOutOfMemory, parse_torch_message
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.writer import LineWriter, write_json
from tests.commands import Run
from tests.fake_nccl_files import COMM_HASH, profiler
from tests.unit.analysis.test_deaths import T0, Job, S, found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run")


def watchdog_dump(job: Job, rank: int, *kinds: str, dtypes: object = ("Float",)) -> None:
    """As ProcessGroupNCCL's watchdog writes it: a pickle; the last collective is not over."""
    states = [DONE] * (len(kinds) - 1) + ["started"]
    more = {"input_dtypes": dtypes, "output_dtypes": dtypes}
    entries = [
        entry(place, (kind, 4, state)) | {"profiling_name": f"nccl:{kind}"} | more
        for place, (kind, state) in enumerate(zip(kinds, states, strict=True))
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    dump = {"version": "2.10", "rank": rank, "pg_config": config, "entries": entries}
    job.run.flight.mkdir(exist_ok=True)
    (job.run.flight / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


@pytest.mark.parametrize("dtypes", [["Float"], "float32"], ids=["as C++ writes", "as its tests do"])
def test_dumps_of_the_watchdog_tell_who_issued_another_collective(job: Job, dtypes: object) -> None:
    for rank in range(3):
        last = "broadcast" if rank == 1 else "all_reduce"
        watchdog_dump(job, rank, *["all_reduce"] * 4, last, dtypes=dtypes)
        job.over(rank, 1, number=6)
    death = job.death()
    assert death.cause == "mismatch"
    assert "collective 5" in death.headline
    assert "rank 1 broadcast" in death.headline


@pytest.mark.parametrize(("ends_s", "cause", "said"), [
    ((1, 2.2, 1.1), "hang", "it never came to all_reduce 5"),
    ((600, 1, 600.2), "crash", "rank 1 died first"),  # it aborted long before the others
])  # fmt: skip
def test_rank_behind_is_the_suspect_where_all_ranks_were_aborted(
    job: Job, ends_s: tuple[float, ...], cause: str, said: str
) -> None:
    for rank, at_s in enumerate(ends_s):
        watchdog_dump(job, rank, *["all_reduce"] * (3 if rank == 1 else 5))
        job.over(rank, at_s, number=6)
    death = job.death()
    assert (death.cause, death.ranks, death.certain) == (cause, (1,), cause == "crash")
    assert said in death.headline
    assert "ranks 0 and 2 waited in all_reduce 5 and were ended" in death.headline
    assert [fate.role for fate in death.fates] == ["victim", "cause", "victim"]


def test_profiler_plugin_of_nccl_names_who_did_not_join_without_dumps(
    job: Job, tmp_path: Path
) -> None:
    prefix = tmp_path / "prof"
    events = LineWriter(job.run.rank(0, 0).events)
    events.append({"type": "environment", "variables": {"NCCL_PROFILE_DUMP_FILE": str(prefix)}})
    events.close()
    for rank, at_s in ((0, 1), (1, 2.2), (2, 1.1)):
        text = profiler(rank, 40 if rank == 1 else 41)
        (tmp_path / f"prof_{COMM_HASH}_{rank}.json").write_text(text)
        job.over(rank, at_s, number=6)
    death = job.death()
    assert (death.cause, death.ranks, death.certain) == ("hang", (1,), False)
    assert "it never came to AllReduce 41" in death.headline


def test_exit_report_is_markdown_with_cause_line_and_every_rank(
    job: Job, tmp_path: Path, run: Run
) -> None:
    job.died(1, 0, "RuntimeError", "shape mismatch")
    for rank in (0, 2):
        job.over(rank, 3, number=15)
    ticket = tmp_path / "ticket.md"
    said = run("verdict", job.run.root, "--exit-report", ticket).err
    text = ticket.read_text()
    assert "rank 1 died first: RuntimeError: shape mismatch (train.py:88" in text
    assert "goodput" in text, "it ran for an hour"
    assert text.startswith("#")
    assert text.count("| ") >= 3, "a row per rank"
    assert str(ticket) in said
    assert run("verdict", job.run.root, "--exit-report", "-").out == text


def test_exit_status_is_said_once_below_the_state_of_the_run(job: Job, run: Run) -> None:
    job.raised(1, 0, "SystemExit", "7", how="exit_call")
    job.over(1, 0, status=7, stderr=["budget used up, requeue me"])
    job.ended(7)
    _, _, below = run("verdict", job.run.root).out.partition("ended, exit 7")
    assert "budget used up, requeue me" in below
    assert f" {time.strftime('%Z')} " in below, "the time zone of its end"
    assert below.count("status 7") == 1
    assert below.count("exited") == 1


def test_share_of_time_is_not_told_of_a_job_that_died_at_once(job: Job, run: Run) -> None:
    job.died(1, 0, "RuntimeError", "shape mismatch")
    manifest = read_manifest(job.run)
    write_manifest(job.run, replace(manifest, end_wall_ns=T0 + 9 * S))
    shown = run("verdict", job.run.root).out
    assert "goodput" not in shown
    assert "no checkpoint was seen: a restart repeats up to 3 steps" in " ".join(shown.split())


def test_list_says_in_a_word_how_each_run_ended(tmp_path: Path, run: Run) -> None:
    failed, killed = Job(tmp_path / "a-failed"), Job(tmp_path / "b-killed")
    failed.died(1, 0, "RuntimeError", "shape mismatch")
    killed.over(1, 0, number=9)
    lines = run("list", tmp_path).out.splitlines()
    assert any("a-failed" in line and "exception" in line for line in lines)
    assert any("b-killed" in line and "killed" in line for line in lines)
    assert run("list", tmp_path, "--json").data


GIB = 1 << 30
TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 512.00 MiB is free. Process 4711 has 9.50 GiB memory in use. Including non-PyTorch "
    "memory, this process has 69.10 GiB memory in use. Of the allocated memory 61.00 GiB is "
    "allocated by PyTorch, with 128.00 MiB allocated in private pools (e.g., CUDA Graphs), and "
    "7.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html)"
)
OLD_TEXT = (  # torch 2.0
    "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.78 GiB total capacity; 14.10 GiB "
    "already allocated; 600.00 MiB free; 14.20 GiB reserved in total by PyTorch)"
)
FAILED = {
    "wall_ns": T0 - S // 10, "device": 0, "requested_bytes": 2 * GIB, "limit_bytes": 79 * GIB,
    "device_total_bytes": 79 * GIB, "device_free_bytes": GIB, "allocated_bytes": 71 * GIB,
    "reserved_bytes": 77 * GIB, "peak_bytes": 71 * GIB, "inactive_split_bytes": 6 * GIB,
    "retry_count": 1, "free_cached_bytes": GIB // 2, "largest_free_bytes": GIB // 4,
    "segment_count": 90, "private_pool_bytes": 0, "phase": "forward",
    "module": "blocks.3.mlp (MLP)", "line": ["/home/me/train.py", 88, "step"], "frames": [],
    "step": 512, "batch": [[64, 4096]],
    "largest": {"shapes": [[64, 2048]], "step": 9, "start_bytes": 37 * GIB, "peak_bytes": 61 * GIB},
    "held": {"parameters": 6 * GIB, "gradients": 6 * GIB, "buffers": 0,
             "optimizer_state": 24 * GIB},
}  # fmt: skip


def failed(job: Job, **changes: object) -> None:
    """A rank that notes an allocation, and dies of torch's error."""
    rank = 1
    content = {"host": job.host(rank), "pid": job.pid(rank), "count": 1,
               "failed": [{**FAILED, **changes}]}  # fmt: skip
    job.run.memory.mkdir(exist_ok=True)
    path = job.run.out_of_memory_file(job.host(rank), job.pid(rank))
    write_json(path, content, below=job.run.root)
    job.died(rank, 0, "torch.OutOfMemoryError", TEXT)


def steps(job: Job, rank: int, held: list[int]) -> None:
    """What its steps began with."""
    writer = LineWriter(job.run.rank(rank).events)
    for step, size in enumerate(held):
        sizes = {"allocated_bytes": size, "peak_bytes": max(held[: step + 1]) + GIB,
                 "reserved_bytes": size, "limit_bytes": 79 * GIB}  # fmt: skip
        writer.append({"type": "gpu_memory", "time_ns": step * S, "step": step, **sizes})
    writer.close()


def memory(job: Job) -> GpuMemoryAtEnd:
    (at_end,) = RunFrames(job.run.root).gpu_memory_at_end()
    return at_end


def test_headline_names_phase_step_line_holders_the_batch_and_what_had_fitted(job: Job) -> None:
    failed(job)
    death = job.death()
    assert found(death) == ("out_of_memory", (1,))
    assert death.headline.startswith(
        "rank 1 died first: out of GPU memory in forward, in blocks.3.mlp (MLP) at step 512 "
        "(train.py:88 in step): 2.00 GiB wanted, 71.0 GiB of 79.0 GiB allocated (activations and "
        "others 35.0 GiB, optimizer state 24.0 GiB, parameters 6.00 GiB, gradients 6.00 GiB); the "
        "batch was 64 x 4096, the largest before 64 x 2048 with a peak of 61.0 GiB"
    )
    assert "bound the batch" in death.remedy
    ratio = memory(job).failed.fits_ratio
    others = round(9.5 * GIB)  # of another process: torch's own text
    assert ratio == pytest.approx((79 * GIB - others - 37 * GIB) / (61 - 37) / GIB / 2)
    assert any("would have fitted" in reason for reason in memory(job).reasons)
    assert "other processes on this GPU hold 9.50 GiB" in memory(job).reasons


@pytest.mark.parametrize(("changes", "said"), [
    ({"free_cached_bytes": 3 * GIB}, True),
    ({"free_cached_bytes": GIB}, True),  # with what the device had left
    ({"free_cached_bytes": GIB - 1}, False),
    ({"free_cached_bytes": 3 * GIB, "largest_free_bytes": 2 * GIB}, False),
    ({"free_cached_bytes": None}, None),
])  # fmt: skip
def test_fragmentation_is_said_only_where_the_request_would_have_fitted(
    job: Job, changes: dict[str, object], said: bool | None
) -> None:
    failed(job, **changes)
    at_end = memory(job)
    assert at_end.failed.fragmented is said
    assert any("fragmentation" in reason for reason in at_end.reasons) is bool(said)


@pytest.mark.parametrize(("held", "per_step"), [
    ([GIB, GIB, *(step * GIB for step in range(2, 40))], GIB),
    ([GIB, 30 * GIB] + [37 * GIB] * 30, None),
    ([step * GIB for step in range(2, 12)] + [12 * GIB] * 20, None),
    ([GIB, 2 * GIB, 3 * GIB, 4 * GIB], None),
])  # fmt: skip
def test_steady_growth_is_told_from_warm_up(
    job: Job, held: list[int], per_step: float | None
) -> None:
    steps(job, 1, held)
    failed(job, batch=[[64, 2048]])
    at_end = memory(job)
    assert at_end.growth_bytes_per_step == per_step
    assert any("grew from step to step" in r for r in at_end.reasons) is (per_step is not None)
    if per_step is not None:
        assert "kept from each step" in job.death().remedy


def test_torchs_own_text_is_enough_for_the_numbers(job: Job) -> None:
    job.died(1, 0, "torch.OutOfMemoryError", TEXT)
    death = job.death()
    assert "20.0 GiB wanted, 61.0 GiB of 79.1 GiB allocated" in death.headline
    said = memory(job).failed
    assert said.reserved_bytes == round(68.5 * GIB)
    assert said.fragmented is None, "how large the pieces were is not known"
    assert said.fits_ratio is None


def test_texts_of_other_torches_and_others_are_taken_as_far_as_they_go() -> None:
    old = parse_torch_message(OLD_TEXT)
    assert old is not None
    assert (old.requested_bytes, old.allocated_bytes) == (GIB, None)
    assert parse_torch_message("DefaultCPUAllocator: not enough memory: you tried to allo") is None
    hip = parse_torch_message("HIP out of memory. Tried to allocate 512 bytes.")
    assert hip == GpuOutOfMemory(requested_bytes=512)


def test_failure_that_the_job_caught_long_before_is_not_its_death(job: Job) -> None:
    failed(job, wall_ns=T0 - 3600 * S)
    at_end = memory(job)
    assert at_end.failed.requested_bytes == 20 * GIB, "torch's text is of the last one"
    assert at_end.failed.batch == ()


@pytest.mark.parametrize("changes", [
    {"batch": 7, "held": [], "largest": {"shapes": [], "peak_bytes": "x"}, "line": "train.py"},
    {"allocated_bytes": -1, "requested_bytes": 1 << 80, "snapshot": "../../etc/passwd.pickle"},
    {"batch": [[-1, "x"], 3, [2] * 99] * 99, "phase": 1, "module": ["x"], "step": 1e300},
    {"snapshot": "absent.pickle"},
])  # fmt: skip
def test_damaged_notes_are_left_out(job: Job, changes: dict[str, object]) -> None:
    failed(job, **changes)
    assert "out of GPU memory" in job.death().headline
    at_end = memory(job)
    assert at_end.snapshot is None
    assert [*at_end.texts]


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


def test_dumps_that_torch_wrote_are_judged(run: Run) -> None:
    files = [str(DUMPS / f"gloo_{rank}.pickle") for rank in (0, 1)]
    said = run("trace", "flight-recorder", *files).said
    assert said.startswith("rank 1 has not come to all_reduce 8 of group default_pg")
    assert "barrier 7 at train.py:23 in step" in said


@pytest.mark.parametrize(("content", "said"), [
    (b"", "no dump of the Flight Recorder"),
    (b"{", "no dump of the Flight Recorder"),
    (b"{}", "it has no entries"),
    (b'{"entries": [{"collective_seq_id": "x"}]}', "no dump of the Flight Recorder"),
    (b'{"entries": 7}', "no dump of the Flight Recorder"),
    (pickle.dumps(OSError), "not one of plain values"),
    (pickle.dumps({"segments": []}), "it has no entries"),
])  # fmt: skip
def test_what_is_no_dump_is_one_error_with_its_file(
    tmp_path: Path, run: Run, content: bytes, said: str
) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    error = run("trace", "flight-recorder", path, status=5).err
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


@pytest.mark.parametrize(("names", "status"), [(("a_1", "b_1"), 4), (("dump",), 4), ((), 5)])
def test_files_that_cannot_be_ranks_are_refused(
    tmp_path: Path, run: Run, names: tuple[str, ...], status: int
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    words = [str(tmp_path / name) for name in names] or [str(tmp_path)]
    assert str(tmp_path) in run("trace", "flight-recorder", *words, status=status).err
