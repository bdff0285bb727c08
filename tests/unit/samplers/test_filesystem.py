"""Network file systems: each mount once, rates that stop at a remount, reasons where none count."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.agent.samplers.filesystem import FilesystemSampler
from haiprof.agent.samplers.table import ALL_METRICS, Node
from haiprof.base.units import NS_PER_S
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import FILESYSTEM
from haiprof.run_format.writer import RecordWriter
from tests.fake_mounts import FakeLustre, FakeMounts, FakeNfs
from tests.unit.analysis.recorded import CLOCK, write_run
from tests.unit.samplers.records import Row, rows

STEP_S = 10
READ = (100, 103, 1, 9000, 9000, 40, 500, 700, 0)
WRITE = (10, 10, 0, 900, 900, 4, 50, 70, 0)
GETATTR = (7, 7, 0, 70, 70, 0, 14, 21, 0)
OPEN = (3, 3, 0, 30, 30, 0, 6, 9, 0)
SEQUENCE = (99, 99, 0, 990, 990, 0, 999, 999, 0)


class Ticking:
    """A sampler on a clock of its own, beside mounts that change."""

    def __init__(self, root: Path) -> None:
        self.mounts = FakeMounts(root)
        self.now = 1000 * NS_PER_S
        self.sampler = FilesystemSampler(Node(root=root, clock=lambda: self.now))

    def sample(self) -> dict[str, Row]:
        self.now += STEP_S * NS_PER_S
        data = self.sampler.sample()
        names = {entity.key[0]: entity.name for entity in self.sampler.entities}
        return {names[int(row["mount_index"] or 0)]: row for row in rows(FILESYSTEM, data)}


@pytest.fixture
def ticking(tmp_path: Path) -> Ticking:
    return Ticking(tmp_path)


def test_nfs_counts_come_in_base_units(ticking: Ticking) -> None:
    requests = {"NULL": (1,) * 9, "READ": READ, "WRITE": WRITE, "GETATTR": GETATTR, "OPEN": OPEN,
                "SEQUENCE": SEQUENCE}  # fmt: skip
    ticking.mounts.put(FakeNfs(moved=(1, 2, 30, 40, 500, 600, 7, 8), requests=requests))
    assert ticking.sampler.open() == []
    assert ticking.sampler.header() == {
        "entities": [{"key": [0], "name": "/data", "fstype": "nfs4", "device": "server:/export"}]
    }
    row = ticking.sample()["/data"]
    assert {k: v for k, v in row.items() if k not in ("time_ns", "read_ns", "mount_index")} == {
        "read_bytes": 31, "write_bytes": 42, "server_read_bytes": 500, "server_write_bytes": 600,
        "server_read_count": 100, "server_write_count": 10, "metadata_count": 10,
        "server_read_rtt_ns": 500_000_000, "server_read_execute_ns": 700_000_000,
        "server_read_queue_ns": 40_000_000, "server_write_rtt_ns": 50_000_000,
        "server_write_execute_ns": 70_000_000, "server_write_queue_ns": 4_000_000,
        "metadata_execute_ns": 30_000_000, "metadata_rtt_ns": 20_000_000, "metadata_queue_ns": 0,
        "retransmission_count": 3, "timeout_count": 2,
    }  # fmt: skip


def test_nfs_server_mounted_at_two_places_is_counted_once(ticking: Ticking) -> None:
    first = FakeNfs(point="/data", moved=(5,) * 8, requests={"READ": READ})
    other = FakeNfs(point="/home", device="0:51", moved=(7,) * 8)
    ticking.mounts.put(first, replace(first, point="/again"), other)
    ticking.sampler.open()
    seen = ticking.sample()
    assert {name: row["server_read_bytes"] for name, row in seen.items()} == {
        "/data": 5,
        "/home": 7,
    }


def test_nfs_mount_that_another_covers_does_not_get_its_counts(ticking: Ticking) -> None:
    below, above = FakeNfs(moved=(5,) * 8), FakeNfs(device="0:51", moved=(7,) * 8)
    ticking.mounts.put(below, above)
    ticking.sampler.open()
    (row,) = ticking.sample().values()
    assert row["server_read_bytes"] == 7
    ticking.mounts.put(FakeNfs(point="/my data", moved=(5,) * 8, requests={"READ": READ}))
    ticking.sampler.open()
    assert ticking.sample()["/my data"]["server_read_bytes"] == 5


def test_nfs_without_statistics_of_requests_has_bytes_and_reasons(ticking: Ticking) -> None:
    ticking.mounts.put(FakeNfs(moved=(5,) * 8))
    missing = {m.metric: m for m in ticking.sampler.open()}
    assert "server_read_bytes" not in missing
    assert missing["server_read_rtt_ns"].status == "unsupported"
    row = ticking.sample()["/data"]
    assert (row["server_read_bytes"], row["retransmission_count"]) == (5, None)


def test_mountstats_that_may_not_be_read_is_denied(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking.mounts.put(FakeNfs(moved=(5,) * 8))
    real = os.open

    def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("mountstats"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)  # the tests may run as root, who may read all
    missing = {m.metric: m.status for m in ticking.sampler.open()}
    assert missing["server_read_bytes"] == "denied"
    assert ticking.sample()["/data"]["server_read_bytes"] is None


def test_lustre_counts_of_its_client(ticking: Ticking) -> None:
    counts = {"read_bytes": (2, 1 << 40), "open": (4, 9), "close": (3, 9), "seek": (99, 9)}
    ticking.mounts.put(FakeLustre(counts=counts))
    missing = {m.metric: m for m in ticking.sampler.open()}
    row = ticking.sample()["/scratch"]
    assert (row["read_bytes"], row["write_bytes"], row["metadata_count"]) == (1 << 40, 0, 7)
    assert row["server_read_bytes"] is None
    assert missing["server_read_bytes"].status == "unsupported"


def test_lustre_that_is_hidden_is_denied_until_it_is_shown(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking.mounts.put(FakeLustre(counts={"read_bytes": (1, 77)}))
    real = os.listdir

    def refusing(path: Any) -> list[str]:
        if "kernel/debug" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path)

    with monkeypatch.context() as hidden:
        hidden.setattr(os, "listdir", refusing)
        missing = {m.metric: m for m in ticking.sampler.open()}
        assert ticking.sample()["/scratch"]["read_bytes"] is None
    assert missing["read_bytes"].status == "denied"
    assert "chmod" in missing["read_bytes"].remedy


def test_lustre_mounted_twice_is_not_guessed(ticking: Ticking) -> None:
    again = FakeLustre(point="/scratch2", instance="ffff9c05deadbeef", device="0:61")
    ticking.mounts.put(FakeLustre(counts={"read_bytes": (1, 77)}), again)
    reasons = {m.reason for m in ticking.sampler.open() if m.metric == "read_bytes"}
    assert all("mounted 2 times" in reason for reason in reasons)
    assert {row["read_bytes"] for row in ticking.sample().values()} == {None}


@pytest.mark.parametrize("kind", ["beegfs", "fuse.hf3fs", "ceph"])
def test_file_systems_whose_clients_count_nothing_are_named(ticking: Ticking, kind: str) -> None:
    ticking.mounts.put((kind, "cluster", "/mnt/it"))
    missing = ticking.sampler.open()
    assert {m.metric for m in missing} == {c.name for c in FILESYSTEM.metrics}
    assert {m.status for m in missing} == {"unsupported"}
    assert all("/mnt/it" in m.reason and "client" in m.reason for m in missing)
    states = ticking.sampler.states()
    assert {(state.entity, state.value) for state in states} == {("/mnt/it", None)}


def test_mount_that_comes_later_is_taken_up(ticking: Ticking) -> None:
    ticking.mounts.put()
    assert ticking.sampler.open() == []  # it goes on looking
    assert ticking.sample() == {}
    (missing,) = ticking.sampler.missing.drain()
    assert (missing.metric, missing.status) == (ALL_METRICS, "absent")
    ticking.mounts.put(FakeNfs(age_s=1, moved=(5,) * 8, requests={"READ": READ}))
    assert ticking.sample()["/data"]["read_bytes"] == 10
    (line,) = ticking.sampler.drain_lines()
    assert (line["type"], line["name"], line["fstype"]) == ("entity", "/data", "nfs4")
    ticking.mounts.put()
    assert ticking.sample() == {}


def test_remount_between_two_samples_is_another_entity(ticking: Ticking) -> None:
    requests = {"READ": READ}
    ticking.mounts.put(FakeNfs(age_s=3, moved=(5,) * 8, requests=requests))
    ticking.sampler.open()
    ticking.mounts.put(FakeNfs(age_s=8, moved=(9,) * 8, requests=requests))  # older, yet another
    assert ticking.sample()["/data"]["mount_index"] == 1
    ticking.mounts.put(FakeNfs(age_s=18, moved=(9,) * 8, requests=requests))
    assert ticking.sample()["/data"]["mount_index"] == 1


def test_without_mountinfo_nothing_is_sampled() -> None:
    (missing,) = FilesystemSampler(Node(root=Path("/nonexistent"))).open()
    assert missing.metric == ALL_METRICS
    assert "mountinfo" in missing.reason


def recorded(root: Path, mounts: Sequence[FakeNfs | FakeLustre]) -> RunPaths:
    """A run with one sample of each, ten seconds apart."""
    ticking = Ticking(root)
    ticking.mounts.put(mounts[0])
    ticking.sampler.open()
    run = write_run(root / "run")
    path = run.node("node0").records("filesystem")
    path.parent.mkdir(parents=True)
    writer = RecordWriter(path, FILESYSTEM, clock=CLOCK, extra=ticking.sampler.header())
    for mount in mounts:
        ticking.mounts.put(mount)
        writer.append(ticking.sampler.sample())
        ticking.now += STEP_S * NS_PER_S
    writer.close()
    ticking.sampler.close()
    return run


def rates(run: RunPaths, metric: str) -> list[tuple[Any, str | None]]:
    found = Analyzer(run.root).counters().filter(metric=metric)
    return found.select("value", "flag").rows()


each_time = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_nfs_rates_and_mean_times_are_of_what_was_added(tmp_path: Path) -> None:
    mounts, below = [], -(1 << 40)  # the kernel's sum of times may have wrapped
    for at, (total, count, rtt_ms) in enumerate([(7, 10, below), (507, 14, below + 12)]):
        read = (count, count, 0, 0, 0, 0, rtt_ms, rtt_ms, 0)
        moves = (0, 0, 0, 0, total, 0, 0, 0)
        mounts.append(FakeNfs(age_s=100 + at * STEP_S, moved=moves, requests={"READ": read}))
    run = recorded(tmp_path, [*mounts, replace(mounts[-1], age_s=100 + 2 * STEP_S)])
    assert rates(run, "server_read_bytes_per_s") == [(50.0, None), (0.0, None)]
    assert rates(run, "server_read_count_per_s") == [(0.4, None), (0.0, None)]
    assert rates(run, "server_read_rtt_ns") == [(pytest.approx(3e6), None)]


@each_time
@given(before=st.integers(1, 1 << 40), after=st.integers(0, 1 << 41))
def test_no_rate_reaches_across_a_remount(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int
) -> None:
    ages = ((100, before), (110, before + 10), (5, after), (15, after + 20))
    nfs = [FakeNfs(age_s=age, moved=(n, 0, 0, 0, 0, 0, 0, 0)) for age, n in ages]
    run = recorded(tmp_path_factory.mktemp("nfs"), nfs)
    assert rates(run, "read_bytes_per_s") == [(1.0, None), (2.0, None)]
    lustre = [
        FakeLustre(instance=f"ffff{'a' if age >= 100 else 'b'}", counts={"read_bytes": (1, n)})
        for age, n in ages
    ]
    run = recorded(tmp_path_factory.mktemp("lustre"), lustre)
    assert rates(run, "read_bytes_per_s") == [(1.0, None), (2.0, None)]


def test_lustre_stats_that_were_cleared_are_a_reset(tmp_path: Path) -> None:
    sums = (500, 700, 10, 110)
    run = recorded(tmp_path, [FakeLustre(counts={"write_bytes": (1, n)}) for n in sums])
    assert rates(run, "write_bytes_per_s") == [(20.0, None), (None, "reset"), (10.0, None)]
