from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from haiprof.agent.samplers.gpu import GpuSampler
from haiprof.agent.samplers.host import HostSampler
from haiprof.agent.samplers.registry import SAMPLERS, counter_row, survey
from haiprof.agent.samplers.table import CounterState, Missing, Node, TableSampler
from haiprof.linux.readings import Entity, Reading, Unavailable
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import Column, Table
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.fakes import FakeTree

TABLE = Table(
    "port",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("port", "i64", "count", "key", "its number"),
        Column("sent_bytes", "i64", "bytes", "counter", "counters/sent"),
        Column("busy_ratio", "f64", "ratio", "gauge", "counters/busy"),
    ),
)


def _quarter() -> list[float | None]:
    return [0.25]


class PortSampler(TableSampler):
    """Two ports, the second without `busy`."""

    recorder = "host"
    table = TABLE
    closed = 0
    busy: Callable[[], list[float | None]] = staticmethod(_quarter)

    def find(self) -> Iterable[Entity]:
        return [self._port(0, type(self).busy), self._port(1, _refused)]

    def release(self) -> None:
        type(self).closed += 1

    def _port(self, number: int, busy: Callable[[], list[float | None]]) -> Entity:
        sent = Reading(columns=("sent_bytes",), origin=f"sent{number}", read=lambda: [4 + number])
        return Entity(
            key=(number,),
            name=f"port {number}",
            readings=(sent, Reading(columns=("busy_ratio",), origin="busy", read=busy)),
        )


def _refused() -> list[float | None]:
    raise Unavailable("busy: not for you", status="denied", remedy="ask for it")


class AbsentSampler(PortSampler):
    def find(self) -> Iterable[Entity]:
        raise Unavailable("no ports here", status="absent", remedy="buy one")


class BrokenSampler(PortSampler):
    def states(self) -> list[CounterState]:
        raise RuntimeError("out of luck")


class EmptySampler(PortSampler):
    def find(self) -> Iterable[Entity]:
        return []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "root").mkdir()
    tree = FakeTree(tmp_path / "root")
    gpus = FakeNvml([FakeGpu(), FakeGpu()])
    return Node(run=RunPaths(tmp_path / "run"), host="node0", root=tree.root, nvml=gpus)


def by_name(states: Iterable[CounterState]) -> dict[tuple[str, str], CounterState]:
    return {(f"{state.source}.{state.metric}", state.entity): state for state in states}


def test_survey_gives_value_source_and_price(node: Node) -> None:
    found = by_name(survey(node, [HostSampler]))
    memory = found["host.memory_total_bytes", ""]
    assert (memory.status, memory.value) == ("available", 16_384_000 * 1024)
    assert memory.origin.endswith("/proc/meminfo")
    assert memory.read_ns is not None
    assert memory.read_ns > 0
    assert len(found) == len(HostSampler.table.metrics)
    row = counter_row(survey(node, [HostSampler])[0])
    assert list(row) == [
        "name", "entity", "status", "value", "unit", "source", "read_ns", "reason", "remedy",
    ]  # fmt: skip
    assert row["name"] == "host.cpu_user_ns"


def test_survey_gives_every_entity_with_what_it_lacks(node: Node) -> None:
    found = by_name(survey(node, [PortSampler]))
    assert found["port.sent_bytes", "port 1"].value == 5
    refused = found["port.busy_ratio", "port 1"]
    assert (refused.status, refused.value, refused.read_ns) == ("denied", None, None)
    assert (refused.reason, refused.remedy) == ("busy: not for you", "ask for it")
    assert found["port.busy_ratio", "port 0"].value == 0.25
    assert len(found) == 4


@pytest.mark.parametrize(("kind", "status", "reason", "remedy"), [
    (AbsentSampler, "absent", "no ports here", "buy one"),
    (BrokenSampler, "unsupported", "RuntimeError: out of luck", ""),
    (EmptySampler, "absent", "nothing of this source is here", ""),
])  # fmt: skip
def test_sampler_without_values_gives_every_column_with_the_reason(
    node: Node, kind: type[PortSampler], status: str, reason: str, remedy: str
) -> None:
    before = kind.closed
    states = survey(node, [kind, HostSampler])
    of_port = [state for state in states if state.source == "port"]
    assert [state.metric for state in of_port] == ["sent_bytes", "busy_ratio"]
    for state in of_port:
        assert (state.status, state.value, state.remedy) == (status, None, remedy)
        assert reason in state.reason
        assert state.origin.startswith("counters/")
    assert any(state.status == "available" for state in states), "the others were asked too"
    assert kind.closed == before + 1


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_counter_without_a_value_is_never_called_available(
    node: Node, value: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PortSampler, "busy", staticmethod(lambda: [value]))
    state = by_name(survey(node, [PortSampler]))["port.busy_ratio", "port 0"]
    assert (state.status, state.value) == ("unsupported", None)
    assert state.reason


def test_lost_entity_gives_every_column_under_its_name(node: Node) -> None:
    class LosingSampler(PortSampler):
        def open(self) -> list[Missing]:
            return [*super().open(), Missing("port 7", "fell off the bus")]

    found = by_name(survey(node, [LosingSampler]))
    lost = [found[f"port.{name}", "port 7"] for name in ("sent_bytes", "busy_ratio")]
    assert [state.reason for state in lost] == ["fell off the bus"] * 2


def test_gpu_library_is_let_go_of(node: Node) -> None:
    survey(node, [GpuSampler])
    assert isinstance(node.nvml, FakeNvml)
    assert node.nvml.is_let_go_of()


def test_every_column_of_every_sampler_is_listed_on_this_machine(tmp_path: Path) -> None:
    states = survey(Node(run=RunPaths(tmp_path / "run"), host="here", pid=os.getpid()))
    listed = {(state.source, state.metric) for state in states}
    assert listed >= {
        (kind.table.name, column.name) for kind in SAMPLERS for column in kind.table.metrics
    }
    for state in states:
        assert (state.value is not None) is (state.status == "available"), state
        assert state.reason or state.status == "available", state
        assert "the sampler failed" not in state.reason
    assert list(tmp_path.iterdir()) == []
    cpu = next(s for s in states if (s.source, s.metric) == ("host", "cpu_count"))
    assert cpu.value == os.sysconf("SC_NPROCESSORS_ONLN")
