"""A dataset that asks a slow server over HTTP for each sample: the line, and what it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from tests.process.jobs import run_script

pytestmark = pytest.mark.slow

JOB = """
import sys
import urllib.request
import torch
address, workers = sys.argv[1], int(sys.argv[2])

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, index):
        with urllib.request.urlopen(f"{address}/{index}") as reply:  # READS
            return torch.frombuffer(bytearray(reply.read()), dtype=torch.uint8).float()

model = torch.nn.Linear(1024, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=.01)
for batch in torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=workers):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINE = JOB.splitlines().index(next(x for x in JOB.splitlines() if x.endswith("# READS"))) + 1


class Slow(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(0.03)
        self.send_response(200)
        self.send_header("Content-Length", "1024")
        self.end_headers()
        self.wfile.write(bytes(1024))

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_waiting_for_an_object_store_is_told_with_its_line(
    tmp_path: Path, address: str, workers: int
) -> None:
    job = run_script(tmp_path, JOB, address, str(workers))
    first = diagnose(job.analyzer()).findings[0]
    assert (first.rule, first.cause) == ("dataloader_bound", "storage")
    assert "network peer" in first.title
    assert (first.code_lines[0].line, first.code_lines[0].function) == (
        LINE, "Samples.__getitem__",
    )  # fmt: skip
