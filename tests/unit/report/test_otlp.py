"""`export --to otlp`: what a collector gets, read by OpenTelemetry's own classes, and failures."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint

from haiprof import Analyzer
from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.cli import main
from haiprof.compat import otlp
from haiprof.compat.exports import otlp_batches, run_identity, step_batches
from haiprof.compat.otlp import DEFAULT, Collector, Pushed, Sender, find_collector
from haiprof.run_analysis.counter_sources import raw_counters
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import HOST
from tests.unit.analysis.recorded import row_of
from tests.unit.report.test_exports import NODE, SECOND, at, exported, run

__all__ = ["run"]  # a fixture


class Server:
    """A collector that decodes what is posted, and answers as it is told to."""

    def __init__(
        self, answers: Sequence[tuple[int, Mapping[str, str], bytes]] = (), *, hangs: bool = False
    ) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.heads: list[Mapping[str, str]] = []
        self.paths: list[str] = []
        self.left = list(answers)
        over, outer = threading.Event(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.heads.append({k.lower(): v for k, v in self.headers.items()})
                outer.paths.append(self.path)
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                status, headers, said = outer.left.pop(0) if outer.left else (200, {}, b"{}")
                if status == 200:
                    read = ExportMetricsServiceRequest()
                    if self.headers["Content-Type"] == "application/json":
                        json_format.Parse(body, read)
                    else:
                        read.ParseFromString(body)
                        said = b"" if said == b"{}" else said
                    outer.requests.append(read)
                if hangs:
                    over.wait()
                    return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: object) -> None:
                """Not at all."""

        self._over = over
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self._over.set()
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def collector(*answers: Any, hangs: bool = False) -> Iterator[Server]:
    found = Server(answers, hangs=hangs)
    threading.Thread(target=found.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield found
    finally:
        found.close()


Points = dict[tuple[str, str, int], float]


def points_of(requests: Sequence[ExportMetricsServiceRequest]) -> Points:
    """Values by name, attributes of resource and point, and time."""
    found: Points = {}
    for request in requests:
        for resource in request.resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                points: Sequence[NumberDataPoint] = (metric.gauge.data_points
                                                     or metric.sum.data_points)  # fmt: skip
                for point in points:
                    whose = str([*resource.resource.attributes, *point.attributes])
                    value = point.as_double or float(point.as_int)
                    found[metric.name, whose, point.time_unix_nano] = value
    return found


def push_run(analyzer: Analyzer, place: Collector, progress: Any = lambda _: None) -> Pushed:
    return Sender(place, progress).push(analyzer)


def whole(run: RunPaths) -> ExportMetricsServiceRequest:
    read = ExportMetricsServiceRequest()
    json_format.Parse(exported(run, "otlp-json"), read)
    return read


@pytest.mark.parametrize("encoding", [otlp.JSON, otlp.PROTOBUF])
def test_collector_gets_every_sample_and_the_steps(run: RunPaths, encoding: str) -> None:
    with collector() as server:
        values = {"PROTOCOL": encoding, "ENDPOINT": server.url, "HEADERS": "api-key=a%20b,x=y"}
        environ = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in values.items()}
        done = push_run(Analyzer(run.root), find_collector(None, environ))
    points = points_of(server.requests)
    counters = {key: value for key, value in points.items() if key[0] != "haiprof.step.duration"}
    assert counters == points_of([whole(run)])
    steps = Analyzer(run.root).steps()
    took = sorted(value for key, value in points.items() if key[0] == "haiprof.step.duration")
    assert took == pytest.approx(sorted(ns / 1e9 for ns in steps["step_ns"].drop_nulls()))
    assert done.point_count == len(points)
    assert set(server.paths) == {"/v1/metrics"}
    assert {head["api-key"] for head in server.heads} == {"a b"}
    assert {head["content-encoding"] for head in server.heads} == {"gzip"}


def test_second_push_has_only_what_came_since_and_what_failed_is_sent_again(run: RunPaths) -> None:
    with collector() as server:
        sender = Sender(Collector(url=server.url))
        first = sender.push(Analyzer(run.root))
        assert sender.push(Analyzer(run.root)) == first
        append(run, row_of(HOST, time_ns=at(2), cpu_user_ns=9 * SECOND))
        count = len(server.requests)
        second = sender.push(Analyzer(run.root))
        assert second.point_count == first.point_count + 1
        assert list(points_of(server.requests[count:]).values()) == [9.0]
        append(run, row_of(HOST, time_ns=at(3), cpu_user_ns=10 * SECOND))
        server.left.append((400, {}, b""))
        with pytest.raises(HaiprofError):
            sender.push(Analyzer(run.root))
        assert sender.push(Analyzer(run.root)).point_count == second.point_count + 1


def append(run: RunPaths, row: Sequence[float | int]) -> None:
    with run.node(NODE).records("host").open("ab") as file:
        file.write(HOST.struct.pack(*row))


def test_large_series_go_in_requests_of_a_bounded_size(run: RunPaths) -> None:
    files = Analyzer(run.root).files
    series, _ = raw_counters(files)
    steps = Analyzer(run.root).steps()
    identity = run_identity(files)
    batches = [*otlp_batches(series, identity, most=2), *step_batches(steps, identity, most=2)]
    assert max(batch.point_count for batch in batches) == 2
    assert len(batches) > 3
    requests = [json_format.Parse(b.text, ExportMetricsServiceRequest()) for b in batches]
    points = points_of(requests)
    assert len(points) == sum(batch.point_count for batch in batches)
    assert points.items() >= points_of([whole(run)]).items()


def test_run_of_an_older_haiprof_whose_tables_had_fewer_columns_is_sent() -> None:
    files = Analyzer(Path(__file__).parents[2] / "data/runs/killed").files
    series, notes = raw_counters(files)
    assert not notes
    assert {"cpu_user_ns", "memory_used_bytes"} & {each.column.name for each in series}


def test_command_pushes_and_says_how_much(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    with collector() as server:
        assert main(["otlp", str(run.root), "--endpoint", server.url]) == 0
    count = len(points_of(server.requests))
    assert f"pushed {count} points in {len(server.requests)} requests" in capsys.readouterr().out


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those between requests, in seconds: none is made."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_busy_collector_is_asked_again_when_it_says(run: RunPaths, pauses: list[float]) -> None:
    said: list[str] = []
    busy = (503, {"Retry-After": "3"}, b"")
    with collector(busy, (429, {}, b"")) as server:
        done = push_run(Analyzer(run.root), Collector(url=server.url), said.append)
    assert pauses[0] == 3.0
    assert "HTTP 503; again in 3.0 s" in said[0]
    assert "HTTP 429" in said[1]
    assert len(points_of(server.requests)) == done.point_count


def test_collector_that_wants_too_long_a_pause_is_given_up(run: RunPaths) -> None:
    busy = (503, {"Retry-After": "3600"}, b"try later")
    with collector(busy) as server, pytest.raises(HaiprofError, match="HTTP 503: try later"):
        push_run(Analyzer(run.root), Collector(url=server.url))
    assert len(server.heads) == 1


@pytest.mark.parametrize(("answer", "what"), [
    ((400, {}, b"bad \x1b[31mrequest"), "HTTP 400: bad"), ((401, {}, b""), "HTTP 401"),
    ((302, {"Location": "http://127.0.0.1:9/"}, b""), "HTTP 302"),
])  # fmt: skip
def test_refusal_is_final_and_what_was_sent_is_said(
    run: RunPaths, answer: object, what: str
) -> None:
    with (collector((200, {}, b"{}"), answer) as server,
          pytest.raises(HaiprofError, match=what) as caught):  # fmt: skip
        push_run(Analyzer(run.root), Collector(url=server.url))
    assert len(server.heads) == 2
    assert "in 1 requests were sent before" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_collector_that_takes_no_json_has_a_hint(run: RunPaths) -> None:
    with collector((415, {}, b"")) as server, pytest.raises(HaiprofError) as caught:
        push_run(Analyzer(run.root), Collector(url=server.url))
    assert "http/protobuf" in caught.value.hint
    assert "haiprof[otlp]" in caught.value.hint


@pytest.mark.parametrize("encoding", [otlp.JSON, otlp.PROTOBUF])
def test_points_that_are_rejected_are_told_and_fail(
    run: RunPaths, encoding: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = 3
    answer.partial_success.error_message = "too old"
    is_json = encoding == otlp.JSON
    said = json_format.MessageToJson(answer).encode() if is_json else answer.SerializeToString()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", encoding)
    with collector((200, {}, said)) as server:
        assert main(["otlp", str(run.root), "--endpoint", server.url, "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["rejected_count"] == 3
    assert json.loads(output.out)["said"] == "too old"
    assert "rejected 3 points" in output.err


def test_odd_answers_are_no_failure(run: RunPaths) -> None:
    for said in (b"", b"<html>", b"[1]", b'{"partialSuccess": 3}', b"\xff\xff"):
        with collector((200, {}, said)) as server:
            done = push_run(Analyzer(run.root), Collector(url=server.url))
        assert done.rejected_count == 0


def test_collector_that_hangs_or_is_not_there_is_given_up(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr(otlp, "RETRY_S", 5.0)
    said: list[str] = []
    with collector(hangs=True) as server:
        place = Collector(url=server.url, timeout_s=0.2)
        with pytest.raises(HaiprofError, match=r"no answer for 0\.2 s"):
            push_run(Analyzer(run.root), place, said.append)
    assert "again in" in said[0]
    with pytest.raises(HaiprofError, match="nobody answers there"):
        push_run(Analyzer(run.root), place)


def test_certificate_must_be_trusted(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:  # speaks no TLS at all
        url = f"https://127.0.0.1:{plain.getsockname()[1]}"
        monkeypatch.setattr(otlp, "RETRY_S", 0.5)
        found = find_collector(url, {"OTEL_EXPORTER_OTLP_TIMEOUT": "200"})
        with pytest.raises(HaiprofError):
            push_run(Analyzer(run.root), found)
    missing = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "no.pem")}
    with pytest.raises(UsageError, match="CERTIFICATE"):
        find_collector(url, missing)


@pytest.mark.parametrize(("endpoint", "environ", "url"), [
    (None, {}, f"{DEFAULT}/v1/metrics"),
    ("http://c:4318", {}, "http://c:4318/v1/metrics"),
    ("http://c:4318/", {}, "http://c:4318/v1/metrics"),
    ("https://c/api/otlp", {}, "https://c/api/otlp"),
    (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c/otlp/"}, "http://c/otlp/v1/metrics"),
    (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m/x"}, "http://m/x"),
])  # fmt: skip
def test_address_is_found_as_opentelemetry_says(
    endpoint: str | None, environ: Mapping[str, str], url: str
) -> None:
    assert find_collector(endpoint, environ).url == url


@pytest.mark.parametrize(("endpoint", "environ"), [
    ("collector:4318", {}), ("ftp://c", {}), ("http://", {}),
    (None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}),
    (None, {"OTEL_EXPORTER_OTLP_TIMEOUT": "1s"}),
    (None, {"OTEL_EXPORTER_OTLP_HEADERS": "a=b%0Ac"}),
])  # fmt: skip
def test_what_cannot_be_read_is_one_error(endpoint: str | None, environ: Mapping[str, str]) -> None:
    with pytest.raises(UsageError):
        find_collector(endpoint, environ)


def test_secrets_of_address_and_headers_are_not_shown() -> None:
    environ = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abcdefgh12345678"}
    found = find_collector("https://me:hunter2hunter2@c:4318", environ)
    assert "hunter2" not in found.shown
    assert "abcdefgh" not in repr(found)


def test_protobuf_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.collector.metrics.v1", None)
    with pytest.raises(MissingExtraError) as caught:
        find_collector(None, {"OTEL_EXPORTER_OTLP_PROTOCOL": otlp.PROTOBUF})
    assert "haiprof[otlp]" in caught.value.hint
