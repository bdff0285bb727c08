"""Waiting for files on NFS: what a mount's client counted stands in the sentence, where it fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from haiprof.agent.samplers.filesystem import FilesystemSampler
from haiprof.agent.samplers.table import Node
from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.verdict import Finding
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import FILESYSTEM
from haiprof.run_format.writer import RecordWriter
from tests.fake_mounts import FakeMounts, FakeNfs
from tests.unit.analysis.recorded import CLOCK
from tests.unit.diagnosis.stories import START_NS, counters, judged
from tests.unit.diagnosis.tables import MAIN, PYTHON, SCRIPT, job
from tests.unit.diagnosis.test_verdict import STARVED_LOADER, Cores, write_cores, write_sampled

Requests = tuple[int, int, int, int, int]
"""READs each second; ms queued, RTT and execution of each; transmissions beyond the first."""
SLOTS: Requests = (20, 300, 40, 340, 0)
SERVER: Requests = (20, 2, 340, 345, 1)
IDLE: Requests = (1, 0, 4, 5, 0)


def write_mount(root: Path, of: Requests, *, point: str = "/data") -> None:
    """What the node's sampler records beside a story of a mount with such reads each second."""
    count, *times, again = of
    now = START_NS - 2 * NS_PER_S
    fake = FakeMounts(root.parent / "fake")
    sampler = FilesystemSampler(Node(root=root.parent / "fake", clock=lambda: now))
    path = RunPaths(root).node("node0").records("filesystem")
    writer = None
    for second in range(20):
        done, total = 1000 + count * second, [n * (1000 + count * second) for n in times]
        read: Sequence[int] = (done, done + again * second, 0, 0, 0, *total, 0)
        fake.put(FakeNfs(point=point, age_s=100 + second, requests={"READ": read}))
        if writer is None:
            assert sampler.open()  # other columns are missing
            writer = RecordWriter(path, FILESYSTEM, clock=CLOCK, extra=sampler.header())
        now += NS_PER_S
        writer.append(sampler.sample())
    assert writer is not None
    writer.close()
    sampler.close()


def starved(root: Path) -> Finding:
    return judged(root).findings[0]


@pytest.mark.parametrize(
    ("of", "says", "do"),
    [
        (SLOTS, "NFS /data: a read takes 340 ms (RTT 40.0 ms, queue 300 ms): RPC slots full",
         "nconnect"),
        (SERVER, "NFS /data: a read takes 345 ms (RTT 340 ms, queue 2.00 ms), 1.00 requests a "
         "second sent again", "server"),
        (IDLE, "for files, the network or a lock", "local copy"),
    ],
    ids=["slots", "server", "idle"],
)  # fmt: skip
def test_a_loader_that_waits_for_nfs_says_for_what(
    tmp_path: Path, of: Requests, says: str, do: str
) -> None:
    root = tmp_path / "run"
    write_cores(root, [Cores(cpus="0-3", main=0.4, wait=0.0, workers=0.05)], cores=4,
                times=STARVED_LOADER)  # fmt: skip
    write_mount(root, of)
    found = starved(root)
    assert (found.rule, found.cause) == ("dataloader_bound", "storage")
    assert found.title.endswith(f"and the loader itself waits: {says}")
    assert do in found.remedy
    assert ("waiting on this client to be sent" in {e.name for e in found.evidence}) == (
        of is not IDLE
    )


def test_a_line_that_waits_for_a_file_says_which_mount_it_may_be(tmp_path: Path) -> None:
    root = tmp_path / "run"
    log = (*job(70, "log"), "os.fsync(file.fileno())")
    write_sampled(root, lambda *_: (0.2, 5.0, 10.0, 2.0), {"other": (SCRIPT, MAIN, log)}, "0",
                  gap_ms=8.0, steps=400)  # fmt: skip
    plain = judged(root).findings[0].title
    assert "waiting for a file" in plain
    write_mount(root, SLOTS, point="/home/me")
    assert judged(root).findings[0].title == (
        f"{plain}; NFS /home/me: a read takes 340 ms (RTT 40.0 ms, queue 300 ms): RPC slots full"
    )


@pytest.mark.parametrize(("again", "is_said"), [(0, False), (30, True)])
def test_segments_sent_again_are_told_where_a_line_waits_for_a_peer(
    tmp_path: Path, again: int, is_said: bool
) -> None:
    root = tmp_path / "run"
    reads = (SCRIPT, MAIN, job(30, "ask"), (f"{PYTHON}/socket.py", 700, "SocketIO.readinto"))
    write_sampled(root, lambda *_: (0.2, 5.0, 10.0, 2.0), {"other": reads}, "0",
                  gap_ms=8.0, steps=400)  # fmt: skip
    second = {"tcp_transmit_segment_count": 1000, "tcp_retransmit_segment_count": again}
    counters(root, lambda *_: {}, host=lambda t: {k: int((t + 2) * n) for k, n in second.items()})
    found = judged(root).findings[0]
    assert "waiting for a network peer" in found.title
    assert "TCP_NODELAY where small messages" in found.remedy
    assert any("TCP segments sent again" in e.name for e in found.evidence) is is_said
