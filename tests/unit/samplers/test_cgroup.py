from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.agent.samplers.host import CgroupSampler
from haiprof.agent.samplers.table import ALL_METRICS, Node
from haiprof.linux.cgroups import Cgroup, find_cgroup
from haiprof.run_format.schema import Table
from haiprof.run_format.tables import CGROUP
from tests.fake_cgroup import FakeCgroups, FakeGroup
from tests.fakes import FakeTree, fail_reads_of_removed_files
from tests.unit.analysis.recorded import row_of, write_records, write_run
from tests.unit.samplers.records import Row, opened, rows

JOB = "/slurm/job_7/step_0"


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path)


@pytest.fixture
def cgroups(tree: FakeTree) -> FakeCgroups:
    return FakeCgroups(tree)


@pytest.fixture
def v2(cgroups: FakeCgroups) -> FakeCgroups:
    """A process three levels deep in a tree of version 2, nothing limited."""
    cgroups.mount_v2()
    cgroups.member(f"0::{JOB}")
    for path in ("/", "/slurm", "/slurm/job_7", JOB):
        cgroups.put_v2(FakeGroup(path=path))
    return cgroups


def sampled(sampler: CgroupSampler) -> dict[str, Row]:
    """The rows of one sample by the entity's name."""
    found = rows(CGROUP, sampler.sample())
    names = {entity.key[0]: entity.name for entity in sampler.entities}
    return {names[int(row["cgroup_index"] or 0)]: row for row in found}


@pytest.mark.parametrize(("content", "cores"), [("50000 20000", 2.5), ("1000 100000", 0.01)])
def test_cgroup_limit_in_cores_is_quota_by_its_own_period(
    tree: FakeTree, v2: FakeCgroups, content: str, cores: float
) -> None:
    tree.write(f"sys/fs/cgroup{JOB}/cpu.max", f"{content}\n")
    sampler = opened(CgroupSampler(Node(root=tree.root)))
    assert sampled(sampler)["own"]["cpu_limit_cores"] == cores


def test_cgroup_v2_has_every_column_in_base_units(tree: FakeTree, v2: FakeCgroups) -> None:
    v2.put_v2(
        FakeGroup(
            path=JOB, quota_us=250_000, periods=40, throttled=39, throttled_us=2_700_000,
            usage_us=5, memory=1000, memory_max=1 << 30, oom_kills=2, limit_hits=6, stalled_us=8,
        )
    )  # fmt: skip
    sampler = CgroupSampler(Node(root=tree.root))
    assert sampler.open() == []
    row = sampled(sampler)["own"]
    del row["time_ns"], row["read_ns"]
    assert row == {
        "cgroup_index": 0, "cpu_ns": 5_000, "cpu_period_count": 40,
        "cpu_throttled_period_count": 39, "cpu_throttled_ns": 2_700_000_000, "cpu_limit_cores": 2.5,
        "memory_used_bytes": 1000, "memory_peak_bytes": 2000, "memory_anonymous_bytes": 4096,
        "memory_file_bytes": 8192, "memory_swap_bytes": 4096, "memory_limit_bytes": 1 << 30,
        "memory_limit_hit_count": 6, "memory_oom_count": 2,
        **{f"pressure_{what}_{kind}_ns": 8_000
           for what in ("cpu", "memory", "io") for kind in ("some", "full")},
    }  # fmt: skip


def test_cgroup_v1_has_the_same_columns_and_its_throttled_time_is_in_ns(
    tree: FakeTree, cgroups: FakeCgroups
) -> None:
    cgroups.mount_v1("cpu,cpuacct")
    cgroups.mount_v1("memory")
    cgroups.member("4:memory:/docker/abc", "2:cpu,cpuacct:/docker/abc", "1:name=systemd:/x")
    group = FakeGroup(
        path="/docker/abc", quota_us=20_000, periods=40, throttled=39, throttled_us=2_700_000,
        usage_us=5, memory=1000, memory_max=1 << 30, oom_kills=2, limit_hits=6,
    )  # fmt: skip
    cgroups.put_v1_cpu(group)
    cgroups.put_v1_memory(group)
    sampler = CgroupSampler(Node(root=tree.root))
    reasons = {m.metric: m.reason for m in sampler.open()}
    row = sampled(sampler)["own"]
    assert {name for name in row if name.startswith("pressure_")} == set(reasons)
    assert all("no cgroup version 2" in reason for reason in reasons.values())
    assert (row["cpu_throttled_ns"], row["cpu_limit_cores"]) == (2_700_000_000, 0.2)
    assert (row["cpu_ns"], row["cpu_period_count"]) == (5_000, 40)
    assert (row["memory_limit_bytes"], row["memory_used_bytes"]) == (1 << 30, 1000)
    assert (row["memory_oom_count"], row["memory_limit_hit_count"]) == (2, 6)
    assert (row["memory_anonymous_bytes"], row["memory_file_bytes"]) == (4096, 8192)


def test_cgroup_hybrid_takes_each_controller_where_it_is(
    tree: FakeTree, cgroups: FakeCgroups
) -> None:
    cgroups.mount_v2("/sys/fs/cgroup/unified")
    cgroups.mount_v1("cpu")
    cgroups.mount_v1("memory")
    cgroups.member("4:memory:/jobs/a", "1:cpu:/", "0::/user/b")
    cgroups.put_v1_cpu(FakeGroup(path="/", quota_us=None, throttled_us=3), "cpu")
    cgroups.put_v1_memory(FakeGroup(path="/jobs/a", memory=77), hierarchical=1 << 20)
    cgroups.put_v1_memory(FakeGroup(path="/jobs"))
    cgroups.put_v2(FakeGroup(path="/user/b", stalled_us=9), mount="/sys/fs/cgroup/unified")
    sampler = CgroupSampler(Node(root=tree.root))
    reasons = {m.metric: m.reason for m in sampler.open()}
    row = sampled(sampler)["own"]
    assert set(reasons) == {"cpu_ns", "cpu_limit_cores"}  # no cpuacct here, and no quota
    assert (row["cpu_throttled_ns"], row["memory_used_bytes"]) == (3_000, 77)
    assert row["memory_limit_bytes"] == 1 << 20  # an ancestor's, even one that is not visible
    assert row["pressure_io_full_ns"] == 9_000


def test_cgroup_limits_are_least_of_the_visible_ancestors(tree: FakeTree, v2: FakeCgroups) -> None:
    v2.put_v2(FakeGroup(path=JOB, quota_us=800_000, memory_max=1 << 34))
    v2.put_v2(FakeGroup(path="/slurm/job_7", quota_us=400_000))
    v2.put_v2(FakeGroup(path="/slurm", quota_us=900_000, memory_max=1 << 33))
    sampler = opened(CgroupSampler(Node(root=tree.root)))
    found = sampled(sampler)
    limits = {name: (r["cpu_limit_cores"], r["memory_limit_bytes"]) for name, r in found.items()}
    assert limits == {"own": (4.0, 1 << 33), "job_7": (4.0, 1 << 33), "slurm": (9.0, 1 << 33)}


def test_cgroup_throttled_by_an_ancestor_shows_in_the_ancestors_record(
    tree: FakeTree, v2: FakeCgroups
) -> None:
    sampler = opened(CgroupSampler(Node(root=tree.root)))
    assert list(sampled(sampler)) == ["own"]
    v2.put_v2(FakeGroup(path="/slurm/job_7", quota_us=100_000, periods=9, throttled=8))
    found = sampled(sampler)
    sampler.close()
    assert list(found) == ["own", "job_7"]
    assert found["own"]["cpu_throttled_period_count"] == 0
    assert found["job_7"]["cpu_throttled_period_count"] == 8
    assert found["own"]["cpu_limit_cores"] == 1.0
    (line,) = sampler.drain_lines()
    assert (line["type"], line["name"], line["key"]) == ("entity", "job_7", [1])


def test_cgroup_without_limits_is_null_and_says_so(tree: FakeTree, v2: FakeCgroups) -> None:
    sampler = CgroupSampler(Node(root=tree.root))
    missing = {m.metric: m for m in sampler.open()}
    row = sampled(sampler)["own"]
    assert set(missing) == {"cpu_limit_cores", "memory_limit_bytes"}
    assert all(m.status == "absent" and "is set in" in m.reason for m in missing.values())
    assert row["cpu_limit_cores"] is None
    assert row["memory_limit_bytes"] is None
    assert row["cpu_throttled_ns"] == 0


def test_cgroup_of_a_leaf_without_the_cpu_controller_takes_the_quota_above(
    tree: FakeTree, v2: FakeCgroups
) -> None:
    tree.remove(f"sys/fs/cgroup{JOB}")
    v2.put_v2(FakeGroup(path=JOB, cpu_enabled=False))
    v2.put_v2(FakeGroup(path="/slurm", quota_us=300_000, throttled_us=4))
    sampler = CgroupSampler(Node(root=tree.root))
    reasons = {m.metric: m.reason for m in sampler.open()}
    found = sampled(sampler)
    assert "cpu controller" in reasons["cpu_throttled_ns"]
    assert found["own"]["cpu_throttled_ns"] is None
    assert found["own"]["cpu_limit_cores"] == 3.0
    assert found["slurm"]["cpu_throttled_ns"] == 4_000


def test_cgroup_at_the_top_of_the_tree_has_no_limits_and_no_pressure_of_its_own(
    tree: FakeTree, v2: FakeCgroups
) -> None:
    v2.member("0::/")
    sampler = CgroupSampler(Node(root=tree.root))
    reasons = {m.metric: m.reason for m in sampler.open()}
    row = sampled(sampler)["own"]
    assert row["cpu_ns"] == 1_000_000
    assert row["pressure_cpu_full_ns"] is None  # the kernel writes 0 there, and means nothing
    assert "source host" in reasons["pressure_cpu_full_ns"]
    assert "top of the tree" in reasons["memory_used_bytes"]


@pytest.mark.parametrize(("mount_root", "path", "below"), [
    ("/docker/abc", "/docker/abc", ""),
    ("/docker/abc", "/docker/abc/nested", "/nested"),
    ("/", "/", ""),
    ("/..", "/../other", "/other"),
])  # fmt: skip
def test_cgroup_in_a_container_is_found_below_its_mount(
    tree: FakeTree, cgroups: FakeCgroups, mount_root: str, path: str, below: str
) -> None:
    cgroups.mount_v2(root=mount_root)
    cgroups.put_v2(FakeGroup(path=below or "/"))
    tree.write("proc/self/cgroup", f"0::{path}\n")
    files = [(tree.root / "proc/self" / name).read_text() for name in ("cgroup", "mountinfo")]
    cgroup = find_cgroup("memory", files[0], files[1], tree.root)
    assert isinstance(cgroup, Cgroup)
    assert cgroup.folder == tree.root / f"sys/fs/cgroup{below}"
    assert len(cgroup.above()) == below.count("/")


@pytest.mark.parametrize(("mount_root", "path"), [("/../..", "/"), ("/", "/../x"), ("/a", "/ab")])
def test_cgroup_outside_its_mount_is_not_guessed(
    tree: FakeTree, cgroups: FakeCgroups, mount_root: str, path: str
) -> None:
    cgroups.mount_v2(root=mount_root)
    cgroups.put_v2(FakeGroup(path="/"))
    cgroups.member(f"0::{path}")
    (missing,) = CgroupSampler(Node(root=tree.root)).open()
    assert missing.metric == ALL_METRICS
    assert "not visible" in missing.reason


def test_cgroup_without_any_tree_is_missing_as_whole(tree: FakeTree, cgroups: FakeCgroups) -> None:
    (missing,) = CgroupSampler(Node(root=tree.root)).open()
    assert missing.metric == ALL_METRICS
    assert "proc/self/cgroup" in missing.reason
    cgroups.member("0::/x")
    (missing,) = CgroupSampler(Node(root=tree.root)).open()
    assert "not mounted" in missing.reason


def test_cgroup_mounted_at_a_path_with_blanks(tree: FakeTree, cgroups: FakeCgroups) -> None:
    cgroups.mount_v2("/mnt/my\\040groups")
    cgroups.put_v2(FakeGroup(path="/a", memory=5), mount="/mnt/my groups")
    cgroups.member("0::/a")
    sampler = opened(CgroupSampler(Node(root=tree.root)))
    assert sampled(sampler)["own"]["memory_used_bytes"] == 5


def test_cgroup_that_is_made_anew_goes_on_under_another_key(
    tree: FakeTree, v2: FakeCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_reads_of_removed_files(monkeypatch)
    v2.put_v2(FakeGroup(path=JOB, throttled_us=100))
    sampler = opened(CgroupSampler(Node(root=tree.root)))
    old = sampled(sampler)["own"]
    folder = tree.root / f"sys/fs/cgroup{JOB}"
    folder.rename(tree.root / "gone")
    v2.put_v2(FakeGroup(path=JOB, throttled_us=5_000))
    tree.remove("gone")
    new = sampled(sampler)["own"]
    assert (old["cgroup_index"], old["cpu_throttled_ns"]) == (0, 100_000)
    assert (new["cgroup_index"], new["cpu_throttled_ns"]) == (1, 5_000_000)


def test_cgroup_of_a_launcher_that_is_moved_is_never_subtracted_from_another(
    tree: FakeTree, v2: FakeCgroups
) -> None:
    v2.put_v2(FakeGroup(path="/other", usage_us=900_000_000))
    sampler = opened(CgroupSampler(Node(root=tree.root)))
    data = [sampler.sample(), sampler.sample()]
    v2.member("0::/other")
    data += [sampler.sample(), sampler.sample()]
    run = write_run(tree.root / "run")
    records = [row for piece in data for row in CGROUP.struct.iter_unpack(piece)]
    write_records(run.node("node0").records("cgroup"), CGROUP, records)
    rates = Analyzer(run.root).counters().filter(metric="cpu_cores")["value"]
    assert rates.to_list() == [0.0, 0.0]


def test_cgroup_that_vanishes_leaves_nulls_with_a_reason_until_it_returns(
    tree: FakeTree, v2: FakeCgroups
) -> None:
    sampler = opened(CgroupSampler(Node(root=tree.root)))
    tree.remove(f"sys/fs/cgroup{JOB}")
    row = sampled(sampler)["own"]
    reasons = {m.metric: m.reason for m in sampler.missing.drain()}
    v2.put_v2(FakeGroup(path=JOB, memory=7))
    back = sampled(sampler)["own"]
    assert row["memory_used_bytes"] is None
    assert back["memory_used_bytes"] == 7
    assert "not visible" in reasons["memory_used_bytes"]


def test_cgroup_that_denies_is_denied_and_no_limit_is_made_up(
    tree: FakeTree, v2: FakeCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def deny(path: Path | str, flags: int, *more: int) -> int:
        if str(path).endswith("/slurm/cpu.max"):  # file modes do not hold for root
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *more)

    v2.put_v2(FakeGroup(path=JOB, quota_us=100_000))
    monkeypatch.setattr(os, "open", deny)
    sampler = CgroupSampler(Node(root=tree.root))
    missing = {m.metric: m for m in sampler.open()}
    row = sampled(sampler)["own"]
    assert missing["cpu_limit_cores"].status == "denied"
    assert row["cpu_limit_cores"] is None


def test_throttled_ratio_is_the_share_of_periods(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    second = 10**9
    counts = [(0, 0, 0), (10, 4, 3), (10, 4, 3), (20, 14, 5)]
    table: Table = CGROUP
    records = [
        row_of(
            table, time_ns=at * second, cgroup_index=0, cpu_period_count=periods,
            cpu_throttled_period_count=throttled, cpu_throttled_ns=held * second,
        )
        for at, (periods, throttled, held) in enumerate(counts)
    ]  # fmt: skip
    write_records(run.node("node0").records("cgroup"), table, records)
    counters = Analyzer(run.root).counters()
    ratio = counters.filter(metric="cpu_throttled_ratio")
    assert ratio["value"].to_list() == [0.4, 1.0]  # none where no period passed
    cores = counters.filter(metric="cpu_throttled_cores")
    assert cores.select("value", "unit").rows() == [(3.0, "cores"), (0.0, "cores"), (2.0, "cores")]


def test_cgroup_on_this_machine_agrees_with_its_own_files() -> None:
    sampler = CgroupSampler(Node())
    if any(m.metric == ALL_METRICS for m in sampler.open()):
        pytest.skip("no cgroup is visible here")
    states = {s.metric: s for s in sampler.states() if s.entity == "own"}
    assert set(states) == {column.name for column in CGROUP.metrics}
    used = states["memory_used_bytes"]
    if used.status == "available":
        assert used.value == pytest.approx(int(Path(used.origin).read_text()), rel=0.5)
