from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from haiprof.linux.topology import (
    Adapter,
    adapters,
    gpu_bus_id,
    nearest_adapters,
    node_of_cpu,
    pci_device,
)
from tests.fake_topology import GPU_UUIDS, FakeTopology
from tests.fakes import FakeTree


@pytest.fixture
def fake(tmp_path: Path) -> FakeTopology:
    return FakeTopology(FakeTree(tmp_path))


def test_topology_gives_each_cpu_its_node(fake: FakeTopology, tmp_path: Path) -> None:
    nodes = node_of_cpu(fake.tree.root)
    assert nodes == {cpu: (cpu // 4) % 2 for cpu in range(16)}
    none = tmp_path / "none"
    assert node_of_cpu(none) == {}
    assert adapters(none) == []
    assert gpu_bus_id(none, "GPU-1") is None
    assert pci_device(none, "0000:00:00.0") is None


def test_topology_finds_a_gpu_by_uuid_in_either_spelling(fake: FakeTopology) -> None:
    root, uuid = fake.tree.root, GPU_UUIDS["gpu1"]
    assert gpu_bus_id(root, uuid) == "0000:9a:00.0"
    assert gpu_bus_id(root, uuid.removeprefix("GPU-").upper()) == "0000:9a:00.0"
    assert gpu_bus_id(root, "MIG-0a1b") is None


def test_topology_gpu_that_was_never_started_hides_its_uuid(fake: FakeTopology) -> None:
    path = "proc/driver/nvidia/gpus/0000:9a:00.0/information"
    fake.tree.write(path, "GPU UUID: \t GPU-????????-????-????-????-????????????\n")
    assert gpu_bus_id(fake.tree.root, GPU_UUIDS["gpu1"]) is None


def test_topology_nearest_adapter_shares_the_switch(fake: FakeTopology) -> None:
    root = fake.tree.root
    gpu0, gpu1 = pci_device(root, "0000:18:00.0"), pci_device(root, "0000:9a:00.0")
    assert gpu0 is not None
    assert gpu1 is not None
    assert (gpu0.node, gpu0.cpus) == (0, "0-3,8-11")
    assert gpu0.bridges == ("0000:15:01.0", "0000:16:00.0", "0000:17:00.0")
    found = adapters(root)
    assert [adapter.name for adapter in found] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert nearest_adapters(gpu0, found) == {"mlx5_0"}
    assert nearest_adapters(gpu1, found) == {"mlx5_2"}
    assert nearest_adapters(gpu0, [a for a in found if a.name != "mlx5_0"]) == set()


def test_topology_node_that_the_firmware_did_not_say_is_not_node_0(fake: FakeTopology) -> None:
    fake.numa_node("mlx5_1", -1)
    adapter = adapters(fake.tree.root)[1]
    assert adapter.pci is not None
    assert adapter.pci.node is None
    fake.tree.write("sys/class/infiniband/rxe0/node_type", "1: CA\n")
    assert adapters(fake.tree.root)[-1] == Adapter(name="rxe0", pci=None)
    gpu = pci_device(fake.tree.root, "0000:18:00.0")
    assert gpu is not None
    assert nearest_adapters(gpu, adapters(fake.tree.root)) == {"mlx5_0"}


def test_topology_of_this_machine_agrees_with_its_files() -> None:
    nodes = node_of_cpu(Path("/"))
    if not nodes:
        pytest.skip("a kernel without NUMA")
    assert set(nodes) >= set(psutil.Process().cpu_affinity())
    for folder in Path("/sys/bus/pci/devices").iterdir():
        pci = pci_device(Path("/"), folder.name)
        assert pci is not None
        said = int((folder / "numa_node").read_text())
        assert pci.node == (None if said < 0 else said)
