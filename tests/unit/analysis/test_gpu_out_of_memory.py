"""GPU memory that ran out, told from what a rank noted, or from torch's own text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.run_analysis.before_death import GpuMemoryAtEnd
from haiprof.run_analysis.gpu_memory import GpuOutOfMemory, parse_torch_message
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.writer import LineWriter, write_json
from tests.unit.analysis.test_deaths import T0, Job, S, found

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


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run")


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


def test_headline_names_phase_step_line_holders_and_the_batch(job: Job) -> None:
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


def test_what_had_fitted_rests_on_the_peak_of_the_largest_batch_before(job: Job) -> None:
    failed(job)
    ratio = memory(job).failed.fits_ratio
    others = round(9.5 * GIB)  # of another process: torch's own text
    assert ratio == pytest.approx((79 * GIB - others - 37 * GIB) / (61 - 37) / GIB / 2)
    assert any("would have fitted" in reason for reason in memory(job).reasons)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"free_cached_bytes": 3 * GIB}, True),
        ({"free_cached_bytes": GIB}, True),  # with what the device had left
        ({"free_cached_bytes": GIB - 1}, False),
        ({"free_cached_bytes": 3 * GIB, "largest_free_bytes": 2 * GIB}, False),
        ({"free_cached_bytes": None}, None),
    ],
)
def test_fragmentation_is_said_only_where_the_request_would_have_fitted(
    job: Job, changes: dict[str, object], said: bool | None
) -> None:
    failed(job, **changes)
    at_end = memory(job)
    assert at_end.failed.fragmented is said
    assert any("fragmentation" in reason for reason in at_end.reasons) is bool(said)


@pytest.mark.parametrize(
    ("held", "per_step"),
    [
        ([GIB, GIB, *(step * GIB for step in range(2, 40))], GIB),
        ([GIB, 30 * GIB] + [37 * GIB] * 30, None),
        ([step * GIB for step in range(2, 12)] + [12 * GIB] * 20, None),
        ([GIB, 2 * GIB, 3 * GIB, 4 * GIB], None),
    ],
)
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


def test_other_processes_on_the_gpu_count(job: Job) -> None:
    failed(job)
    assert "other processes on this GPU hold 9.50 GiB" in memory(job).reasons


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
    assert (
        parse_torch_message("DefaultCPUAllocator: not enough memory: you tried to allocate 8")
        is None
    )
    assert parse_torch_message("HIP out of memory. Tried to allocate 512 bytes.") == GpuOutOfMemory(
        requested_bytes=512
    )


def test_failure_that_the_job_caught_long_before_is_not_its_death(job: Job) -> None:
    failed(job, wall_ns=T0 - 3600 * S)
    at_end = memory(job)
    assert at_end.failed.requested_bytes == 20 * GIB, "torch's text is of the last one"
    assert at_end.failed.batch == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 7, "held": [], "largest": {"shapes": [], "peak_bytes": "x"}, "line": "train.py"},
        {"allocated_bytes": -1, "requested_bytes": 1 << 80, "snapshot": "../../etc/passwd.pickle"},
        {"batch": [[-1, "x"], 3, [2] * 99] * 99, "phase": 1, "module": ["x"], "step": 1e300},
        {"snapshot": "absent.pickle"},
    ],
)
def test_damaged_notes_are_left_out(job: Job, changes: dict[str, object]) -> None:
    failed(job, **changes)
    assert "out of GPU memory" in job.death().headline
    at_end = memory(job)
    assert at_end.snapshot is None
    assert [*at_end.texts]
