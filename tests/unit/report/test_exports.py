"""Exports read back by the parsers of those who take them; the Grafana dashboard asks for them."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from haiprof import Analyzer
from haiprof.base.errors import UsageError
from haiprof.compat.exports import write_export
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.otel_names import SCHEMA_URL, Instrument, instruments, label
from haiprof.run_format.schema import NULL_I64, Table
from haiprof.run_format.tables import COUNTER_TABLES, GPU, HOST, INFINIBAND, PROCESS
from tests.unit.analysis.recorded import (
    CLOCK,
    row_of,
    spans_of,
    write_rank,
    write_records,
    write_run,
)

NODE = "node0"
SECOND = 1_000_000_000
UUID = "GPU-1b2c"
KEYS = {"pid": 100, "start_ticks": 7}


def at(second: int) -> int:
    return CLOCK.mono_ns + second * SECOND


def wall(second: int) -> int:
    return CLOCK.wall_ns + second * SECOND


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Rank 0 on a node with one GPU; a counter is set back, a gauge goes missing."""
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * 4), gpu_uuid=UUID)
    node = run.node(NODE)
    host = [
        row_of(HOST, time_ns=at(0), cpu_user_ns=5 * SECOND, memory_available_bytes=4096),
        row_of(HOST, time_ns=at(1), cpu_user_ns=7 * SECOND + 250_000_000),
    ]
    process = [
        row_of(PROCESS, time_ns=at(second), **KEYS, cpu_ns=cpu_ns, thread_count=3)
        for second, cpu_ns in enumerate([1 * SECOND, 2 * SECOND, SECOND // 2, SECOND])
    ]
    gpu = [row_of(GPU, time_ns=at(0), gpu=3, power_watts=math.nan, memory_used_bytes=1 << 60)]
    write_records(node.records("host"), HOST, host, host=NODE)
    write_records(node.records("process"), PROCESS, process, host=NODE)
    entity = {"key": [3], "name": "gpu 3", "uuid": UUID, "model": "H200"}
    write_records(node.records("gpu"), GPU, gpu, host=NODE, entities=[entity])
    return run


def exported(run: RunPaths, form: str, **wanted: Any) -> str:
    file = io.BytesIO()
    write_export(Analyzer(run.root), form, None, **wanted, force=False, stdout=file)
    return file.getvalue().decode()


def scraped(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def parsed(text: str) -> ExportMetricsServiceRequest:
    """As any OTLP receiver reads JSON: unknown fields are errors, 64-bit integers may be text."""
    request = json_format.Parse(text, ExportMetricsServiceRequest())
    assert isinstance(request, ExportMetricsServiceRequest)
    return request


def attributes(pairs: Sequence[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def metrics(request: ExportMetricsServiceRequest) -> dict[tuple[Any, str], Any]:
    """By process id (null for the node) and name."""
    return {
        (attributes(part.resource.attributes).get("process.pid"), metric.name): metric
        for part in request.resource_metrics
        for scope in part.scope_metrics
        for metric in scope.metrics
    }


# -- Prometheus -------------------------------------------------------------------------------


def test_prometheus_holds_last_values_as_they_were_read_and_leaves_out_missing_ones(
    run: RunPaths,
) -> None:
    families = scraped(exported(run, "prometheus"))
    cpu = families["system_cpu_time_seconds"]
    assert cpu.type == "counter"
    (sample,) = cpu.samples
    assert sample.name == "system_cpu_time_seconds_total"
    assert sample.value == 7.25
    assert sample.timestamp == pytest.approx(wall(1) / SECOND)
    assert sample.labels == {"run": "job-1", "host": NODE, "cpu_mode": "user"}
    (available,) = families["system_memory_linux_available_bytes"].samples
    assert available.timestamp == pytest.approx(wall(0) / SECOND)  # the last sample that had one
    assert "haiprof_gpu_power_watts" not in families
    assert "system_disk_io_bytes" not in families


def test_prometheus_names_rank_and_gpu(run: RunPaths) -> None:
    families = scraped(exported(run, "prometheus"))
    (cpu,) = families["haiprof_process_cpu_time_seconds"].samples
    (memory,) = families["hw_gpu_memory_usage_bytes"].samples
    assert (cpu.value, cpu.labels["rank"]) == (1.0, "0")
    assert memory.labels | {"rank": "0", "gpu": "3", "entity": "gpu 3"} == memory.labels
    assert memory.value == float(1 << 60)


def test_prometheus_series_of_a_restarted_rank_is_the_newer_one(run: RunPaths) -> None:
    later = {"pid": 555, "start_ticks": 8}
    write_rank(run, spans_of("D F B O"), attempt=1, pid=555, start_ticks=8)
    rows = [
        row_of(PROCESS, time_ns=at(9), **later, cpu_ns=SECOND),
        row_of(PROCESS, time_ns=at(1), **KEYS, cpu_ns=8 * SECOND),
    ]
    run.node(NODE).records("process").unlink()
    write_records(run.node(NODE).records("process"), PROCESS, rows, host=NODE)
    (sample,) = scraped(exported(run, "prometheus"))["haiprof_process_cpu_time_seconds"].samples
    assert (sample.labels["rank"], sample.value) == ("0", 1.0)


def test_prometheus_labels_survive_any_name(run: RunPaths) -> None:
    name = 'a"b\\c\nd,e}f'
    rows = [row_of(INFINIBAND, time_ns=at(0), port_index=0, transmit_bytes=8)]
    path = run.node(NODE).records("infiniband")
    write_records(path, INFINIBAND, rows, host=NODE, entities=[{"key": [0], "name": name}])
    (sample,) = scraped(exported(run, "prometheus"))["hw_network_io_bytes"].samples
    assert sample.labels["entity"] == name


def one_of_each(table: Table) -> dict[str, float]:
    numbers = {column.name: 1000 + place for place, column in enumerate(table.metrics)}
    return {**numbers, **dict.fromkeys(table.keys, 1), "time_ns": at(0)}


@pytest.mark.parametrize("table", COUNTER_TABLES, ids=lambda table: table.name)
def test_every_column_is_exported_once_with_its_own_name(table: Table, tmp_path: Path) -> None:
    run = write_run(tmp_path / "all")
    values = one_of_each(table)
    write_records(run.node(NODE).records(table.name), table, [row_of(table, **values)], host=NODE)
    samples = [s for f in scraped(exported(run, "prometheus")).values() for s in f.samples]
    found = [(s.name, s.labels, s.value) for s in samples]
    assert len(found) == len(table.metrics)
    for column in table.metrics:
        meaning = instruments()[table.name, column.name]
        own = {name.replace(".", "_"): value for name, value in meaning.attributes.items()}
        (value,) = [
            value
            for name, labels, value in found
            if name == meaning.prometheus_sample_name and own.items() <= labels.items()
        ]
        assert value == values[column.name] / meaning.divisor


def test_no_two_columns_have_the_same_name_and_attributes() -> None:
    names = [(i.prometheus_sample_name, *i.attributes.items()) for i in instruments().values()]
    assert len(set(names)) == len(names)
    kinds: dict[str, set[tuple[str, str]]] = {}
    for each in instruments().values():
        kinds.setdefault(each.name, set()).add((each.unit, each.kind))
    assert {name: kind for name, kind in kinds.items() if len(kind) > 1} == {}


# -- OTLP -------------------------------------------------------------------------------------


def test_otlp_is_what_a_receiver_parses(run: RunPaths) -> None:
    text = exported(run, "otlp-json")
    request = parsed(text)
    assert {part.schema_url for part in request.resource_metrics} == {SCHEMA_URL}
    resources = [attributes(part.resource.attributes) for part in request.resource_metrics]
    assert all(r["service.name"] == "haiprof" and r["host.name"] == NODE for r in resources)
    process = [r for r in resources if "process.pid" in r]
    assert [(r["process.pid"], r["haiprof.rank"]) for r in process] == [(100, 0)]
    assert process[0]["process.runtime.version"] == "3.11"


def test_otlp_points_hold_every_sample_and_its_time(run: RunPaths) -> None:
    found = metrics(parsed(exported(run, "otlp-json")))
    cpu = found[None, "system.cpu.time"]
    assert (cpu.unit, cpu.sum.is_monotonic, cpu.sum.aggregation_temporality) == ("s", True, 2)
    points = cpu.sum.data_points
    assert [p.as_double for p in points] == [5.0, 7.25]
    assert [p.time_unix_nano for p in points] == [wall(0), wall(1)]
    assert [p.start_time_unix_nano for p in points] == [wall(0), wall(0)]
    assert attributes(points[0].attributes) == {"cpu.mode": "user"}
    assert found[100, "haiprof.process.thread.count"].WhichOneof("data") == "gauge"
    memory = found[None, "system.memory.linux.available"]
    assert memory.WhichOneof("data") == "sum"
    assert not memory.sum.is_monotonic
    assert len(memory.sum.data_points) == 1  # the second sample has none
    (point,) = metrics(parsed(exported(run, "otlp-json")))[
        None, "hw.gpu.memory.usage"
    ].sum.data_points
    assert point.as_int == 1 << 60
    own = attributes(point.attributes)
    assert own["hw.id"] == UUID
    assert (own["hw.type"], own["hw.model"], own["haiprof.rank"]) == ("gpu", "H200", 0)


def test_otlp_counter_that_was_set_back_begins_anew(run: RunPaths) -> None:
    points = metrics(parsed(exported(run, "otlp-json")))[
        100, "haiprof.process.cpu.time"
    ].sum.data_points
    assert [p.as_double for p in points] == [1.0, 2.0, 0.5, 1.0]
    starts = [p.start_time_unix_nano for p in points]
    assert starts == [wall(0), wall(0), wall(2), wall(2)]


def test_otlp_lines_are_requests_of_their_own(run: RunPaths) -> None:
    whole = parsed(exported(run, "otlp-json"))
    lines = exported(run, "otlp-json", lines=True).splitlines()
    apart = [part for line in lines for part in parsed(line).resource_metrics]
    assert len(lines) == len(whole.resource_metrics) == 2
    assert apart == list(whole.resource_metrics)


def test_otlp_follows_the_json_rules_of_the_protocol(run: RunPaths) -> None:
    """Without protobuf's help: text for 64-bit integers, numbers for enumerations."""
    document = json.loads(exported(run, "otlp-json"))
    for part in document["resourceMetrics"]:
        for metric in part["scopeMetrics"][0]["metrics"]:
            data = metric.get("sum") or metric["gauge"]
            assert data.get("aggregationTemporality", 2) == 2
            for point in data["dataPoints"]:
                assert point["timeUnixNano"].isdigit()
                assert isinstance(point.get("asInt", "0"), str)
                assert isinstance(point.get("asDouble", 0.0), float)
                assert ("asInt" in point) != ("asDouble" in point)


def test_run_without_counters_exports_nothing_rather_than_zeros(tmp_path: Path) -> None:
    run = write_run(tmp_path / "empty")
    assert exported(run, "prometheus") == ""
    assert json.loads(exported(run, "otlp-json")) == {"resourceMetrics": []}
    assert exported(run, "otlp-json", lines=True) == '{"resourceMetrics":[]}\n'
    text = exported(run, "csv")
    assert text.startswith("time_ns,host,source,")
    assert text.count("\n") == 1


def test_damaged_counts_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "damaged")
    rows = [row_of(HOST, time_ns=at(0), disk_read_bytes=-5, cpu_user_ns=NULL_I64)]
    write_records(run.node(NODE).records("host"), HOST, rows, host=NODE)
    assert exported(run, "prometheus") == ""


# -- tables -----------------------------------------------------------------------------------

FRAMES: Mapping[str, str] = {"counters": "metric", "steps": "step", "phases": "phase"}


@pytest.mark.parametrize("what", [*FRAMES, "ranks"])
def test_csv_and_parquet_hold_the_frame(run: RunPaths, tmp_path: Path, what: str) -> None:
    frame: pl.DataFrame = getattr(Analyzer(run.root), what)()
    assert frame.height > 0
    flat = frame.with_columns(
        pl.col(name).list.join("; ")
        for name, dtype in frame.schema.items()
        if isinstance(dtype, pl.List)
    )
    text = exported(run, "csv", what=what)
    read = pl.read_csv(io.StringIO(text), schema=flat.schema)
    assert read.equals(flat)
    path = tmp_path / "frame.parquet"
    out, stdout = Analyzer(run.root), io.BytesIO()
    done = write_export(out, "parquet", path, what=what, force=False, stdout=stdout)
    assert pl.read_parquet(path).equals(frame)
    assert (done.count, done.unit) == (frame.height, "rows")


# -- files ------------------------------------------------------------------------------------


def write(run: RunPaths, path: Path, *, force: bool = False) -> None:
    write_export(Analyzer(run.root), "csv", path, force=force, stdout=io.BytesIO())


def test_file_that_is_there_stays_unless_forced(run: RunPaths, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        write(run, path)
    assert path.read_text() == "mine"
    write(run, path, force=True)
    assert path.read_text().startswith("time_ns")


def test_failed_export_leaves_no_file_behind(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.csv"

    def full(frame: pl.DataFrame, file: io.BytesIO) -> None:
        file.write(b"time_ns,")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("haiprof.compat.exports.write_csv", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="No space left"):
        write(run, path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("path", ["/dev/null", "/"])
def test_only_regular_files_are_replaced(run: RunPaths, path: str) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        write(run, Path(path), force=True)


# -- words ------------------------------------------------------------------------------------


def test_documentation_lists_the_standard_names_and_no_others() -> None:
    page = (Path(__file__).parents[3] / "docs" / "exports.md").read_text(encoding="utf-8")
    listed = {
        tuple(cell.strip(" `") for cell in line.split("|")[1:4])
        for line in page.split("## Names that are OpenTelemetry's")[1].splitlines()[3:]
    }
    standard = [each for each in instruments().values() if not each.name.startswith("haiprof.")]
    assert listed == {(each.name, each.prometheus_sample_name, each.unit) for each in standard}


DASHBOARD = json.loads(
    (Path(__file__).parents[3] / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8")
)
SERVED: dict[str, list[Instrument]] = {}
for each in instruments().values():
    SERVED.setdefault(each.prometheus_sample_name, []).append(each)
IDENTITY = {"run", "host", "rank", "gpu", "entity"}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
# Grafana's unit of a panel -> the unit of what it draws, and whether that is a rate of a counter.
UNITS = {
    "Bps": {("By", True)}, "bytes": {("By", False)}, "percentunit": {("1", False), ("s", True)},
    "watt": {("W", False)}, "hertz": {("Hz", False)}, "celsius": {("Cel", False)},
    "s": {("s", True), ("{count}", True)},
}  # fmt: skip


def asked(expression: str) -> list[str]:
    """Metrics of an expression: each has a selector."""
    return re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{", expression)


def labels(name: str) -> set[str]:
    return IDENTITY | {label(attribute) for i in SERVED[name] for attribute in i.attributes}


@pytest.mark.parametrize(("panel", "target"), TARGETS, ids=lambda part: part.get("title", "expr"))
def test_panel_asks_for_what_is_served(panel: dict[str, Any], target: dict[str, Any]) -> None:
    expression = target["expr"]
    names = asked(expression)
    assert names
    assert set(names) <= SERVED.keys()
    allowed = set.union(*map(labels, names))
    grouped = {word for by in re.findall(r"by \(([^)]*)\)", expression) for word in by.split(", ")}
    matched = set(re.findall(r"[{,]([a-z_]+)=", expression))
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert grouped | matched | shown <= allowed
    assert not grouped or shown <= grouped, "a label that the sum has lost"
    for name in names:
        rated = bool(re.search(rf"(rate|increase)\({name}\{{", expression))
        (kind,) = {each.kind for each in SERVED[name]}
        assert rated == (kind == "counter")
        if panel["fieldConfig"]["defaults"]["unit"] != "short":
            unit = SERVED[name][0].unit
            assert (unit, rated) in UNITS[panel["fieldConfig"]["defaults"]["unit"]]


def test_variables_ask_for_what_is_served_and_panels_have_places_of_their_own() -> None:
    queries = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    for query in queries:
        name, wanted = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert wanted in labels(name)
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert len(set(places)) == len(places)
