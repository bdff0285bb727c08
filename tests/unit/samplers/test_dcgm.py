"""The DCGM exporter as a source, on a real HTTP server that collects like one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from haiprof.agent.samplers import gpu
from haiprof.agent.samplers.gpu import DEFAULT_URL, DcgmSampler, fetch
from haiprof.agent.samplers.table import ALL_METRICS, Missing, Node
from haiprof.linux.readings import Unavailable
from haiprof.run_format.tables import DCGM
from tests.fake_nvml import FakeGpu, FakeNvml, NVMLError_FunctionNotFound
from tests.unit.samplers.records import opened, rows

UUIDS = [f"GPU-00000000-0000-0000-0000-{n:012d}" for n in (0, 1)]


class Exporter:
    """Collects when told, and gives out what it has collected until then, as dcgm-exporter does."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, str]] = {
            uuid: {
                "DCGM_FI_PROF_SM_ACTIVE": "0.812500", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.250000",
                "DCGM_FI_PROF_PCIE_TX_BYTES": "112603", "DCGM_FI_PROF_NVLINK_RX_BYTES": "0",
                "DCGM_FI_DEV_XID_ERRORS": "0", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "1000",
            }
            for uuid in reversed(UUIDS)
        }  # fmt: skip
        self.more = ""
        self.status = 200
        self.delay_s = 0.0
        self.requests = 0
        self.location = ""
        self._page = ""
        self.collect()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                self.send_response(outer.status)
                if outer.location:
                    self.send_header("Location", outer.location)
                self.end_headers()
                body = outer._page + f"go_goroutines {outer.requests}\n"
                for line in body.splitlines(keepends=True) if self.path == "/metrics" else ():
                    time.sleep(outer.delay_s)
                    try:
                        self.wfile.write(line.encode())
                    except OSError:
                        return

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def collect(self) -> None:
        fields = dict.fromkeys(name for figures in self.figures.values() for name in figures)
        lines = []
        for field in fields:
            lines += [f"# HELP {field} Words, with {{braces}}.", f"# TYPE {field} counter"]
            for at, (uuid, figures) in enumerate(self.figures.items()):
                labels = f'gpu="{at}",UUID="{uuid}",modelName="NVIDIA \\"A100\\", 80GB",pod=""'
                if field in figures:
                    lines.append(f"{field}{{{labels}}} {figures[field]}")
        self._page = "\n".join(lines) + "\n" + self.more

    def close(self) -> None:
        if self._thread.is_alive():
            self.server.shutdown()
            self._thread.join()
        self.server.server_close()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Exporter]:
    """An exporter with more time to answer than haiprof gives one, for a machine that is busy."""
    if "dribbles" not in request.node.name:
        monkeypatch.setattr(gpu, "CONNECT_S", 10)
        monkeypatch.setattr(gpu, "READ_S", 30)
    server = Exporter()
    yield server
    server.close()


def no_gpm() -> FakeNvml:
    failures = {"nvmlGpmQueryDeviceSupport": NVMLError_FunctionNotFound}
    return FakeNvml([FakeGpu(failures=dict(failures)), FakeGpu(failures=dict(failures))])


def sampler_at(url: str) -> DcgmSampler:
    return DcgmSampler(Node(nvml=no_gpm()), url=url)


def test_figures_are_by_uuid_in_base_units_whatever_type_the_page_gives(exporter: Exporter) -> None:
    exporter.figures[UUIDS[1]]["DCGM_FI_PROF_SM_ACTIVE"] = "0.5"
    exporter.collect()
    sampler = sampler_at(exporter.url)
    missing = sampler.open()
    assert {each.metric for each in missing} >= {"dram_active_ratio", "pcie_receive_bytes_per_s"}
    first, second = rows(DCGM, sampler.sample())
    assert (first["gpu"], first["sm_active_ratio"]) == (0, 0.8125)
    assert first["tensor_active_ratio"] == 0.25
    assert first["pcie_transmit_bytes_per_s"] == 112603.0
    assert first["nvlink_receive_bytes_per_s"] == 0.0
    assert first["dram_active_ratio"] is None
    assert first["last_xid"] == 0
    assert (second["gpu"], second["sm_active_ratio"]) == (1, 0.5)
    entities = sampler.header()["entities"]
    assert [entity["uuid"] for entity in entities] == UUIDS  # type: ignore[attr-defined]


def test_collection_that_was_recorded_is_not_recorded_again(exporter: Exporter) -> None:
    sampler = opened(sampler_at(exporter.url))
    assert len(rows(DCGM, sampler.sample())) == 2
    asked = exporter.requests
    assert sampler.sample() == b""
    assert exporter.requests == asked + 1  # once for both GPUs
    # Idle, and collected again: the same activity is a new figure, as the energy shows.
    exporter.figures[UUIDS[0]]["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] = "1060"
    exporter.collect()
    assert [row["sm_active_ratio"] for row in rows(DCGM, sampler.sample())] == [0.8125, 0.8125]


def test_default_is_this_machine_only() -> None:
    assert DcgmSampler(Node()).url == DEFAULT_URL
    assert "127.0.0.1" in DEFAULT_URL
    sampler = sampler_at("http://127.0.0.1:9/metrics")
    (missing,) = sampler.open()
    assert missing.metric == ALL_METRICS
    assert missing.status == "absent"
    assert "no DCGM exporter answers at http://127.0.0.1:9/metrics" in missing.reason
    assert "dcgm-exporter" in missing.remedy
    assert sampler.sample() == b""


@pytest.mark.parametrize("url", [
    "ftp://127.0.0.1/",
    "file:///etc/passwd",
    "nonsense",
    "http://",
    "http://a:b/",
    "http://a:1/x y",
])  # fmt: skip
def test_address_that_is_none_is_said(url: str) -> None:
    (missing,) = sampler_at(url).open()
    assert "not an http address" in missing.reason


def test_gpm_makes_the_exporter_needless_unless_it_is_asked_for(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.agent.samplers.gpu.DEFAULT_URL", exporter.url)
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    (missing,) = DcgmSampler(Node(nvml=nvml)).open()
    assert "not needed" in missing.reason
    assert exporter.requests == 0
    asked = DcgmSampler(Node(nvml=nvml), url=exporter.url)
    asked.open()
    assert len(rows(DCGM, asked.sample())) == 2
    asked.close()
    assert not nvml.is_open


def test_gpus_of_others_on_the_node_are_left_out(exporter: Exporter) -> None:
    exporter.figures["GPU-ffffffff-0000-0000-0000-000000000009"] = {"DCGM_FI_PROF_SM_ACTIVE": "1"}
    exporter.collect()
    sampler = opened(sampler_at(exporter.url))
    assert [row["gpu"] for row in rows(DCGM, sampler.sample())] == [0, 1]


@pytest.mark.parametrize(("field", "value", "column", "words"), [
    ("DCGM_FI_PROF_SM_ACTIVE", "9.2e+18", "sm_active_ratio", "cannot be"),
    ("DCGM_FI_PROF_SM_ACTIVE", "NaN", "sm_active_ratio", "cannot be"),
    ("DCGM_FI_PROF_SM_ACTIVE", "-1", "sm_active_ratio", "cannot be"),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "0", "pcie_transmit_bytes_per_s", "never is"),
    ("DCGM_FI_PROF_NVLINK_RX_BYTES", "1.8e+19", "nvlink_receive_bytes_per_s", "cannot be"),
])  # fmt: skip
def test_value_that_cannot_be_is_missing_with_the_reason(
    exporter: Exporter, field: str, value: str, column: str, words: str
) -> None:
    exporter.figures[UUIDS[0]][field] = value
    exporter.collect()
    sampler = sampler_at(exporter.url)
    found = [each for each in sampler.open() if each.metric == column]
    assert [words in each.reason for each in found] == [True]
    assert rows(DCGM, sampler.sample())[0][column] is None


def test_mig_instances_and_contradictions_are_not_taken_for_the_gpu(exporter: Exporter) -> None:
    instance = f'DCGM_FI_PROF_DRAM_ACTIVE{{gpu="0",UUID="{UUIDS[0]}",GPU_I_ID="3"}} 0.9\n'
    twice = f'DCGM_FI_PROF_SM_ACTIVE{{gpu="0",UUID="{UUIDS[0]}",pod="b"}} 0.1 1700000000000\n'
    exporter.more = instance + twice
    exporter.collect()
    sampler = opened(sampler_at(exporter.url))
    first, second = rows(DCGM, sampler.sample())
    assert (first["dram_active_ratio"], first["sm_active_ratio"]) == (None, None)
    assert second["sm_active_ratio"] == 0.8125


def reasons(missing: list[Missing]) -> str:
    return " ".join(each.reason for each in missing)


def test_exporter_that_goes_away_gives_no_records_and_comes_back(exporter: Exporter) -> None:
    sampler = opened(sampler_at(exporter.url))
    sampler.sample()
    exporter.status = 503
    assert sampler.sample() == b""
    said = reasons(sampler.missing.drain())
    assert "gpu 0" in said
    assert "gpu 1" in said
    assert "HTTP 503" in said
    assert "no such GPU" not in said
    exporter.status = 200
    exporter.figures[UUIDS[0]]["DCGM_FI_PROF_SM_ACTIVE"] = "0.3"
    exporter.collect()
    assert rows(DCGM, sampler.sample())[0]["sm_active_ratio"] == 0.3


def test_exporter_that_dribbles_is_not_waited_for(exporter: Exporter) -> None:
    sampler = opened(sampler_at(exporter.url))
    exporter.delay_s = 0.2  # 6 s for the page
    assert sampler.sample() == b""
    assert "too slow" in reasons(sampler.missing.drain())
    exporter.delay_s = 0.0


def test_exporter_that_dribbles_its_head_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def dribble() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.0 200 OK\r\n")
                while not ended.wait(0.1):
                    connection.sendall(b"X-More: words\r\n")

        thread = threading.Thread(target=dribble)
        thread.start()
        with pytest.raises(Unavailable, match="too slow"):
            fetch(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        ended.set()
        thread.join()


def test_exporter_that_sends_elsewhere_is_not_followed(exporter: Exporter) -> None:
    exporter.status, exporter.location = 302, f"{exporter.url}/elsewhere"
    (missing,) = sampler_at(exporter.url).open()
    assert "HTTP 302" in missing.reason
    assert exporter.requests == 1
    exporter.status, exporter.location, exporter._page = 200, "", "<html>hello</html>\n"
    (missing,) = sampler_at(exporter.url).open()
    assert "no DCGM figures" in missing.reason


def test_proxy_is_not_asked_for_what_runs_here(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    sampler = opened(sampler_at(exporter.url))
    assert len(rows(DCGM, sampler.sample())) == 2


def test_doctor_sees_value_price_and_reason(exporter: Exporter) -> None:
    sampler = opened(sampler_at(exporter.url))
    states = {(s.entity, s.metric): s for s in sampler.states()}
    active = states["gpu 0", "sm_active_ratio"]
    assert (active.status, active.value, active.origin) == ("available", 0.8125, exporter.url)
    assert active.read_ns is not None
    dram = states["gpu 0", "dram_active_ratio"]
    assert (dram.status, dram.value) == ("absent", None)
    assert "dcp-metrics-included.csv" in dram.remedy
