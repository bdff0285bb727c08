"""The live scrape: what Prometheus gets while a job runs, and what a job must not notice."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from haiprof.agent.prometheus_endpoint import Latest
from haiprof.agent.samplers.loop import Stream
from haiprof.agent.samplers.table import CounterState, Missing, MissingLog, TableSampler
from haiprof.base.errors import MissingExtraError, UsageError
from haiprof.base.options import Options
from haiprof.launch.run import _check_extras
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import NULL_I64, ClockAnchor, Table
from haiprof.run_format.tables import GPU, PROCESS
from tests.process.jobs import training
from tests.process.live import within
from tests.unit.analysis.recorded import row_of

HAIPROF = [sys.executable, "-m", "haiprof"]
TRAIN = training('while not os.path.exists("stop"):')
NODE = "node1"
SECOND = 1_000_000_000
UUID = "GPU-1b2c"


class Told(TableSampler):
    """A sampler whose next records and events a test gives."""

    recorder = "gpu"
    every = 1
    read_limit_ns = SECOND

    def __init__(self, table: Table, entities: Sequence[Mapping[str, object]] = ()) -> None:
        self.name = table.name
        self.table = table
        self.rows: list[dict[str, float]] = []
        self.lines: list[Mapping[str, object]] = []
        self._told = list(entities)
        self.missing = MissingLog()

    def open(self) -> list[Missing]:
        return []

    def header(self) -> dict[str, object]:
        return {"entities": self._told}

    def urgent(self) -> bool:
        return False

    def sample(self) -> bytes:
        return b"".join(self.table.struct.pack(*row_of(self.table, **row)) for row in self.rows)

    def drain_lines(self) -> list[Mapping[str, object]]:
        lines, self.lines = self.lines, []
        return lines

    def states(self) -> list[CounterState]:
        return []

    def close(self) -> None:
        pass


class Scraped:
    """A node under a hand-turned clock, with one stream per sampler."""

    def __init__(self, folder: Path, *samplers: Told) -> None:
        self.now_ns = 10 * SECOND
        self.run = RunPaths(folder / "job-1")
        node = self.run.node(NODE)
        node.root.mkdir(parents=True)
        self.streams = [
            Stream(sampler, SECOND, clock=self.clock, report=lambda _: None) for sampler in samplers
        ]
        for stream in self.streams:
            assert stream.start(node, ClockAnchor(0, 0), {})
        self._latest = Latest(self.run, NODE, lambda: self.streams, clock=self.clock)

    def clock(self) -> int:
        return self.now_ns

    def report(self, rank: int, **facts: object) -> None:
        paths = self.run.rank(rank)
        paths.root.mkdir(parents=True)
        paths.report.write_text(json.dumps({"host": NODE, **facts}))

    def second(self) -> None:
        self.now_ns += SECOND
        for stream in self.streams:
            stream.sample_if_due(self.now_ns)

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        return {
            metric.name: [(dict(s.labels), s.value) for s in metric.samples]
            for metric in self._latest.collect()
        }


def test_scrape_shows_the_latest_sample_in_base_units(tmp_path: Path) -> None:
    ranks = Told(PROCESS)
    ranks.rows = [{"time_ns": 1, "pid": 7, "start_ticks": 70, "cpu_ns": SECOND // 2}]
    node = Scraped(tmp_path, ranks)
    node.report(3, pid=7, start_ticks=70)
    ranks.rows[0]["cpu_ns"] = 2 * SECOND
    node.second()
    assert node.samples() == {
        "haiprof_process_cpu_time_seconds": [({"run": "job-1", "host": NODE, "rank": "3"}, 2.0)]
    }


def test_scrape_leaves_out_what_is_missing_silent_or_gone(tmp_path: Path) -> None:
    gpus = Told(GPU, [{"key": [0], "name": "gpu 0", "uuid": UUID}])
    gpus.rows = [{"time_ns": 1, "gpu": 0, "utilization_ratio": 0.5, "memory_used_bytes": NULL_I64}]
    node = Scraped(tmp_path, gpus)
    node.now_ns += 3 * SECOND
    assert list(node.samples()) == ["hw_gpu_utilization_ratio"]
    node.now_ns += 1
    assert node.samples() == {}, "its source has fallen silent"
    node.second()
    assert node.samples() != {}
    gpus.rows = []
    node.second()
    assert node.samples() == {}


def test_gpu_has_its_name_and_the_rank_that_uses_it_once_that_is_known(tmp_path: Path) -> None:
    gpus = Told(GPU)
    node = Scraped(tmp_path, gpus)
    gpus.rows = [{"time_ns": 1, "gpu": 1, "utilization_ratio": 0.5}]
    gpus.lines = [{"type": "entity", "key": [1], "name": "gpu 1", "uuid": UUID}]
    node.second()
    ((before, _),) = node.samples()["hw_gpu_utilization_ratio"]
    node.report(5, gpu_uuid=UUID.removeprefix("GPU-"))
    ((after, _),) = node.samples()["hw_gpu_utilization_ratio"]
    assert "rank" not in before
    assert (after["rank"], after["gpu"], after["entity"]) == ("5", "1", "gpu 1")


@pytest.fixture
def port() -> int:
    """One that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def launched(folder: Path, *words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*HAIPROF, *words], cwd=folder, env={**os.environ, **environ}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # passed on: a kill would leave the job
        process.communicate()


def scrape(port: int) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def until(port: int, ready: Callable[[dict[str, Metric]], Any], process: Any) -> dict[str, Metric]:
    """Scrapes until it shows what a test waits for; the job must still run then."""

    def shown() -> dict[str, Metric] | None:
        assert process.poll() is None, process.communicate()
        with contextlib.suppress(OSError):
            found = scrape(port)
            return found if ready(found) else None
        return None

    return within(120, shown)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    (path,) = folder.glob("haiprof-logs/*/nodes/*/events.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["type"] == kind]


def cpu_s(found: dict[str, Metric]) -> float:
    (sample,) = found["haiprof_process_cpu_time_seconds"].samples
    assert sample.labels["rank"] == "0"
    return float(sample.value)


@pytest.mark.slow
def test_training_job_is_scraped_while_it_runs(tmp_path: Path, port: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["--prometheus-port", str(port), "train.py"]
    with launched(tmp_path, *words) as process:
        first = until(port, lambda found: "haiprof_process_cpu_time_seconds" in found, process)
        second = until(port, lambda found: cpu_s(found) > cpu_s(first), process)
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children()]
        of_process = [c for member in family for c in member.net_connections()]
        assert {c.laddr.ip for c in of_process if c.status == "LISTEN"} == {"127.0.0.1"}
        modes = {s.labels["cpu_mode"] for s in second["system_cpu_time_seconds"].samples}
        memory = second["haiprof_process_memory_rss_bytes"].samples[0].value
        (tmp_path / "stop").touch()
        _, errors = process.communicate()
    assert {"user", "system", "idle"} <= modes
    assert memory > 50e6
    assert process.returncode == 0, errors
    assert f"http://127.0.0.1:{port}/metrics" in errors
    assert "Traceback" not in errors
    assert [line["status"] for line in events(tmp_path, "scrape")] == ["serving"]
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_port_that_is_taken_costs_the_job_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ["bash", "-c", "sleep 2; echo hi; exit 3"]
        environ = {"HAIPROF_PROMETHEUS_PORT": str(port)}
        with launched(tmp_path, *command, **environ) as process:
            output, errors = process.communicate(timeout=120)
    assert (output, process.returncode) == ("hi\n", 3)
    assert f"port {port}: Address already in use" in errors
    (line,) = events(tmp_path, "scrape")
    assert (line["status"], line["port"]) == ("refused", port)


def test_missing_package_is_named_before_the_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as raised:
        _check_extras(Options(prometheus_port=9100))
    assert "haiprof[prometheus]" in raised.value.hint


@pytest.mark.parametrize("port", [-1, 65_536])
def test_port_must_be_one(port: int) -> None:
    with pytest.raises(UsageError, match="prometheus-port"):
        Options(prometheus_port=port)
