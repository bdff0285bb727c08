"""A job without a Flight Recorder stands still: fakes of NCCL's RAS and files name the rank."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.fake_nccl_files import inspector_of
from tests.fake_ras import fake_ras
from tests.process.jobs import SIMULATED_GPU
from tests.process.live import START_S, LiveJob, plain_ranks, within
from tests.unit.jobs.test_nccl_ras import as_json

pytestmark = pytest.mark.slow

SCRIPT = f"""{SIMULATED_GPU}import time
import torch.distributed as dist
dist.init_process_group("gloo")
torch.cuda.init()
rank = dist.get_rank()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for step in range(100_000):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step == 40:
        print("TRAINS", flush=True) if rank == 0 else None
        if rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(4))
"""


def test_rank_that_did_not_join_is_named_by_nccl_where_torch_tells_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with fake_ras("") as server:
        extra = {
            "NCCL_RAS_ADDR": f"localhost:{server.address[1]}",
            "TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        }  # fmt: skip
        with LiveJob(tmp_path, plain_ranks(2, str(script)), "--quiet", extra=extra) as job:
            pids = within(START_S, lambda: p if len(p := job.pids()) == 2 else None)
            shift = [pids[rank] - 100 - rank for rank in (0, 1)]
            answer = as_json([41, 40])
            for rank in (0, 1):
                answer = answer.replace(
                    f'"pid": {100 + rank}', f'"pid": {100 + rank + shift[rank]}'
                )
            server.answers[:] = [answer]
            within(START_S, lambda: (job.listed()["idle_ns"] or 0) > 1e9)
            seen = job.ask("snapshot", job.pid)
    assert all(not rank["collectives"] for rank in seen["ranks"]), "no Flight Recorder"
    assert seen["moves"] is None
    first = seen["suspects"][0]
    assert (first["rank"], first["certain"]) == (1, True)
    assert first["reason"] == "it has begun 40 AllReduce, others 41, as NCCL's RAS tells"
    assert server.heard[:2] == ["CLIENT PROTOCOL 2", "TIMEOUT 3"]


@pytest.mark.proof
def test_files_of_nccls_inspector_name_it_where_ras_does_not_answer(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "nccl"
    script.write_text(SCRIPT)
    folder.mkdir()
    with fake_ras("") as server:
        port = server.address[1]
    extra = {
        "NCCL_RAS_ADDR": f"localhost:{port}", "TORCH_FR_BUFFER_SIZE": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": str(folder),
    }  # fmt: skip
    with LiveJob(tmp_path, plain_ranks(2, str(script)), "--quiet", extra=extra) as job:
        pids = within(START_S, lambda: p if len(p := job.pids()) == 2 else None)
        for rank in (0, 1):
            changes = {"pid": pids[rank], "hostname": socket.gethostname()}
            text = inspector_of(rank, 41 - rank, size=2, changes=changes)
            (folder / f"here-pid{pids[rank]}.log").write_text(text)
        within(START_S, lambda: (job.listed()["idle_ns"] or 0) > 1e9)
        seen = job.ask("snapshot", job.pid)
    first = seen["suspects"][0]
    assert (first["rank"], first["certain"]) == (1, False)
    assert first["reason"].endswith("is number 40, others' 41, as NCCL's Inspector wrote")
    assert any("RAS" in note and "refused" in note for note in seen["notes"])
