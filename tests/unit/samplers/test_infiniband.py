"""RDMA ports: bytes from words, each counter's own end, nothing that a driver does not count."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.agent.samplers.network import InfinibandHealthSampler, InfinibandSampler
from haiprof.agent.samplers.table import ALL_METRICS, Node
from haiprof.base.units import NS_PER_S
from haiprof.run_format.tables import INFINIBAND, INFINIBAND_HEALTH
from haiprof.run_format.writer import LineWriter, RecordWriter
from tests.fake_rdma import FakePort, FakeRdma, efa, hfi1, mana, mlx5_roce, rxe
from tests.sampling import examples
from tests.unit.analysis.recorded import CLOCK, write_run
from tests.unit.samplers.records import Row, opened, rows


@pytest.fixture
def rdma(tmp_path: Path) -> FakeRdma:
    return FakeRdma(tmp_path)


def by_name(sampler: InfinibandSampler | InfinibandHealthSampler) -> dict[str, Row]:
    data = sampler.sample()
    names = {entity.key[0]: entity.name for entity in sampler.entities}
    return {names[int(row["port_index"] or 0)]: row for row in rows(sampler.table, data)}


def test_infiniband_bytes_are_words_times_four_of_every_port(rdma: FakeRdma) -> None:
    rdma.put(FakePort(pma={"port_xmit_data": 1000, "port_rcv_data": 1 << 40, "port_xmit_wait": 7}))
    rdma.put(FakePort(device="mlx5_0", number=2, pma={"port_xmit_data": 5}))
    rdma.put(mlx5_roce())
    sampler = InfinibandSampler(Node(root=rdma.root), pread=rdma.pread)
    assert {m.metric for m in sampler.open()} == {"retransmission_count"}
    ports = by_name(sampler)
    assert list(ports) == ["mlx5_0/1", "mlx5_0/2", "mlx5_1/1"]
    assert ports["mlx5_0/1"]["transmit_bytes"] == 4000
    assert ports["mlx5_0/1"]["receive_bytes"] == 4 << 40
    assert ports["mlx5_0/1"]["transmit_wait_count"] == 7
    assert ports["mlx5_0/2"]["transmit_bytes"] == 20
    assert ports["mlx5_1/1"]["ecn_marked_count"] == 0


_END = (1 << 32) - 1


@pytest.mark.parametrize(("sent", "received", "extended", "expected"), [
    (_END, _END, (1 << 33, 1 << 34), (4 << 33, 4 << 34)),  # older kernels: words too
    (3, "garbage", None, (12, None)),
    ((1 << 64) - 1, 1, None, (None, 4)),  # beyond 63 bits
])  # fmt: skip
def test_infiniband_file_that_is_odd_leaves_the_others(
    rdma: FakeRdma, sent: int, received: int | str, extended: tuple[int, int] | None,
    expected: tuple[int | None, int | None],
) -> None:  # fmt: skip
    rdma.put(FakePort(pma={"port_xmit_data": sent, "port_rcv_data": received}))
    folder = rdma.root / "sys/class/infiniband/mlx5_0/ports/1/counters_ext"
    for name, words in zip(("xmit", "rcv"), extended or (), strict=False):
        folder.mkdir(exist_ok=True)
        (folder / f"port_{name}_data_64").write_text(f"{words}\n")
    sampler = InfinibandSampler(Node(root=rdma.root))
    missing = {m.metric for m in sampler.open()}
    row = by_name(sampler)["mlx5_0/1"]
    columns = ("transmit_bytes", "receive_bytes")
    assert tuple(row[name] for name in columns) == expected
    assert missing & set(columns) == {name for name in columns if row[name] is None}


def test_infiniband_header_says_what_a_port_is(rdma: FakeRdma) -> None:
    rdma.put(mlx5_roce())
    rdma.put(efa())
    sampler = opened(InfinibandSampler(Node(root=rdma.root)))
    assert sampler.header()["entities"] == [
        {"key": [0], "name": "mlx5_1/1", "device": "mlx5_1", "port": 1, "link_layer": "Ethernet",
         "rate_bytes_per_s": 12.5e9, "numa_node": 1, "netdev": "ens1", "driver": "mlx5_core"},
        {"key": [1], "name": "rdmap0s31/1", "device": "rdmap0s31", "port": 1,
         "link_layer": "Unspecified", "rate_bytes_per_s": 50e9, "numa_node": None, "netdev": None,
         "driver": "efa"},
    ]  # fmt: skip


def test_infiniband_of_other_vendors_uses_their_names_and_says_what_they_lack(
    rdma: FakeRdma,
) -> None:
    ports = (mana(), efa(), rxe())
    for port in ports:
        port.hardware = {name: at + 1 for at, name in enumerate(port.hardware_names)}
        rdma.put(port)
    sampler = InfinibandSampler(Node(root=rdma.root))
    missing = {(m.metric, m.reason.partition(":")[0]): m for m in sampler.open()}
    seen = by_name(sampler)
    named = {name: {k: v for k, v in row.items() if v is not None and k.endswith(("_bytes",
             "_count"))} for name, row in seen.items()}  # fmt: skip
    assert named["mana_0/1"] == {
        "transmit_bytes": 8, "receive_bytes": 9, "cnp_handled_count": 7, "out_of_sequence_count": 4,
        "packet_sequence_error_count": 2, "ack_timeout_count": 1, "rnr_nak_count": 3,
        "implied_nak_count": 6, "duplicate_request_count": 5,
    }  # fmt: skip
    assert named["rdmap0s31/1"] == {
        "transmit_bytes": 1,
        "receive_bytes": 2,
        "retransmission_count": 6,
    }
    assert named["rxe0/1"] == {
        "out_of_sequence_count": 4, "packet_sequence_error_count": 6, "rnr_nak_count": 5,
        "duplicate_request_count": 3,
    }  # fmt: skip
    no_bytes = missing["transmit_bytes", "rxe0/1"]
    assert no_bytes.status == "unsupported"
    assert "no such counter" in no_bytes.reason
    assert ("transmit_bytes", "mana_0/1") not in missing


def test_infiniband_counters_of_the_device_are_those_of_its_only_port(rdma: FakeRdma) -> None:
    port = mana()
    rdma.put(port)
    (rdma.root / "sys/class/infiniband/mana_0/hw_counters").mkdir()
    (rdma.root / "sys/class/infiniband/mana_0/hw_counters/sent_cnps").write_text("12\n")
    sampler = opened(InfinibandSampler(Node(root=rdma.root)))
    assert by_name(sampler)["mana_0/1"]["cnp_sent_count"] == 12


def test_infiniband_port_without_pma_is_unsupported_in_the_drivers_words(rdma: FakeRdma) -> None:
    rdma.put(hfi1())
    sampler = InfinibandSampler(Node(root=rdma.root))
    missing = {m.metric: m for m in sampler.open()}
    assert missing["transmit_bytes"].status == "unsupported"
    assert "N/A (no PMA)" in missing["transmit_bytes"].reason
    (row,) = rows(INFINIBAND, sampler.sample())
    assert {v for k, v in row.items() if k.endswith(("_bytes", "_count"))} == {None}
    states = {state.metric: state for state in sampler.states()}
    assert states["receive_bytes"].status == "unsupported"
    assert states["receive_bytes"].value is None


def test_infiniband_file_that_may_not_be_read_is_denied(
    rdma: FakeRdma, monkeypatch: pytest.MonkeyPatch
) -> None:
    rdma.put(FakePort())
    real = os.open

    def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("port_rcv_data"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)  # the tests may run as root, who may read all
    sampler = InfinibandSampler(Node(root=rdma.root))
    missing = {m.metric: m for m in sampler.open()}
    assert missing["receive_bytes"].status == "denied"
    assert by_name(sampler)["mlx5_0/1"]["transmit_bytes"] == 0


def test_infiniband_absent_says_so_and_is_no_sampler() -> None:
    (missing,) = InfinibandSampler(Node(root=Path("/nonexistent"))).open()
    assert missing.metric == ALL_METRICS
    assert missing.status == "absent"
    assert "no RDMA device" in missing.reason


def test_infiniband_health_tells_link_and_errors(rdma: FakeRdma) -> None:
    rdma.put(FakePort(pma={"symbol_error": 70_000, "link_downed": 3, "port_xmit_packets": 9}))
    rdma.put(FakePort(device="mlx5_2", state="1: DOWN", rate="10 Gb/sec (4X SDR)"))
    sampler = opened(InfinibandHealthSampler(Node(root=rdma.root)))
    ports = by_name(sampler)
    up, down = ports["mlx5_0/1"], ports["mlx5_2/1"]
    assert (up["link_up_ratio"], up["link_rate_bytes_per_s"]) == (1.0, 50e9)
    assert (up["symbol_error_count"], up["link_down_count"]) == (65535, 3)
    assert up["transmit_packet_count"] == 9
    assert (down["link_up_ratio"], down["link_rate_bytes_per_s"]) == (0.0, None)


def test_infiniband_device_that_is_plugged_in_again_is_another_entity(rdma: FakeRdma) -> None:
    rdma.put(FakePort(pma={"port_xmit_data": 100}))
    rdma.put(FakePort(device="mlx5_9"))
    sampler = opened(InfinibandSampler(Node(root=rdma.root), pread=rdma.pread))
    rdma.remove("mlx5_0")
    assert list(by_name(sampler)) == ["mlx5_9/1"]
    assert [m.metric for m in sampler.missing.drain()] == ["mlx5_0/1"]
    rdma.put(FakePort(pma={"port_xmit_data": 500}))
    for _ in range(60):
        ports = by_name(sampler)
    assert ports["mlx5_0/1"]["transmit_bytes"] == 2000
    assert ports["mlx5_0/1"]["port_index"] == 2
    (line,) = sampler.drain_lines()
    assert (line["type"], line["key"], line["name"]) == ("entity", [2], "mlx5_0/1")


def test_infiniband_driver_reload_between_two_samples_is_noticed_at_once(rdma: FakeRdma) -> None:
    rdma.put(FakePort(pma={"port_xmit_data": 100}))
    sampler = opened(InfinibandSampler(Node(root=rdma.root), pread=rdma.pread))
    rdma.remove("mlx5_0")
    rdma.put(FakePort(pma={"port_xmit_data": 900}))  # more than before: no counter goes back
    assert by_name(sampler)["mlx5_0/1"]["port_index"] == 1


def test_infiniband_port_that_comes_up_later_is_found_within_a_minute(rdma: FakeRdma) -> None:
    rdma.put(FakePort())
    for sampler in (
        InfinibandSampler(Node(root=rdma.root)),
        InfinibandHealthSampler(Node(root=rdma.root)),
    ):
        sampler.open()
        rdma.put(FakePort(device=f"late_{sampler.table.name}"))
        for _ in range(60 // sampler.every):
            ports = by_name(sampler)
        assert f"late_{sampler.table.name}/1" in ports
        sampler.close()


class Recording:
    """A run of samples one second apart, as the sampler's stream writes them."""

    def __init__(self, root: Path, rdma: FakeRdma) -> None:
        self.now = NS_PER_S
        self.run = write_run(root / "run")
        self.sampler = InfinibandSampler(
            Node(root=rdma.root, clock=lambda: self.now), pread=rdma.pread
        )
        self.sampler.open()
        node = self.run.node("node0")
        node.root.mkdir(parents=True)
        self._writer = RecordWriter(
            node.records("infiniband"), INFINIBAND, clock=CLOCK, extra=self.sampler.header()
        )
        self._events = LineWriter(node.events)

    def sample(self) -> None:
        self._writer.append(self.sampler.sample())
        for line in self.sampler.drain_lines():
            self._events.append({**line, "source": "infiniband"})
        self.now += NS_PER_S

    def rates(self, metric: str) -> list[tuple[Any, str | None]]:
        """(rate, flag), without the gap before the first."""
        self._writer.close()
        self._events.close()
        self.sampler.close()
        found = Analyzer(self.run.root).counters().filter(metric=metric)
        assert set(found["entity"]) <= {"mlx5_0/1"}
        return found.select("value", "flag").rows()


def recorded(
    root: Path, port_at: Sequence[FakePort], before: Callable[[int, FakeRdma], None] | None = None
) -> Recording:
    rdma = FakeRdma(root)
    rdma.put(port_at[0])
    recording = Recording(root, rdma)
    for at, port in enumerate(port_at):
        if before is not None:
            before(at, rdma)
        rdma.put(port)
        recording.sample()
    return recording


growths = st.lists(st.integers(0, 1 << 33), min_size=2, max_size=8)
each_time = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def counts(start: int, grown: Sequence[int]) -> list[int]:
    total = [start]
    for each in grown:
        total.append(total[-1] + each)
    return total


@each_time
@given(start=st.integers(0, 1 << 40), grown=growths)
def test_rates_of_extended_counters_are_the_true_bytes(
    tmp_path_factory: pytest.TempPathFactory, start: int, grown: list[int]
) -> None:
    total = counts(start, grown)
    assume((1 << 32) - 1 not in total)  # the one value that a counter of 32 bits would stay at
    ports = [FakePort(pma={"port_xmit_data": words}) for words in total]
    seen = recorded(tmp_path_factory.mktemp("ib"), ports).rates("transmit_bytes_per_s")
    assert seen == [(pytest.approx(4.0 * words), None) for words in grown]


def test_counters_wrap_or_stop_at_32_bits_as_their_files_do(tmp_path: Path) -> None:
    ports = [FakePort(hardware={"np_cnp_sent": count}) for count in (_END - 4, 5)]
    wraps = recorded(tmp_path / "wraps", ports)
    assert wraps.rates("cnp_sent_count_per_s") == [(10.0, "wrap")]
    pma = [{"port_rcv_data": n, "port_xmit_wait": n} for n in (5, 8, _END)]
    stops = recorded(tmp_path / "stops", [FakePort(extended=False, pma=each) for each in pma])
    assert stops.rates("receive_bytes_per_s") == [(12.0, None), (None, "saturated")]
    assert stops.rates("transmit_wait_count_per_s") == [(3.0, None), (None, "saturated")]


@each_time
@given(before=st.integers(2, 1 << 34), after=st.integers(0, 1 << 34), reload=st.booleans())
def test_no_rate_reaches_across_a_reset_or_a_reload(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, reload: bool
) -> None:
    after = after if reload else after % (before - 1)  # perfquery -R: seen by going back
    words = [before - 1, before, after, after + 1]
    assume((1 << 32) - 1 not in words)
    ports = [FakePort(pma={"port_xmit_data": n}) for n in words]

    def happen(at: int, rdma: FakeRdma) -> None:
        if at == 2 and reload:
            rdma.remove("mlx5_0")
            rdma.put(ports[2])

    seen = recorded(tmp_path_factory.mktemp("ib"), ports, happen).rates("transmit_bytes_per_s")
    assert [pair for pair in seen if pair[1] is None] == [(4.0, None), (4.0, None)]
    assert [flag for _, flag in seen if flag] == ([] if reload else ["reset"])


def test_tables_have_a_source_for_each_counter() -> None:
    assert {c.name for c in INFINIBAND.metrics} == set(InfinibandSampler.sources)
    link = {"link_up_ratio", "link_rate_bytes_per_s"}
    health = {c.name for c in INFINIBAND_HEALTH.metrics} - link
    assert health == set(InfinibandHealthSampler.sources)
