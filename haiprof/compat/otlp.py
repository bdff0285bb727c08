"""A run's counters and step times, pushed to an OpenTelemetry collector by OTLP/HTTP.

Source: opentelemetry.io/docs/specs/otlp (retries, partial success) and .../otel/protocol/exporter
(environment variables). JSON, which needs nothing; Protobuf with an extra.
"""

from __future__ import annotations

import gzip
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit

import polars as pl

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.base.posting import open_without_redirects
from haiprof.base.units import shorten, visible
from haiprof.base.version import __version__
from haiprof.compat.exports import Batch, otlp_batches, run_identity, step_batches
from haiprof.run_analysis.counter_sources import RawSeries, raw_counters
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.secrets import mask_text

DEFAULT = "http://localhost:4318"
PATH = "/v1/metrics"
JSON, PROTOBUF = "http/json", "http/protobuf"
RETRY_S, LONGEST_WAIT_S = 60.0, 30.0
"""How long one request is tried again, and how long it waits at most before the next try."""
_RETRIED = (429, 502, 503, 504)
_TYPES = {JSON: "application/json", PROTOBUF: "application/x-protobuf"}
_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Where it is pushed to, and how."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    encoding: str = JSON
    packs: bool = True  # Whether requests are compressed with gzip
    context: ssl.SSLContext | None = None

    @property
    def shown(self) -> str:
        """Its address for people, without credentials."""
        return mask_text(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a collector took."""

    url: str
    request_count: int
    point_count: int
    rejected_count: int  # Points that it says it did not take
    said: str  # What it said of them
    notes: tuple[str, ...]  # What was damaged or missing in the run


def find_collector(endpoint: str | None, environ: Mapping[str, str]) -> Collector:
    """The collector of `--endpoint`, of OpenTelemetry's own variables, else of this machine."""

    def variable(name: str, default: str = "") -> str:
        own = environ.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}")
        return own or environ.get(f"OTEL_EXPORTER_OTLP_{name}") or default

    whole = endpoint or environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "")
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT
    url = whole or base.rstrip("/") + PATH
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{mask_text(url)}: expected an address such as {DEFAULT}")
    if parts.path in ("", "/"):
        url = url.rstrip("/") + PATH
    encoding, timeout = variable("PROTOCOL", JSON), variable("TIMEOUT", "10000")
    if encoding not in _TYPES:
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={encoding}: haiprof speaks {JSON} and {PROTOBUF}"
        )
    if encoding == PROTOBUF:
        _protobuf()
    if not timeout.isdecimal() or not 0 < int(timeout) <= 3_600_000:
        raise UsageError(f"OTEL_EXPORTER_OTLP_TIMEOUT={timeout}: expected milliseconds")
    # `api-key=x,tenant=y`, as in a W3C Baggage.
    pairs = [part.partition("=") for part in variable("HEADERS").split(",") if part.strip()]
    headers = {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}
    if any("\n" in each or "\r" in each for pair in headers.items() for each in pair):
        raise UsageError("OTEL_EXPORTER_OTLP_HEADERS: a line break in a header")
    return Collector(
        url=url, headers=headers, timeout_s=int(timeout) / 1000,
        encoding=encoding, packs=variable("COMPRESSION", "gzip") == "gzip",
        context=_context(parts.scheme, variable),
    )  # fmt: skip


def _context(scheme: str, variable: Callable[[str], str]) -> ssl.SSLContext | None:
    if scheme != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=variable("CERTIFICATE") or None)
        if variable("CLIENT_CERTIFICATE"):
            context.load_cert_chain(variable("CLIENT_CERTIFICATE"), variable("CLIENT_KEY") or None)
    except OSError as error:
        raise UsageError(f"OTEL_EXPORTER_OTLP_CERTIFICATE: {error}") from None
    return context


def _protobuf() -> tuple[Any, Any]:
    """Protobuf's own reader of JSON, and the request's class."""
    try:
        from google.protobuf import json_format
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
    except ImportError:
        raise MissingExtraError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={PROTOBUF} needs opentelemetry-proto",
            hint="pip install 'haiprof[otlp]', or take http/json",
        ) from None
    return json_format, metrics_service_pb2.ExportMetricsServiceRequest


class Sender:
    """Pushes a run, each time what has come since."""

    def __init__(
        self, collector: Collector, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._collector, self._progress = collector, progress
        self._sent_ns: dict[tuple[object, ...], int] = {}
        """Time of the last point of each series, and of each rank's steps."""
        self.done = Pushed(url=collector.shown, request_count=0, point_count=0, rejected_count=0,
                           said="", notes=())  # fmt: skip

    def push(self, analyzer: RunFrames) -> Pushed:
        """Pushes every new sample of a run, and the new steps of its ranks.

        Where the collector does not take some, those that it took are sent again the next time.
        """
        found, notes = raw_counters(analyzer.files)
        self.done = replace(self.done, notes=notes)
        identity = run_identity(analyzer.files)
        series = [each.take(is_new) for each in found if (
            is_new := each.time_ns > self._sent_ns.get(_identity(each), 0)).any()]  # fmt: skip
        every = analyzer.steps()
        known = [(*key, end_ns) for key, end_ns in self._sent_ns.items() if len(key) == 2]
        own_types = {name: every.schema[name] for name in ("rank", "attempt")}
        types: dict[str, pl.DataType] = {**own_types, "sent": pl.Int64()}
        sent = pl.DataFrame(known, schema=types, orient="row")
        own = every.join(sent, on=["rank", "attempt"], how="left")
        steps = own.filter(pl.col("sent").fill_null(0) < _END).drop("sent")
        for batch in (*otlp_batches(series, identity), *step_batches(steps, identity)):
            self._push_batch(batch)
        for each in series:
            self._sent_ns[_identity(each)] = int(each.time_ns[-1])
        for rank, attempt, end_ns in steps.group_by("rank", "attempt").agg(_END.max()).rows():
            self._sent_ns[rank, attempt] = end_ns
        return self.done

    def _push_batch(self, batch: Batch) -> None:
        done = self.done
        try:
            rejected, said = _send(batch, self._collector, self._progress)
        except HaiprofError as error:
            sent = f"; {done.point_count} points in {done.request_count} requests were sent before"
            raise type(error)(f"{error}{sent}", hint=error.hint) from None
        self.done = replace(
            done, request_count=done.request_count + 1, said=said or done.said,
            point_count=done.point_count + batch.point_count,
            rejected_count=done.rejected_count + rejected,
        )  # fmt: skip


_END = pl.col("start_ns") + pl.col("step_ns")


def _identity(series: RawSeries) -> tuple[object, ...]:
    return series.host, series.source, series.key, series.column.name


def _send(batch: Batch, collector: Collector, progress: Callable[[str], None]) -> tuple[int, str]:
    """Sends one request, again while the collector is busy or away; what it rejected and said."""
    body = batch.text.encode()
    if collector.encoding == PROTOBUF:
        json_format, request = _protobuf()
        body = json_format.Parse(batch.text, request()).SerializeToString()
    headers = {"Content-Type": _TYPES[collector.encoding], "User-Agent": f"haiprof/{__version__}"}
    if collector.packs:
        body, headers["Content-Encoding"] = gzip.compress(body, 3), "gzip"
    until, wait_s = time.monotonic() + RETRY_S, 1.0
    while True:
        status, why, answer, asked_s = _post(collector, body, {**headers, **collector.headers})
        if status is not None and 200 <= status < 300:
            return _read_answer(answer, collector.encoding)
        pause_s = asked_s if asked_s is not None else wait_s * random.uniform(0.8, 1.2)
        is_final = status is not None and status not in _RETRIED
        if is_final or pause_s > LONGEST_WAIT_S or time.monotonic() + pause_s > until:
            hint = ""
            if status == 415 and collector.encoding == JSON:
                hint = f"OTEL_EXPORTER_OTLP_PROTOCOL={PROTOBUF}, with pip install 'haiprof[otlp]'"
            raise HaiprofError(f"{collector.shown}: {why}", hint=hint)
        progress(f"{collector.shown}: {why}; again in {pause_s:.1f} s")
        time.sleep(pause_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S / 2)


def _post(
    collector: Collector, body: bytes, headers: Mapping[str, str]
) -> tuple[int | None, str, bytes, float | None]:
    """Status, None where nobody answered; why not; the answer; seconds until it may be asked."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request

    request = Request(collector.url, data=body, headers=dict(headers), method="POST")
    try:
        with open_without_redirects(request, collector.timeout_s, collector.context) as answer:
            return answer.status, "", answer.read(_ANSWER_BYTES), None
    except HTTPError as error:
        with error:
            said = shorten(visible(error.read(_ANSWER_BYTES).decode("utf-8", "replace")), 160)
            after = error.headers.get("Retry-After")
        what = f"it answered HTTP {error.code}{f': {mask_text(said)}' if said else ''}"
        return error.code, what, b"", _parse_wait(after)
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        if cause is not error and isinstance(cause, ssl.SSLError):
            return 0, f"its certificate is not trusted ({type(cause).__name__})", b"", None
        why = f"the connection broke ({type(error).__name__})"
        if isinstance(cause, TimeoutError):
            why = f"no answer for {collector.timeout_s:g} s"
        elif cause is not error:
            why = f"nobody answers there ({getattr(cause, 'strerror', None) or cause})"
        return None, why, b"", None


def _parse_wait(text: str | None) -> float | None:
    """`Retry-After`: seconds, or a date."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _read_answer(answer: bytes, encoding: str) -> tuple[int, str]:
    """How many points were rejected, and why, of a partial success."""
    if encoding == PROTOBUF:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

        read = metrics_service_pb2.ExportMetricsServiceResponse()
        try:
            read.MergeFromString(answer)
        except Exception:  # noqa: BLE001 (protobuf's DecodeError is of one of several backends)
            return 0, ""
        told = read.partial_success
        return max(told.rejected_data_points, 0), shorten(visible(told.error_message))
    try:
        content = json.loads(answer or b"{}")
        partial = content.get("partialSuccess") or {}
        rejected, said = partial.get("rejectedDataPoints"), partial.get("errorMessage")
        return max(int(rejected or 0), 0), shorten(visible(str(said or "")))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return 0, ""
